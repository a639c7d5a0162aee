"""Patterns that cost time, each with the events and numbers as evidence.

A finding is reported only if its numbers pass the thresholds below, never on names alone. Detectors
that need a steady state skip windows with few launches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from attnscope.profile.analysis.flops import FlopCounts
from attnscope.profile.analysis.gaps import idle_time
from attnscope.profile.analysis.kernel_names import category, short_name, uses_tensor_cores
from attnscope.profile.analysis.links import python_line
from attnscope.profile.analysis.steps import program_window
from attnscope.profile.attribution.owners import Attribution
from attnscope.profile.trace.events import CpuEvent, GpuEvent

# Minimum share of the program in which the GPU is idle after waits; a wait for a busy GPU is free.
SYNC_SHARE = 0.05
# A synchronisation with nothing to wait for takes 5 to 40 us under the profiler.
LONG_SYNC_US = 100.0
# Minimum share of kernel time. Below it, even a free product gains less than run-to-run noise.
FP32_SHARE = 0.05
UNFUSED_SHARE = 0.05
TINY_GRID_SHARE = 0.10
# Minimum total kernel time; below it there were only a few calls.
LEAST_KERNEL_US = 100.0
# A grid of half the SMs leaves half the card unused. Fuller grids often have no better tile size.
TINY_GRID_FILL = 0.5
# Minimum share of the time from the first to the last kernel in which the GPU waited for launches.
STARVED_SHARE = 0.30
# Minimum number of launches; fewer are mostly set-up, not a steady state.
STEADY_LAUNCHES = 100
# Kernels between the products of unfused attention: scale, mask, casts, dropout, copies.
BETWEEN_PRODUCTS = 12

# What gives a kernel of a category more blocks.
MORE_BLOCKS = {
    "attention": "batch, heads, split of keys",
    "GEMM": "a larger batch, split of the inner dimension",
}

_SYNCS = (
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize",
    "cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize",
)  # fmt: skip
_FP32 = ("float32", "tfloat32")
STARVATION = "starvation"
TF32 = "TF32 tensor cores"
_BATCHED = ("aten::bmm", "aten::baddbmm")
_SOFTMAX = ("aten::_softmax", "aten::_masked_softmax")

Row = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """Something that costs time.

    kind: "synchronisation", "fp32 product", "unfused attention", "starvation" or "tiny grid".
    title: one sentence with the numbers. evidence: rows, most expensive first, times in
    microseconds. advice: what to try. cost_us: the time that it is about, of which a part can
    be saved.
    """

    kind: str
    title: str
    evidence: list[Row]
    advice: str
    cost_us: float = 0.0


def _synchronisations(attribution: Attribution, counts: FlopCounts) -> Finding | None:
    """Host synchronisations followed by more launches, which could have overlapped the GPU work."""
    trace = attribution.trace
    start, end = program_window(trace)
    last_launch = max((trace.cpu[w.launch].start for w in trace.gpu if w.launch >= 0), default=0)
    waits: dict[tuple[str, ...], list[CpuEvent]] = defaultdict(list)
    for event in trace.cpu:
        if event.kind != "call" or event.name not in _SYNCS:
            continue
        if event.duration >= LONG_SYNC_US * 1e3 and event.start < last_launch:
            waits[_cause(attribution, event)].append(event)
    total = sum(event.duration for events in waits.values() for event in events)
    idle_after = _idle_after(trace.gpu)
    idle = sum(idle_after(event.end) for events in waits.values() for event in events)
    if not waits or idle < SYNC_SHARE * (end - start):
        return None
    evidence: list[Row] = [
        {
            "call": call,
            "op": op or None,
            "range": ranges or None,
            "line": line or None,
            "calls": len(events),
            "wait_us": sum(event.duration for event in events) / 1e3,
            "gpu_idle_after_us": sum(idle_after(event.end) for event in events) / 1e3,
        }
        for (call, op, ranges, line), events in waits.items()
    ]
    evidence.sort(key=lambda row: -row["wait_us"])
    count, first = sum(map(len, waits.values())), evidence[0]
    cause = first["op"] or first["line"] or first["range"] or "no op"
    return Finding(
        "synchronisation",
        f"{count} synchronisations kept the host waiting for {total / 1e6:.2f} ms, and the GPU was "
        f"idle after them for {idle / 1e6:.2f} ms, {idle / (end - start):.0%} of the program; most "
        f"of the waiting is in {first['call']} of {cause}",
        evidence,
        "Read results later or less often (.item(), .cpu(), print of a tensor, boolean masks), or "
        "copy to pinned memory without blocking.",
        idle / 1e3,
    )


def _cause(attribution: Attribution, event: CpuEvent) -> tuple[str, str, str, str]:
    """The origin of a synchronisation: call, outermost op, ranges, innermost line of Python."""
    ops = [e.name for e in attribution.trace.ancestors(event) if e.kind == "op"]
    ranges = "/".join(e.name for e in attribution.ranges(event))
    return event.name, ops[-1] if ops else "", ranges, python_line(attribution, event) or ""


def _idle_after(work: Sequence[GpuEvent]) -> Callable[[int], int]:
    """Nanoseconds from a time until the next GPU work begins; 0 while GPU work is running.

    `work` is sorted by start.
    """
    starts = [event.start for event in work]
    ends = list(accumulate((event.end for event in work), max))

    def idle(time: int) -> int:
        at = bisect_left(starts, time)
        running = at > 0 and ends[at - 1] > time
        return 0 if running or at == len(starts) else starts[at] - time

    return idle


def _starvation(attribution: Attribution, counts: FlopCounts) -> Finding | None:
    """Gaps in which the GPU was idle because the host had not made the next launch call."""
    kernels = attribution.trace.kernels
    if len(kernels) < STEADY_LAUNCHES:
        return None
    idle = idle_time(attribution)
    if idle.starved < STARVED_SHARE * idle.span:
        return None
    evidence: list[Row] = []
    for name, gaps in idle.gaps.items():
        row = {"range": name, "gaps": len(gaps), "idle_us": sum(gaps) / 1e3}
        evidence.append(row | {"longest_us": max(gaps) / 1e3})
    evidence.sort(key=lambda row: -row["idle_us"])
    mean = attribution.total_ns / len(kernels) / 1e3
    replayed = sum(attribution.replay(kernel) is not None for kernel in kernels) / len(kernels)
    advice = "Launch less: CUDA graphs, torch.compile, fused optimizers, larger batches."
    if replayed > 0.5:
        advice = (
            f"{replayed:.0%} of the kernels come from CUDA graphs already: capture more of the "
            "program into one graph, and look for work of the host between two replays."
        )
    return Finding(
        STARVATION,
        f"the GPU waited for launches {idle.starved / idle.span:.0%} of the time from the first "
        f"GPU work to the last ({idle.starved / 1e6:.2f} of {idle.span / 1e6:.2f} ms); a kernel "
        f"takes {mean:.1f} us on average",
        evidence,
        f"{advice} The profiler adds to every launch, so compare with the unprofiled time first.",
        idle.starved / 1e3,
    )


def _unfused_attention(attribution: Attribution, counts: FlopCounts) -> Finding | None:
    """Attention as separate ops: a batched product, a softmax over it, another batched product."""
    by_op: dict[int, list[GpuEvent]] = defaultdict(list)
    for kernel in attribution.trace.kernels:
        if (op := attribution.op(kernel)) is not None:
            by_op[op.index].append(kernel)
    evidence: list[Row] = []
    indices = sorted(by_op)
    for first, softmax, last in _attention_triples(attribution, indices):
        kernels = [
            kernel
            for index in indices[
                bisect_left(indices, first.index) : bisect_left(indices, last.index) + 1
            ]
            if attribution.trace.cpu[index].thread == softmax.thread
            for kernel in by_op[index]
        ]
        time = sum(k.duration for k in kernels)
        products = sum(k.duration for op in (first, last) for k in by_op[op.index])
        soft = sum(k.duration for k in by_op[softmax.index])
        evidence.append(
            {
                "range": "/".join(e.name for e in attribution.ranges(first)) or None,
                "module": ".".join(attribution.module(first)) or None,
                "line": python_line(attribution, first),
                "scores": list(softmax.shapes[0]) if softmax.shapes else None,
                "kernels": len(kernels),
                "gpu_us": time / 1e3,
                "products_us": products / 1e3,
                "softmax_us": soft / 1e3,
                "between_us": (time - products - soft) / 1e3,
                "flops": sum(counts.of(op) or 0 for op in (first, last)) or None,
            }
        )
    total = sum(row["gpu_us"] for row in evidence) * 1e3
    if not evidence or total < UNFUSED_SHARE * attribution.total_ns:
        return None
    evidence.sort(key=lambda row: -row["gpu_us"])
    return Finding(
        "unfused attention",
        f"{len(evidence)} attention calls ran as products and a softmax: {total / 1e6:.2f} ms, "
        f"{total / attribution.total_ns:.0%} of kernel time",
        evidence,
        "Use attnscope.attention or torch.nn.functional.scaled_dot_product_attention with a fused "
        "backend: the scores are then never written to memory.",
        total / 1e3,
    )


def _attention_triples(
    attribution: Attribution, indices: Sequence[int]
) -> Iterator[tuple[CpuEvent, CpuEvent, CpuEvent]]:
    """(product, softmax, product) of ops that launched kernels, within the same ranges.

    Recorded shapes must match: the first product returns [b, m, n], the softmax takes [.., m, n],
    and the last product takes that result. Without shapes, few kernels may run in between.
    """
    ops = [attribution.trace.cpu[i] for i in indices]
    for at, softmax in enumerate(ops):
        if softmax.name not in _SOFTMAX:
            continue
        near = slice(max(0, at - BETWEEN_PRODUCTS), at + BETWEEN_PRODUCTS + 1)
        around = [op for op in ops[near] if op.thread == softmax.thread and op.name in _BATCHED]
        before = [op for op in around if op.index < softmax.index]
        after = [op for op in around if op.index > softmax.index]
        if not before or not after:
            continue
        first, last = before[-1], after[0]
        if attribution.ranges(first) == attribution.ranges(last) and _fit(first, softmax, last):
            yield first, softmax, last


def _fit(first: CpuEvent, softmax: CpuEvent, last: CpuEvent) -> bool:
    """Whether the recorded shapes match; True if none were recorded."""
    if not (first.shapes and softmax.shapes and last.shapes):
        return True
    a, b = first.shapes[1:3] if first.name == "aten::baddbmm" else first.shapes[:2]
    p = last.shapes[1] if last.name == "aten::baddbmm" else last.shapes[0]
    scores = softmax.shapes[0]
    made = (a[0], a[1], b[2])
    return made == p and made[1:] == scores[-2:] and prod(made) == prod(scores)


def _fp32_products(attribution: Attribution, counts: FlopCounts) -> Finding | None:
    """Matrix products of float32 inputs, by recorded dtypes or, if there are none, by symbols."""
    groups: dict[tuple[str, str, str], list[GpuEvent]] = defaultdict(list)
    trace = attribution.trace
    for kernel in trace.kernels:
        if category(kernel.name) not in ("GEMM", "attention"):
            continue
        op = attribution.op(kernel)
        around = [] if op is None else [op, *trace.ancestors(op)]
        work = next((counts.works[e.index] for e in around if e.index in counts.works), None)
        if work.dtype not in _FP32 if work else not _is_fp32_symbol(kernel.name):
            continue
        units = TF32 if uses_tensor_cores(kernel.name) else "FP32 units"
        groups[op.name if op else "", short_name(kernel.name), units].append(kernel)
    time = sum(k.duration for kernels in groups.values() for k in kernels)
    if time < max(FP32_SHARE * attribution.total_ns, LEAST_KERNEL_US * 1e3):
        return None
    evidence: list[Row] = [
        {
            "op": op_name or None,
            "kernel": name,
            "units": units,
            "line": python_line(attribution, kernels[0]),
            "calls": len(kernels),
            "gpu_us": sum(kernel.duration for kernel in kernels) / 1e3,
        }
        for (op_name, name, units), kernels in groups.items()
    ]
    evidence.sort(key=lambda row: -row["gpu_us"])
    units = " and ".join(sorted({row["units"] for row in evidence}))
    return Finding(
        "fp32 product",
        f"products of float32 inputs took {time / 1e6:.2f} ms, {time / attribution.total_ns:.0%} "
        f"of kernel time, on {units}",
        evidence,
        _instead_of_fp32({row["units"] for row in evidence}),
        time / 1e3,
    )


def _instead_of_fp32(units: set[str]) -> str:
    bf16 = "If bf16 was meant, use torch.autocast or cast the inputs"
    if units == {TF32}:
        return f"{bf16}: its peak is twice the peak of TF32, on which all of them run already."
    return f'{bf16}; if not, torch.set_float32_matmul_precision("high") allows TF32 tensor cores.'


def _is_fp32_symbol(symbol: str) -> bool:
    marks = ("sgemm", "f32f32_f32f32_f32", "s1688gemm", "tf32", "_sss_", "_f32_aligned")
    return any(mark in symbol for mark in marks)


def _tiny_grids(attribution: Attribution, counts: FlopCounts) -> Finding | None:
    """Kernels with blocks for less than half of the SMs, whether or not others ran beside them.

    Communication needs few blocks.
    """
    trace = attribution.trace
    sms = {d["id"]: d["numSms"] for d in trace.devices if "numSms" in d}
    groups: dict[tuple[str, int], list[GpuEvent]] = defaultdict(list)
    for kernel in trace.kernels:
        if kernel.grid and kernel.device in sms and category(kernel.name) != "communication":
            blocks = prod(kernel.grid)
            if blocks < TINY_GRID_FILL * sms[kernel.device]:
                groups[short_name(kernel.name), blocks].append(kernel)
    total = attribution.total_ns
    evidence: list[Row] = []
    for (name, blocks), kernels in groups.items():
        time = sum(kernel.duration for kernel in kernels)
        if time >= max(TINY_GRID_SHARE * total, LEAST_KERNEL_US * 1e3):
            op = attribution.op(kernels[0])
            row: Row = {"kernel": name, "blocks": blocks, "sms": sms[kernels[0].device]}
            row |= {"calls": len(kernels), "gpu_us": time / 1e3, "share": time / total}
            evidence.append(row | {"op": op.name if op else None})
    if not evidence:
        return None
    evidence.sort(key=lambda row: -row["gpu_us"])
    first = evidence[0]
    kind = category(groups[first["kernel"], first["blocks"]][0].name)
    return Finding(
        "tiny grid",
        f"{len(evidence)} kernels with a real share of the time have fewer blocks than half the "
        f"SMs; {first['kernel']} has {first['blocks']} for {first['sms']} SMs and takes "
        f"{first['share']:.0%} of kernel time",
        evidence,
        f"Give it more parallel work ({MORE_BLOCKS.get(kind, 'a larger batch')}), or run "
        "independent work on another stream beside it.",
        sum(row["gpu_us"] for row in evidence),
    )


# To add a detector, add a line here. Findings are sorted by their cost.
Detector = Callable[[Attribution, FlopCounts], Finding | None]
DETECTORS: list[Detector] = [
    _synchronisations,
    _starvation,
    _unfused_attention,
    _fp32_products,
    _tiny_grids,
]


def detect(attribution: Attribution, counts: FlopCounts | None = None) -> list[Finding]:
    """The findings of DETECTORS in a trace, most expensive first; empty if none passes a threshold.

    `counts` are the FLOPs of the attribution's ops; by default they are counted here.
    """
    if not attribution.trace.kernels:
        return []
    counts = counts or FlopCounts(attribution)
    findings = (detector(attribution, counts) for detector in DETECTORS)
    found = [finding for finding in findings if finding is not None]
    return sorted(found, key=lambda finding: -finding.cost_us)
