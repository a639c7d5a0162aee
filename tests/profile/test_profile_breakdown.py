"""Step breakdown: each instant counts once, by priority; the parts sum to the step."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pandas
import pytest
from made_trace import (
    RECORDINGS,
    Event,
    MadeTrace,
    cpu,
    kernel,
    launch,
    named,
    op,
    recorded,
    write_trace,
)

from attnscope.profile import Profile
from attnscope.profile.analysis.steps import PARTS, find_steps, program_window, step_breakdown
from attnscope.profile.attribution.backward import ENGINE
from attnscope.profile.attribution.owners import Attribution, busy_ns
from attnscope.profile.trace.markers import WAIT
from attnscope.profile.trace.reader import read_trace


def parts(table: pandas.DataFrame) -> pandas.DataFrame:
    return table[[f"{part}_us" for part in PARTS]]


def test_each_instant_goes_to_the_first_part(tmp_path: Path) -> None:
    made = MadeTrace()
    made.range("program", 0, 100)
    made.op("aten::mm", 10, 40)
    made.kernel("k", 30, 20, launch=20)  # the call takes 20 to 22
    made.kernel("Memcpy DtoH", 45, 15, launch=40, cat="gpu_memcpy")
    made.kernel("Memset", 70, 5, launch=62, cat="gpu_memset")
    made.call("cudaStreamSynchronize", 65, 25)
    made.op("aten::add", 55, 25, thread=2)
    table = step_breakdown(made.attribution(tmp_path))
    row = table.iloc[0]
    assert (row["step"], row["wall_us"]) == ("all", 100)
    # kernel 30-50; copy 50-60 of 45-60; fill 70-75; runtime 20-22, 62-64, 65-70, 75-90;
    # cpu 10-20, 22-30, 60-62, 64-65; other 0-10, 90-100.
    assert list(parts(table).iloc[0]) == [20, 10, 5, 24, 21, 20]
    assert table.attrs["steps"] == "the whole program"
    assert table.attrs["setup_us"] is None and table.attrs["setup_reason"]


@pytest.mark.parametrize("name", RECORDINGS)
def test_recorded_steps_sum_to_their_wall_time(name: str) -> None:
    attribution = recorded(name)
    table = step_breakdown(attribution)
    assert (parts(table).sum(axis=1) - table["wall_us"]).abs().max() < 1e-6
    assert (parts(table) >= 0).all(axis=None)
    steps, _ = find_steps(attribution)
    start, end = steps[0].start, steps[-1].end
    kernels = [k for k in attribution.trace.kernels if start <= k.start and k.end <= end]
    # The steps are back to back here, so no kernel is cut.
    assert table["kernel_us"].sum() == pytest.approx(busy_ns(kernels) / 1e3)
    assert len(kernels) == len(attribution.trace.kernels)


def test_steps_of_a_loop_without_a_profiler_schedule() -> None:
    train = step_breakdown(recorded("train"))
    assert list(train["step"]) == ["forward 0", "forward 1"]
    assert list(train["first"]) == [True, False]
    assert train.attrs["steps"] == "from one outermost range 'forward' to the next"
    assert train.attrs["setup_us"] == pytest.approx(train["wall_us"][0] - train["wall_us"][1])
    assert len(step_breakdown(recorded("ops"))) == 3
    assert list(step_breakdown(recorded("streams"))["step"]) == ["all"]


def test_profiler_steps_last_from_start_to_start(tmp_path: Path) -> None:
    made = MadeTrace()
    for at, start in enumerate((0, 50, 110)):
        made.range(f"ProfilerStep#{at}", start, 40)
        made.range("forward", start + 1, 10)
        made.op("aten::mm", start + 2, 5)
    made.kernel("k", 30, 30, launch=3)  # of step 0, runs into step 1
    made.kernel("k", 60, 10, launch=53)
    made.kernel("k", 120, 40, launch=113)  # outlasts the last range
    attribution = made.attribution(tmp_path)
    steps, rule = find_steps(attribution)
    assert rule == "the profiler's steps"
    assert [(s.name, s.start, s.end) for s in steps] == [
        ("ProfilerStep#0", 0, 50_000),
        ("ProfilerStep#1", 50_000, 110_000),
        ("ProfilerStep#2", 110_000, 160_000),
    ]
    table = step_breakdown(attribution)
    assert list(table["kernel_us"]) == [20, 20, 40]
    assert table.attrs["setup_us"] == pytest.approx(50 - 55)
    assert (table.attrs["mean_us"], table.attrs["counted"]) == (55, 2)
    assert table.attrs["sd_us"] == pytest.approx(50**0.5)


def test_program_window(tmp_path: Path) -> None:
    made = MadeTrace()
    made.call("cudaDeviceSynchronize", 0, 5)
    made.kernel("k", 20, 5, launch=10)
    made.call("cudaDeviceSynchronize", 30, 5)
    assert program_window(made.attribution(tmp_path).trace) == (10_000, 25_000)
    empty = MadeTrace()
    with pytest.raises(ValueError, match="trace must have an op"):
        program_window(empty.attribution(tmp_path).trace)


def test_a_loader_that_is_exhausted_begins_no_step(tmp_path: Path) -> None:
    """Two epochs of two batches: each ends with a call that finds none, the next draws a seed."""
    load = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    step = "Optimizer.step#AdamW.step"
    events: list[Event] = []
    for epoch in (0, 1000):
        events.append(op("aten::random_", epoch, epoch + 5))
        for at in range(epoch + 10, epoch + 210, 100):
            events += [named(load, at, at + 9), op("aten::mm", at + 20, at + 40)]
        events.append(named(load, epoch + 300, epoch + 302))
    path = write_trace(tmp_path / "t.json", *events)
    steps, rule = find_steps(Attribution(read_trace(path)))
    assert [step.start // 1000 for step in steps] == [10, 110, 1010, 1110] and load in rule
    steppers = [named(step, at, at + 5) for at in (50, 150, 1050, 1150)]
    path = write_trace(tmp_path / "t.json", *events, *steppers)
    steps, rule = find_steps(Attribution(read_trace(path)))
    ends = [0, 55, 155, 1055, 1155]
    assert [(s.start // 1000, s.end // 1000) for s in steps] == list(pairwise(ends))
    assert rule == f"to the end of each {step!r}"


def test_a_range_that_agrees_with_the_optimizer_is_the_step(tmp_path: Path) -> None:
    events = [named("work", at, at + 90) for at in (0, 100, 200)]
    events += [named("Optimizer.step#SGD.step", at + 80, at + 85) for at in (0, 100, 200)]
    for names, rule in (
        (events, "from one outermost range 'work' to the next"),
        (events[1:], "to"),
    ):
        path = write_trace(tmp_path / "t.json", *names)
        steps, found = find_steps(Attribution(read_trace(path)))
        assert len(steps) == 3 and found.startswith(rule)


def test_steps_are_named_by_an_event(tmp_path: Path) -> None:
    events = [named("all", 0, 1000)]
    for at in (0, 300, 600):
        events += [op("generate", at + 1, at + 200), op("generate", at + 20, at + 100)]
        events.append(cpu("python_function", "serve.py(7): token", at + 1, at + 150))
        events.append(cpu("python_function", "nn.Module: GPT_0", at + 2, at + 149))
    path = write_trace(tmp_path / "t.json", *events)
    owners = Attribution(read_trace(path))
    for name in ("generate", "token", "GPT"):
        steps, rule = find_steps(owners, name)
        assert [step.name for step in steps] == [f"{name} 0", f"{name} 1", f"{name} 2"]
        assert rule == f"from each {name!r} to the next" and steps[-1].end == 1_000_000
    with pytest.raises(ValueError, match="got 'nowhere'. Its ranges are: all"):
        find_steps(owners, "nowhere")


def test_steps_of_a_trace_are_cut_out(tmp_path: Path) -> None:
    made = MadeTrace()
    for number in range(550, 556):
        begin = 100 * (number - 550)
        made.range(f"ProfilerStep#{number}", begin, 95)
        made.op("aten::mm", begin + 5, 20)
        made.kernel("k", begin + 90, 60, launch=begin + 10)  # runs on into the next step
    path = write_trace(tmp_path / "t.json", *made.events, deviceProperties=made.devices)
    whole = Profile.read(path)
    assert list(whole.stages()["range"]) == ["ProfilerStep"]
    assert whole.steps().attrs["setup_us"] is None  # 550 is not the program's first
    found = Profile.read(path, range(551, 554))
    table = found.steps()
    assert list(table["step"]) == ["step 551", "step 552", "step 553"]
    assert list(table["wall_us"]) == [100, 100, 100] and table.attrs["mean_us"] == 100
    assert len(found.trace.kernels) == 3 and found.incomplete is None and found.lint.trusted
    assert found.operators().set_index("name")["gpu_us"]["aten::mm"] == 180
    found.export_chrome_trace(tmp_path / "added.json")
    for wanted, have in ((range(552, 557), "got 556. It has 550:555"), (range(3), "got 0. It has")):
        with pytest.raises(ValueError, match=have):
            Profile.read(path, wanted)


def test_steps_belong_to_one_thread(tmp_path: Path) -> None:
    """A data loading thread has repeating ranges too, and more of them."""
    load = [named("load", 10 * at, 10 * at + 5, tid=2) for at in range(9)]
    work = [op("copy", 10 * at, 10 * at + 5, tid=2) for at in range(9)]
    train = [named("train", 20 + 30 * at, 45 + 30 * at) for at in range(3)]
    path = write_trace(tmp_path / "t.json", *load, *work, *train, launch(1, 30), kernel(1, 32, 40))
    steps, rule = find_steps(Attribution(read_trace(path)))
    assert [step.name for step in steps] == ["train 0", "train 1", "train 2"]
    assert rule == "from one outermost range 'train' to the next"
    waits = [named(WAIT, -9, -5), named(WAIT, 110, 112)]
    path = write_trace(tmp_path / "t.json", *load, *work, *train, *waits)
    assert len(find_steps(Attribution(read_trace(path)))[0]) == 3


def test_steps_are_not_those_of_an_autograd_thread(tmp_path: Path) -> None:
    events: list[Event] = []
    for at in range(3):
        begin, sequence = 1000 * at, {"Sequence number": at, "Fwd thread id": 1}
        events += [named("forward", begin, begin + 300), op("mm", begin + 10, begin + 50)]
        events += [launch(100 + at, begin + 20), kernel(100 + at, begin + 30, begin + 90)]
        events.append(op(f"{ENGINE}MmBackward0", begin + 400, begin + 700, tid=9, **sequence))
        for part in range(3):
            number, start = 10 * at + part + 1, begin + 410 + 90 * part
            events.append(named("nccl:all_reduce", start, start + 50, tid=9))
            events += [launch(number, start + 5, tid=9), kernel(number, start + 9, start + 30)]
    path = write_trace(tmp_path / "t.json", *events)
    steps, _ = find_steps(Attribution(read_trace(path)))
    assert [step.name for step in steps] == ["forward 0", "forward 1", "forward 2"]
