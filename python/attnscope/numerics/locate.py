"""Where a result first goes wrong, and why: NaN and Inf, softmax overflow, loss of precision.

Dense tensors in the op's layouts: q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv], out
[B, Sq, Hq, Dv], lse [B, Hq, Sq], gradients like their tensors. A row of a head is computed again in
fp64, in fp32, and with every step rounded to the dtype; the causes follow from these.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from attnscope.numerics.gate import first
from attnscope.reference import (
    Gradients,
    attention_backward_reference,
    attention_reference,
    naive_attention_backward,
)
from attnscope.reference.blocks import Options, make_options, row_intervals

EXPLAINS = 0.5  # share of an error that another computation must reach to explain it
MIN_SCORE_ERROR = 1e-12  # below, an error has no cause


@dataclass(frozen=True)
class Location:
    """The first element that is not finite, or the element that is furthest from fp64.

    Attributes:
        tensor, index: where it is.
        got, want: its value, and the fp64 reference's.
        tile: the kernel's tile with that row, such as "query tile 3 (rows 384 to 511)"; empty where
            the kernel is not known.
        cause: in words, with the numbers.
        fp32: whether fp32 accumulation would have given a finite value, and its error.
    """

    tensor: str
    index: tuple[int, ...]
    got: float
    want: float
    tile: str
    cause: str
    fp32: str

    @property
    def error(self) -> float:
        """The absolute difference of got and want; nan where one is not finite."""
        return abs(self.got - self.want)

    def facts(self) -> dict[str, Any]:
        """The location for JSON: values that are not finite are text."""
        values = {"got": self.got, "want": self.want, "error": self.error}
        return asdict(self) | {k: v if math.isfinite(v) else str(v) for k, v in values.items()}

    def lines(self) -> list[str]:
        """The location as lines of text."""
        where = f"{self.tensor}{list(self.index)} is {self.got:g}, fp64 has {self.want:.6g}"
        if math.isfinite(self.error):
            where += f": off by {self.error:.3g}"
        parts = [where, self.tile, f"cause: {self.cause}", f"fp32 accumulation: {self.fp32}"]
        return [part for part in parts if part]


@dataclass(frozen=True)
class _Row:
    """A query row of a head: q [D], the keys that it sees k [K, D], v [K, Dv], from `start` on."""

    q: Tensor
    k: Tensor
    v: Tensor
    start: int
    options: Options

    def dots(self) -> Tensor:
        return self.k.double() @ self.q.double()

    def scores(self) -> Tensor:
        scores = self.dots() * self.options.scale
        cap = self.options.softcap
        return cap * torch.tanh(scores / cap) if cap else scores

    def attend(self, dtype: torch.dtype) -> Tensor:
        """out [Dv] with every step in a dtype and the row max subtracted, in fp64 at the end."""
        scores = (self.k.to(dtype) @ self.q.to(dtype)) * self.options.scale
        if self.options.softcap:
            scores = self.options.softcap * torch.tanh(scores / self.options.softcap)
        weights = torch.exp(scores - scores.max())
        out = (weights @ self.v.to(dtype)) / weights.sum()
        return out.to(self.q.dtype).double()


def locate_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    block: tuple[int, int] | None = None,
) -> Location | None:
    """Where a forward's result goes wrong; None where it equals fp64 everywhere.

    `block` is the kernel's (query rows, keys) of a tile. Raises ValueError for packed tensors and
    for shapes that do not fit together.
    """
    _must_fit(q, k, v, out)
    options = make_options(q, causal, window, scale, softcap)
    shown: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap}
    shown |= {"scale": scale}
    for name, tensor in (("out", out), ("lse", lse)):
        at = None if tensor is None else _first_odd(name, tensor, q, k, options)
        if at is not None and tensor is not None:
            batch, row, head = (at[0], at[1], at[2]) if name == "out" else (at[0], at[2], at[1])
            want = _reference_at(name, at, (batch, row, head), (q, k, v), shown)
            return _describe(name, at, float(tensor[at]), want, (batch, row, head), (q, k, v),
                             options, block)  # fmt: skip
    exact = attention_reference(q, k, v, **shown)[0]
    error = (out.double() - exact).abs()
    if not error.numel() or float(error.max()) <= MIN_SCORE_ERROR:
        return None
    at = tuple(int(i) for i in torch.unravel_index(error.argmax().cpu(), error.shape))
    return _describe("out", at, float(out[at]), float(exact[at]), at[:3], (q, k, v), options, block)


def _must_fit(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    if not (q.dim() == k.dim() == v.dim() == out.dim() == 4):
        raise ValueError(
            f"tensors must be dense with 4 dimensions, got {[t.dim() for t in (q, k, v, out)]}. "
            "Locate one sequence of a packed batch at a time"
        )
    if out.shape != (*q.shape[:3], v.shape[3]) or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"out must have the shape {[*q.shape[:3], v.shape[3]]} of the call, got "
            f"{list(out.shape)}"
        )


def _first_odd(
    name: str, tensor: Tensor, q: Tensor, k: Tensor, options: Options
) -> tuple[int, ...] | None:
    """The first element that is not finite; an lse of -inf is right in rows without keys."""
    odd = ~torch.isfinite(tensor)
    if name == "lse":
        begin, end = row_intervals(torch.arange(q.shape[1]), q.shape[1], k.shape[1], options)
        dead = (begin >= end).to(tensor.device)
        odd &= ~(dead & torch.isneginf(tensor))
    return first(odd)


def _reference_at(
    name: str,
    at: tuple[int, ...],
    place: tuple[int, int, int],
    inputs: tuple[Tensor, Tensor, Tensor],
    options: dict[str, Any],
) -> float:
    batch, row, head = place
    q, k, v = inputs
    group = head // (q.shape[2] // k.shape[2])
    one, of = slice(batch, batch + 1), slice(group, group + 1)
    rows = torch.tensor([row])
    ref_out, ref_lse = attention_reference(
        q[one, :, head : head + 1], k[one, :, of], v[one, :, of], rows=rows, **options
    )
    return float(ref_out[0, 0, 0, at[3]] if name == "out" else ref_lse[0, 0, 0])


def _describe(
    name: str,
    at: tuple[int, ...],
    got: float,
    want: float,
    place: tuple[int, ...],
    inputs: tuple[Tensor, Tensor, Tensor],
    options: Options,
    block: tuple[int, int] | None,
) -> Location:
    batch, number, head = place
    q, k, v = inputs
    group = head // (q.shape[2] // k.shape[2])
    begin, end = (
        int(t) for t in row_intervals(torch.tensor([number]), q.shape[1], k.shape[1], options)
    )
    row = _Row(q[batch, number, head], k[batch, begin:end, group], v[batch, begin:end, group],
               begin, options)  # fmt: skip
    column = at[3] if name == "out" else None
    cause, fp32 = _cause(row, got, want, column, block, (batch, number, head, group))
    if not math.isfinite(got) and math.isfinite(want) and begin < end:
        cause = _leak(k, v, batch, group) or cause
    return Location(name, at, got, want, tile_text(number, block, "query"), cause, fp32)


def tile_text(row: int, block: tuple[int, int] | None, what: str) -> str:
    """The tile of a row of queries or keys; empty without a block."""
    if block is None:
        return ""
    size = block[0] if what == "query" else block[1]
    tile = row // size
    return f"{what} tile {tile} (rows {tile * size} to {(tile + 1) * size - 1})"


def _cause(
    row: _Row,
    got: float,
    want: float,
    column: int | None,
    block: tuple[int, int] | None,
    place: tuple[int, int, int, int],
) -> tuple[str, str]:
    """(cause, whether fp32 accumulation would hold) of one element of a row."""
    if not row.k.shape[0]:
        return "the row sees no key: 0 / 0 in the normalisation", "no matter; out is 0 there"
    if bad := _bad_input(row, place):
        return f"an input: {bad}", "no: the input itself is not finite"
    fp32 = _held(row, column, want)
    if not math.isfinite(got):
        return _overflow(row, block), fp32
    return _rounding(row, got, want, column), fp32


def _bad_input(row: _Row, place: tuple[int, int, int, int]) -> str:
    """The first input of the row that is not finite, by tensor and index; empty if none is."""
    batch, number, head, group = place
    if at := first(~torch.isfinite(row.q)):
        return f"q[{batch}, {number}, {head}, {at[0]}] is {float(row.q[at]):g}"
    for name, tensor in (("k", row.k), ("v", row.v)):
        if at := first(~torch.isfinite(tensor)):
            key = row.start + at[0]
            return f"{name}[{batch}, {key}, {group}, {at[1]}] is {float(tensor[at]):g}"
    return ""


def _leak(k: Tensor, v: Tensor, batch: int, group: int) -> str:
    """A key or value that is not finite and that the row does not see; empty if none is."""
    for name, tensor in (("k", k), ("v", v)):
        if at := first(~torch.isfinite(tensor[batch, :, group])):
            value = float(tensor[batch, :, group][at])
            return (
                f"a leak: {name}[{batch}, {at[0]}, {group}, {at[1]}] is {value:g}, which the row "
                "does not see. A masked weight is 0, and 0 times it is NaN"
            )
    return ""


def _overflow(row: _Row, block: tuple[int, int] | None) -> str:
    dtype = row.q.dtype
    name, largest = str(dtype).removeprefix("torch."), torch.finfo(dtype).max
    dots, scores = row.dots(), row.scores()
    at = int(dots.abs().argmax())
    key = row.start + at
    where = f"key {key}" + (f", {tile_text(key, block, 'key')}" if block else "")
    if float(dots.abs().max()) > largest:
        return (
            f"overflow of q k in {name}: {float(dots[at]):.6g} at {where}, the end is {largest:g}"
        )
    top = float(scores.max())
    ends = {name: math.log(largest), "float32": math.log(torch.finfo(torch.float32).max)}
    for kind, end in sorted(ends.items(), key=lambda item: item[1]):
        if top > end:
            return (
                f"overflow of P in {kind}: the score {top:.4g} at {where} is past {end:.4g}, and "
                "exp of it overflows where the row max is not subtracted"
            )
    weights = torch.exp(scores - scores.max())
    sums = float((weights @ row.v.double().abs()).max())
    if sums > largest:
        return f"overflow of P v in {name}: the sums reach {sums:.6g}, the end is {largest:g}"
    return (
        "not in the numbers of this row: memory that was not written, a wrong mask, or a race. Run "
        "compute-sanitizer (profile_kernels.py --sanitizer), and attnscope stress"
    )


def _held(row: _Row, column: int | None, want: float) -> str:
    """What fp32 accumulation gives: finite or not, and its error for an element of out."""
    out = row.attend(torch.float32)
    if not bool(torch.isfinite(out).all()):
        return "no: it is not finite either"
    if column is None:
        return "yes: finite"
    return f"yes: finite, off by {abs(float(out[column]) - want):.3g}"


def _rounding(row: _Row, got: float, want: float, column: int | None) -> str:
    if column is None:
        return "loss of precision in the sum of exponentials"
    error = abs(got - want)
    narrow = abs(float(row.attend(row.q.dtype)[column]) - want)
    narrow = narrow if math.isfinite(narrow) else 0.0  # it overflows, and explains nothing
    wide = abs(float(row.attend(torch.float32)[column]) - want)
    name = str(row.q.dtype).removeprefix("torch.")
    top = float(row.scores().abs().max())
    if wide >= EXPLAINS * error:
        return (
            f"rounding of the inputs and of out: fp32 accumulation is off by {wide:.3g} too "
            f"(scores up to {top:.3g})"
        )
    step = torch.finfo(torch.float32).eps * top
    weights = torch.softmax(row.scores(), 0)
    moved = step * float(weights @ (row.v[:, column].double() - want).abs())
    if moved >= EXPLAINS * error:
        return (
            f"rounding of the scores in fp32: at {top:.3g} a step is {step:.2g}, which moves this "
            f"element by up to {moved:.3g}"
        )
    if narrow >= EXPLAINS * error:
        return (
            f"loss of precision: scores and P in {name} are off by {narrow:.3g}, fp32 "
            f"accumulation by {wide:.3g} (scores up to {top:.3g})"
        )
    return (
        f"not rounding: every step in {name} is off by {narrow:.3g} only. A wrong mask, scale or "
        "tile, or a race"
    )


def locate_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grads: Gradients,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    block: tuple[int, int] | None = None,
) -> Location | None:
    """Where gradients (dq, dk, dv) go wrong; None where they equal fp64 everywhere.

    The reference is computed for the whole call: use sizes that `attnscope check` uses.
    """
    _must_fit(q, k, v, dout)
    options: dict[str, Any] = {"causal": causal, "window": window, "scale": scale}
    options |= {"softcap": softcap}
    names = ("dq", "dk", "dv")
    want = attention_backward_reference(dout, q, k, v, **options)
    places = [(name, first(~torch.isfinite(grad))) for name, grad in zip(names, grads, strict=True)]
    name, at = next((place for place in places if place[1] is not None), ("", None))
    if at is None:
        errors = [
            float((g.double() - w).abs().max()) if g.numel() else 0.0
            for g, w in zip(grads, want, strict=True)
        ]
        if max(errors) <= MIN_SCORE_ERROR:
            return None
        name = names[errors.index(max(errors))]
        apart = (grads[names.index(name)].double() - want[names.index(name)]).abs()
        at = tuple(int(i) for i in torch.unravel_index(apart.argmax().cpu(), apart.shape))
    which = names.index(name)
    got, right = float(grads[which][at]), float(want[which][at])
    wide = naive_attention_backward(*(t.float() for t in (dout, q, k, v)), **options)
    held = float(wide[which].to(q.dtype)[at])
    fp32 = "no: it is not finite either"
    if math.isfinite(held):
        fp32 = f"yes: finite, off by {abs(held - right):.3g}"
    tile = tile_text(at[1], block, "query" if name == "dq" else "key")
    inputs = {"dout": dout, "q": q, "k": k, "v": v}
    cause = _backward_cause(inputs, at, got, right, held)
    return Location(name, at, got, right, tile, cause, fp32)


def _backward_cause(
    inputs: dict[str, Tensor], at: tuple[int, ...], got: float, want: float, held: float
) -> str:
    for name, tensor in inputs.items():
        if bad := first(~torch.isfinite(tensor)):
            return f"an input: {name}{list(bad)} is {float(tensor[bad]):g}"
    dtype = inputs["q"].dtype
    largest = torch.finfo(dtype).max
    short = str(dtype).removeprefix("torch.")
    if abs(want) > largest:
        return f"the gradient itself does not fit {short}: {want:.6g}, the end is {largest:g}"
    if not math.isfinite(got):
        bound = float(inputs["dout"].double().norm(dim=-1).max())
        bound *= float(inputs["v"].double().norm(dim=-1).max())
        if bound > largest:
            return (
                f"overflow of dP in {short}: |dout| |v| reaches {bound:.6g}, the end is {largest:g}"
            )
        return (
            "not in the numbers of the call: an out or lse of the forward that is not finite, "
            "memory that was not written, or a race. Locate the forward first"
        )
    if math.isfinite(held) and abs(held - want) >= EXPLAINS * abs(got - want):
        return f"rounding: plain fp32 is off by {abs(held - want):.3g} too"
    return f"loss of precision or a wrong mask: plain fp32 is off by {abs(held - want):.3g} only"
