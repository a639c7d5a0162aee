"""Leaves out or clips the events of a trace that cannot be true, and counts them by kind.

Such events are kernels whose clock was not converted, files merged twice, or categories of other
versions. `analysis/lint.py` reports the counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from attnscope.profile.trace.events import CLOCKS_NS, CpuEvent, Faults, GpuEvent, Trace
from attnscope.profile.trace.markers import GRAPH_LAUNCHES

HALF_A_DAY_NS = 43_200 * 10**9  # no recording is as long
MINUTE_NS = 60 * 10**9
MOST_EARLY = 0.01  # of the GPU work; if more starts before its launch, the clocks differ
TIMED_PHASES = ("X", "B")  # "E" ends a "B"; events of other phases have no duration
# Categories that are not read: they are no work of the program. attnscope's are its own rows.
NOT_WORK = (
    "attnscope_op", "attnscope_stage",
    "gpu_user_annotation", "mtia_user_annotation", "Trace", "overhead", "cuda_sync", "cuda_event",
    "cuda_profiler_range", "cpu_instant_event", "ac2g", "async_cpu_to_gpu", "async_gpu", "fwdbwd",
)  # fmt: skip

Event = TypeVar("Event", CpuEvent, GpuEvent)


def note_unread(faults: Faults, category: object, phase: object) -> None:
    """Count an event that the reader does not know, unless it cannot be work."""
    if phase in TIMED_PHASES and category not in NOT_WORK:
        faults.unread[str(category), str(phase)] += 1


def leave_out_far(trace: Trace) -> None:
    """Leave out events that start or end half a day or more from the median start, and those at 0
    in a trace that starts later. The times must be those of the file."""
    events: list[CpuEvent | GpuEvent] = [*trace.cpu, *trace.gpu]
    starts = [event.start for event in events]
    if not starts:
        return
    first, last = min(starts), max(event.end for event in events)
    if last - first < HALF_A_DAY_NS and first != 0:
        return
    middle = sorted(starts)[len(starts) // 2]
    unset = middle > MINUTE_NS  # then a time of 0 is none

    def is_near(event: CpuEvent | GpuEvent) -> bool:
        far = max(middle - event.start, event.end - middle) >= HALF_A_DAY_NS
        return not far and not (unset and event.start == 0)

    trace.faults.left_out |= {work.correlation for work in trace.gpu if not is_near(work)}
    trace.cpu = [event for event in trace.cpu if is_near(event)]
    trace.gpu = [event for event in trace.gpu if is_near(event)]
    trace.faults.far = len(starts) - len(trace.cpu) - len(trace.gpu)


def leave_out_duplicates(trace: Trace) -> None:
    """Leave out events that repeat another one, from lists that are sorted by start.

    CPU events without an id are kept: recursive calls may begin and end together.
    """
    before = len(trace.cpu) + len(trace.gpu)
    trace.cpu = _distinct(trace.cpu, _cpu_identity)
    trace.gpu = _distinct(trace.gpu, lambda e: (e.name, e.device, e.stream, e.correlation))
    trace.faults.duplicates = before - len(trace.cpu) - len(trace.gpu)


def _cpu_identity(event: CpuEvent) -> Hashable | None:
    if not event.correlation and not event.external_id:
        return None
    return event.kind, event.name, event.thread, event.correlation, event.external_id


def _distinct(events: Iterable[Event], identity: Callable[[Event], Hashable | None]) -> list[Event]:
    kept: list[Event] = []
    start = end = -1
    seen: set[Hashable] = set()  # of the events with this start and end, once there are two
    for event in events:
        if event.start != start or event.end != end:
            start, end = event.start, event.end
            seen.clear()
        else:
            seen = seen or {identity(kept[-1])}
            key = identity(event)
            if key is not None and key in seen:
                continue
            seen.add(key)
        kept.append(event)
    return kept


def correct_gpu_work(trace: Trace) -> None:
    """Leave out GPU work that starts before its launch, clip work that outlasts its stream's next.

    The launches must be known.
    """
    _leave_out_early(trace)
    _clip(trace)
    trace.faults.instant = sum(work.start == work.end for work in trace.kernels)


def _leave_out_early(trace: Trace) -> None:
    faults = trace.faults
    early = [
        work
        for work in trace.gpu
        if work.launch >= 0 and work.start + CLOCKS_NS < trace.cpu[work.launch].start
    ]
    if not early:
        return
    faults.early = len(early)
    faults.earliest_ns = max(trace.cpu[work.launch].start - work.start for work in early)
    faults.clocks_differ = len(early) > max(1, MOST_EARLY * len(trace.gpu))
    if faults.clocks_differ:
        return
    gone = {work.index for work in early}
    faults.left_out |= {work.correlation for work in early}
    trace.gpu = [work for work in trace.gpu if work.index not in gone]
    for at, work in enumerate(trace.gpu):
        work.index = at


def _clip(trace: Trace) -> None:
    """Clip work that ends after later work of its stream has ended: a stream runs in order.

    Kernels may overlap the next one (programmatic launch), but do not outlast it. Work of CUDA
    graphs is left unchanged: parallel branches may share the stream of the launch.
    """
    streams: dict[tuple[int, int, int], list[GpuEvent]] = defaultdict(list)
    for work in trace.gpu:
        if work.launch < 0 or not trace.cpu[work.launch].name.startswith(GRAPH_LAUNCHES):
            streams[work.device, work.context, work.stream].append(work)
    for order in streams.values():
        # From the last to the first: the earliest end of all later work, and where it starts.
        limit: GpuEvent | None = None
        for work in reversed(order):
            if limit is not None and work.end > limit.end + CLOCKS_NS:
                trace.faults.clipped += 1
                trace.faults.clipped_ns += work.end - max(work.start, limit.start)
                work.end = max(work.start, limit.start)
            if limit is None or work.end <= limit.end:
                limit = work
