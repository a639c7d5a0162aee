"""Removes the profiler's own events, which are found by name, from a recording."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnscope.profile.trace.markers import (
    BEGIN_CAPTURE,
    END_CAPTURE,
    SENTINEL,
    STEP,
    STEPS_END,
    WAIT,
)

if TYPE_CHECKING:
    from attnscope.profile.trace.events import CpuEvent, Trace


def remove_own(trace: Trace) -> None:
    """Remove the profiler's own events, and set the window to the time between them."""
    _take_marks(trace)
    own = [e for e in trace.cpu if e.kind == "range" and e.name in (SENTINEL, WAIT)]
    if not own:
        return
    kept: list[CpuEvent] = []
    launched: dict[int, int] = {}  # correlation -> index in own
    for event in trace.cpu:
        inside = [
            at
            for at, one in enumerate(own)
            if event.thread == one.thread and one.start <= event.start < one.end
        ]
        if not inside:
            kept.append(event)
        elif event.correlation:
            launched[event.correlation] = inside[0]
    found = [launched[w.correlation] for w in trace.gpu if w.correlation in launched]
    waits = [one for one in own if one.name == WAIT]
    at_ends = [at for at, one in enumerate(own) if one.name == SENTINEL]
    trace.waits = len(waits)
    trace.sentinels = [found.count(at) for at in at_ends]
    trace.cpu = kept
    trace.gpu = [w for w in trace.gpu if w.correlation not in launched]
    if len(at_ends) > 1:
        trace.start, trace.end = own[at_ends[0]].end, own[at_ends[-1]].start
    elif len(waits) > 1:
        trace.start, trace.end = waits[0].end, waits[-1].end
    if len(waits) > 1:
        trace.thread = waits[-1].thread
        _cut(trace, trace.start, waits[-1].start)


def _take_marks(trace: Trace) -> None:
    events, trace.cpu = trace.cpu, []
    for event in events:
        which = event.name.removeprefix(STEP)
        if event.kind != "range" or which == event.name:
            trace.cpu.append(event)
        elif event.name == STEPS_END:
            trace.steps_end = event.start
        elif which.isdecimal():
            trace.steps.append((int(which), event.start))


def _cut(trace: Trace, begin: int, end: int) -> None:
    """Remove other threads' events before `begin` and after `end`, the bounds of the region.

    Events that cross a bound are cut, because PyTorch records open events until the profiler stops.
    GPU work is kept by the time of its launch, so it may run on after the region.
    """
    kept: list[CpuEvent] = []
    outside: set[int] = set()
    for event in trace.cpu:
        if event.start < end and event.end > begin:
            event.start, event.end = max(event.start, begin), min(event.end, end)
            kept.append(event)
        elif event.kind == "call" and event.name.startswith(BEGIN_CAPTURE + END_CAPTURE):
            kept.append(event)  # a capture may contain launches in the region
        elif event.correlation:
            outside.add(event.correlation)
    inside = {event.correlation for event in kept if event.correlation}
    trace.cpu = kept
    trace.gpu = [
        work
        for work in trace.gpu
        if work.correlation in inside
        or work.correlation not in outside
        and begin <= work.start < trace.end
    ]
    trace.memory = [one for one in trace.memory if begin <= one.time < end]
