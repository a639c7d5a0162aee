"""The thread that a CUDA call was made on, where the trace names one that had ended by then.

PyTorch's profiler gives a call the number that it first saw with the thread's pthread id, and keeps
that for the life of the process. A thread that starts after another one has ended often has the
pthread id of that one, and its calls then have its number: they, and their kernels, lie in no op.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from attnscope.profile.own import SENTINEL, SENTINEL_KERNEL

if TYPE_CHECKING:
    from attnscope.profile.trace import CpuEvent, GpuEvent

Proofs = list[tuple[int, int]]  # when, and which thread it really was


def mend_threads(events: Sequence[CpuEvent], gpu: Iterable[GpuEvent]) -> None:
    """Give calls the thread that made them; `events` must be sorted by start.

    What proves it: the external id of a call is that of the op open on its thread; the kernels of a
    sentinel are launched by the thread of the sentinel. Another call with the same number in the
    trace is of the thread of the proof nearest to it in time.
    """
    ops = {e.external_id: e.thread for e in events if e.kind == "op" and e.external_id}
    sentinels = [e for e in events if e.kind == "range" and e.name == SENTINEL]
    own = {work.correlation for work in gpu if sentinels and SENTINEL_KERNEL in work.name}
    calls = [event for event in events if event.kind == "call"]
    proofs: dict[int, Proofs] = defaultdict(list)
    for call in calls:
        thread = ops.get(call.external_id)
        if thread is None and call.correlation in own:
            around = (one.thread for one in sentinels if one.start <= call.start < one.end)
            thread = next(around, None)
        if thread is not None:
            proofs[call.thread].append((call.start, thread))
    proofs = {
        number: proofs
        for number, proofs in proofs.items()
        if any(thread != number for _, thread in proofs)
    }
    for call in calls:
        if call.thread in proofs:
            call.thread = _nearest(proofs[call.thread], call.start)


def _nearest(proofs: Proofs, time: int) -> int:
    at = bisect_left(proofs, (time, -1))
    return min(proofs[max(0, at - 1) : at + 1], key=lambda proof: abs(proof[0] - time))[1]
