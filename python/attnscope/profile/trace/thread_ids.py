"""Corrects ids of CUDA calls: external ids that name no op, and threads that had already ended.

In traces of 2023 the external id of a call repeats its correlation id, and equals the id of some op
by accident.

PyTorch's profiler maps a pthread id to a thread number once, for the life of the process. A new
thread often reuses the pthread id of a thread that has ended, and its calls then get the ended
thread's number. By time, such calls lie in no op.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attnscope.profile.trace.events import CpuEvent, GpuEvent, is_open
from attnscope.profile.trace.markers import SENTINEL, SENTINEL_KERNEL

FEW_IDS = 2  # as many external ids may equal the correlation ids by accident


def correct_ids(events: Sequence[CpuEvent], gpu: Sequence[GpuEvent]) -> None:
    """Remove external ids that only repeat correlation ids, and correct the threads of calls."""
    ops = {e.external_id: e for e in events if e.kind == "op" and e.external_id}
    calls = [e for e in events if e.kind == "call"]
    _drop_copied_ids(ops, calls, gpu)
    _correct_threads(events, ops, calls, gpu)


def _drop_copied_ids(
    ops: Mapping[int, CpuEvent], calls: Sequence[CpuEvent], gpu: Sequence[GpuEvent]
) -> None:
    """Remove the external ids of calls and GPU work if they repeat the correlation ids and one of
    them names an op that is not open at its call, or if no call can be compared with them."""
    if not all(work.external_id in (0, work.correlation) for work in gpu):
        return
    timed = ((ops[e.external_id], e.start) for e in calls if e.external_id in ops)
    unknown = not calls and sum(work.external_id != 0 for work in gpu) > FEW_IDS
    if unknown or not all(is_open(op, start) for op, start in timed):
        for call in calls:
            call.external_id = 0
        for work in gpu:
            work.external_id = 0


def _correct_threads(
    events: Sequence[CpuEvent],
    ops: Mapping[int, CpuEvent],
    calls: Sequence[CpuEvent],
    gpu: Iterable[GpuEvent],
) -> None:
    """Set the thread of each call whose real thread the trace identifies.

    If a call's external id names an op that is open at the call, the op's thread made the call. A
    sentinel's kernels were launched by the sentinel's thread, unless a thread with the call's
    number was alive. Any other call keeps its number; on an ended thread it has no owner.
    """
    sentinels = [e for e in events if e.kind == "range" and e.name == SENTINEL]
    own = {work.correlation for work in gpu if sentinels and SENTINEL_KERNEL in work.name}
    lives: dict[int, tuple[int, int]] = {}
    for call in calls:
        op = ops.get(call.external_id)
        if op and is_open(op, call.start):
            call.thread = op.thread
        elif call.correlation in own:
            if call.thread not in lives:
                lives[call.thread] = _life(events, call.thread)
            begin, end = lives[call.thread]
            if not begin <= call.start < end:
                around = (one.thread for one in sentinels if one.start <= call.start < one.end)
                call.thread = next(around, call.thread)


def _life(events: Sequence[CpuEvent], thread: int) -> tuple[int, int]:
    """From the first start to the last end of what a thread recorded besides calls."""
    mine = [e for e in events if e.thread == thread and e.kind != "call"]
    return (mine[0].start, max(e.end for e in mine)) if mine else (0, 0)
