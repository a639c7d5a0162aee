"""Which captured call each kernel of a replayed CUDA graph comes from.

A capture records launch calls that start no work; a replay runs as many kernels, all with the
replay's own call. They are in the order of the captured calls: by the number of their node, where
the trace has it, or else by time, if the replay ran on one stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from attnscope.profile.attribution.audit import LAUNCH
from attnscope.profile.trace.events import CpuEvent, GpuEvent, Trace
from attnscope.profile.trace.markers import BEGIN_CAPTURE, END_CAPTURE, GRAPH_LAUNCHES


@dataclass
class Capture:
    """A capture of a graph: its time, and the launch calls of its kernels in order."""

    start: int
    end: int = -1
    launches: list[CpuEvent] = field(default_factory=list)


def find_captures(trace: Trace) -> list[Capture]:
    """The captures that ended in the trace, without those that overlap another one."""
    started = {work.launch for work in trace.gpu}
    found: list[Capture] = []
    running: list[Capture] = []
    mixed: set[int] = set()  # captures of which it is unknown which launches are theirs
    for event in trace.cpu:
        if event.kind != "call":
            continue
        if event.name.startswith(BEGIN_CAPTURE):
            running.append(Capture(event.start))
            if len(running) > 1:
                mixed |= set(map(id, running))
        elif event.name.startswith(END_CAPTURE) and running:
            running[-1].end = event.end
            found.append(running.pop())
        elif running and LAUNCH.match(event.name) and event.index not in started:
            done = event.correlation in trace.faults.left_out
            if not done and not event.name.startswith(GRAPH_LAUNCHES):
                running[-1].launches.append(event)
    return [capture for capture in found if id(capture) not in mixed and capture.launches]


def captured_calls(trace: Trace) -> dict[int, tuple[CpuEvent, Capture]]:
    """Index of a replayed kernel in Trace.gpu -> its captured launch call, and the capture.

    Empty for kernels of graphs that were captured before the recording.
    """
    captures = find_captures(trace)
    if not captures:
        return {}
    replays: dict[int, list[GpuEvent]] = defaultdict(list)
    for kernel in trace.kernels:
        if kernel.launch >= 0 and trace.cpu[kernel.launch].name.startswith(GRAPH_LAUNCHES):
            replays[kernel.launch].append(kernel)
    found = {}
    for launch, kernels in replays.items():
        ordered = _in_order(kernels)
        capture = _capture_of(trace, trace.cpu[launch], len(kernels), captures)
        if ordered and capture:
            for kernel, call in zip(ordered, capture.launches, strict=True):
                found[kernel.index] = (call, capture)
    return found


def _in_order(kernels: Sequence[GpuEvent]) -> list[GpuEvent] | None:
    """Kernels of a replay in the order of their capture; None if it is unknown."""
    if all(kernel.node for kernel in kernels):
        return sorted(kernels, key=lambda kernel: kernel.node)
    one_stream = len({(kernel.device, kernel.stream) for kernel in kernels}) == 1
    return list(kernels) if one_stream else None


def _capture_of(
    trace: Trace, replay: CpuEvent, kernels: int, captures: Sequence[Capture]
) -> Capture | None:
    """The last capture before a replay with as many launches; None if several differ in their
    ops."""
    fitting = [c for c in captures if c.end <= replay.start and len(c.launches) == kernels]
    names = {tuple(_op_name(trace, call) for call in c.launches) for c in fitting}
    return fitting[-1] if len(names) == 1 else None


def _op_name(trace: Trace, call: CpuEvent) -> str:
    return next((event.name for event in trace.ancestors(call) if event.kind == "op"), "")
