"""Why a GPU was idle: the host had not launched yet, or work that was launched did not start."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakKeyDictionary

from attnscope.profile.analysis.kernel_names import category
from attnscope.profile.attribution.owners import Attribution, busy_ns
from attnscope.profile.trace.events import GpuEvent, Trace


@dataclass(frozen=True)
class Idle:
    """The time from the first to the last GPU work, in nanoseconds.

    Attributes:
        span: the whole time.
        busy: a kernel, copy or fill ran.
        starved: idle until the launch call of the next work ended, less the profiler's overhead.
        gaps: the single gaps in `starved`, by the outermost range of the work that ended them.
        exposed: communication ran, and no other kernel.
    """

    span: int
    busy: int
    starved: int
    gaps: dict[str, list[int]]
    exposed: int

    @property
    def rest(self) -> int:
        """Idle for other reasons: launch latency, waits between streams, the profiler."""
        return self.span - self.busy - self.starved


_known: WeakKeyDictionary[Attribution, Idle] = WeakKeyDictionary()


def idle_time(attribution: Attribution) -> Idle:
    """The idle time of the GPUs of a trace, taken together."""
    if attribution not in _known:
        _known[attribution] = _idle_time(attribution)
    return _known[attribution]


def _idle_time(attribution: Attribution) -> Idle:
    trace = attribution.trace
    if not trace.gpu:
        return Idle(0, 0, 0, {}, 0)
    overhead = _overhead_before(trace)
    gaps: dict[str, list[int]] = defaultdict(list)
    first = until = trace.gpu[0].start
    for work in trace.gpu:
        if work.launch >= 0 and work.start > until:
            launched = min(work.start, trace.cpu[work.launch].end)
            gap = launched - until
            if gap > 0 and (gap := gap - overhead(launched) + overhead(until)) > 0:
                ranges = attribution.ranges(work)
                gaps[ranges[0].name if ranges else "(no range)"].append(gap)
        until = max(until, work.end)
    starved = sum(sum(found) for found in gaps.values())
    return Idle(until - first, attribution.busy_ns, starved, dict(gaps), exposed_ns(trace.kernels))


def exposed_ns(kernels: Iterable[GpuEvent]) -> int:
    """Nanoseconds in which communication ran and no other kernel."""
    kernels = list(kernels)
    others = [kernel for kernel in kernels if category(kernel.name) != "communication"]
    return busy_ns(kernels) - busy_ns(others) if len(others) < len(kernels) else 0


def _overhead_before(trace: Trace) -> Callable[[int], int]:
    """Cumulative profiler overhead up to a time, in nanoseconds."""
    starts = sorted(one.start for one in trace.overhead)
    ends = sorted(one.end for one in trace.overhead)
    begun, ended = (list(accumulate(times, initial=0)) for times in (starts, ends))

    def before(time: int) -> int:
        started, done = bisect_left(starts, time), bisect_left(ends, time)
        return started * time - begun[started] - (done * time - ended[done])

    return before
