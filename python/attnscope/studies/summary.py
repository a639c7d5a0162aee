"""The GPU work of a profile by phase and part of a model."""

from __future__ import annotations

from collections import Counter, defaultdict
from math import prod
from typing import Any

from attnscope.profile.analysis.flops import FlopCounts
from attnscope.profile.analysis.kernel_names import category, short_name, uses_tensor_cores
from attnscope.profile.analysis.result import Result
from attnscope.profile.attribution.owners import Attribution, busy_ns
from attnscope.profile.trace.events import CpuEvent, GpuEvent
from attnscope.studies.parts import CORE, OUTSIDE, PARTS, PHASES
from attnscope.studies.records import Flops, Found, GpuWork, KernelTimes, PhaseTimes, Use

NO_GPU = "no GPU: kernels are what a GPU runs"
# Operations an element: maximum, subtract, exp, sum, divide; backward: multiply, sum, subtract,
# multiply.
SOFTMAX_OPS = {"aten::_softmax": 5, "aten::_softmax_backward_data": 4}


def gpu_work(profile: Result) -> GpuWork:
    """The GPU work of a profile with kernels."""
    attribution, trace = profile.attribution, profile.trace
    if not trace.kernels:
        raise ValueError("trace must have a kernel, got none")
    calls: Counter[tuple[Any, ...]] = Counter()
    times: Counter[tuple[Any, ...]] = Counter()
    for kernel in trace.kernels:
        where, name = place(attribution, kernel), kernel.name
        key = (*where, short_name(name), category(name), uses_tensor_cores(name))
        calls[key] += 1
        times[key] += kernel.duration
    columns = ("phase", "part", "kernel", "category", "tensor_cores")
    use = profile.efficiency()
    flops, softmax_flops = _flops(attribution, profile.flop_counts)
    return GpuWork(
        total_us=attribution.total_ns / 1e3,
        owned=attribution.share or 0.0,
        phases=_phases(attribution),
        kernels=[
            KernelTimes(
                **dict(zip(columns, key, strict=True)), calls=calls[key], total_us=time / 1e3
            )
            for key, time in times.most_common()
        ],
        flops=flops,
        softmax_flops=softmax_flops,
        efficiency=Use(
            gpu_utilisation=use.gpu_utilisation,
            tensor_core_time_share=use.tensor_core_time_share,
        ),
        findings=[Found(kind=one.kind, title=one.title) for one in profile.findings()],
    )


def place(attribution: Attribution, event: CpuEvent | GpuEvent) -> tuple[str, str]:
    """Phase of a step and part of the model that an event belongs to.

    Backward work belongs to the part of its forward op.
    """
    around = [one.name for one in attribution.ranges(event)]
    phase = next((name for name in around if name in PHASES), OUTSIDE)
    op = attribution.op(event) if isinstance(event, GpuEvent) else event
    forward = attribution.forward_op(op) if op else None
    if forward:
        around = [one.name for one in attribution.ranges(forward)]
    return phase, next((name for name in reversed(around) if name in PARTS), OUTSIDE)


def _phases(attribution: Attribution) -> dict[str, PhaseTimes]:
    trace = attribution.trace
    work: dict[str, list[GpuEvent]] = defaultdict(list)
    for one in trace.gpu:
        names = {event.name for event in attribution.ranges(one)}
        for phase in names & set(PHASES):
            work[phase].append(one)
    walls: Counter[str] = Counter()
    for event in trace.cpu:
        if event.kind == "range" and event.name in PHASES:
            walls[event.name] += event.duration
    found = {}
    for phase in PHASES:
        if not walls[phase]:
            continue
        inside = work[phase]
        kernels = [one for one in inside if one.kind == "kernel"]
        span = max((w.end for w in inside), default=0) - min((w.start for w in inside), default=0)
        found[phase] = PhaseTimes(
            wall_us=walls[phase] / 1e3,
            kernel_us=sum(one.duration for one in kernels) / 1e3,
            busy_us=busy_ns(kernels) / 1e3,
            span_us=span / 1e3,
            copy_us=sum(one.duration for one in inside if one.kind != "kernel") / 1e3,
            kernels=len(kernels),
        )
    return found


def _flops(attribution: Attribution, counts: FlopCounts) -> tuple[list[Flops], dict[str, int]]:
    """FLOPs of each place, and of the softmax of the core by phase."""
    flops: Counter[tuple[str, str]] = Counter()
    softmax: Counter[str] = Counter()
    missed = {place(attribution, kernel): reason for kernel, reason in counts.uncounted}
    for at, work in counts.works.items():
        flops[place(attribution, attribution.trace.cpu[at])] += work.flops
    for event in attribution.trace.cpu:
        if event.kind == "op" and event.name in SOFTMAX_OPS and event.shapes:
            phase, part = place(attribution, event)
            if part == CORE:
                softmax[phase] += SOFTMAX_OPS[event.name] * prod(event.shapes[0])
    rows = []
    for phase, part in {**flops, **missed}:
        reason = missed.get((phase, part))
        number = None if reason else flops[phase, part]
        rows.append(Flops(phase=phase, part=part, flops=number, reason=reason))
    return rows, dict(softmax)
