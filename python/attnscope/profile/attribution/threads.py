"""The CPU events of each thread, found by time."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

from attnscope.profile.trace.events import CpuEvent, Trace


class Threads:
    """What the threads of a trace did, and when."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.events: dict[int, list[CpuEvent]] = defaultdict(list)
        for event in trace.cpu:
            self.events[event.thread].append(event)
        self._starts = {t: [e.start for e in events] for t, events in self.events.items()}

    def last_at(self, thread: int, time: int) -> CpuEvent | None:
        """The last event that a thread began up to a time."""
        at = bisect_right(self._starts.get(thread, []), time) - 1
        return self.events[thread][at] if at >= 0 else None

    def open_at(self, thread: int, time: int) -> list[CpuEvent]:
        """The events open on a thread at a time, innermost first."""
        last = self.last_at(thread, time)
        return [e for e in (last, *self._trace.ancestors(last)) if e.end > time] if last else []
