"""Where the time of a step went: each instant counts once, in the first active part.

The parts in order: kernel, memcpy and memset on a GPU; runtime: a CUDA API call; cpu: a PyTorch op
on any thread; other: nothing of these. PyTorch's TensorBoard plug-in has the same rule
(kineto/tb_plugin, "Step Time Breakdown"), with further categories for communication and DataLoader.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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

    If steps were requested, the program begins with the first of them, so that work before its
    first op, such as loading data, is included. The profiler's own work before and after is
    excluded. Raises ValueError for an empty trace.
    """
    launches = {work.launch for work in trace.gpu if work.launch >= 0}
    starts = [at for _, at in trace.steps[:1]] + [work.start for work in trace.gpu[:1]]
    ends = [work.end for work in trace.gpu]
    for event in trace.cpu:
        if event.kind == "op" or event.kind == "range" or event.index in launches:
            starts.append(event.start)
            ends.append(event.end)
    if not ends:
        raise ValueError("trace must have an op, a range or a GPU event, got none")
    return min(starts), max(max(ends), trace.steps_end or 0)


def find_steps(attribution: Attribution) -> tuple[list[Step], str]:
    """The steps of a program and the rule that found them.

    The first rule that applies is used:

    1. optimizer steps, if they were requested (`profile(steps=...)`);
    2. the profiler's steps ("ProfilerStep#N", made by profiler.step());
    3. from one occurrence of a repeated outermost range to the next. The range is the first that
       repeats on the thread that launches most; autograd's threads are the last choice;
    4. the whole program.

    A step lasts until the GPU work launched in it is done; the next step begins no earlier.
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
    """Steps from mark to mark; an unfinished last step is dropped unless it is the only one."""
    times = [at for _, at in trace.steps] + [trace.steps_end or end]
    steps = [
        Step(f"step {number}", *span)
        for (number, _), span in zip(trace.steps, pairwise(times), strict=True)
    ]
    return steps if trace.steps_end is not None or len(steps) == 1 else steps[:-1]


def step_breakdown(attribution: Attribution) -> pandas.DataFrame:
    """One row per step: step, first, wall_us and, for each of PARTS, `<part>_us`.

    The parts sum to wall_us.

    attrs: "steps" is the rule that found the steps. "setup_us" is the first step's time minus the
    median of the others; without others it is None, with the reason in "setup_reason".
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


def _union(events: Iterable[CpuEvent | GpuEvent]) -> Iterator[Interval]:
    """The times in which any event ran, as disjoint intervals in order; events sorted by start."""
    begin = until = 0
    for event in events:
        if event.start > until:
            if until > begin:
                yield begin, until
            begin = event.start
        until = max(until, event.end)
    if until > begin:
        yield begin, until


def split(
    steps: Sequence[Step], by_part: Sequence[Iterable[CpuEvent | GpuEvent]]
) -> list[list[int]]:
    """Nanoseconds of each step in each part; each instant counts in the first active part.

    The steps and the events of each part must be sorted by start, and the steps disjoint. The last
    entry is time that no part covers, so the entries of a step sum to its length.
    """
    edges: list[tuple[int, int, int]] = []  # time, part, +1 or -1
    for part, events in enumerate(by_part):
        for start, end in _union(events):
            edges += [(start, part, 1), (end, part, -1)]
    # Step boundaries split the intervals there; they belong to no part.
    none = len(by_part)
    for step in steps:
        edges += [(step.start, none, 0), (step.end, none, 0)]
    edges.sort()
    active = 0  # bit p: part p is active
    first = [next((p for p in range(none) if bits >> p & 1), none) for bits in range(1 << none)]
    taken = [[0] * (none + 1) for _ in steps]
    at, before = 0, 0
    for time, part, change in edges:
        while at < len(steps) and steps[at].end <= before:
            at += 1
        if at < len(steps) and before >= steps[at].start and time > before:
            taken[at][first[active]] += time - before
        active += change << part
        before = time
    return taken
