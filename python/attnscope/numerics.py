"""The gate: is a result as close to the fp64 reference as its dtype allows?

The rule, row by row (a row is one query of one head): the largest error against fp64 may be
C_FORWARD times the error of plain same-dtype PyTorch nearby, plus a few ulps of the output's dtype
at the row's magnitude. "Nearby" is within NEARBY rows of the same head: one row's baseline can be
exact by luck, and the whole tensor's is set by the few rows with the fewest keys.
docs/numerics.md gives the reasons and what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attnscope.inputs import KINDS as KINDS
from attnscope.inputs import Case, make_inputs
from attnscope.reference import attention_reference, naive_attention_blocked

C_FORWARD = 2.0
# Ulps of the output dtype at the row's largest |out|. In 16 bits most of the error is the rounding
# of out. In fp32 and fp64 most of it is the order of summation: the baseline's order is a library's
# best, and the reference itself is rounded to fp64.
FLOOR_ULPS = {torch.bfloat16: 1.0, torch.float16: 1.0, torch.float32: 32.0, torch.float64: 256.0}
# Ulps of the scores' dtype (fp32 or fp64), times |lse|. A score is rounded a few times at its own
# magnitude, about |lse|; its absolute error becomes a relative error of its weight.
SCORE_ULPS = 4.0
LSE_FLOOR_ULPS = 32.0  # of fp32, at max(1, |lse|)
TANH_APPROX = 2.0**-11  # relative error of the hardware's tanh, which a softcap may use
NEARBY = 32  # rows on either side

# Scores (query-key pairs over all heads) up to which every row is compared; above, a sample of
# heads and rows. All of the paper's shapes are below it on a GPU.
FULL_SCORES = {"cuda": 1 << 34, "cpu": 1 << 25}
_SAMPLE_BLOCKS = 8

ForwardFn = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Verdict:
    """Result of the gate. Errors are absolute, against fp64; ratios are kernel over baseline.

    `margin` decides: the worst row's error as a share of its allowed error, at most 1 to pass.
    `err_ratio` (largest error over the baseline's largest error) is informative only; None if the
    baseline is exact. The lse fields are None if there is no lse.
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
    repeatable: bool | None = None
    checked: str = "all rows"


def compare_forward(
    out: Tensor,
    lse: Tensor | None,
    ref_out: Tensor,
    ref_lse: Tensor,
    baseline_out: Tensor,
    baseline_lse: Tensor,
    *,
    softcap: float = 0.0,
) -> Verdict:
    """Compare one result with fp64 and with the same-dtype baseline.

    Layouts are the op's, dense or packed: out [B, Sq, Hq, Dv] with lse [B, Hq, Sq], or
    [Tq, Hq, Dv] with [Hq, Tq]. `ref_*` are fp64, `baseline_out` is in out's dtype; `baseline_lse`
    comes from fp32 scores, which is what kernels keep. `softcap` allows the lse the error of the
    hardware's tanh. inf and nan must be exactly where the reference has them, and rows without keys
    must be exactly 0.
    """
    if out.dtype != baseline_out.dtype:
        return Verdict(False, f"out has dtype {out.dtype}, not {baseline_out.dtype}")
    for name, got, want in (("out", out, ref_out), ("lse", lse, ref_lse)):
        if got is not None and got.shape != want.shape:
            return Verdict(False, f"{name} has shape {list(got.shape)}, not {list(want.shape)}")
        if got is not None and (found := _odd_values(name, got, want)):
            return Verdict(False, found)
    dead = torch.isneginf(ref_lse).transpose(-1, -2).unsqueeze(-1)
    if at := _first((out != 0) & dead):
        return Verdict(False, f"out{list(at)} is {out[at].item():g} in a row without keys, not 0")

    err, base = _row_errors(out, ref_out), _row_errors(baseline_out, ref_out)
    magnitude = _finite(ref_out).abs().amax(-1).transpose(-1, -2)
    scores = torch.promote_types(out.dtype, torch.float32)
    floor = FLOOR_ULPS[out.dtype] * _ulp(magnitude, out.dtype)
    floor += SCORE_ULPS * _finite(ref_lse).abs() * _ulp(magnitude, scores)
    margin, at = _worst(err, base, floor)
    verdict = Verdict(
        passed=margin <= 1.0,
        max_abs_err=_max(err),
        baseline_err=_max(base),
        err_ratio=_ratio(_max(err), _max(base)),
        margin=margin,
    )
    if margin > 1.0:
        where = f"head {list(at[:-1])}, row {at[-1]}"
        reason = f"out: {where} is off by {err[at].item():.3g}, {margin:.3g} times what is allowed"
        verdict = replace(verdict, reason=reason)
    if lse is None:
        return verdict

    err, base = (_finite(t.double() - ref_lse).abs() for t in (lse, baseline_lse))
    floor = LSE_FLOOR_ULPS * _ulp(_finite(ref_lse).abs().clamp_min(1.0), torch.float32)
    margin, at = _worst(err, base, floor + softcap * TANH_APPROX)
    if margin > 1.0 and verdict.passed:
        reason = f"lse{list(at)} is off by {err[at].item():.3g}, {margin:.3g} times what is allowed"
        verdict = replace(verdict, passed=False, reason=reason)
    return replace(
        verdict,
        lse_err=_max(err),
        lse_baseline_err=_max(base),
        lse_ratio=_ratio(_max(err), _max(base)),
        lse_margin=margin,
    )


def check_forward_fn(
    fn: ForwardFn,
    workload: Any,
    kind: str = "normal",
    seed: int = 0,
    device: str | torch.device = "cuda",
) -> Verdict:
    """Run `fn(q, k, v, cu_seqlens_q, cu_seqlens_k) -> (out, lse or None)` and check it.

    `workload` has the attributes of attnscope.bench.workloads.Workload; fn must apply the
    workload's mask and softcap itself. Free memory that fn may allocate is filled with NaN before
    each of two runs, so unwritten outputs become visible. `repeatable` is whether both runs agree
    bitwise (reported, not required). Exceptions of fn propagate.
    """
    case, device = Case.of(workload), torch.device(device)
    inputs = make_inputs(case, kind, seed, device)
    truth = _truth(case, kind, seed, device)
    runs = []
    for _ in range(2):
        _poison(case, inputs[0])
        runs.append(fn(*inputs))
    (out, lse), (out2, lse2) = runs
    same_lse = lse is lse2 or (lse is not None and lse2 is not None and torch.equal(lse, lse2))
    repeatable = same_lse and torch.equal(out, out2)
    verdict = truth.judge(out, lse)
    if not repeatable and verdict.passed:
        verdict = truth.judge(out2, lse2)
    return replace(verdict, repeatable=repeatable)


@dataclass(frozen=True)
class _Truth:
    """Reference and baseline of one case, with the heads and rows they cover (None: all)."""

    case: Case
    pairs: Tensor | None  # int64 [2, P]: batch entry and head; packed: zeros and head
    rows: Tensor | None
    ref: tuple[Tensor, Tensor]
    baseline: tuple[Tensor, Tensor]

    def judge(self, out: Tensor, lse: Tensor | None) -> Verdict:
        """Check the whole result for nan and inf, and compare the covered rows in full."""
        packed = self.case.seqlens is not None
        if out.dim() != (3 if packed else 4):
            return Verdict(False, f"out has {out.dim()} dimensions; expected {3 if packed else 4}")
        if at := _first(~torch.isfinite(out)):
            return Verdict(False, f"out{list(at)} is {out[at].item():g}; the reference is finite")
        if self.pairs is not None:
            b, h = self.pairs.to(out.device)
            if packed:
                out, lse = out[:, h], None if lse is None else lse[h]
            else:
                out, lse = (
                    out[b, :, h].unsqueeze(2),
                    None if lse is None else lse[b, h].unsqueeze(1),
                )
        if self.rows is not None:
            rows = self.rows.to(out.device)
            out, lse = out[:, rows], None if lse is None else lse[..., rows]
        verdict = compare_forward(out, lse, *self.ref, *self.baseline, softcap=self.case.softcap)
        return replace(verdict, checked=self.covered())

    def covered(self) -> str:
        parts = []
        if self.pairs is not None:
            heads = self.case.heads_q * (self.case.batch if self.case.seqlens is None else 1)
            parts.append(f"{self.pairs.shape[1]} of {heads} heads")
        if self.rows is not None:
            parts.append(f"{self.rows.numel()} of {self.case.seqlen_q} rows")
        return ", ".join(parts) or "all rows"


@lru_cache(maxsize=1)
def _truth(case: Case, kind: str, seed: int, device: torch.device) -> _Truth:
    q, k, v, cu_q, cu_k = make_inputs(case, kind, seed, device)
    pairs, rows = _sample(case, seed, device)
    if pairs is not None:
        b, h = pairs.to(device)
        g = h // (case.heads_q // case.heads_kv)
        if case.seqlens is None:
            q, k, v = (t[b, :, i].unsqueeze(2) for t, i in ((q, h), (k, g), (v, g)))
        else:
            q, k, v = q[:, h], k[:, g], v[:, g]
    args: dict[str, Any] = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "rows": rows}
    args |= case.options
    ref = attention_reference(q, k, v, **args)
    out, lse = naive_attention_blocked(q, k, v, **args)
    if q.element_size() < 4:
        lse = naive_attention_blocked(q.float(), k.float(), v.float(), **args)[1]
    return _Truth(case, pairs, rows, ref, (out, lse))


def _sample(case: Case, seed: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Which (batch entry, head) pairs and rows to compare: the edges and a seeded choice."""
    limit = FULL_SCORES[device.type]
    if case.heads_q * case.scores_per_head() <= limit:
        return None, None
    generator = torch.Generator().manual_seed(seed)
    rows = None
    per_head, batch = case.scores_per_head(), 1
    if case.seqlens is None:
        batch = case.batch
        per_head = case.seqlen_q * case.seqlen_k
        blocks = torch.arange(case.seqlen_q).split(2 * NEARBY)
        if len(blocks) > _SAMPLE_BLOCKS:
            chosen = _choose(len(blocks), _SAMPLE_BLOCKS, generator)
            rows = torch.cat([blocks[i] for i in chosen.tolist()])
            per_head = rows.numel() * case.seqlen_k
    heads = batch * case.heads_q
    pair = _choose(heads, max(1, min(heads, limit // max(per_head, 1))), generator)
    return torch.stack((pair // case.heads_q, pair % case.heads_q)), rows


def _choose(count: int, take: int, generator: torch.Generator) -> Tensor:
    """`take` of range(count), in order: the last, the first, and others at random."""
    inner = torch.randperm(max(count - 2, 0), generator=generator) + 1
    return torch.cat((torch.tensor([count - 1, 0][:count]), inner))[:take].sort().values


def _poison(case: Case, q: Tensor) -> None:
    """Leave NaN in the free memory that the allocator will use for out and lse."""
    rows = q.shape[:-1]
    held = [
        torch.full(shape, math.nan, dtype=dtype, device=q.device)
        for shape, dtype in (((*rows, case.head_dim_v), q.dtype), (rows, torch.float32))
        for _ in range(2)
    ]
    del held


def _odd_values(name: str, got: Tensor, want: Tensor) -> str:
    """Where inf or nan of `got` and `want` differ; empty if they agree."""
    for test in (torch.isnan, torch.isposinf, torch.isneginf):
        if at := _first(test(got) != test(want)):
            return f"{name}{list(at)} is {got[at].item():g}, the reference {want[at].item():g}"
    return ""


def _first(mask: Tensor) -> tuple[int, ...] | None:
    if not bool(mask.any()):
        return None
    at = int(mask.flatten().to(torch.uint8).argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(at), mask.shape))


def _finite(t: Tensor) -> Tensor:
    return torch.where(torch.isfinite(t), t, 0.0)


def _row_errors(out: Tensor, ref: Tensor) -> Tensor:
    """Largest error of each row, in the lse's layout."""
    if out.numel() == 0:
        return torch.zeros(out.shape[:-1], dtype=ref.dtype, device=ref.device).transpose(-1, -2)
    return _finite(out.double() - ref).abs().amax(-1).transpose(-1, -2)


def _ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """The spacing of `dtype` at a magnitude (fp64), subnormals included."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(magnitude.clamp_min(info.tiny)).exponent
    return torch.ldexp(torch.full_like(magnitude, info.eps), exponent - 1)


def _worst(err: Tensor, base: Tensor, floor: Tensor) -> tuple[float, tuple[int, ...]]:
    """(largest share of the allowed error, where), with the baseline taken over nearby rows."""
    if err.numel() == 0:
        return 0.0, ()
    flat = base.flatten(0, -2).unsqueeze(1)
    nearby = torch.nn.functional.max_pool1d(flat, 2 * NEARBY + 1, stride=1, padding=NEARBY)
    share = err / (C_FORWARD * nearby.view_as(base) + floor)
    at = torch.unravel_index(share.argmax().cpu(), share.shape)
    index = tuple(int(i) for i in at)
    return float(share[index]), index


def _max(t: Tensor) -> float:
    return float(t.max()) if t.numel() else 0.0


def _ratio(err: float, base: float) -> float | None:
    return err / base if base > 0.0 else None
