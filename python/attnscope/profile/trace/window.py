"""Removes the profiler's own events, found by name, from a recording; cuts a trace to a time."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from operator import attrgetter

from attnscope.profile.trace.events import CpuEvent, Trace, entry_order
from attnscope.profile.trace.markers import (
    BEGIN_CAPTURE,
    END_CAPTURE,
    PROFILER_STEP,
    SENTINEL,
    STEP,
    STEP_OF,
    STEPS_END,
    WAIT,
)

_start = attrgetter("start")


def remove_own(trace: Trace) -> None:
    """Remove the profiler's own events, and set the window to the time between them."""
    _take_marks(trace)
    own = [e for e in trace.cpu if e.kind == "range" and e.name in (SENTINEL, WAIT)]
    if not own:
        return
    removed: set[int] = set()  # positions in trace.cpu
    launched: dict[int, int] = {}  # correlation -> index in own
    for at, one in enumerate(own):
        first, last = (bisect_left(trace.cpu, t, key=_start) for t in (one.start, one.end))
        for position in range(first, last):
            event = trace.cpu[position]
            if event.thread == one.thread:
                removed.add(position)
                if event.correlation:
                    launched.setdefault(event.correlation, at)
    kept = [event for at, event in enumerate(trace.cpu) if at not in removed]
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
        if event.kind != "range":
            trace.cpu.append(event)
            continue
        if event.name.startswith(f"{PROFILER_STEP}#"):
            number = event.name.removeprefix(f"{PROFILER_STEP}#")
            if number.isdecimal():
                trace.profiler_steps.append((int(number), event.start, event.end))
                event.name = PROFILER_STEP
        which, _, of = event.name.removeprefix(STEP).partition(STEP_OF)
        if not event.name.startswith(STEP):
            trace.cpu.append(event)
        elif event.name == STEPS_END:
            trace.steps_end = event.start
        elif which.isdecimal():
            trace.steps.append((int(which), event.start))
            trace.step_range = of


def _cut(trace: Trace, begin: int, end: int) -> None:
    """Remove other threads' events before `begin` and after `end`, the bounds of the region.

    Events that cross a bound are cut, because PyTorch records open events until the profiler stops.
    GPU work is kept by the time of its launch, so it may run on after the region.
    """
    kept: list[CpuEvent] = []
    outside: set[int] = set()
    cut = False
    for event in trace.cpu:
        if event.start < end and event.end > begin:
            if event.start < begin or event.end > end:
                event.start, event.end = max(event.start, begin), min(event.end, end)
                cut = True
            kept.append(event)
        elif event.kind == "call" and event.name.startswith(BEGIN_CAPTURE + END_CAPTURE):
            kept.append(event)  # a capture may contain launches in the region
        elif event.correlation:
            outside.add(event.correlation)
    inside = {event.correlation for event in kept if event.correlation}
    if cut:  # some events begin with the window now
        kept.sort(key=entry_order)
    trace.cpu = kept
    trace.gpu = [
        work
        for work in trace.gpu
        if work.correlation in inside
        or work.correlation not in outside
        and begin <= work.start < trace.end
    ]
    trace.memory = [one for one in trace.memory if begin <= one.time < end]


def cut_to(trace: Trace, begin: int, end: int) -> Trace:
    """A new trace with the events between two times; GPU work is kept by the time of its launch.

    Ops, ranges and frames that cross a bound are cut there. `trace` must not be used again.
    """
    launched = [trace.cpu[w.launch].start if w.launch >= 0 else w.start for w in trace.gpu]
    gpu = [w for w, at in zip(trace.gpu, launched, strict=True) if begin <= at < end]
    cpu = []
    for event in trace.cpu:
        crosses = event.kind != "call" and event.start < begin < event.end
        captures = event.kind == "call" and event.name.startswith(BEGIN_CAPTURE + END_CAPTURE)
        if begin <= event.start < end or crosses or captures:
            cpu.append(event)
    numbers = {event.index: at for at, event in enumerate(cpu)}
    for at, event in enumerate(cpu):
        event.index, event.parent = at, numbers.get(event.parent, -1)
        if event.kind != "call":
            event.start, event.end = max(event.start, begin), min(event.end, end)
    for at, work in enumerate(gpu):
        work.index, work.launch = at, numbers.get(work.launch, -1)
    return replace(
        trace,
        cpu=cpu,
        gpu=gpu,
        start=begin,
        end=max([end, *(work.end for work in gpu)]),
        overhead=[one for one in trace.overhead if begin <= one.start < end],
        memory=[one for one in trace.memory if begin <= one.time < end],
    )
