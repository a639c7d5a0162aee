"""Ranges, threads and forward ops of backward work, on whichever thread it ran."""

import gzip
import json
from pathlib import Path

import pytest
from made_trace import RECORDED, cpu, kernel, launch, named, op, write_trace

from attnscope.profile.analysis.flops import FlopCounts
from attnscope.profile.analysis.tables import stage_table
from attnscope.profile.attribution.owners import Attribution
from attnscope.profile.trace.reader import read_trace


def made(path: Path, *events: dict) -> Attribution:
    return Attribution(read_trace(write_trace(path / "made.json", *events)))


def unpacked(name: str) -> list[dict]:
    return json.loads(gzip.decompress((RECORDED / f"{name}.json.gz").read_bytes()))["traceEvents"]


def kernel_self_us(owners: Attribution) -> list[float]:
    return list(stage_table(owners, FlopCounts(owners), None, "no card")["gpu_self_us"])


ENGINE = "autograd::engine::evaluate_function: MulBackward0"


def test_backward_is_not_credited_to_a_thread_that_is_at_work(tmp_path: Path) -> None:
    """The forward's thread runs other ops during the backward, so it did not call backward()."""
    about = {"Sequence number": 5, "Fwd thread id": 1}
    forward = [named("forward", 0, 40), op("aten::mul", 10, 20, **{"Sequence number": 5})]
    backward = [
        op(ENGINE, 60, 90, tid=9, **about), op("MulBackward0", 61, 89, tid=9, **about),
        op("aten::mul", 65, 80, tid=9), launch(1, 66, tid=9), kernel(1, 70, 95),
    ]  # fmt: skip
    waiting = made(tmp_path, *forward, named("step", 50, 100), *backward)
    work = waiting.trace.kernels[0]
    assert [r.name for r in waiting.ranges(work)] == ["step"]
    mul = waiting.forward_op(waiting.op(work))  # type: ignore[arg-type]
    assert mul is not None and (mul.name, mul.thread) == ("aten::mul", 1)
    at_work = made(tmp_path, *forward, named("step", 50, 100), op("z", 70, 75), *backward)
    assert at_work.ranges(at_work.trace.kernels[0]) == ()


def test_gradients_are_accumulated_in_the_backward_of_the_nodes_before(tmp_path: Path) -> None:
    """AccumulateGrad has no forward op to identify its caller; other threads run other ops."""
    about = {"Sequence number": 5, "Fwd thread id": 1}
    accumulate = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    owners = made(
        tmp_path,
        op("elsewhere", 0, 5, tid=3), cpu("python_function", "loop.py(1): wait", 0, 100, tid=4),
        op("aten::mul", 10, 20, **{"Sequence number": 5}), named("step", 50, 100),
        op(ENGINE, 60, 70, tid=9, **about), op(accumulate, 71, 80, tid=9),
        op("aten::add_", 72, 79, tid=9), launch(1, 73, tid=9), kernel(1, 75, 78),
    )  # fmt: skip
    assert [r.name for r in owners.ranges(owners.trace.kernels[0])] == ["step"]


def engine(
    name: str, start: float, end: float, tid: int = 9, number: int | None = None, forward: int = 1
) -> list[dict]:
    """A backward op as the engine runs it; without a sequence number, as AccumulateGrad."""
    about = {} if number is None else {"Sequence number": number, "Fwd thread id": forward}
    outer = op(f"autograd::engine::evaluate_function: {name}", start, end, tid, **about)
    return [outer, op(name, start + 1, end - 1, tid, **about)]


def work_of(correlation: int, at: float, tid: int = 9) -> list[dict]:
    return [launch(correlation, at, tid=tid), kernel(correlation, at + 1, at + 3)]


def frame(name: str, start: float, end: float, tid: int) -> dict:
    return cpu("python_function", name, start, end, tid)


RUN_BACKWARD = "<built-in method run_backward of torch._C._EngineBase object at 0x7f>"
# A forward and a range on thread 1; its backward and an AccumulateGrad on thread 9.
FORWARD = [op("mul", 10, 20, **{"Sequence number": 5}), named("step", 50, 200)]
MUL = [*engine("MulBackward0", 60, 90, number=5), *work_of(1, 66)]
ACCUMULATE = [*engine("AccumulateGrad", 92, 99), *work_of(2, 94)]
BACKWARD = [*FORWARD, *MUL, *ACCUMULATE]
SECOND = {"Sequence number": 0}  # the first op that made a node on thread 9
BACKWARDS: dict[str, tuple[list[dict], list[list[str]]]] = {
    "unchanged": (BACKWARD, [["step"]] * 2),
    "python frames of a third thread": ([*BACKWARD, frame("wait", 0, 300, 3)], [["step"]] * 2),
    "a third thread has ops": (
        [*BACKWARD, op("pin", 0, 5, 3), op("pin", 95, 96, 3), op("pin", 300, 301, 3)],
        [["step"]] * 2,
    ),
    "the caller runs the CPU's part": (
        [*BACKWARD, *engine("ToCopyBackward0", 52, 62, 1, 6), *engine("AccumulateGrad", 70, 80, 1)],
        [["step"]] * 2,
    ),
    "ops after the last backward op, of DDP": (
        [*BACKWARD, op("aten::copy_", 100, 110, 9), *work_of(3, 102)],
        [["step"]] * 3,
    ),
    "a python frame that ends too late": ([*BACKWARD, frame("hook", 61, 95, 9)], [["step"]] * 2),
    "a recomputed forward and its backward inside": (
        [
            *FORWARD, *engine("CheckpointBackward", 60, 90, number=5),
            op("aten::mm", 62, 66, 9, **SECOND), *engine("MmBackward0", 68, 85, 9, 0, forward=2),
            *work_of(1, 70),
        ],
        [["step"]],
    ),
    "double backward": (
        [
            *FORWARD, *engine("MulBackward0", 60, 90, number=5), *work_of(1, 66),
            op("aten::mul", 62, 80, 9, **SECOND),
            *engine("MulBackward0", 120, 140, 9, 0, forward=2), *work_of(2, 125),
        ],
        [["step"]] * 2,
    ),
    "forwards on threads that ended": (
        [
            named("step", 0, 200), op("mul", 10, 20, 4, **SECOND), op("mul", 10, 20, 5, **SECOND),
            *engine("MulBackward0", 60, 90, 9, 0, forward=4), *work_of(1, 66),
            *engine("MulBackward0", 60, 90, 8, 0, forward=5), *work_of(2, 67, 8),
        ],
        [["step"]] * 2,
    ),
    "called on another thread, as its frame says": (
        [
            *BACKWARD, frame("join", 51, 190, 1), named("other", 55, 120, 4),
            op("aten::ones_like", 56, 58, 4), frame(RUN_BACKWARD, 59, 110, 4),
        ],
        [["other"]] * 2,
    ),
    "a thread that runs the backward of another's forward itself": (
        [
            *FORWARD, *engine("MulBackward0", 60, 90, 4, 5), *work_of(1, 66, 4),
            op("mul", 100, 110, 4, **SECOND), *work_of(2, 102, 4),
        ],
        [[]] * 2,
    ),
    "two threads could have called": (
        [*FORWARD, op("z", 0, 5, 3), op("z", 300, 301, 3), *ACCUMULATE], [[]]
    ),
    "the forward ran before the window": ([named("step", 50, 200), *MUL], [["step"]]),
}  # fmt: skip


@pytest.mark.parametrize("case", BACKWARDS)
def test_backward_is_in_the_ranges_of_the_thread_that_called_it(case: str, tmp_path: Path) -> None:
    events, want = BACKWARDS[case]
    owners = made(tmp_path, *events)
    assert [[r.name for r in owners.ranges(k)] for k in owners.trace.kernels] == want
    assert sum(kernel_self_us(owners)) == sum(k.duration for k in owners.trace.kernels) / 1e3


def test_python_frames_of_other_threads_leave_a_recorded_backward_in_its_range(
    tmp_path: Path,
) -> None:
    events = unpacked("stack")
    times = [(e["ts"], e["dur"]) for e in events if e.get("cat") == "python_function"]
    start = min(ts for ts, _ in times)
    end = max(ts + dur for ts, dur in times)
    events.append(frame("threading.py(1002): _bootstrap", start, end, 0))
    path = tmp_path / "stack.json"
    path.write_text(json.dumps({"traceEvents": events}))
    owners = Attribution(read_trace(path))
    kernels = owners.trace.kernels
    assert sum("backward" in [r.name for r in owners.ranges(k)] for k in kernels) == 102


def test_arrows_distinguish_forward_threads_with_the_same_numbers(tmp_path: Path) -> None:
    events = []
    for thread in (1, 2):
        same = {"Sequence number": 0}
        events.append(op(f"f{thread}", 0, 5, tid=thread, **same))
        start = 100 * thread
        events.append(op("Back", start, start + 5, tid=9, **same, **{"Fwd thread id": thread + 6}))
        arrow = {"cat": "fwdbwd", "name": "fwdbwd", "id": thread, "pid": 1}
        events.append(arrow | {"ph": "s", "tid": thread, "ts": 0})
        events.append(arrow | {"ph": "f", "tid": 9, "ts": start})
    linked = made(tmp_path, *events)
    back = [e for e in linked.trace.cpu if e.name == "Back"]
    assert [linked.forward_op(e).name for e in back] == ["f1", "f2"]  # type: ignore[union-attr]
    bare = made(tmp_path, *[e for e in events if e["cat"] != "fwdbwd"])
    assert [bare.forward_op(e) for e in bare.trace.cpu if e.name == "Back"] == [None, None]


def test_sequence_numbers_distinguish_forward_threads(tmp_path: Path) -> None:
    events = []
    for thread in (1, 2):
        for number in range(3):
            at = 100 * thread + 10 * number
            sequence = {"Sequence number": number + thread}
            events.append(op(f"f{thread}", at, at + 5, tid=thread, **sequence))
            about = sequence | {"Fwd thread id": thread}
            events.append(op("Back", 1000 + at, 1005 + at, tid=9, **about))
    owners = made(tmp_path, *events)
    back = [e for e in owners.trace.cpu if e.name == "Back"]
    assert [owners.forward_op(e).name for e in back] == ["f1"] * 3 + ["f2"] * 3  # type: ignore[union-attr]
