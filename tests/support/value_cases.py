"""Values of the forward for extreme inputs, for every implementation.

VALUE_CASES lists them for parametrize, like forward_cases.CASES. Ids contain the head dim, so that
slow implementations can skip some.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from forward_cases import make_params
from helpers import Target, assert_matches, assert_unaffected
from torch import Tensor

from attnscope.numerics import compare_forward
from attnscope.reference import attention_reference, naive_attention_blocked, segments

NAN, INF = math.nan, math.inf
SEQLEN_Q, SEQLEN_K = 150, 170
WINDOWS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "left": {"window": (33, -1)},
    "right": {"window": (-1, 5)},
    "band": {"window": (8, 16)},
    "causal-softcap": {"causal": True, "softcap": 20.0},
    "causal-wide-softcap": {"causal": True, "window": (40, 0), "softcap": 1e4},
}
# Before any window, in the middle of a block, at the edges of blocks, in the sequence's tail.
KEYS = (0, 40, 63, 64, 96, 150, SEQLEN_K - 1)


def some_keys(t: Target) -> tuple[int, ...]:
    """KEYS, or a few of them for the interpreter, which runs the loads one by one."""
    return KEYS[1::2] if (t.impl, t.device) == ("triton", "cpu") else KEYS


def seen_rows(seqlen_q: int, seqlen_k: int, key: int, options: dict[str, Any]) -> Tensor:
    """bool [seqlen_q]: the rows that see the key."""
    left, right = options.get("window", (-1, -1))
    right = 0 if options.get("causal") else right
    diagonal = torch.arange(seqlen_q) + seqlen_k - seqlen_q
    seen = torch.ones(seqlen_q, dtype=torch.bool)
    if left >= 0:
        seen &= key >= diagonal - left
    if right >= 0:
        seen &= key <= diagonal + right
    return seen


def bad_value_reaches_the_rows_that_see_it(
    t: Target, mask: str, dim: int, first: float, second: float
) -> None:
    """A bad value at each of two keys: a row gets neither value, one value, or their sum."""
    options = WINDOWS[mask]
    q, k, v = t.qkv(1, SEQLEN_Q, SEQLEN_K, 2, 1, dim)
    truth, truth_lse = attention_reference(q, k, v, **options)
    baseline, baseline_lse = naive_attention_blocked(q.float(), k.float(), v.float(), **options)
    column, softcap = dim - 3, options.get("softcap", 0.0)
    keys = some_keys(t)
    for i, key in enumerate(keys):
        poisoned, want = v.clone(), truth.clone()
        for at, bad in ((key, first), (keys[i - 2], second)):
            poisoned[0, at, 0, column] = bad
            want[0, seen_rows(SEQLEN_Q, SEQLEN_K, at, options).to(t.device), :, column] += bad
        out, lse = t(q, k, poisoned, **options)
        verdict = compare_forward(
            out, lse, want, truth_lse, baseline.to(t.dtype), baseline_lse, softcap=softcap
        )
        assert verdict.passed, (key, verdict.reason)


def bad_key_reaches_the_rows_that_see_it(t: Target, mask: str, dim: int) -> None:
    options = WINDOWS[mask]
    q, k, v = t.qkv(1, SEQLEN_Q, SEQLEN_K, 2, 1, dim)
    clean, clean_lse = t(q, k, v, **options)
    for key in some_keys(t):
        poisoned = k.clone()
        poisoned[0, key, 0, 5] = NAN
        out, lse = t(q, poisoned, v, **options)
        seen = seen_rows(SEQLEN_Q, SEQLEN_K, key, options).to(t.device)
        assert out[:, seen].isnan().all() and lse[..., seen].isnan().all(), key
        assert_unaffected(t, out[:, ~seen], clean[:, ~seen])
        assert_unaffected(t, lse[..., ~seen], clean_lse[..., ~seen])


def bad_token_of_a_packed_batch(t: Target, poison: float) -> None:
    """A bad token in a causal sequence reaches only the later rows of the same sequence."""
    q, k, v = t.randn(200, 2, 64), t.randn(200, 1, 64), t.randn(200, 1, 64)
    cu = t.cu_seqlens(0, 30, 130, 190)  # ten rows of padding at the end
    clean = t(q, k, v, cu, cu, 100, 100, causal=True)
    k[195:], v[195:] = poison, poison
    v[70] = poison
    out, lse = t(q, k, v, cu, cu, 100, 100, causal=True)
    assert_unaffected(t, lse, clean[1])
    rows = torch.arange(200, device=t.device)
    seen = (rows >= 70) & (rows < 130)
    assert_unaffected(t, out[~seen], clean[0][~seen])
    assert not out[seen].isfinite().any()
    if poison == INF:
        assert (out[seen] == INF).all()


def equal_giant_logits_give_the_mean(t: Target, dim: int, options: dict[str, Any]) -> None:
    _, _, v = t.qkv(1, 90, 210, 2, 2, dim)
    for size in (6e4,) if t.dtype == torch.float16 else (1e5, 1e9):
        q, k = (
            torch.full((1, rows, 2, dim), size, dtype=t.dtype, device=t.device)
            for rows in (90, 210)
        )
        out, lse = t(q, k, v, **options)
        assert_matches(out, lse, q, k, v, **options)


def giant_row_beside_normal_rows(t: Target, size: float, options: dict[str, Any]) -> None:
    q, k, v = t.qkv(1, 130, 210, 2, 1)
    q[:, 37] *= size
    q[:, 101] = q[:, 101].abs() * -size
    k[:, 150:] = k[:, 10:70]  # the greatest logit occurs twice in many rows
    out, lse = t(q, k, v, **options)
    assert_matches(out, lse, q, k, v, **options)


def giant_maximum_that_rises_and_falls(t: Target) -> None:
    """Parallel keys of different lengths: the row max of each block goes up, or down."""
    lengths = torch.linspace(-1, 1, 256, device=t.device)
    for order in (lengths, lengths.flip(0), -lengths.abs(), lengths.abs() - 2):
        k = torch.zeros(1, 256, 1, 64, device=t.device)
        k[0, :, 0, 0] = order * 3e4
        q, v = torch.zeros_like(k), t.randn(1, 256, 1, 64)
        q[..., 0] = 3e4
        q, k = q.to(t.dtype), k.to(t.dtype)
        assert_matches(*t(q, k, v, causal=True), q, k, v, causal=True)


def maximum_that_rises_by_steps(t: Target, dim: int) -> None:
    """Every 64 keys the logits fall by a power of two: kernels that visit the last first see rises.

    Powers up to 12 pass without a new maximum, if at all; fp16 holds no P beyond 2^16.
    """
    v = t.randn(1, 500, 2, dim)
    q, k = torch.zeros(1, 100, 2, dim), torch.zeros(1, 500, 2, dim)
    for bits in (1.0, 7.0, 12.0, 13.0, 20.0):
        q[..., 0] = bits
        k[..., 0] = -(torch.arange(500) // 64)[:, None]
        k[..., 1] = torch.randn(1, 500, 2)
        q[..., 1] = torch.randn(1, 100, 2)
        inputs = *(x.to(t.device, t.dtype) for x in (q, k)), v
        assert_matches(*t(*inputs, scale=math.log(2)), *inputs, scale=math.log(2))


def logits_that_overflow_are_nan(t: Target) -> None:
    if t.dtype in (torch.float16, torch.float64):
        pytest.skip("sums of float16 products and of float64 do not overflow here")
    q, k, v = t.qkv(1, 40, 100, 1, 1)
    q[:, 7], k[:] = 1e19, 1e19 * (1 + k.abs())
    out, lse = t(q, k, v, scale=1.0)
    assert out[:, 7].isnan().all() and lse[..., 7].isnan().all()
    # Scores below float32 are -inf: weight 0.
    q[:, 7] *= -1
    out, lse = t(q, k, v, scale=1.0)
    assert (out[:, 7] == 0).all() and (lse[..., 7] == -INF).all()


def softcap_of_any_size(t: Target, softcap: float, factor: float) -> None:
    q, k, v = t.qkv(1, 100, 140, 2, 1)
    q *= factor
    out, lse = t(q, k, v, causal=True, softcap=softcap)
    assert_matches(out, lse, q, k, v, causal=True, softcap=softcap)
    if softcap >= 1e6 and factor == 1.0:  # the gate allows lse the error of an approximate tanh
        plain, plain_lse = t(q, k, v, causal=True)
        torch.testing.assert_close(lse, plain_lse, atol=2e-5, rtol=2e-6)
        eps = torch.finfo(t.dtype).eps  # the two calls may take different kernels
        torch.testing.assert_close(out, plain, atol=max(4 * eps, 1e-5), rtol=4 * eps)


def any_cu_seqlens_write_every_row(t: Target, *bounds: int) -> None:
    """Each element of out is 0 or the value from a segment with the row; lse: -inf for 0."""
    total = 96
    q, k, v = t.randn(total, 2, 32), t.randn(total, 1, 32), t.randn(total, 1, 32)
    cu = t.cu_seqlens(*bounds)
    outs, lses = [torch.zeros(total, 2, 32)], [torch.full((2, total), -INF)]
    for begin, end in segments(cu, total):
        out, lse = outs[0].clone(), lses[0].clone()
        rows = slice(begin, end)
        want, want_lse = attention_reference(*(x[rows][None] for x in (q, k, v)), scale=0.1)
        out[rows], lse[:, rows] = want[0].float().cpu(), want_lse[0].float().cpu()
        outs.append(out)
        lses.append(lse)
    for _ in range(3):
        rubbish = [torch.full_like(q, NAN), torch.full((2, total), NAN, device=t.device)]
        del rubbish  # the allocator gives its memory to the outputs
        out, lse = t.op(
            q, k, v, cu, cu, scale=0.1, max_seqlen_q=total, max_seqlen_k=total, **t.forced
        )
        far = torch.stack([(out.float().cpu() - want).abs() for want in outs]).amin(0)
        assert (far < 0.03).all(), far.max()
        near = torch.stack([torch.isclose(lse.cpu(), w, atol=1e-3, rtol=1e-3) for w in lses])
        assert near.any(0).all(), lse


DIMS = (64, 96, 128, 192, 256)
POISONS = ((NAN, NAN), (INF, INF), (INF, -INF), (-INF, NAN))
GIANT_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": True, "window": (60, 0)},
    {"scale": 3.0},
    {"scale": -1.0},
    {"softcap": 3e6},
)


def _value_params() -> list[pytest.param]:
    masks = [mask for mask in WINDOWS if mask not in ("causal", "band")]
    poisoned_masks = [(mask, 64, *POISONS[i % 4]) for i, mask in enumerate(masks)]
    return make_params(
        {
            bad_value_reaches_the_rows_that_see_it: [
                *(("causal", dim, *pair) for dim in DIMS for pair in POISONS),
                *(("band", dim, NAN, INF) for dim in (8, *DIMS)),
                *poisoned_masks,
            ],
            bad_key_reaches_the_rows_that_see_it: [
                *((mask, 64) for mask in WINDOWS),
                *(("causal", dim) for dim in DIMS[1:]),
            ],
            bad_token_of_a_packed_batch: [(NAN,), (INF,)],
            equal_giant_logits_give_the_mean: [
                *((64, options) for options in GIANT_OPTIONS),
                *((dim, {"causal": True}) for dim in (8, 96, 128, 192, 256)),
            ],
            giant_row_beside_normal_rows: [
                (size, options)
                for size in (1e4, -1e4)
                for options in ({}, {"causal": True}, {"scale": 100.0}, {"scale": -100.0})
            ],
            giant_maximum_that_rises_and_falls: [()],
            maximum_that_rises_by_steps: [(64,), (128,)],
            logits_that_overflow_are_nan: [()],
            softcap_of_any_size: [
                *((cap, 1.0) for cap in (30.0, 50.0, 255.0, 256.0, 1e3, 1e6, 1e12, 1e36)),
                *((cap, 200.0) for cap in (30.0, 300.0, 1e3, 1e4, 1e12)),
            ],
            any_cu_seqlens_write_every_row: [
                (0, 48, 0, 48, 0, 48, 96),
                (0, 60, 20, 96),
                (96, 0, 96, 5),
                (-(1 << 31), -5, 200, 3),
                (7, 7, 3, 90),
                (50, 10),
            ],
        }
    )


VALUE_CASES = _value_params()
