"""Recording regions, on the CPU: warm-up, lost events, exceptions, a second profiler, options."""

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from made_trace import RECORDED, cpu, kernel, launch, op, write_trace

from attnscope.profile import Profile, ProfileError, annotate, profile
from attnscope.profile.analysis import result
from attnscope.profile.analysis.catalog import TABLES
from attnscope.profile.attribution.audit import Audit
from attnscope.profile.record import recorder
from attnscope.profile.render.formats import write_all
from attnscope.profile.render.table import GAP, fit
from attnscope.profile.render.terminal import NO_GPU_TIME, attribution_line, heading
from attnscope.profile.trace.events import CpuEvent


def work(size: int = 32) -> torch.Tensor:
    x = torch.randn(size, size, requires_grad=True)
    (x @ x).sum().backward()
    assert x.grad is not None
    return x.grad


def names(found: Profile) -> set[str]:
    return set(found.operators()["name"])


def test_a_region_is_recorded_and_has_no_gpu_time_without_a_gpu() -> None:
    with profile("region") as found:
        with annotate("step"):
            work()
    assert {"aten::mm", "aten::randn", "MmBackward0"} <= names(found)
    step = found.stages().iloc[0]
    assert (step["range"], step["calls"], step["depth"]) == ("step", 1, 0)
    assert found.wall_s is not None and 0 < step.wall_us < found.wall_s * 1e6
    assert found.incomplete is None and found.interrupted is None
    if not torch.cuda.is_available():
        assert attribution_line(found.attribution) == NO_GPU_TIME
        assert found.kernels().empty and found.attribution.share is None


def test_nothing_of_the_profiler_is_in_the_record() -> None:
    with profile() as found:
        torch.ones(3).neg()
    assert not any("profiler" in name or "sentinel" in name for name in names(found))
    calls = found.operators().set_index("name")["calls"]
    assert calls["aten::neg"] == 1 and calls["aten::ones"] == 1


def test_reading_before_the_end_is_an_error_with_the_reason() -> None:
    with profile() as found:
        with pytest.raises(ProfileError, match="must have ended, got one that is running"):
            found.trace  # noqa: B018
        with pytest.raises(ProfileError, match="must have ended"):
            found.operators()
        with pytest.raises(AttributeError):
            found.no_such_thing  # noqa: B018
    assert found.trace.cpu == [] and found.operators()["name"].tolist() == ["(not owned by an op)"]


def test_the_profile_of_a_region_does_not_change_and_is_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with profile() as region:
        work()
    found = region.profile
    assert isinstance(found, Profile) and region.operators().equals(found.operators())
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.name = "other"  # type: ignore[misc]
    monkeypatch.setattr("attnscope.profile.analysis.result.detect", None)
    monkeypatch.setattr("attnscope.profile.analysis.catalog.operator_table", None)
    table = found.operators()
    table["name"] = "changed"
    assert "changed" not in set(found.operators()["name"])
    assert found.flop_counts is found.flop_counts


def test_tables_findings_and_flops_are_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counted: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return function(*args, **kwargs)

        return call

    for name, kind in TABLES.items():
        made = dataclasses.replace(kind, make=counting(name, kind.make))
        monkeypatch.setitem(TABLES, name, made)
    for name in ("detect", "efficiency", "FlopCounts", "check_figures"):
        function = getattr(result, name)
        monkeypatch.setattr(result, name, counting(name, function))
    found = Profile.read(RECORDED / "stack.json.gz")
    found.print()
    write_all(found, tmp_path / "out")
    assert counted == Counter([*TABLES, "detect", "efficiency", "FlopCounts", "check_figures"])


def test_a_decorated_function_is_warmed_up_timed_and_recorded() -> None:
    calls = []

    @profile("f", warmup=3)
    def f(size: int, *, scale: float) -> float:
        """Said."""
        calls.append(size)
        work(size)
        return size * scale

    assert f(16, scale=0.5) == 8.0
    assert calls == [16] * 4 and f.__doc__ == "Said."
    found = f.profile
    assert found.operators().set_index("name").loc["aten::matmul"].calls == 1
    assert found.unprofiled_wall_s > 0 and found.unprofiled_reason is None
    assert "without (" in heading(found) and "x)" in heading(found)
    f(8, scale=1.0)
    assert f.profile is not found and len(calls) == 8


@pytest.mark.parametrize("warmup", [0, 1])
def test_without_warmup_the_unprofiled_time_is_missing_with_the_reason(warmup: int) -> None:
    f = profile(warmup=warmup)(work)
    f()
    assert f.profile.unprofiled_wall_s is None
    assert f.profile.unprofiled_reason == "needs warmup >= 2"
    assert "not measured (needs warmup >= 2)" in heading(f.profile)


class Losing:
    """An audit that reports lost launches the first `times` times."""

    def __init__(self, times: int) -> None:
        self.times, self.calls = times, 0

    def __call__(self, trace: Any) -> Audit:
        self.calls += 1
        lost = [CpuEvent("call", "cudaLaunchKernel", 1, 0, 1)] if self.calls <= self.times else []
        return Audit(launches=5, lost=lost)


def losing(monkeypatch: pytest.MonkeyPatch, times: int) -> Losing:
    found = Losing(times)
    monkeypatch.setattr("attnscope.profile.analysis.result.audit", found)
    return found


def test_lost_events_are_recorded_again_when_the_region_can_be_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    audit, calls = losing(monkeypatch, 2), []
    f = profile(warmup=1, retries=2)(lambda: calls.append(1))
    f()
    assert audit.calls == 3 and len(calls) == 1 + 3
    assert f.profile.incomplete is None


def test_lost_events_are_an_error_after_bounded_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    audit, calls = losing(monkeypatch, 99), []
    f = profile("f", warmup=0, retries=2)(lambda: calls.append(1))
    with pytest.raises(ProfileError, match="f: 1 of 5 launches have no kernel"):
        f()
    assert audit.calls == 3 and len(calls) == 3


def test_lost_events_in_a_block_are_an_error_and_what_is_there_is_marked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losing(monkeypatch, 1)
    with pytest.raises(ProfileError, match="1 of 5 launches have no kernel"):
        with profile() as found:
            work()
    assert found.incomplete
    found.print()
    assert "INCOMPLETE: 1 of 5 launches" in capsys.readouterr().out


def test_an_exception_goes_on_and_what_ran_before_it_is_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ZeroDivisionError):
        with profile() as found:
            torch.ones(3).neg()
            1 / 0  # noqa: B018
    assert found.interrupted == "ZeroDivisionError: division by zero"
    assert "aten::neg" in names(found)
    found.print()
    assert "ended by ZeroDivisionError: division by zero" in capsys.readouterr().out


def test_an_exception_of_a_decorated_function_is_not_tried_again() -> None:
    calls = []

    @profile(warmup=0)
    def f() -> None:
        calls.append(1)
        raise ProfileError("mine")

    with pytest.raises(ProfileError, match="mine"):
        f()
    assert len(calls) == 1 and f.profile.interrupted == "ProfileError: mine"


def test_the_region_error_comes_first_when_the_record_fails_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(recorder, "read_trace", fail)
    with pytest.raises(KeyError, match="mine"):
        with profile() as found:
            raise KeyError("mine")
    with pytest.raises(ProfileError, match="KeyError: 'mine'; and nothing was kept: disk full"):
        found.interrupted  # noqa: B018
    with pytest.raises(OSError, match="disk full"):
        with profile():
            pass


def test_a_profiler_can_be_used_twice_in_one_process() -> None:
    rows = []
    for _ in range(2):
        with profile() as found:
            work()
        rows.append(found.operators().set_index("name")["calls"].to_dict())
    assert rows[0] == rows[1]


def test_two_profilers_at_once_are_refused_and_the_first_goes_on() -> None:
    with profile() as outer:
        with pytest.raises(ProfileError, match="the only running profiler"):
            with profile():
                pass
        torch.ones(3).neg()
    assert "aten::neg" in names(outer)
    with torch.profiler.profile() as theirs:
        with pytest.raises(ProfileError, match="the only running profiler"):
            with profile():
                pass
        torch.ones(3).neg()
    assert any(e.key == "aten::neg" for e in theirs.key_averages())
    mine = profile()
    with mine as first:
        with pytest.raises(ProfileError, match="the only running profiler"):
            with mine:
                pass
        torch.ones(3).neg()
    assert "aten::neg" in names(first)
    with profile():
        pass


def test_under_another_tool_the_profiler_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ProfileError, match="got nsys .NSYS_PROFILING_SESSION_ID is set"):
        with profile():
            raise AssertionError("the region must not run")


def test_ops_of_other_threads_are_recorded() -> None:
    with profile() as found:
        thread = threading.Thread(target=lambda: torch.ones(3).cosh())
        thread.start()
        thread.join()
    assert "aten::cosh" in names(found)


def test_shapes_stacks_and_memory_are_there_when_asked_for() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

    net, x = Net(), torch.ones(8, 8)
    with profile(shapes=False) as plain:
        net(x)
    with profile(stacks=True, memory=True) as full:
        net(x)
    mm, mm_full = (next(e for e in p.trace.cpu if e.name == "aten::mm") for p in (plain, full))
    assert mm.shapes is None and mm_full.shapes is not None
    assert mm_full.shapes[:2] == ((8, 8), (8, 8))
    assert full.attribution.module(mm_full) == ("Net_0",)
    assert any("test_profile.py" in frame for frame in full.attribution.stack(mm_full))
    assert plain.attribution.stack(mm) == () and plain.memory().empty
    memory = full.memory().set_index("op")
    assert memory.loc["aten::mm"].allocated_bytes == 8 * 8 * 4


def test_a_record_is_the_same_with_and_without_pytorchs_own_table() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Conv1d(4, 4, 3))
    found = []
    for averages in (True, True, False):  # the first call of an op differs
        one = recorder.Recorder("both", recorder.Options(), averages)
        one.start()
        net(torch.ones(4, 4, 8)).sum().backward()
        trace = one.stop().trace
        # Neither times nor numbers that go on from one recording to the next.
        same = dict.fromkeys(("start", "end", "external_id", "sequence"), 0)
        cpu = [dataclasses.replace(event, **same) for event in trace.cpu]
        found.append((cpu, [event.sequence >= 0 for event in trace.cpu], len(trace.arrows)))
    assert found[1] == found[2] and len(found[1][0]) > 20 and found[1][2]


def test_expected_launches_are_checked_by_name_and_number() -> None:
    found = Profile.read(RECORDED / "ops.json.gz")
    found.expect("attnscope::forward", 3)
    found.expect("attnscope::sm90::forward_kernel", 3)
    found.expect("scaled_dot_product_flash", 6)
    with pytest.raises(ProfileError, match="kernels of 'aten::mm' must be 20, got 3"):
        found.expect("aten::mm", 20)
    with pytest.raises(ProfileError, match="op or kernel, got 'aten::mn'. .*aten::mm"):
        found.expect("aten::mn", 3)
    with profile() as cpu:
        torch.ones(3)
    if not torch.cuda.is_available():
        with pytest.raises(ProfileError, match="must be 20, got a profile without GPU time"):
            cpu.expect("aten::ones", 20)


def test_lines_are_shown_for_a_program_without_modules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(
        tmp_path / "lines.json", cpu("python_function", "mine.py(7): step", 0, 50), op("a", 1, 40),
        launch(1, 2), kernel(1, 5, 9),
    )  # fmt: skip
    Profile.read(path).print()
    out = capsys.readouterr().out
    assert out.startswith("the GPU worked 100% of the time; other 100% of its work\n")
    assert "\nlines: a GPU without a name; window 50 us; GPU work in 4 us of it\n" in out
    assert "Python lines" in out and "mine.py(7): step" in out and "Modules" not in out


def test_expected_launches_count_under_an_op_that_only_the_external_id_names(
    tmp_path: Path,
) -> None:
    events = [op("outer", 0, 9), op("inner", 1, 8, **{"External id": 3})]
    path = write_trace(tmp_path / "t.json", *events, kernel(5, 9, 10, **{"External id": 3}))
    Profile.read(path).expect("outer", 1)


@pytest.mark.parametrize("option", ["warmup", "retries"])
def test_a_negative_number_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be 0 or more, got -1"):
        profile(**{option: -1})


def test_a_large_trace_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recorder, "LARGE_TRACE", 1000)
    with profile():
        work()
    assert "profile fewer steps" in capsys.readouterr().err


def test_a_long_region_is_warned_of_while_it_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recorder, "LONG_REGION_S", 0.05)
    with profile():
        time.sleep(0.3)
    assert "every op and kernel of it is kept in memory" in capsys.readouterr().err


def test_the_trace_file_goes_with_the_profile() -> None:
    with profile("a/b c") as found:
        work()
    source = found.source
    assert source.is_file() and source.name == "a-b-c.json"
    del found
    assert not source.exists()


def test_a_trace_can_be_read_back(tmp_path: Path) -> None:
    with profile("mine") as found:
        work()
    copy = tmp_path / "kept.json"
    copy.write_bytes(found.source.read_bytes())
    again = Profile.read(copy)
    assert again.name == "kept" and again.wall_s is None
    assert again.operators().equals(found.operators())


def test_many_ops_with_everything_recorded_stay_usable() -> None:
    x = torch.ones(4)
    with profile(stacks=True, memory=True) as found:
        for _ in range(2000):
            x = x.neg()
    assert found.operators().set_index("name").loc["aten::neg"].calls == 2000
    assert found.source.stat().st_size < 20 << 20


def test_columns_that_do_not_fit_are_left_out_and_numbers_never_cut() -> None:
    needed = {"name": 60, "calls": 5, "gpu_us": 10, "self_cpu_us": 12, "op": 50}
    wide = fit(needed, {"name", "op"}, 200)
    assert wide == needed
    narrow = fit(needed, {"name", "op"}, 80)
    assert "self_cpu_us" not in narrow and narrow["gpu_us"] == 10 and narrow["calls"] == 5
    assert narrow["name"] >= 24 and sum(narrow.values()) + GAP * (len(narrow) - 1) <= 80
    assert list(fit({"range": 30, "calls": 5, "gpu_us": 60}, {"range"}, 40)) == ["range", "calls"]
    assert list(fit({"name": 60, "calls": 5, "gpu_us": 10}, {"name"}, 45).values()) == [26, 5, 10]


def test_only_what_runs_when_it_is_called_is_decorated() -> None:
    with pytest.raises(TypeError, match=r"name must be a title, got <function .* Decorate with @"):
        profile(lambda: None)  # type: ignore[arg-type]

    def steps() -> Iterator[int]:
        yield 1

    async def later() -> None: ...

    for function in (steps, later):
        with pytest.raises(TypeError, match="function must run when it is called, got "):
            profile()(function)
