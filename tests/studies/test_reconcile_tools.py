"""One call by every tool: times of nsys and ncu per call, their limits, and their failures."""

import sys
from pathlib import Path

import pytest
import typer
from made_nsys import MadeReport
from typer.testing import CliRunner

from attnscope.nsight import ncu, nsys
from attnscope.nsight.ncu_reader import Kernel
from attnscope.nsight.nsys import Recorded
from attnscope.nsight.recording import read_recording
from attnscope.nsight.tool import ToolError
from attnscope.studies.ops import tools
from attnscope.studies.ops.reconcile import Measurement, compare

RANGE = "cuda-backward@attnscope"


def recorded(path: Path, calls: int, pieces: int = 2, length: float = 5.0):
    """A range of equal calls, and the same kernels before it."""
    made, at = MadeReport(), 0.0
    made.kernel("warmup", 1, 2, 90)
    made.range("cuda-backward", 100, 100 + 20 * calls * pieces, "attnscope")
    for at in range(calls * pieces):
        start = 110 + 20 * at
        made.kernel("k", start, start + 5, start + 5 + length + at % 2, thread=4001)
    return read_recording(made.save(path))


def test_nsys_times_are_sums_of_the_kernels_of_each_call(tmp_path):
    found = tools.nsys_measurement(recorded(tmp_path / "r.sqlite", 3), RANGE, 3)
    assert found.samples_us == [11.0, 11.0, 11.0]
    assert found.tolerance == tools.NSYS_TOLERANCE
    with pytest.raises(ValueError, match="the same work in each of 4 calls, got 6 pieces"):
        tools.nsys_measurement(recorded(tmp_path / "r.sqlite", 3), RANGE, 4)


def test_the_limit_of_a_tool_is_its_own(tmp_path):
    reference = Measurement("torch profiler", [100.0, 100.0])
    strict = Measurement("nsys", [100.6, 100.6], tolerance=0.005)
    loose = Measurement("ncu", [104.0, 104.0], tolerance=0.05)
    table = compare([reference, strict, loose], tolerance=0.03)
    assert table["agrees"].tolist() == [True, False, True]


def test_runs_under_the_tools_are_read_and_their_failures_are_reasons(tmp_path, monkeypatch):
    program = [sys.executable, "-m", "target"]

    def record(settings, folder):
        assert settings.command[-2:] == ["--iterations", "3"] and settings.range == RANGE
        return Recorded(recorded(tmp_path / "r.sqlite", 3), [], 0)

    def profile(settings, folder, chip):
        assert (settings.cache, settings.clock, settings.ranges) == ("none", "none", [RANGE])
        return [Kernel(at, "k", values={"gpu__time_duration.sum": 5e3 + at}) for at in range(6)]

    monkeypatch.setattr(nsys, "record", record)
    monkeypatch.setattr(ncu, "record", profile)
    assert tools.record_nsys(program, RANGE, 3, tmp_path).samples_us == [11.0, 11.0, 11.0]
    assert tools.record_ncu(program, RANGE, 3, tmp_path).samples_us == [10.001, 10.005, 10.009]
    assert "in each of 4 calls" in str(tools.record_ncu(program, RANGE, 4, tmp_path).reason)

    def fail(*arguments):
        raise ToolError("no permission", "this user may not read counters", "be root")

    monkeypatch.setattr(ncu, "record", fail)
    failed = tools.record_ncu(program, RANGE, 3, tmp_path)
    assert failed.reason == "no permission: this user may not read counters"
    assert not failed.samples_us


def test_a_machine_without_a_gpu_is_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    app = typer.Typer()
    app.command()(tools.reconcile_command)
    done = CliRunner().invoke(app, [])
    assert done.exit_code == 2 and "one of the 0 CUDA devices" in done.output
