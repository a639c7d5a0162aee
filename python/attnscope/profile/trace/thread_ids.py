"""Corrects ids of CUDA calls: external ids that name no op, and threads that had already ended.

In traces of 2023 the external id of a call repeats its correlation id, and equals the id of some op
by accident.

PyTorch's profiler maps a pthread id to a thread number once, for the life of the process. A new
thread often reuses the pthread id of a thread that has ended, and its calls then get the ended
thread's number. By time, such calls lie in no op.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attnscope.profile.trace.events import CpuEvent, GpuEvent, is_open
from attnscope.profile.trace.markers import SENTINEL, SENTINEL_KERNEL

FEW_IDS = 2  # as many external ids may equal the correlation ids by accident


def drop_copied_ids(events: Sequence[CpuEvent], gpu: Sequence[GpuEvent]) -> None:
    """Remove the external ids of calls and GPU work if they repeat the correlation ids and one of
    them names an op that is not open at its call, or if no call can be compared with them."""
    ops = {e.external_id: e for e in events if e.kind == "op" and e.external_id}
    calls = [e for e in events if e.kind == "call"]
    timed = [(ops[e.external_id], e.start) for e in calls if e.external_id in ops]
    copied = all(work.external_id in (0, work.correlation) for work in gpu)
    unknown = not calls and sum(work.external_id != 0 for work in gpu) > FEW_IDS
    if copied and (unknown or not all(is_open(op, start) for op, start in timed)):
        for event in calls:
            event.external_id = 0
        for work in gpu:
            work.external_id = 0


def correct_threads(events: Sequence[CpuEvent], gpu: Iterable[GpuEvent]) -> None:
    """Set the thread of each call whose real thread the trace identifies.

    If a call's external id names an op that is open at the call, the op's thread made the call. A
    sentinel's kernels were launched by the sentinel's thread, unless a thread with the call's
    number was alive. Any other call keeps its number; on an ended thread it has no owner.
    """
    ops = {e.external_id: e for e in events if e.kind == "op" and e.external_id}
    sentinels = [e for e in events if e.kind == "range" and e.name == SENTINEL]
    own = {work.correlation for work in gpu if sentinels and SENTINEL_KERNEL in work.name}
    begin: dict[int, int] = {}
    end: dict[int, int] = {}
    for event in events:
        if event.kind != "call":
            begin.setdefault(event.thread, event.start)
            end[event.thread] = max(end.get(event.thread, 0), event.end)
    for call in events:
        if call.kind != "call":
            continue
        op = ops.get(call.external_id)
        if op and is_open(op, call.start):
            call.thread = op.thread
        elif call.correlation in own:
            lives = begin.get(call.thread, call.start + 1) <= call.start < end.get(call.thread, 0)
            around = (one.thread for one in sentinels if one.start <= call.start < one.end)
            call.thread = call.thread if lives else next(around, call.thread)
