"""The profiler beside nsys on whole programs: equal kernel counts, GPU time within 0.5 %.

Each program of this folder runs once under each of the two; neither sees the other. The run ends
with a table of what each found (conftest.py). Workers may share a GPU (alone.py). Beside tests of
other folders, whose kernels stretch the times, the counts are compared alone.
"""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from attnscope.profile import Profile

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
PROGRAMS = Path(__file__).parent
ROW = "beside nsys"  # the property of a test that is a row of the table: see conftest.py
TOLERANCE = 0.005  # of the GPU time
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
HOST_S = 0.5  # by which the start of a process varies
LATE_STEPS, LATE_MS = 8, 80  # of ddp_two_gpus.py
# Program and arguments -> the least share of its GPU time that must have an owner.
CASES = {
    "gpt_training.py": 1.0,
    "gpt_training.py --compile": 1.0,
    "cnn_dataloader.py": 1.0,
    "generate.py": 1.0,
    "graph_training.py": 1.0,
    "hugging_face.py": 1.0,
    "triton_direct.py": 0.2,  # its own kernel has no op around it
    "threads_streams.py": 1.0,
}


def run(*command: str, folder: Path) -> str:
    # The same generated code in all runs: Inductor chooses it by time in the first.
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    environment |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TRITON_CACHE_DIR": str(folder / "triton")}
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and TORCHRUN[1] not in command:  # each worker of a parallel run uses one GPU
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = given.split(",") if given else [*map(str, range(torch.cuda.device_count()))]
        environment |= {"CUDA_VISIBLE_DEVICES": gpus[int(worker.removeprefix("gw")) % len(gpus)]}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def program(case: str) -> list[str]:
    name, *arguments = case.split()
    return [str(PROGRAMS / name), *arguments]


def alone(*command: str) -> list[str]:
    """A program, or `-m` and a module, that waits until no other one uses its GPUs."""
    return [str(PROGRAMS / "alone.py"), *command]


def nsys_report(folder: Path, command: list[str]) -> Path:
    """The database of a Python program under nsys."""
    if shutil.which("nsys") is None:
        pytest.skip("no nsys on PATH")
    report = folder / "report"
    options = ["--trace=cuda,nvtx", "--cuda-graph-trace=node", "--sample=none", "--cpuctxsw=none"]
    where = ["--force-overwrite=true", f"--output={report}"]
    run("nsys", "profile", *options, *where, sys.executable, *command, folder=folder)
    export = ["--type=sqlite", "--force-overwrite=true", f"--output={report}.sqlite"]
    run("nsys", "export", *export, f"{report}.nsys-rep", folder=folder)
    return Path(f"{report}.sqlite")


def nsys_kernels(folder: Path, command: list[str], name: str | None = None) -> tuple[int, int]:
    """Kernels that nsys sees, and their nanoseconds; of the NVTX range `name` only, if given."""
    report = nsys_report(folder, command)
    query = "SELECT count(*), sum(k.end - k.start) FROM CUPTI_ACTIVITY_KIND_KERNEL k"
    if name is not None:
        query += (
            " JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId JOIN"
            " NVTX_EVENTS n ON r.start BETWEEN n.start AND n.end LEFT JOIN StringIds s"
            f" ON s.id = n.textId WHERE coalesce(n.text, s.value) = '{name}'"
        )
    with sqlite3.connect(report) as data:
        count, ns = data.execute(query).fetchone()
    return count, ns


def record(folder: Path, command: list[str]) -> dict[str, Any]:
    """The record of a program under the profiler."""
    ours = ["-m", "attnscope", "profile", "--output", str(folder / "out")]
    run(sys.executable, *alone(*ours, *command), folder=folder)
    found: dict[str, Any] = json.loads((folder / "out" / "profile.json").read_text())
    return found


Row = tuple[str, ...]


Agree = Callable[[str, tuple[int, float], tuple[int, int], float], bool]


@pytest.fixture
def agree(record_property: Callable[[str, object], None], pytestconfig: pytest.Config) -> Agree:
    """Whether kernels and nanoseconds agree, after a row for the table about them and the owned
    share; different counts fail at once."""
    folder = pytestconfig.invocation_params.dir
    asked = [(folder / path.split("::")[0]).resolve() for path in pytestconfig.args]
    beside_others = "PYTEST_XDIST_WORKER" in os.environ and not all(
        path.is_relative_to(PROGRAMS.resolve()) for path in asked
    )

    def compare(case: str, ours: tuple[int, float], theirs: tuple[int, int], share: float) -> bool:
        ratio = ours[1] / theirs[1]
        times = [f"{ns / 1e6:.3f}" for ns in (ours[1], theirs[1])]
        counts = [f"{count:,}" for count in (ours[0], theirs[0])]
        record_property(ROW, [case, *counts, *times, f"{ratio:.4f}", f"{share:.2%}"])
        assert ours[0] == theirs[0], f"kernels: {ours[0]} by the profiler, {theirs[0]} by nsys"
        return beside_others or abs(ratio - 1) <= TOLERANCE

    return compare


def assert_agrees(compare: Callable[[], bool], runs: int = 2) -> None:
    """Compare until the times agree: two runs of a program may differ by chance."""
    if not any(compare() for _ in range(runs)):
        pytest.fail(f"GPU time differs by more than {TOLERANCE:.1%} in {runs} runs")


@pytest.mark.parametrize("case", CASES)
def test_counts_and_time_are_those_of_nsys(case: str, tmp_path: Path, agree: Agree) -> None:
    if case == "hugging_face.py" and find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    if "--compile" in case:
        run(sys.executable, *alone(*program(case)), folder=tmp_path)  # fills the caches

    def compare() -> bool:
        found = record(tmp_path, program(case))
        owned = found["attribution"]
        assert found["incomplete"] is None and found["lint"]["trusted"], found["lint"]
        ours = (owned["kernels"], owned["total_us"] * 1e3)
        theirs = nsys_kernels(tmp_path, alone(*program(case)))
        assert owned["share"] >= CASES[case]
        return agree(case, ours, theirs, owned["share"])

    assert_agrees(compare)


def test_a_trace_that_a_script_recorded_itself_is_read(tmp_path: Path, agree: Agree) -> None:
    script = alone(*program("own_profiler.py"))

    def compare() -> bool:
        run(sys.executable, *script, str(tmp_path / "own.json"), folder=tmp_path)
        profile = Profile.read(tmp_path / "own.json")
        owners = profile.attribution
        assert profile.incomplete is None and owners.share == 1
        theirs = nsys_kernels(tmp_path, script, "measured")
        ours = (len(profile.trace.kernels), float(owners.total_ns))
        return agree("own_profiler.py", ours, theirs, owners.share)

    assert_agrees(compare)


@pytest.mark.timing
def test_a_long_program_takes_little_longer_and_its_report_comes_soon(tmp_path: Path) -> None:
    """Until its end it takes at most 15 % more; the report of 33,000 kernels follows in 12 s."""
    script = tmp_path / "timed.py"
    path, *tokens = program("generate.py 380")
    script.write_text(
        f"import runpy, sys, time\nsys.argv = {[path, *tokens]}\n"
        f"runpy.run_path({path!r}, run_name='__main__')\nprint('ended', time.time())\n"
    )
    plain = []
    for _ in range(2):  # the first reads files from the disk
        begin = time.time()
        run(sys.executable, str(script), folder=tmp_path)
        plain.append(time.time() - begin)
    command = ["-m", "attnscope", "profile", "--output", str(tmp_path / "out"), str(script)]
    begin = time.time()
    text = run(sys.executable, *command, folder=tmp_path)
    end = time.time()
    ended = float(re.search(r"ended (\S+)", text)[1])  # type: ignore[index]
    kernels = json.loads((tmp_path / "out" / "profile.json").read_text())["attribution"]["kernels"]
    print(
        f"{kernels:,} kernels: plain {plain[1]:.2f} s, profiled to the end of the program "
        f"{ended - begin:.2f} s, then {end - ended:.2f} s until the command has ended"
    )
    assert kernels > 33_000 and end - ended < 12 * kernels / 33_000
    assert ended - begin < 1.15 * plain[1] + HOST_S


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def record_ranks(folder: Path, script: list[str]) -> dict[str, Any]:
    """The merged report of a program on two ranks."""
    ours = [sys.executable, "-m", "attnscope", "profile"]
    out = folder / "out"
    ranks = alone(*TORCHRUN, "--no-python", *ours, "--output", str(out), *script)
    run(sys.executable, *ranks, folder=folder)
    run(*ours, "--merge", str(out), folder=folder)
    merged: dict[str, Any] = json.loads((out / "ranks.json").read_text())
    assert [row["state"] for row in merged["tables"]["ranks"]] == ["complete"] * 2
    return merged


@TWO_GPUS
def test_ddp_on_two_gpus_is_what_nsys_sees(tmp_path: Path, agree: Agree) -> None:
    # One bucket: collectives slow the kernels beside them, differently in each run.
    script = program("ddp_two_gpus.py 30 0 1000")

    def compare() -> bool:
        merged = record_ranks(tmp_path, script)
        theirs = nsys_by_device(tmp_path, alone(*TORCHRUN, *script))
        same = []
        for row, found in zip(merged["tables"]["ranks"], theirs, strict=True):
            path = tmp_path / "out" / f"rank{row['rank']}" / "profile.json"
            kernels = json.loads(path.read_text())["attribution"]["kernels"]
            assert row["owned"] == 1
            ours = (kernels, row["compute_us"] * 1e3)
            same.append(agree(f"ddp_two_gpus.py, rank {row['rank']}", ours, found, row["owned"]))
        return all(same)

    assert_agrees(compare, runs=3)


@TWO_GPUS
def test_waiting_for_a_late_rank_is_found_on_two_gpus(tmp_path: Path) -> None:
    merged = record_ranks(tmp_path, program(f"ddp_two_gpus.py {LATE_STEPS} {LATE_MS} 25"))
    tables = merged["tables"]
    late = json.loads((tmp_path / "out" / "rank1" / "profile.json").read_text())
    (spin,) = (row for row in late["tables"]["kernels"] if "spin_kernel" in row["symbol"])
    (reduced,) = (row for row in tables["communication"] if row["collective"] == "all_reduce")
    print(merged["verdict"])
    print({key: reduced[key] for key in ("calls", "time_us", "own_us", "waiting_us", "bus_gbs")})
    print({key: spin[key] for key in ("calls", "total_us")})
    # torch.cuda._sleep is no op: its kernels alone have no owner.
    unowned = [row["kernel"] for row in late["attribution"]["unowned"]]
    print(f"without an owner: {unowned}")
    assert tables["ranks"][0]["owned"] == 1
    assert len(unowned) == LATE_STEPS and set(unowned) == {spin["kernel"]}
    # The first rank waits in one collective of each step while the last one's GPU spins.
    assert spin["calls"] == LATE_STEPS and spin["total_us"] > 0.5e3 * LATE_STEPS * LATE_MS
    assert reduced["waiting_us"] == pytest.approx(spin["total_us"], rel=0.1)
    assert tables["ranks"][1]["late"] >= LATE_STEPS and "most of it for rank 1" in merged["verdict"]
    assert 10 < reduced["bus_gbs"] < 450  # NVLink of an H200: 450 GB/s in each direction


def nsys_by_device(folder: Path, command: list[str]) -> list[tuple[int, int]]:
    """For each GPU, the kernels that nsys sees, and the nanoseconds of those that are not NCCL's,
    which wait for the other rank."""
    report = nsys_report(folder, command)
    query = (
        "SELECT count(*), sum((s.value NOT LIKE '%nccl%') * (k.end - k.start)) FROM"
        " CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.demangledName"
        " GROUP BY k.deviceId ORDER BY k.deviceId"
    )
    with sqlite3.connect(report) as data:
        return [(count, ns) for count, ns in data.execute(query)]
