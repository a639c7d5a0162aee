"""The fp64 reference and the same-dtype baseline, against attention written key by key."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attnscope.reference import (
    attention_reference,
    blocks,
    forward,
    naive_attention,
    naive_attention_blocked,
    segments,
)

INF, NAN = math.inf, math.nan
MASKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (2, 3)},
    {"window": (0, 0)},
    {"window": (3, -1)},
    {"window": (-1, 2)},
    {"causal": True, "window": (4, 7)},
]


def key_by_key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Dense attention in fp64 from the definition: a list of visible keys for every row."""
    (batch, len_q, heads, dim), (len_k, heads_kv) = q.shape, k.shape[1:3]
    left, right = window[0], 0 if causal else window[1]
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    lse = torch.full((batch, heads, len_q), -INF, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // heads_kv)
            for i in range(len_q):
                at = i + len_k - len_q
                keys = [
                    j
                    for j in range(len_k)
                    if (left < 0 or j >= at - left) and (right < 0 or j <= at + right)
                ]
                if not keys:
                    continue
                scores = k[b, keys, g].double() @ q[b, i, h].double() / math.sqrt(dim)
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                lse[b, h, i] = torch.logsumexp(scores, 0)
                out[b, i, h] = torch.softmax(scores, 0) @ v[b, keys, g].double()
    return out, lse


def inputs(len_q: int, len_k: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    shapes = ((2, len_q, 4, 16), (2, len_k, 2, 16), (2, len_k, 2, 8))
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], tolerance: float) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("lengths", [(3, 5), (5, 3), (1, 7), (6, 11), (11, 6), (4, 0), (0, 4)])
def test_both_follow_the_definition(lengths, mask, softcap):
    q, k, v = inputs(*lengths)
    options = {**mask, "softcap": softcap}
    want = key_by_key(q, k, v, **options)
    assert_same(attention_reference(q, k, v, **options), want, 1e-12)
    assert_same(naive_attention(q, k, v, **options), want, 1e-5)
    assert_same(naive_attention_blocked(q, k, v, **options), want, 1e-5)


def test_rows_without_keys_are_zero_and_minus_infinity():
    q, k, v = inputs(5, 3, torch.bfloat16)
    for fn in (attention_reference, naive_attention, naive_attention_blocked):
        out, lse = fn(q, k, v, causal=True)
        assert (out[:, :2] == 0).all() and (lse[..., :2] == -INF).all()
        assert out[:, 2:].isfinite().all() and lse[..., 2:].isfinite().all()


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("scores", [1, 40, 300])
def test_blocks_change_nothing(monkeypatch, scores, mask):
    q, k, v = inputs(33, 50)
    want = attention_reference(q, k, v, **mask)
    monkeypatch.setitem(blocks.SCORES, "cpu", scores)
    assert_same(attention_reference(q, k, v, **mask), want, 1e-14)
    assert_same(naive_attention_blocked(q, k, v, **mask), naive_attention(q, k, v, **mask), 1e-5)


def test_rows_are_those_of_the_whole():
    q, k, v = inputs(40, 40)
    rows = torch.tensor([0, 3, 4, 17, 39])
    for fn in (attention_reference, naive_attention_blocked):
        out, lse = fn(q, k, v, causal=True, window=(9, -1))
        some_out, some_lse = fn(q, k, v, causal=True, window=(9, -1), rows=rows)
        torch.testing.assert_close(some_out, out[:, rows])
        torch.testing.assert_close(some_lse, lse[..., rows])


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_keys_that_a_row_does_not_see_may_hold_anything(poison):
    q, k, v = inputs(12, 12)
    clean = attention_reference(q, k, v, causal=True)
    k[:, 7:], v[:, 7:] = poison, poison
    out, lse = attention_reference(q, k, v, causal=True)
    exact = {"rtol": 1e-12, "atol": 1e-12}  # some BLAS libraries sum in another order
    torch.testing.assert_close(out[:, :7], clean[0][:, :7], **exact)
    torch.testing.assert_close(lse[..., :7], clean[1][..., :7], **exact)
    assert out[:, 7:].isnan().all()


def test_packed_is_dense_for_every_segment():
    lengths_q, lengths_k = [0, 5, 3, 1, 0], [4, 0, 9, 7, 0]
    q, k, v = torch.randn(11, 4, 16), torch.randn(23, 2, 16), torch.randn(23, 2, 8)
    q[9:], k[20:], v[20:] = NAN, NAN, NAN  # rows of no segment
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    for fn in (attention_reference, naive_attention, naive_attention_blocked):
        out, lse = fn(q, k, v, cu_q, cu_k, causal=True)
        assert out.shape == (11, 4, 8) and lse.shape == (4, 11)
        for (q0, q1), (k0, k1) in zip(segments(cu_q, 11), segments(cu_k, 23), strict=True):
            want, want_lse = fn(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], causal=True)
            torch.testing.assert_close(out[q0:q1], want[0])
            torch.testing.assert_close(lse[:, q0:q1], want_lse[0])
        assert (out[9:] == 0).all() and (lse[:, 9:] == -INF).all()


def test_segments_are_clamped_to_the_tensor():
    cu_seqlens = torch.tensor([-3, 4, 2, 1 << 30], dtype=torch.int32)
    assert segments(cu_seqlens, 10) == [(0, 4), (4, 4), (2, 10)]
    assert segments(torch.tensor([0], dtype=torch.int32), 0) == []


def test_the_baseline_is_in_the_dtype_of_the_inputs():
    q, k, v = inputs(64, 64, torch.bfloat16)
    want, _ = attention_reference(q, k, v)
    out, lse = naive_attention(q, k, v)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    error = (out.double() - want).abs().max()
    assert 1e-4 < error < 3e-2  # its scores and probabilities are rounded to 8 bits


def test_baseline_agrees_with_torch():
    q, k, v = inputs(37, 37, torch.float64)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(naive_attention(q, k, v, causal=True)[0], want.transpose(1, 2))


def test_memory_does_not_grow_with_the_square(monkeypatch):
    largest = 0
    exact = forward._exact

    def watch(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        nonlocal largest
        largest = max(largest, q.shape[0] * q.shape[1] * k.shape[1])
        return exact(q, k, *rest)

    monkeypatch.setattr(forward, "_exact", watch)
    monkeypatch.setitem(blocks.SCORES, "cpu", 1 << 16)
    q = torch.randn(1, 1500, 2, 8)
    attention_reference(q, q, q)
    assert 0 < largest <= 1 << 16


def test_errors_name_the_argument():
    q, k, v = inputs(4, 4)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="window must be -1 .* got \\(-2, 0\\)"):
        attention_reference(q, k, v, window=(-2, 0))
    for fn in (attention_reference, naive_attention):
        with pytest.raises(
            ValueError, match="cu_seqlens_q and cu_seqlens_k must be given together"
        ):
            fn(q[0], k[0], v[0], cu)
    with pytest.raises(ValueError, match="rows must be None for a packed batch"):
        attention_reference(q[0], k[0], v[0], cu, cu, rows=torch.tensor([0]))
