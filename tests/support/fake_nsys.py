"""A program that imitates nsys: its files, its messages, and each of its failures.

FAKE_NSYS is a JSON object: `report` (an sqlite file that becomes the recording), `fail` (one of
FAILURES) with `at` (the verb that fails, default profile), `log` (a file that gets each call).
"""

import json
import os
import shutil
import sqlite3
import subprocess
import sys

FAILURES = {
    "permission": "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA "
    "GPU Performance Counters on the target device 0.",
    "busy": "CUPTI error CUPTI_ERROR_MULTIPLE_SUBSCRIBERS: another tool is attached.",
    "option": "unrecognised option '--cuda-graph-trace=node'",
    "disk": "Failed to write the report: No space left on device",
    "driver": "CUDA driver version is insufficient for CUDA runtime version",
    "corrupt": "Importer error: the report file is corrupt",
    "strange": "Something that nobody has seen",
}
REPORTS = """
The following built-in reports are available:

  cuda_api_sum -- CUDA API Summary
  cuda_gpu_kern_sum[:nvtx-name][:base|:mangled] -- CUDA GPU Kernel Summary
  cuda_gpu_mem_time_sum -- CUDA GPU MemOps Summary (by Time)
"""


def value(arguments: list[str], name: str) -> str | None:
    found = [one.partition("=")[2] for one in arguments if one.startswith(f"{name}=")]
    if not found and name in arguments:
        return arguments[arguments.index(name) + 1]
    return found[0] if found else None


def emitted(report: str, name: str) -> tuple[int, int]:
    """How many ranges match a gate, all of them and those with registered strings."""
    text, _, domain = name.partition("@")
    db = sqlite3.connect(report)
    query = (
        "SELECT count(*), count(textId) FROM NVTX_EVENTS e LEFT JOIN StringIds s ON "
        "e.textId = s.id WHERE eventType = 59 AND coalesce(text, value) = ? AND (? = '*' OR "
        "coalesce((SELECT value FROM NVTX_EVENTS d JOIN StringIds n ON d.textId = n.id WHERE "
        "d.eventType = 75 AND d.domainId = e.domainId), '') = ?)"
    )
    return db.execute(query, (text, domain, domain)).fetchone()


def profile(arguments: list[str], how: dict) -> int:
    print("[1/1] [0%         ] report.nsys-rep\r[1/1] [====100%] report.nsys-rep", flush=True)
    at = arguments.index("-o") + 2
    options, program = arguments[:at], arguments[at:]
    code = subprocess.run(program).returncode
    gate = value(options, "--nvtx-capture")
    if gate is not None:
        every, registered = emitted(how["report"], gate)
        anything = os.environ.get("NSYS_NVTX_PROFILER_REGISTER_ONLY") == "0"
        if not (every if anything else registered):
            print("No reports were generated", file=sys.stderr)
            return code
    if how.get("fail") != "nothing":
        number = ".1" if "repeat" in (value(options, "--capture-range-end") or "") else ""
        shutil.copy(how["report"], f"{options[-1]}{number}.nsys-rep")
    return code


def stats(arguments: list[str]) -> int:
    if "--help-reports" in arguments:
        print(REPORTS)
        return 1  # as nsys does
    db = sqlite3.connect(arguments[-1])
    rows = db.execute(
        "SELECT value, count(*), sum(end - start) FROM CUPTI_ACTIVITY_KIND_KERNEL JOIN StringIds "
        "ON demangledName = id GROUP BY value"
    )
    with open(f"{value(arguments, '--output')}_cuda_gpu_kern_sum.csv", "w") as file:
        print("Time (%),Total Time (ns),Instances,Avg (ns),Name", file=file)
        for name, count, total in rows:
            print(f'1.0,{total},{count},{total / count},"{name}"', file=file)
    return 0


def main() -> int:
    verb, *arguments = sys.argv[1:]
    how = json.loads(os.environ["FAKE_NSYS"])
    if "log" in how:
        only = os.environ.get("NSYS_NVTX_PROFILER_REGISTER_ONLY")
        with open(how["log"], "a") as file:
            print(json.dumps([verb, only, *arguments]), file=file)
    if verb == "--version":
        print("NVIDIA Nsight Systems version 2025.3.2.474-253236389321v0")
        return 0
    if how.get("fail") in FAILURES and how.get("at", "profile") == verb:
        print(FAILURES[how["fail"]], file=sys.stderr)
        return 1
    if verb == "profile":
        return profile(arguments, how)
    if verb == "stats":
        return stats(arguments)
    shutil.copy(arguments[-1], value(arguments, "--output"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
