"""The thread that a CUDA call was made on, where the trace names one that had ended by then.

PyTorch's profiler gives a call the number that it first saw with the thread's pthread id, and keeps
that for the life of the process. A thread that starts after another one has ended often has the
pthread id of that one, and its calls then have its number: by time, they lie in no op.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attnscope.profile.trace.events import CpuEvent, GpuEvent
from attnscope.profile.trace.markers import SENTINEL, SENTINEL_KERNEL

CLOCKS_NS = 2000  # by which the clocks of CUPTI and of PyTorch may differ


def correct_threads(events: Sequence[CpuEvent], gpu: Iterable[GpuEvent]) -> None:
    """Give calls the thread that made them, where the trace proves it.

    The external id of a call names an op that is open at the call: its thread made the call. The
    kernels of a sentinel were launched by the sentinel's thread, unless a thread with the call's
    number lives. Any other call keeps its number: on a thread that has ended it has no owner.
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
        if op and op.start - CLOCKS_NS <= call.start < op.end + CLOCKS_NS:
            call.thread = op.thread
        elif call.correlation in own:
            lives = begin.get(call.thread, call.start + 1) <= call.start < end.get(call.thread, 0)
            around = (one.thread for one in sentinels if one.start <= call.start < one.end)
            call.thread = call.thread if lives else next(around, call.thread)
