"""The thread that a CUDA call was made on, where the trace names one that had ended by then.

PyTorch's profiler gives a call the number that it first saw with the thread's pthread id, and keeps
that for the life of the process. A thread that starts after another one has ended often has the
pthread id of that one, and its calls then have its number: they, and their kernels, lie in no op.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from attnscope.profile.trace.markers import SENTINEL, SENTINEL_KERNEL

if TYPE_CHECKING:
    from attnscope.profile.trace.events import CpuEvent, GpuEvent

Proofs = list[tuple[int, int]]  # when, and which thread it really was


def mend_threads(events: Sequence[CpuEvent], gpu: Iterable[GpuEvent]) -> None:
    """Give calls the thread that made them; `events` must be sorted by start.

    What proves it: the external id of a call is that of the op open on its thread; the kernels of a
    sentinel are launched by its thread, unless that of their number is alive. Other calls with the
    same number are of the thread of a proof before or after them: of threads with one pthread id
    the next begins after the last one has ended, so a call lies within the life of one, or is of
    the one nearer in time.
    """
    ops = {e.external_id: e.thread for e in events if e.kind == "op" and e.external_id}
    sentinels = [e for e in events if e.kind == "range" and e.name == SENTINEL]
    own = {work.correlation for work in gpu if sentinels and SENTINEL_KERNEL in work.name}
    calls = [event for event in events if event.kind == "call"]
    begin: dict[int, int] = {}
    end: dict[int, int] = {}
    for event in events:
        if event.kind != "call":
            begin.setdefault(event.thread, event.start)
            end[event.thread] = max(end.get(event.thread, 0), event.end)
    proofs: dict[int, Proofs] = defaultdict(list)
    for call in calls:
        thread = ops.get(call.external_id)
        if thread is None and call.correlation in own:
            alive = begin.get(call.thread, call.start + 1) <= call.start < end.get(call.thread, 0)
            around = (one.thread for one in sentinels if one.start <= call.start < one.end)
            thread = None if alive else next(around, None)
        if thread is not None:
            proofs[call.thread].append((call.start, thread))
    proofs = {
        number: proofs
        for number, proofs in proofs.items()
        if any(thread != number for _, thread in proofs)
    }
    for call in calls:
        if found := proofs.get(call.thread):
            at = bisect_right(found, call.start, key=lambda proof: proof[0])
            before, after = found[max(0, at - 1)][1], found[min(at, len(found) - 1)][1]
            since, until = call.start - end[before], begin[after] - call.start
            call.thread = before if since < until else after
