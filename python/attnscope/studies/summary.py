"""The GPU side of one profiled step, as a record."""

from __future__ import annotations

from collections import Counter, defaultdict
from math import prod
from typing import Any

from attnscope.profile.analysis.flops import FlopCounts
from attnscope.profile.analysis.kernel_names import category, short_name, uses_tensor_cores
from attnscope.profile.analysis.result import Result
from attnscope.profile.attribution.owners import Attribution, busy_ns
from attnscope.profile.trace.events import CpuEvent, GpuEvent
from attnscope.studies.parts import CORE, PARTS, PHASES
from attnscope.studies.records import OUTSIDE, Record

# Operations an element: maximum, subtract, exp, sum, divide; backward: multiply, sum, subtract,
# multiply.
SOFTMAX_OPS = {"aten::_softmax": 5, "aten::_softmax_backward_data": 4}


def summarise(profile: Result) -> Record:
    """The GPU side of one profiled step, times in microseconds.

    total_us, owned: kernel time, and the share that ops own. phases: of each, wall_us (the range
    on the CPU, the wait for the device included), kernel_us, busy_us, span_us, copy_us, kernels.
    kernels: rows of phase, part, kernel, category, tensor_cores, calls, total_us; each kernel is
    in one row. flops: rows of phase, part, flops (None with a reason). softmax_flops: by phase, in
    the attention core. efficiency, findings: see those modules.
    """
    attribution, trace = profile.attribution, profile.trace
    if not trace.kernels:
        raise ValueError("trace: no kernel ran")
    calls: Counter[tuple[Any, ...]] = Counter()
    times: Counter[tuple[Any, ...]] = Counter()
    for kernel in trace.kernels:
        where, name = place(attribution, kernel), kernel.name
        key = (*where, short_name(name), category(name), uses_tensor_cores(name))
        calls[key] += 1
        times[key] += kernel.duration
    columns = ("phase", "part", "kernel", "category", "tensor_cores")
    found = profile.efficiency()
    return {
        "total_us": attribution.total_ns / 1e3,
        "owned": attribution.share,
        "phases": _phases(attribution),
        "kernels": [
            dict(zip(columns, key, strict=True)) | {"calls": calls[key], "total_us": time / 1e3}
            for key, time in times.most_common()
        ],
        **_flops(attribution, profile.flop_counts),
        "efficiency": {
            "gpu_utilisation": found.gpu_utilisation,
            "tensor_core_time_share": found.tensor_core_time_share,
        },
        "findings": [{"kind": one.kind, "title": one.title} for one in profile.findings()],
    }


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


def _phases(attribution: Attribution) -> dict[str, Record]:
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
        found[phase] = {
            "wall_us": walls[phase] / 1e3,
            "kernel_us": sum(one.duration for one in kernels) / 1e3,
            "busy_us": busy_ns(kernels) / 1e3,
            "span_us": span / 1e3,
            "copy_us": sum(one.duration for one in inside if one.kind != "kernel") / 1e3,
            "kernels": len(kernels),
        }
    return found


def _flops(attribution: Attribution, counts: FlopCounts) -> Record:
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
        rows.append({"phase": phase, "part": part, "flops": number, "reason": reason})
    return {"flops": rows, "softmax_flops": dict(softmax)}
