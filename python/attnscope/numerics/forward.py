"""The gate of forward calls: out and lse, row by row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attnscope.inputs import Case, make_inputs
from attnscope.numerics.gate import (
    FLOOR_ULPS,
    FULL_SCORES,
    NEARBY,
    SCORE_ULPS,
    Verdict,
    choose,
    finite,
    first,
    largest,
    odd_values,
    ratio,
    row_errors,
    ulp,
    worst,
)
from attnscope.reference import attention_reference, naive_attention_blocked

C_FORWARD = 2.0
LSE_FLOOR_ULPS = 32.0  # of fp32, at max(1, |lse|)
TANH_APPROX = 2.0**-11  # relative error of the hardware's tanh, which a softcap may use
_SAMPLE_BLOCKS = 8

ForwardFn = Callable[..., tuple[Tensor, Tensor | None]]


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
        if got is not None and (found := odd_values(name, got, want)):
            return Verdict(False, found)
    dead = torch.isneginf(ref_lse).transpose(-1, -2).unsqueeze(-1)
    if at := first((out != 0) & dead):
        return Verdict(False, f"out{list(at)} is {out[at].item():g} in a row without keys, not 0")

    err, base = row_errors(out, ref_out), row_errors(baseline_out, ref_out)
    magnitude = finite(ref_out).abs().amax(-1).transpose(-1, -2)
    scores = torch.promote_types(out.dtype, torch.float32)
    floor = FLOOR_ULPS[out.dtype] * ulp(magnitude, out.dtype)
    floor += SCORE_ULPS * finite(ref_lse).abs() * ulp(magnitude, scores)
    margin, at = worst(err, base, floor, C_FORWARD)
    verdict = Verdict(
        passed=margin <= 1.0,
        max_abs_err=largest(err),
        baseline_err=largest(base),
        err_ratio=ratio(largest(err), largest(base)),
        margin=margin,
    )
    if margin > 1.0:
        where = f"head {list(at[:-1])}, row {at[-1]}"
        reason = f"out: {where} is off by {err[at].item():.3g}, {margin:.3g} times what is allowed"
        verdict = replace(verdict, reason=reason)
    if lse is None:
        return verdict

    err, base = (finite(t.double() - ref_lse).abs() for t in (lse, baseline_lse))
    floor = LSE_FLOOR_ULPS * ulp(finite(ref_lse).abs().clamp_min(1.0), torch.float32)
    margin, at = worst(err, base, floor + softcap * TANH_APPROX, C_FORWARD)
    if margin > 1.0 and verdict.passed:
        reason = f"lse{list(at)} is off by {err[at].item():.3g}, {margin:.3g} times what is allowed"
        verdict = replace(verdict, passed=False, reason=reason)
    return replace(
        verdict,
        lse_err=largest(err),
        lse_baseline_err=largest(base),
        lse_ratio=ratio(largest(err), largest(base)),
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
    truth = forward_truth(case, kind, seed, device)
    runs = []
    for _ in range(2):
        _poison(case, inputs[0])
        runs.append(fn(*inputs))
    (out, lse), (out2, lse2) = runs
    same_lse = lse is lse2 or (lse is not None and lse2 is not None and torch.equal(lse, lse2))
    repeatable = same_lse and torch.equal(out, out2)
    verdict = truth.assess(out, lse)
    if not repeatable and verdict.passed:
        verdict = truth.assess(out2, lse2)
    return replace(verdict, repeatable=repeatable)


@dataclass(frozen=True)
class ForwardTruth:
    """Reference and baseline of one case, with the heads and rows they cover (None: all)."""

    case: Case
    pairs: Tensor | None  # int64 [2, P]: batch entry and head; packed: zeros and head
    rows: Tensor | None
    ref: tuple[Tensor, Tensor]
    baseline: tuple[Tensor, Tensor]

    def assess(self, out: Tensor, lse: Tensor | None) -> Verdict:
        """Check the whole result for nan and inf, and compare the covered rows in full."""
        packed = self.case.seqlens is not None
        if out.dim() != (3 if packed else 4):
            return Verdict(False, f"out has {out.dim()} dimensions; expected {3 if packed else 4}")
        if at := first(~torch.isfinite(out)):
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
def forward_truth(case: Case, kind: str, seed: int, device: torch.device) -> ForwardTruth:
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
    return ForwardTruth(case, pairs, rows, ref, (out, lse))


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
            chosen = choose(len(blocks), _SAMPLE_BLOCKS, generator)
            rows = torch.cat([blocks[i] for i in chosen.tolist()])
            per_head = rows.numel() * case.seqlen_k
    heads = batch * case.heads_q
    pair = choose(heads, max(1, min(heads, limit // max(per_head, 1))), generator)
    return torch.stack((pair // case.heads_q, pair % case.heads_q)), rows


def _poison(case: Case, q: Tensor) -> None:
    """Leave NaN in the free memory that the allocator will use for out and lse."""
    rows = q.shape[:-1]
    held = [
        torch.full(shape, math.nan, dtype=dtype, device=q.device)
        for shape, dtype in (((*rows, case.head_dim_v), q.dtype), (rows, torch.float32))
        for _ in range(2)
    ]
    del held
