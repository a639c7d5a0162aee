"""Where the time of a step went: each instant counted once, in the first of these that happened.

kernel, memcpy and memset on a GPU; runtime: a CUDA API call; cpu: an op of PyTorch on any thread;
other: none of them. This is the rule of the step-time breakdown of PyTorch's TensorBoard plug-in
(kineto/tb_plugin, "Step Time Breakdown"), without its categories for communication and DataLoader.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from attnscope.profile.attribution.owners import Attribution
from attnscope.profile.trace.events import CpuEvent, GpuEvent, Trace

if TYPE_CHECKING:
    import pandas

PARTS = ("kernel", "memcpy", "memset", "runtime", "cpu", "other")
PROFILER_STEP = "ProfilerStep#"

Interval = tuple[int, int]


@dataclass(frozen=True)
class Step:
    """A named part of the program, [start, end) in nanoseconds of the trace."""

    name: str
    start: int
    end: int


def program_window(trace: Trace) -> Interval:
    """From the first op, range or GPU event (or the launch of one) to the end of the last.

    A program whose steps were asked for begins with the first of these: what precedes its first op,
    such as loading data, is of it. What the profiler does before and after is outside. Raises
    ValueError for an empty trace.
    """
    events: list[CpuEvent | GpuEvent] = [e for e in trace.cpu if e.kind in ("op", "range")]
    events += trace.gpu
    events += [trace.cpu[work.launch] for work in trace.gpu if work.launch >= 0]
    if not events:
        raise ValueError("trace: holds no op, no range and no GPU event")
    starts = [e.start for e in events] + [at for _, at in trace.steps[:1]]
    return min(starts), max([e.end for e in events] + [trace.steps_end or 0])


def find_steps(attribution: Attribution) -> tuple[list[Step], str]:
    """The steps of a program and how they were told.

    Steps are those of the optimizer, where these were asked for (`profile(steps=...)`), else the
    profiler's own ("ProfilerStep#N", made by profiler.step()), else what begins with each
    occurrence of the first outermost range that repeats (on one thread: of those that have such a
    range the one that launches most, autograd's last), else the whole program. A step lasts until
    the GPU work launched in it is done; the next one begins no earlier.
    """
    trace = attribution.trace
    begin, end = program_window(trace)
    outer = [e for e in trace.cpu if e.kind == "range" and not attribution.ranges(e)]
    own = [e for e in trace.cpu if e.kind == "range" and e.name.startswith(PROFILER_STEP)]
    if trace.steps:
        found, rule = _optimizer_steps(trace, end), "to the end of each step of the optimizer"
    elif own:
        found, rule = [Step(e.name, e.start, e.end) for e in own], "the profiler's steps"
    else:
        counts = Counter((e.thread, e.name) for e in outer)
        again = [e for e in outer if counts[e.thread, e.name] > 1]
        if not again:
            return [Step("all", begin, end)], "the whole program"
        again = [e for e in again if e.thread not in attribution.autograd_threads] or again
        launches = Counter(trace.cpu[w.launch].thread for w in trace.gpu if w.launch >= 0)
        ops = Counter(e.thread for e in trace.cpu if e.kind == "op")
        first = max(
            again, key=lambda e: (launches[e.thread], e.thread == trace.thread, ops[e.thread])
        )
        name = first.name
        starts = [e.start for e in outer if (e.thread, e.name) == (first.thread, name)]
        ends = [*starts[1:], end]
        found = [
            Step(f"{name} {i}", *span) for i, span in enumerate(zip(starts, ends, strict=True))
        ]
        rule = f"from one outermost range {name!r} to the next"
    done = [step.end for step in found]
    begins = [step.start for step in found]
    for work in trace.gpu:
        if work.launch >= 0:
            launched = trace.cpu[work.launch].start
            at = bisect_right(begins, launched) - 1
            if at >= 0 and launched < found[at].end:
                done[at] = max(done[at], work.end)
    steps: list[Step] = []
    for step, until in zip(found, done, strict=True):
        start = max(step.start, steps[-1].end if steps else 0)
        steps.append(replace(step, start=start, end=max(until, start)))
    return steps, rule


def _optimizer_steps(trace: Trace, end: int) -> list[Step]:
    """From mark to mark; what follows the last whole step is of none, unless there is no other."""
    times = [at for _, at in trace.steps] + [trace.steps_end or end]
    steps = [
        Step(f"step {number}", *span)
        for (number, _), span in zip(trace.steps, pairwise(times), strict=True)
    ]
    return steps if trace.steps_end is not None or len(steps) == 1 else steps[:-1]


def step_breakdown(attribution: Attribution) -> pandas.DataFrame:
    """One row a step: step, first, wall_us and `<part>_us` for each of PARTS, which sum to it.

    attrs: "steps" is how steps were told; "setup_us" what the first step took more than the median
    of the others, None with the reason in "setup_reason" where there are no others.
    """
    import pandas

    trace = attribution.trace
    steps, rule = find_steps(attribution)
    ops = [e for e in trace.cpu if e.kind == "op"]
    calls = [e for e in trace.cpu if e.kind == "call"]
    by_part: list[Sequence[CpuEvent | GpuEvent]] = [
        [e for e in trace.gpu if e.kind == kind] for kind in PARTS[:3]
    ]
    by_part += [calls, ops]
    later = bool(trace.steps) and trace.steps[0][0] > 0
    rows = []
    for step, parts in zip(steps, split(steps, by_part), strict=True):
        row = {"step": step.name, "first": step is steps[0] and len(steps) > 1 and not later}
        row |= {"wall_us": (step.end - step.start) / 1e3}
        rows.append(row | {f"{part}_us": ns / 1e3 for part, ns in zip(PARTS, parts, strict=True)})
    table = pandas.DataFrame(rows)
    table.attrs["steps"] = rule
    table.attrs["setup_us"] = None
    if later:
        table.attrs["setup_reason"] = "the program's first step was not recorded"
    elif len(walls := [step.end - step.start for step in steps]) > 1:
        table.attrs["setup_us"] = (walls[0] - median(walls[1:])) / 1e3
    else:
        table.attrs["setup_reason"] = "there is one step only"
    return table


def split(
    steps: Sequence[Step], by_part: Sequence[Iterable[CpuEvent | GpuEvent]]
) -> list[list[int]]:
    """Nanoseconds of each step in each part, the first part that is active taking an instant.

    Steps must be in order and apart. A last entry is what no part covers, so that the entries of a
    step sum to its length.
    """
    edges: list[tuple[int, int, int]] = []  # time, part, +1 or -1
    for part, events in enumerate(by_part):
        for event in events:
            if event.end > event.start:
                edges += [(event.start, part, 1), (event.end, part, -1)]
    # The steps' own edges cut the line there; they are of no part.
    none = len(by_part)
    for step in steps:
        edges += [(step.start, none, 0), (step.end, none, 0)]
    edges.sort()
    active = [0] * none
    taken = [[0] * (none + 1) for _ in steps]
    at, before = 0, 0
    for time, part, change in edges:
        while at < len(steps) and steps[at].end <= before:
            at += 1
        if at < len(steps) and before >= steps[at].start and time > before:
            first = next((p for p in range(none) if active[p]), none)
            taken[at][first] += time - before
        if part < none:
            active[part] += change
        before = time
    return taken
