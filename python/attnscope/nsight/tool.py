"""Runs a profiler from a list of arguments; its log, exit code and missing files become errors.

A session is a list of steps. The plan can be printed without running it. Each run writes a folder:
`session.yaml` (the settings), `commands.json` (each command with its exit code and time),
`versions.json`, and `logs/` with the output of every step.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

import yaml

from attnscope.common.console import say
from attnscope.common.tools import TOOLS, find_tool

TAIL_LINES = 6  # lines of a log that an error quotes
PROGRESS = re.compile(r"(\[\d+/\d+\] |Processing \d+ events: )\[[= ]*\d+%")  # a bar of nsys
GRACE_S = 30.0  # for a tool to write its report after an interrupt
PR_SET_PDEATHSIG = 1  # of prctl
_LIBC = ctypes.CDLL(None)
PACKAGES = ("attnscope", "torch", "triton", "nvtx", "numpy")


@dataclass(frozen=True)
class Failure:
    """A known way to fail: `pattern` is searched in the output of the tool, line by line."""

    name: str
    pattern: str
    cause: str
    remedy: str


class ToolError(RuntimeError):
    """A session that cannot go on: `name` of the failure, its cause, remedy, and the tool's lines.

    The message has them on lines of their own; `exit_code` is for the command line.
    """

    def __init__(
        self, name: str, cause: str, remedy: str = "", lines: Sequence[str] = (), exit_code: int = 1
    ) -> None:
        self.name, self.cause, self.remedy, self.lines = name, cause, remedy, tuple(lines)
        self.exit_code = exit_code
        parts = [f"{name}: {cause}", *(f"  | {line}" for line in lines)]
        super().__init__("\n".join([*parts, f"try: {remedy}"] if remedy else parts))


# Failures of any tool. A tool's own list is searched before this one.
COMMON_FAILURES = (
    Failure(
        "disk full",
        r"No space left on device|disk quota exceeded|not enough (disk )?space",
        "the disk has no room for the report",
        "free space, or give --output on another disk; TMPDIR moves the tool's temporary files",
    ),
    Failure(
        "no permission",
        r"ERR_NVGPUCTRPERM|permission to access NVIDIA GPU Performance Counters"
        r"|INSUFFICIENT_PRIVILEGES",
        "this user may not read the GPU's performance counters",
        "run as root, in a container with --cap-add SYS_ADMIN, or load the kernel module nvidia "
        "with NVreg_RestrictProfilingToAdminUsers=0; kernel times need no counters: attnscope nsys",
    ),
    Failure(
        "another profiler attached",
        r"MULTIPLE_SUBSCRIBERS|multiple subscribers|already (being )?profiled"
        r"|driver resource was unavailable|[Aa]nother (instance|profil)|HARDWARE_BUSY",
        "another profiler uses the GPU's counters or CUPTI",
        "end it (DCGM, PyTorch's profiler in the program, a second nsys or ncu), then run again",
    ),
    Failure(
        "driver mismatch",
        r"driver version is insufficient|[Dd]river.{0,40}(not supported|incompatible|mismatch)"
        r"|LibraryNotLoaded|[Uu]nsupported (CUDA )?driver",
        "the driver does not support this version of the tool, or the reverse",
        "install the tool of the CUDA release that the driver supports (attnscope env lists both)",
    ),
    Failure(
        "no GPU",
        r"no CUDA-capable device|No CUDA devices?|No NVIDIA GPU|No kernels? launched",
        "no CUDA device is visible to the program",
        "check nvidia-smi and CUDA_VISIBLE_DEVICES",
    ),
)


@dataclass(frozen=True)
class Step:
    """One command of a session.

    Attributes:
        label: a word for the log files, such as "profile".
        argv: the command; its first word is the program.
        env: variables added to this process' environment.
        writes: a file that must exist, and not be empty, after the command.
        exit_codes: the codes that are fine; None for any, where `writes` decides.
        echo: whether the output is copied to stderr while the command runs.
        timeout_s: seconds it may take; None for no limit.
    """

    label: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    writes: Path | None = None
    exit_codes: tuple[int, ...] | None = (0,)
    echo: bool = False
    timeout_s: float | None = None

    @property
    def line(self) -> str:
        """The command as one line for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*variables, shlex.join(self.argv)])


@dataclass(frozen=True)
class Done:
    """A finished step: exit code (negative: a signal), output and seconds; whether it was late and
    interrupted."""

    step: Step
    code: int
    stdout: str
    stderr: str
    seconds: float
    late: bool = False

    @property
    def output(self) -> str:
        return f"{self.stdout}\n{self.stderr}"


def locate(name: str) -> tuple[str, str]:
    """Path and version of a program of `common.tools.TOOLS`. Raises ToolError if it is missing."""
    tool = find_tool(name)
    if tool.path is None or tool.version is None:
        raise ToolError("tool missing", f"{name} {tool.missing}", TOOLS[name][1], exit_code=2)
    return tool.path, tool.version


def check_program(command: Sequence[str]) -> None:
    """Raises ValueError unless `command` starts with a program that can be run."""
    if not command:
        raise ValueError("command must be a program after --, got none. Write -- python script.py")
    if shutil.which(command[0]) is None:
        remedy = f". Write python {command[0]}" if command[0].endswith(".py") else ""
        raise ValueError(f"command must start with a program on PATH, got {command[0]!r}{remedy}")


def print_plan(steps: Sequence[Step]) -> None:
    """Print the commands of a session, one a line, as a shell would take them."""
    for step in steps:
        say(step.line)


class Session:
    """The folder of a run, and the steps that ran in it.

    Args:
        folder: must be new or empty.
        settings: what the user asked for; written to `session.yaml`.
        tools: (name, path, version) of the programs used.

    Raises ValueError if the folder has files or cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        tools: Sequence[tuple[str, str, str]] = (),
    ) -> None:
        check_new(folder)
        self.folder, self.done = folder, list[Done]()
        self._started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
        (folder / "session.yaml").write_text(text)
        _write_json(folder / "versions.json", versions(tools))

    def run(self, step: Step, failures: Sequence[Failure] = ()) -> Done:
        """Run a step, and record it. Raises ToolError if it failed, with what its log shows."""
        number = len(self.done) + 1
        stem = self.folder / "logs" / f"{number}-{step.label}"
        try:
            done = run(step, stem)
        except OSError as error:
            raise ToolError("not started", f"{step.argv[0]}: {error.strerror or error}") from None
        self.done.append(done)
        self._record()
        check(done, failures)
        return done

    def _record(self) -> None:
        commands = [
            {
                "label": one.step.label,
                "command": one.step.line,
                "argv": list(one.step.argv),
                "env": dict(one.step.env),
                "exit_code": one.code,
                "seconds": round(one.seconds, 3),
            }
            for one in self.done
        ]
        content = {"started": self._started, "directory": os.getcwd(), "commands": commands}
        _write_json(self.folder / "commands.json", content)


def check_new(folder: Path) -> None:
    """Raises ValueError unless `folder` is absent or an empty folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"output must be a new or empty folder, got {folder}. Give another one")


def new_folder(name: str) -> Path:
    """A folder name for a run of now, such as nsys-20260102-030405."""
    return Path(f"{name}-{datetime.now():%Y%m%d-%H%M%S}")


def versions(tools: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    """What a recording depends on: tools, packages, Python, platform, driver."""
    packages: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    try:
        driver = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        driver = None
    return {
        "tools": {name: {"path": path, "version": version} for name, path, version in tools},
        "packages": packages,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "driver": driver,
    }


def run(step: Step, stem: Path) -> Done:
    """Run a step with its output in `<stem>.out` and `<stem>.err`.

    An interrupt or a time-out interrupts the command, which has GRACE_S seconds to write its files.
    Raises KeyboardInterrupt for the first, OSError if the program does not start.
    """
    start = time.monotonic()
    process = subprocess.Popen(
        list(step.argv),
        env=os.environ | dict(step.env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that an interrupt of this process does not end it at once
        preexec_fn=_interruptible,
    )
    lines: tuple[list[str], list[str]] = ([], [])
    readers = [
        threading.Thread(
            target=_copy, args=(pipe, stem.with_name(stem.name + suffix), into, step.echo)
        )
        for pipe, suffix, into in zip(
            (process.stdout, process.stderr), (".out", ".err"), lines, strict=True
        )
    ]
    for reader in readers:
        reader.daemon = True  # a process that outlives the command may keep the pipe open
        reader.start()
    late = False
    try:
        process.wait(step.timeout_s)
    except subprocess.TimeoutExpired:
        late = True
        _interrupt(process)
    except BaseException:
        _interrupt(process)
        raise
    for reader in readers:
        reader.join(10.0)
    seconds = time.monotonic() - start
    return Done(step, process.returncode, "".join(lines[0]), "".join(lines[1]), seconds, late)


def _copy(pipe: IO[str], path: Path, into: list[str], echo: bool) -> None:
    with pipe, path.open("w") as log:
        for line in pipe:
            into.append(line)
            log.write(line)
            log.flush()
            if echo and not PROGRESS.match(line):
                sys.stderr.write(line)


def _interruptible() -> None:
    """A child of a process that ignores SIGINT (`nohup ... &`) would ignore it too. The kernel
    sends it if this process is killed: a tool left behind would keep the GPU's counters."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGINT)


def _interrupt(process: subprocess.Popen[str]) -> None:
    """Interrupt the command and what it started; kill what is still there after GRACE_S."""
    for sign in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(GRACE_S)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def check(done: Done, failures: Sequence[Failure] = ()) -> None:
    """Raises ToolError if a step failed: it was late, by its exit code, or by the file that it did
    not write."""
    step = done.step
    if done.late:
        raise ToolError(
            "time-out",
            f"{step.label} took longer than {step.timeout_s:g} s, and was interrupted",
            "profile less of the program, or allow more by --timeout",
            tail(done.stderr) or tail(done.stdout),
        )
    missing = step.writes is not None and not (step.writes.is_file() and step.writes.stat().st_size)
    bad_code = step.exit_codes is not None and done.code not in step.exit_codes
    if not bad_code and not missing:
        return
    if known := find_failure(done.output, failures):
        failure, line = known
        raise ToolError(failure.name, failure.cause, failure.remedy, [line])
    lines = tail(done.stderr) or tail(done.stdout)
    if bad_code or done.code:
        how = f"exit code {done.code}" if done.code >= 0 else _signal(done.code)
        raise ToolError(f"{step.label} failed", f"{Path(step.argv[0]).name}: {how}", "", lines)
    assert step.writes is not None
    cause = f"{Path(step.argv[0]).name} ended with exit code 0 but wrote no {step.writes.name}"
    raise ToolError("no report", cause, "", lines)


def find_failure(output: str, failures: Sequence[Failure] = ()) -> tuple[Failure, str] | None:
    """The first known failure that the output shows, with the line that shows it."""
    for failure in (*failures, *COMMON_FAILURES):
        for line in output.splitlines():
            if re.search(failure.pattern, line):
                return failure, line.strip()
    return None


def tail(output: str) -> list[str]:
    """The last lines of a log that are neither blank nor a progress bar."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    return [line for line in lines if not PROGRESS.match(line)][-TAIL_LINES:]


def _signal(code: int) -> str:
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
