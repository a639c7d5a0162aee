"""FLOPs of ops from their recorded shapes; rates.py computes the share of the card's peak.

Matrix products, convolutions and attention are counted, with two operations per multiply-add.
Attention counts exactly the (query, key) pairs that its mask keeps. Softmax and elementwise work
is not counted, as is usual. Every number carries its rule, every missing number its reason.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Any, NamedTuple

from attnscope.common.hardware.devices import Device, find_device
from attnscope.profile.analysis.kernel_names import category, short_name, uses_tensor_cores
from attnscope.profile.analysis.rates import NO_WORK, Rate, Work, rate
from attnscope.profile.attribution.owners import Attribution
from attnscope.profile.trace.events import CpuEvent, GpuEvent, Trace

Shapes = tuple[Any, ...]

DTYPES = {
    "c10::BFloat16": "bfloat16", "c10::Half": "float16", "float": "float32", "double": "float64",
    "c10::Float8_e4m3fn": "float8_e4m3fn", "c10::Float8_e5m2": "float8_e5m2",
}  # fmt: skip
NO_SHAPES = "shapes were not recorded"
LENGTHS = "a trace does not hold the lengths of packed, padded or paged sequences"


@dataclass(frozen=True)
class _Attention:
    """Positions of an attention op's arguments in its schema.

    `order` names q's dimensions and `first` is the position of q (k and v follow). Masks: `causal`
    is the position of the flag, aligned to the bottom right, or to the top left in torch's own ops;
    `window` is the position of the left bound (the right bound follows); `bias` is the position of
    a mask tensor. `lengths`: if any of these arguments is given (packed, padded or paged
    sequences), the shapes do not determine which keys a query sees.
    """

    first: int
    causal: int
    order: str = "BSHD"
    top_left: bool = False
    window: int | None = None
    lengths: tuple[int, ...] = ()
    bias: int | None = None

    @property
    def backward(self) -> bool:
        return self.first == 1  # the gradient of the output precedes q


_SDPA = "aten::_scaled_dot_product_"
# New keys of a cache, lengths in use, and pages.
_FA3_FORWARD = _Attention(0, 24, window=25, lengths=(3, 7, 8, 10, 11, 14))
_ATTENTION = {
    "attnscope::forward": _Attention(0, 8, window=9, lengths=(3, 4)),
    "attnscope_triton::forward": _Attention(0, 8, window=9, lengths=(3, 4)),
    "attnscope::backward": _Attention(1, 12, window=13, lengths=(7, 8)),
    "attnscope_triton::backward": _Attention(1, 12, window=13, lengths=(7, 8)),
    f"{_SDPA}flash_attention": _Attention(0, 4, "BHSD", True),
    f"{_SDPA}flash_attention_backward": _Attention(1, 11, "BHSD", True, lengths=(6, 7)),
    f"{_SDPA}efficient_attention": _Attention(0, 6, "BHSD", True, bias=3),
    f"{_SDPA}efficient_attention_backward": _Attention(1, 11, "BHSD", True, bias=4),
    f"{_SDPA}cudnn_attention": _Attention(0, 6, "BHSD", True, bias=3),
    f"{_SDPA}cudnn_attention_backward": _Attention(1, 14, "BHSD", True, lengths=(9, 10), bias=8),
    "aten::_cudnn_attention_forward": _Attention(0, 10, "BHSD", True, lengths=(4, 5), bias=3),
    "aten::_cudnn_attention_backward": _Attention(1, 14, "BHSD", True, lengths=(9, 10), bias=8),
    "aten::_flash_attention_forward": _Attention(0, 8, window=11, lengths=(3, 4, 13, 15)),
    "aten::_flash_attention_backward": _Attention(1, 11, window=15, lengths=(6, 7)),
    "aten::_efficient_attention_forward": _Attention(
        0, 9, top_left=True, lengths=(4, 5, 12, 13), bias=3
    ),
    "aten::_efficient_attention_backward": _Attention(
        1, 14, top_left=True, lengths=(6, 7, 18), bias=4
    ),
    "flash_attn::_flash_attn_forward": _Attention(0, 5, window=6),
    "flash_attn::_flash_attn_backward": _Attention(1, 11, window=12),
    "flash_attn_3::fwd": _FA3_FORWARD,
    "flash_attn_3::bwd": _Attention(1, 16, window=17, lengths=(9, 10, 11, 12)),
    "fa3_fwd::fwd": _FA3_FORWARD,
}
# Position of the first factor; the second follows.
_PRODUCTS = {
    "aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_scaled_mm": 0,
}  # fmt: skip


def op_work(event: CpuEvent) -> Work | str:
    """The FLOPs of one op by its own formula, or the reason why they are unknown.

    Ops that only call other ops ("aten::matmul", "aten::linear") have no formula: see FlopCounts.
    """
    if _formula(event.name) is None:
        return f"no FLOP formula for {event.name}"
    return _work(_Call(event.name, event.shapes, event.dtypes, event.concrete))


class _Call(NamedTuple):
    """An op and its recorded inputs, as in CpuEvent."""

    name: str
    shapes: Shapes | None
    dtypes: tuple[Any, ...] | None
    concrete: tuple[Any, ...] | None


@lru_cache(1 << 12)  # a program makes few different calls, many times each
def _work(call: _Call) -> Work | str:
    formula = _formula(call.name)
    assert formula is not None
    if not call.shapes or call.dtypes is None or call.concrete is None:
        return NO_SHAPES
    try:
        return formula(call, call.shapes)
    except (IndexError, TypeError, ValueError, AssertionError):
        return f"{call.name}: its recorded inputs are not those of the op that is known"


def op_flops(event: CpuEvent) -> int | None:
    """The number of FLOPs from `op_work`; None if unknown."""
    work = op_work(event)
    return work.flops if isinstance(work, Work) else None


@cache
def _formula(name: str) -> Callable[[_Call, Shapes], Work | str] | None:
    if name in _PRODUCTS:
        return _product
    if name in _ATTENTION:
        return _attention
    if name == "aten::convolution":
        return _convolution
    return _convolution_backward if name == "aten::convolution_backward" else None


def _product(event: _Call, shapes: Shapes) -> Work:
    at = _PRODUCTS[event.name]
    a, b = shapes[at : at + 2]
    assert 2 <= len(a) == len(b) <= 3 and (*a[:-2], a[-1]) == b[:-1]
    rule = "2 m n k" if len(a) == 2 else "2 b m n k"
    return Work(2 * prod(a) * b[-1], _dtype(event, at), rule)


def _attention(event: _Call, shapes: Shapes) -> Work | str:
    from attnscope.attention_flops import visible_pairs

    op = _ATTENTION[event.name]
    given = (at < len(shapes) and (shapes[at] or (event.concrete or ())[at]) for at in op.lengths)
    if any(given):
        return LENGTHS
    batch, *_ = q = shapes[op.first]
    k, v = shapes[op.first + 1 : op.first + 3]
    rows, heads = (1, 2) if op.order == "BSHD" else (2, 1)
    len_q, len_k = q[rows], k[rows]
    left, right, rule = -1, -1, "all pairs"
    if op.window is not None:
        left, right = (_value(event, op.window + i, default=-1) for i in (0, 1))
    if left >= 0 or right >= 0:
        rule = "visible pairs of a window"
    causal = int(_value(event, op.causal, default=False))
    if causal:
        right, rule = 0, "visible pairs of a causal mask"
        # 2 is custom_mask_type's value for a mask aligned to the bottom right.
        if op.top_left and causal != 2:
            # Query i sees keys j <= i: the bottom right of the part that any query sees.
            len_k = min(len_q, len_k)
            right = len_q - len_k
    elif op.bias is not None and shapes[op.bias]:
        rule = "all pairs, the mask tensor not looked into"
    pairs = batch * q[heads] * visible_pairs(len_q, len_k, left, right)
    # Forward: q k^T and p v. Backward: q k^T again, dq, dk, and dv, dp.
    times_d, times_dv = (3, 2) if op.backward else (1, 1)
    pair = "2 (3 D + 2 Dv)" if op.backward else "2 (D + Dv)"
    return Work(
        2 * pairs * (times_d * q[-1] + times_dv * v[-1]),
        _dtype(event, op.first),
        f"attention {pair} a pair, {rule}",
    )


def _convolution(event: _Call, shapes: Shapes) -> Work:
    x, w = shapes[:2]
    stride, padding, dilation, transposed = (_value(event, at) for at in range(3, 7))
    each = range(len(x) - 2)
    stride, padding, dilation = ([p[i % len(p)] for i in each] for p in (stride, padding, dilation))
    points = [
        (x[i + 2] + 2 * padding[i] - dilation[i] * (w[i + 2] - 1) - 1) // stride[i] + 1
        for i in each
    ]
    flops = 2 * x[0] * prod(x[2:] if transposed else points) * prod(w)
    return Work(flops, _dtype(event, 0), "2 a multiply-add of each filter tap")


def _convolution_backward(event: _Call, shapes: Shapes) -> Work:
    """Each requested gradient costs as many FLOPs as the forward pass."""
    grad, x, w = shapes[:3]
    transposed, wanted = _value(event, 7), _value(event, 10)
    points = prod((x if transposed else grad)[2:])
    flops = 2 * x[0] * points * prod(w) * sum(wanted[:2])
    return Work(flops, _dtype(event, 1), "2 a multiply-add of each filter tap and gradient")


def _dtype(event: _Call, at: int) -> str:
    name = (event.dtypes or ())[at]
    return DTYPES.get(name, name.removeprefix("c10::"))


def _value(event: _Call, at: int, **default: Any) -> Any:
    """A recorded scalar or list; `default` for None and for arguments missing in this torch."""
    recorded = event.concrete or ()
    text = recorded[at] if at < len(recorded) else ""
    if text == "" and default:
        return default["default"]
    return ast.literal_eval(text)


def trace_device(trace: Trace) -> tuple[Device | None, str | None]:
    """The card of a trace, found by name, SM count and memory; or (None, reason)."""
    kinds = {(d.get("name"), d.get("numSms"), d.get("totalGlobalMem")) for d in trace.devices}
    if len(kinds) != 1:
        return None, "the trace names no device" if not kinds else "the trace has unlike devices"
    name, sms, memory = kinds.pop()
    return find_device(str(name), sms, memory / 2**30 if memory else None)


class FlopCounts:
    """The FLOPs of a trace, each counted once.

    `works` maps the index of an op in Trace.cpu to its Work. If ops with formulas are nested, only
    the outermost is counted, and only if it launched kernels: ops that ran on the CPU or were
    captured into a CUDA graph did no GPU work then. `uncounted` lists matrix-product and attention
    kernels that belong to no counted op: graph replays, plain launches, ops without a formula.
    """

    def __init__(self, attribution: Attribution) -> None:
        self._attribution = attribution
        self.trace = attribution.trace
        self.works: dict[int, Work] = {}
        self.uncounted: list[tuple[GpuEvent, str]] = []
        self._inside: dict[int, list[int]] = defaultdict(list)  # works below an event
        self._missed: dict[int, list[int]] = defaultdict(list)  # positions in uncounted
        self._covered: dict[int, int] = {}  # an op inside a counted one -> the counted one
        self._launched: dict[int, list[GpuEvent]] = defaultdict(list)
        for kernel in self.trace.kernels:
            self._add(kernel)
        for index, kernels in self._launched.items():
            if index in self.works:
                self.works[index] = _as_run(self.works[index], kernels)
        # Indices of the events with FLOPs or uncounted kernels in them, or inside a counted op.
        self.known = {*self._inside, *self._missed, *self._covered}

    def _add(self, kernel: GpuEvent) -> None:
        owner = self._attribution.op(kernel)
        ops = [] if owner is None else self.trace.ops_from(owner)
        for at in range(len(ops) - 1, -1, -1):
            op = ops[at]
            work = self.works.get(op.index) or op_work(op)
            if isinstance(work, Work):
                if op.index not in self.works:
                    self.works[op.index] = work
                    for index in self._containers(op):
                        self._inside[index].append(op.index)
                self._launched[op.index].append(kernel)
                for inner in ops[:at]:
                    self._covered[inner.index] = op.index
                return
        if category(kernel.name) in ("GEMM", "attention"):
            replayed = self._attribution.replay(kernel) is not None
            unowned = "replayed by a CUDA graph" if replayed else "not launched by an op"
            reason = _why(ops) if ops else unowned
            captured = self._attribution.captured_op(kernel)
            around = [captured, *self.trace.ancestors(captured)] if captured else []
            missed = {event.index for event in around if event.kind == "op"}
            for index in self._containers(owner or kernel) | missed:
                self._missed[index].append(len(self.uncounted))
            self.uncounted.append((kernel, reason))

    def _containers(self, event: CpuEvent | GpuEvent) -> set[int]:
        """Events that include this one: itself, its enclosing events, and the ranges around it."""
        found = {event.index} if isinstance(event, CpuEvent) else set()
        found |= {other.index for other in self.trace.ancestors(event)}
        return found | {other.index for other in self._attribution.ranges(event)}

    def of(self, event: CpuEvent) -> int | None:
        """FLOPs inside an op, a range or a Python frame; None if unknown."""
        found = self.within([event])
        return None if isinstance(found, str) else sum(work.flops for work in found)

    def within(self, events: Iterable[CpuEvent]) -> list[Work] | str:
        """The works inside any of the events, each once; or why some are unknown."""
        events = [event for event in events if event.index in self.known]
        missed = sorted({at for event in events for at in self._missed.get(event.index, ())})
        if missed:
            kernel, reason = self.uncounted[missed[0]]
            one = len(missed) == 1
            count = "a kernel" if one else f"{len(missed)} kernels"
            count += f" of matrix products {'is' if one else 'are'} not counted"
            return f"{count}, such as {short_name(kernel.name)}: {reason}"
        below = {at for event in events for at in self._inside.get(event.index, ())}
        works = [self.works[at] for at in sorted(below)]
        # Ops inside a counted op have their own count, or none.
        counted = {-1, *below}
        covered = [e for e in events if self._covered.get(e.index, -1) not in counted]
        works += [work for e in covered if isinstance(work := op_work(e), Work)]
        return works or NO_WORK

    def rate(
        self,
        events: Iterable[CpuEvent],
        time_ns: float,
        device: Device | None,
        device_reason: str | None = None,
        sm_clock_mhz: float | None = None,
    ) -> Rate:
        """`rate` of the works inside the events, over their kernels' time in nanoseconds."""
        works = self.within(events)
        if isinstance(works, str):
            return Rate(reason=works)
        return rate(works, time_ns, device, device_reason, sm_clock_mhz)

    def dtypes(self) -> set[str]:
        """All dtypes that were multiplied."""
        return {work.dtype for work in self.works.values()}

    def rules(self) -> list[str]:
        """All rules by which FLOPs were counted."""
        return sorted({work.rule for work in self.works.values()})


def _why(ops: list[CpuEvent]) -> str:
    """Why none of the ops around a kernel (innermost first) could be counted."""
    reasons = [reason for op in ops if isinstance(reason := op_work(op), str)]
    known = [reason for reason in reasons if not reason.startswith("no FLOP formula")]
    return (known or reasons)[0]


def _as_run(work: Work, kernels: list[GpuEvent]) -> Work:
    """Relabel float32 products that ran on tensor cores as TF32, which has its own peak."""
    if work.dtype == "float32" and any(uses_tensor_cores(kernel.name) for kernel in kernels):
        return Work(work.flops, "tfloat32", work.rule)
    return work
