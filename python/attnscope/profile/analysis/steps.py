"""Where the time of a step went: each instant counts once, in the first active part.

The parts in order: kernel, memcpy and memset on a GPU; runtime: a CUDA API call; cpu: a PyTorch op
on any thread; other: nothing of these. PyTorch's TensorBoard plug-in has the same rule
(kineto/tb_plugin, "Step Time Breakdown"), with further categories for communication and DataLoader.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.profile.attribution.owners import Attribution
from attnscope.profile.trace.events import CpuEvent, GpuEvent, Trace
from attnscope.profile.trace.window import cut_to

if TYPE_CHECKING:
    import pandas

PARTS = ("kernel", "memcpy", "memset", "runtime", "cpu", "other")
OPTIMIZER_STEP = "Optimizer.step#"  # PyTorch's range around each step of an optimizer
# Ranges of PyTorch itself: parts of a step, never the step.
TORCHS = (
    "enumerate(DataLoader)", "Optimizer.", "DistributedDataParallel.", "FSDP::", "nccl:", "gloo:",
    "c10d::", "## Call CompiledFxGraph", "Torch-Compiled Region", "Pregraph bytecode",
    "TorchDynamo",
)  # fmt: skip
# Ops of a new iterator of a DataLoader, which draws a seed.
NEW_EPOCH = ("aten::empty", "aten::random_", "aten::item", "aten::_local_scalar_dense")

Interval = tuple[int, int]


@dataclass(frozen=True)
class Step:
    """A named part of the program, [start, end) in nanoseconds of the trace, with its number."""

    name: str
    start: int
    end: int
    number: int = 0


def program_window(trace: Trace) -> Interval:
    """From the first op, range or GPU event (or the launch of one) to the end of the last.

    If steps were requested, the program begins with the first of them, so that work before its
    first op, such as loading data, is included. The profiler's own work before and after is
    excluded. Raises ValueError for an empty trace.
    """
    if trace.program is None:
        raise ValueError("trace must have an op, a range or a GPU event, got none")
    return trace.program


def find_steps(attribution: Attribution, name: str | None = None) -> tuple[list[Step], str]:
    """The steps of a program and the rule that found them.

    A step lasts from its start to the next one's; the last one until the GPU work launched in it is
    done. The first rule that applies is used:

    1. `name`: each outermost event of that name (a range, an op, or a Python function or module, if
       stacks were recorded) begins a step;
    2. the steps that were marked while recording (`profile(steps=..., step_range=...)`);
    3. the profiler's steps ("ProfilerStep#N", made by profiler.step());
    4. the first repeated outermost range of the program on the thread that launches most, unless
       the optimizer stepped another number of times;
    5. from the end of one step of the first optimizer to the next; step 0 begins with the program;
    6. a repeated outermost range of PyTorch's own, such as the DataLoader's;
    7. the whole program.

    Raises ValueError if no event has the name.
    """
    trace = attribution.trace
    _, end = program_window(trace)
    if name is not None:
        return _from_starts(
            attribution, _named(attribution, name), name
        ), f"from each {name!r} to the next"
    if trace.steps:
        rule = "to the end of each step of the optimizer"
        if trace.step_range:
            rule = f"from each {trace.step_range!r} to the next"
        marked = _marked_steps(trace, end)
        return marked if trace.cut else _until_done(attribution, marked), rule
    if trace.profiler_steps:
        return _until_done(attribution, _profiler_steps(trace)), "the profiler's steps"
    optimizer = _optimizer_ranges(trace)
    theirs = _repeated(attribution, lambda event: not event.name.startswith(TORCHS))
    if theirs and (len(optimizer) < 2 or len(optimizer) == len(theirs)):
        rule = f"from one outermost range {theirs[0].name!r} to the next"
        return _from_starts(attribution, theirs, theirs[0].name), rule
    if len(optimizer) > 1:
        rule = f"to the end of each {optimizer[0].name!r}"
        return _until_done(attribution, _after_each(trace, optimizer)), rule
    rest = theirs or _with_work(attribution, _repeated(attribution, lambda event: True))
    if len(rest) > 1:
        rule = f"from one outermost range {rest[0].name!r} to the next"
        return _from_starts(attribution, rest, rest[0].name), rule
    return [Step("all", *program_window(trace))], "the whole program"


def _named(attribution: Attribution, name: str) -> list[CpuEvent]:
    """The outermost events of a name on the thread that has most of them."""
    trace = attribution.trace
    module = re.compile(rf"nn\.Module: {re.escape(name)}(_\d+)?")
    hits: set[int] = set()
    found: dict[int, list[CpuEvent]] = defaultdict(list)
    for event in trace.cpu:
        same = event.name == name and event.kind in ("range", "op")
        if event.kind == "python":
            same = event.name.endswith(f"): {name}") or bool(module.fullmatch(event.name))
        if same:
            hits.add(event.index)
            if not any(outer.index in hits for outer in trace.ancestors(event)):
                found[event.thread].append(event)
    if not found:
        ranges = dict.fromkeys(event.name for event in trace.cpu if event.kind == "range")
        known = ", ".join(list(ranges)[:8]) or "none"
        raise ValueError(
            f"step-range must name a range, op, function or module of the trace, got {name!r}. "
            f"Its ranges are: {known}"
        )
    return max(found.values(), key=len)


def _optimizer_ranges(trace: Trace) -> list[CpuEvent]:
    """The steps of the first optimizer."""
    found = [e for e in trace.cpu if e.kind == "range" and e.name.startswith(OPTIMIZER_STEP)]
    return [event for event in found if event.name == found[0].name]


def _repeated(attribution: Attribution, allowed: Callable[[CpuEvent], bool]) -> list[CpuEvent]:
    """The first outermost range that repeats on the thread that launches most; autograd's threads
    are the last choice."""
    trace = attribution.trace
    outer = [e for e in trace.cpu if e.kind == "range" and allowed(e) and not attribution.ranges(e)]
    counts = Counter((e.thread, e.name) for e in outer)
    again = [e for e in outer if counts[e.thread, e.name] > 1]
    if not again:
        return []
    again = [e for e in again if e.thread not in attribution.autograd_threads] or again
    launches = Counter(trace.cpu[w.launch].thread for w in trace.gpu if w.launch >= 0)
    ops = Counter(e.thread for e in trace.cpu if e.kind == "op")
    first = max(again, key=lambda e: (launches[e.thread], e.thread == trace.thread, ops[e.thread]))
    return [e for e in outer if (e.thread, e.name) == (first.thread, first.name)]


def _with_work(attribution: Attribution, ranges: list[CpuEvent]) -> list[CpuEvent]:
    """The ranges with an op between their end and the next one's start; a DataLoader's last one in
    each epoch has none but those of the next epoch's iterator."""
    if not ranges:
        return []
    ops = (event for event in attribution.trace.cpu if event.kind == "op")
    starts = [event.start for event in ops if event.name not in NEW_EPOCH]
    ends = [event.start for event in ranges[1:]] + [attribution.trace.end + 1]
    return [
        event
        for event, end in zip(ranges, ends, strict=True)
        if bisect_left(starts, end) > bisect_left(starts, event.end)
    ]


def _from_starts(attribution: Attribution, begins: Sequence[CpuEvent], name: str) -> list[Step]:
    """Steps from the start of one event to the next."""
    _, end = program_window(attribution.trace)
    starts = [event.start for event in begins]
    return [
        Step(f"{name} {number}", *span, number)
        for number, span in enumerate(zip(starts, [*starts[1:], end], strict=True))
    ]


def _after_each(trace: Trace, ranges: Sequence[CpuEvent]) -> list[Step]:
    """Steps from the end of one range to the end of the next."""
    times = [program_window(trace)[0], *(event.end for event in ranges)]
    return [Step(f"step {number}", *span, number) for number, span in enumerate(pairwise(times))]


def _profiler_steps(trace: Trace) -> list[Step]:
    marks = sorted(trace.profiler_steps, key=lambda mark: mark[1])
    ends = [start for _, start, _ in marks[1:]] + [marks[-1][2]]
    return [
        Step(f"ProfilerStep#{number}", start, end, number)
        for (number, start, _), end in zip(marks, ends, strict=True)
    ]


def _marked_steps(trace: Trace, end: int) -> list[Step]:
    """Steps from mark to mark; an unfinished last step is dropped unless it is the only one."""
    times = [at for _, at in trace.steps] + [trace.steps_end or end]
    steps = [
        Step(f"step {number}", *span, number)
        for (number, _), span in zip(trace.steps, pairwise(times), strict=True)
    ]
    return steps if trace.steps_end is not None or len(steps) == 1 else steps[:-1]


def _until_done(attribution: Attribution, steps: list[Step]) -> list[Step]:
    """The steps, the last one until the GPU work launched in it is done."""
    trace, last = attribution.trace, steps[-1]
    done = [
        work.end
        for work in trace.gpu
        if work.launch >= 0 and last.start <= trace.cpu[work.launch].start < last.end
    ]
    return [*steps[:-1], replace(last, end=max([last.end, *done]))]


def select_steps(trace: Trace, wanted: range | None, name: str | None = None) -> Trace:
    """The trace cut to some of its steps, or whole, with these steps marked.

    `wanted` has the numbers of steps in a row (None: all), `name`: see find_steps. `trace`
    must not be used again. Raises ValueError for steps that are not in the trace.
    """
    steps, _ = find_steps(Attribution(trace), name)
    numbers = [step.number for step in steps]
    if wanted is not None and (missing := [n for n in wanted if n not in numbers]):
        have = f"{numbers[0]}:{numbers[-1]}" if len(steps) > 1 else "no steps: give --step-range"
        raise ValueError(f"steps must be steps of the trace, got {missing[0]}. It has {have}")
    chosen = [step for step in steps if wanted is None or step.number in wanted]
    if wanted is not None:
        trace = cut_to(trace, chosen[0].start, chosen[-1].end)
    trace.steps = [(step.number, step.start) for step in chosen]
    trace.steps_end = chosen[-1].end
    trace.cut = chosen[-1] is not steps[-1]
    trace.step_range = name or chosen[0].name.partition("#")[0].removesuffix(f" {chosen[0].number}")
    return trace


def step_breakdown(attribution: Attribution, name: str | None = None) -> pandas.DataFrame:
    """One row per step: step, first, wall_us and, for each of PARTS, `<part>_us`.

    The parts sum to wall_us. `name`: see find_steps.

    attrs: "steps" is the rule that found the steps. "setup_us" is the first step's time minus the
    median of the others; without others it is None, with the reason in "setup_reason". "mean_us"
    and "sd_us" are the mean and the standard deviation of wall_us over "counted" steps, without a
    first one that includes set-up; None if there is one step only.
    """
    import pandas

    trace = attribution.trace
    steps, rule = find_steps(attribution, name)
    ops = [e for e in trace.cpu if e.kind == "op"]
    calls = [e for e in trace.cpu if e.kind == "call"]
    by_part: list[Sequence[CpuEvent | GpuEvent]] = [
        [e for e in trace.gpu if e.kind == kind] for kind in PARTS[:3]
    ]
    by_part += [calls, ops]
    later = steps[0].number > 0
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
    steady = [step.end - step.start for step in steps if later or step is not steps[0]]
    table.attrs["counted"] = len(steady)
    table.attrs["mean_us"] = fmean(steady) / 1e3 if steady else None
    table.attrs["sd_us"] = stdev(steady) / 1e3 if len(steady) > 1 else None
    return table


def _union(events: Sequence[CpuEvent | GpuEvent]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The times in which any event ran, as starts and ends of disjoint intervals in order; events
    sorted by start."""
    starts = np.array([event.start for event in events], dtype=np.int64)
    ends = np.maximum.accumulate(np.array([event.end for event in events], dtype=np.int64))
    begins = np.ones(len(starts), dtype=bool)
    begins[1:] = starts[1:] > ends[:-1]
    return starts[begins], ends[np.append(begins[1:], True)] if len(ends) else ends


def split(
    steps: Sequence[Step], by_part: Sequence[Sequence[CpuEvent | GpuEvent]]
) -> list[list[int]]:
    """Nanoseconds of each step in each part; each instant counts in the first active part.

    The steps and the events of each part must be sorted by start, and the steps disjoint. The last
    entry is time that no part covers, so the entries of a step sum to its length.
    """
    if not steps:
        return []
    none = len(by_part)
    begins = np.array([step.start for step in steps], dtype=np.int64)
    ends = np.array([step.end for step in steps], dtype=np.int64)
    # Step boundaries split the intervals there; they belong to no part. Bit p: part p is active.
    times, changes = [begins, ends], [np.zeros(2 * len(steps), dtype=np.int64)]
    for part, events in enumerate(by_part):
        for edges, sign in zip(_union(events), (1, -1), strict=True):
            times.append(edges)
            changes.append(np.full(len(edges), sign << part, dtype=np.int64))
    at = np.concatenate(times)
    order = np.argsort(at, kind="stable")
    at, active = at[order], np.cumsum(np.concatenate(changes)[order])
    first = [next((p for p in range(none) if bits >> p & 1), none) for bits in range(1 << none)]
    step = np.searchsorted(begins, at[:-1], side="right") - 1
    inside = (step >= 0) & (at[:-1] < ends[step])
    taken = np.zeros((len(steps), none + 1), dtype=np.int64)
    where = (step[inside], np.array(first)[active[:-1][inside]])
    np.add.at(taken, where, np.diff(at)[inside])
    found: list[list[int]] = taken.tolist()
    return found
