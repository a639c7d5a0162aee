"""The gate of backward calls: dq, dk and dv, row by row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attnscope.inputs import Case, make_inputs, make_output_gradients
from attnscope.numerics.gate import (
    FLOOR_ULPS,
    FULL_SCORES,
    SCORE_ULPS,
    Errors,
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
from attnscope.reference import (
    Gradients,
    attention_backward_reference,
    backward_rounding,
    live_rows_and_keys,
    naive_attention_backward,
)

C_BACKWARD = 2.0
# Ulps of the scores' dtype, at |dout| (|v| + |out|) P: dP and delta are sums that then cancel.
SUM_ULPS = 4.0
NAMES = ("dq", "dk", "dv")
# Two runs show most races of unordered sums; deterministic calls are compared more often.
RUNS = 2
DETERMINISTIC_RUNS = 4

# (dout, q, k, v, cu_seqlens_q, cu_seqlens_k, dlse) -> (dq, dk, dv)
BackwardFn = Callable[..., Gradients]


@dataclass(frozen=True)
class BackwardTruth:
    """What gradients are compared with; every field has dq, dk and dv.

    `floor` is the part of a row's allowed error that does not depend on the baseline,
    [.., heads, rows]; `live` are the rows that see a key and the keys that a row sees, [rows].
    """

    ref: Gradients
    baseline: Gradients
    floor: Gradients
    live: Gradients


def backward_truth(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    **options: Any,
) -> BackwardTruth:
    """Reference, baseline and floors of a call; options as `attention_backward_reference`."""
    inputs = (dout, q, k, v, cu_seqlens_q, cu_seqlens_k)
    ref = attention_backward_reference(*inputs, **options)
    rounding = backward_rounding(*inputs, **options, sum_ulps=SUM_ULPS, score_ulps=SCORE_ULPS)
    ulps = FLOOR_ULPS[q.dtype]
    dq, dk, dv = (
        ulps * ulp(_rows(grad), q.dtype) + _rows(errors)
        for grad, errors in zip(ref, rounding, strict=True)
    )
    masks = {name: options[name] for name in ("causal", "window") if name in options}
    rows, keys = live_rows_and_keys(q, k, cu_seqlens_q, cu_seqlens_k, **masks)
    baseline = naive_attention_backward(*inputs, **options)
    return BackwardTruth(ref, baseline, (dq, dk, dv), (rows, keys, keys))


def compare_backward(grads: Gradients, truth: BackwardTruth) -> Verdict:
    """Compare dq, dk and dv with fp64 and with the same-dtype baseline.

    inf and nan must be exactly where the reference has them. Gradients of rows without keys and of
    keys that no row sees must be exactly 0.
    """
    found: dict[str, Errors] = {}
    reason = ""
    fields = (NAMES, grads, truth.ref, truth.baseline, truth.floor, truth.live)
    for name, got, ref, baseline, floor, live in zip(*fields, strict=True):
        if got.dtype != baseline.dtype:
            return Verdict(False, f"{name} has dtype {got.dtype}, not {baseline.dtype}")
        if got.shape != ref.shape:
            return Verdict(False, f"{name} has shape {list(got.shape)}, not {list(ref.shape)}")
        if odd := odd_values(name, got, ref):
            return Verdict(False, odd)
        if at := first((got != 0) & ~live[:, None, None]):
            what = "a row without keys" if name == "dq" else "a key that no row sees"
            return Verdict(False, f"{name}{list(at)} is {got[at].item():g} in {what}, not 0")
        err, base = row_errors(got, ref), row_errors(baseline, ref)
        margin, at = worst(err, base, floor, C_BACKWARD)
        found[name] = Errors(
            largest(err), largest(base), ratio(largest(err), largest(base)), margin
        )
        if margin > 1.0 and not reason:
            where = f"head {list(at[:-1])}, row {at[-1]}"
            off = f"off by {err[at].item():.3g}, {margin:.3g} times what is allowed"
            reason = f"{name}: {where} is {off}"
    leading = max(found.values(), key=lambda errors: errors.margin)
    return Verdict(not reason, reason, **asdict(leading), gradients=found)


def check_backward_fn(
    fn: BackwardFn,
    workload: Any,
    kind: str = "normal",
    seed: int = 0,
    device: str | torch.device = "cuda",
    *,
    with_dlse: bool = False,
    deterministic: bool = False,
) -> Verdict:
    """Run `fn(dout, q, k, v, cu_seqlens_q, cu_seqlens_k, dlse) -> (dq, dk, dv)` and check it.

    As `check_forward_fn`. dlse is None unless `with_dlse`. With `deterministic`, DETERMINISTIC_RUNS
    runs must agree bitwise; otherwise RUNS runs, and `repeatable` is reported.
    """
    case, device = Case.of(workload), torch.device(device)
    inputs = make_inputs(case, kind, seed, device)
    dout, dlse = make_output_gradients(case, kind, seed, device)
    truth = cached_truth(case, kind, seed, device, with_dlse)
    runs = []
    for _ in range(DETERMINISTIC_RUNS if deterministic else RUNS):
        poison(inputs)
        runs.append(fn(dout, *inputs, dlse if with_dlse else None))
    return assess_runs(runs, truth, deterministic)


def assess_runs(runs: list[Gradients], truth: CachedTruth, deterministic: bool) -> Verdict:
    """The verdict on the gradients of several runs of one call."""
    differing = next(
        (
            name
            for run in runs[1:]
            for name, a, b in zip(NAMES, runs[0], run, strict=True)
            if not torch.equal(a, b)
        ),
        None,
    )
    verdict = truth.assess(runs[0])
    if differing and verdict.passed:
        verdict = truth.assess(runs[-1])
    if differing and verdict.passed and deterministic:
        reason = f"{differing} differs between runs, and deterministic gradients were asked for"
        verdict = replace(verdict, passed=False, reason=reason)
    return replace(verdict, repeatable=differing is None)


@dataclass(frozen=True)
class CachedTruth:
    """The truth of one case, with the KV heads that it covers (None: all)."""

    case: Case
    groups: Tensor | None  # int64 [2, P]: batch entry and KV head; packed: zeros and KV head
    truth: BackwardTruth

    def assess(self, grads: Gradients) -> Verdict:
        """Check the whole result for nan and inf, and compare the covered heads in full."""
        packed = self.case.seqlens is not None
        for name, got in zip(NAMES, grads, strict=True):
            if got.dim() != (3 if packed else 4):
                expected = f"expected {3 if packed else 4}"
                return Verdict(False, f"{name} has {got.dim()} dimensions; {expected}")
            if at := first(~torch.isfinite(got)):
                reason = f"{name}{list(at)} is {got[at].item():g}; the reference is finite"
                return Verdict(False, reason)
        covered = "all rows"
        if self.groups is not None:
            dq, dk, dv = (_of_groups(t, self.groups, self.case) for t in grads)
            grads = dq, dk, dv
            heads = self.case.heads_kv * (1 if packed else self.case.batch)
            covered = f"{self.groups.shape[1]} of {heads} KV heads"
        return replace(compare_backward(grads, self.truth), checked=covered)


@lru_cache(maxsize=1)
def cached_truth(
    case: Case, kind: str, seed: int, device: torch.device, with_dlse: bool
) -> CachedTruth:
    """The truth of a case, kept for the next impl."""
    q, k, v, cu_q, cu_k = make_inputs(case, kind, seed, device)
    dout, dlse = make_output_gradients(case, kind, seed, device)
    groups = _sample(case, seed, device)
    if groups is not None:
        dout, q, k, v = (_of_groups(t, groups, case) for t in (dout, q, k, v))
        dlse = _of_groups(dlse.mT.unsqueeze(-1), groups, case).squeeze(-1).mT
    options = case.options | {"dlse": dlse if with_dlse else None}
    return CachedTruth(case, groups, backward_truth(dout, q, k, v, cu_q, cu_k, **options))


def poison(inputs: Any) -> None:
    """Leave NaN in the free memory that the allocator will use for gradients."""
    held = [
        torch.full(t.shape, math.nan, dtype=dtype, device=t.device)
        for t in inputs[:3]
        for dtype in (t.dtype, t.dtype, torch.float32)
    ]
    del held


def _sample(case: Case, seed: int, device: torch.device) -> Tensor | None:
    """Which (batch entry, KV head) pairs to compare: the last, the first and others by seed.

    A KV head counts with its query heads and all rows and keys: dk and dv are sums over them.
    """
    limit = FULL_SCORES[device.type]
    if case.heads_q * case.scores_per_head() <= limit:
        return None
    batch, each = 1, case.scores_per_head()
    if case.seqlens is None:
        batch, each = case.batch, case.seqlen_q * case.seqlen_k
    each *= case.heads_q // case.heads_kv
    heads = batch * case.heads_kv
    generator = torch.Generator().manual_seed(seed)
    pair = choose(heads, max(1, min(heads, limit // max(each, 1))), generator)
    return torch.stack((pair // case.heads_kv, pair % case.heads_kv))


def _of_groups(t: Tensor, groups: Tensor, case: Case) -> Tensor:
    """The heads of some groups: dense [P, rows, heads of a group, :], packed [rows, heads, :]."""
    b, g = groups.to(t.device)
    grouped = t.unflatten(-2, (case.heads_kv, -1))
    if case.seqlens is not None:
        return grouped[:, g].flatten(1, 2)
    return grouped[b, :, g]


def _rows(t: Tensor) -> Tensor:
    """Largest magnitude of each row, [.., heads, rows] as the lse."""
    if t.numel() == 0:
        return torch.zeros(t.shape[:-1], dtype=t.dtype, device=t.device).mT
    return finite(t).abs().amax(-1).mT
