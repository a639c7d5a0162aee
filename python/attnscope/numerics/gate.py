"""Parts of the gate that the forward's and the backward's rule share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Ulps of the output dtype at the row's largest |out|. In 16 bits most of the error is the rounding
# of out. In fp32 and fp64 most of it is the order of summation: the baseline's order is a library's
# best, and the reference itself is rounded to fp64.
FLOOR_ULPS = {torch.bfloat16: 1.0, torch.float16: 1.0, torch.float32: 32.0, torch.float64: 256.0}
# Ulps of the scores' dtype (fp32 or fp64), times |lse|. A score is rounded a few times at its own
# magnitude, about |lse|; its absolute error becomes a relative error of its weight.
SCORE_ULPS = 4.0
NEARBY = 32  # rows on either side
# Scores (query-key pairs over all heads) up to which every row is compared; above, a sample of
# heads and rows. All of the paper's shapes are below it on a GPU.
FULL_SCORES = {"cuda": 1 << 34, "cpu": 1 << 25}


@dataclass(frozen=True)
class Errors:
    """Errors of one gradient; see Verdict."""

    max_abs_err: float
    baseline_err: float
    err_ratio: float | None
    margin: float


@dataclass(frozen=True)
class Verdict:
    """Result of the gate. Errors are absolute, against fp64; ratios are kernel over baseline.

    `margin` decides: the worst row's error as a share of its allowed error, at most 1 to pass.
    `err_ratio` (largest error over the baseline's largest error) is informative only; None if the
    baseline is exact. The lse fields are None if there is no lse. `gradients` has the errors of dq,
    dk and dv; the errors of the verdict itself belong to the gradient with the largest margin.
    """

    passed: bool
    reason: str = ""
    max_abs_err: float | None = None
    baseline_err: float | None = None
    err_ratio: float | None = None
    margin: float | None = None
    lse_err: float | None = None
    lse_baseline_err: float | None = None
    lse_ratio: float | None = None
    lse_margin: float | None = None
    gradients: Mapping[str, Errors] = field(default_factory=dict)
    repeatable: bool | None = None
    checked: str = "all rows"


def choose(count: int, take: int, generator: torch.Generator) -> Tensor:
    """`take` of range(count), in order: the last, the first, and others at random."""
    inner = torch.randperm(max(count - 2, 0), generator=generator) + 1
    return torch.cat((torch.tensor([count - 1, 0][:count]), inner))[:take].sort().values


def odd_values(name: str, got: Tensor, want: Tensor) -> str:
    """Where inf or nan of `got` and `want` differ; empty if they agree."""
    for test in (torch.isnan, torch.isposinf, torch.isneginf):
        if at := first(test(got) != test(want)):
            return f"{name}{list(at)} is {got[at].item():g}, the reference {want[at].item():g}"
    return ""


def first(mask: Tensor) -> tuple[int, ...] | None:
    """Index of the first true element."""
    if not bool(mask.any()):
        return None
    at = int(mask.flatten().to(torch.uint8).argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(at), mask.shape))


def finite(t: Tensor) -> Tensor:
    """The tensor with 0 for inf and nan."""
    return torch.where(torch.isfinite(t), t, 0.0)


def row_errors(out: Tensor, ref: Tensor) -> Tensor:
    """Largest error of each row, [.., heads, rows] as the lse."""
    if out.numel() == 0:
        return torch.zeros(out.shape[:-1], dtype=ref.dtype, device=ref.device).transpose(-1, -2)
    return finite(out.double() - ref).abs().amax(-1).transpose(-1, -2)


def ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """The spacing of `dtype` at a magnitude (fp64), subnormals included."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(magnitude.clamp_min(info.tiny)).exponent
    return torch.ldexp(torch.full_like(magnitude, info.eps), exponent - 1)


def worst(err: Tensor, base: Tensor, floor: Tensor, c: float) -> tuple[float, tuple[int, ...]]:
    """Find the row [.., heads, rows] with the largest share of its allowed error.

    Allowed are `c` times the baseline's error over nearby rows, and `floor`. Returns (share, row).
    """
    if err.numel() == 0:
        return 0.0, ()
    flat = base.flatten(0, -2).unsqueeze(1)
    nearby = torch.nn.functional.max_pool1d(flat, 2 * NEARBY + 1, stride=1, padding=NEARBY)
    share = err / (c * nearby.view_as(base) + floor)
    at = torch.unravel_index(share.argmax().cpu(), share.shape)
    index = tuple(int(i) for i in at)
    return float(share[index]), index


def largest(t: Tensor) -> float:
    """The largest element; 0 of none."""
    return float(t.max()) if t.numel() else 0.0


def ratio(err: float, base: float) -> float | None:
    """Error over the baseline's error; None if that is 0."""
    return err / base if base > 0.0 else None
