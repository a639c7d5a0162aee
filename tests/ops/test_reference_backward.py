"""Gradients of the fp64 reference and of the baseline, against autograd of the definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attnscope.reference import (
    attention_backward_reference,
    attention_reference,
    backward_rounding,
    blocks,
    live_rows_and_keys,
    naive_attention,
    naive_attention_backward,
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
Call = tuple[Tensor, Tensor, Tensor, Tensor]  # dout, q, k, v


def inputs(len_q: int, len_k: int, dtype: torch.dtype = torch.float32) -> Call:
    shapes = ((2, len_q, 4, 8), (2, len_q, 4, 16), (2, len_k, 2, 16), (2, len_k, 2, 8))
    dout, q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    return dout, q, k, v


def seen(len_q: int, len_k: int, causal: bool = False, window: Any = (-1, -1)) -> Tensor:
    """Which keys each row sees, from the definition."""
    left, right = window[0], 0 if causal else window[1]
    at = torch.arange(len_q)[:, None] + len_k - len_q
    keys = torch.arange(len_k)
    visible = torch.ones(len_q, len_k, dtype=torch.bool)
    if left >= 0:
        visible &= keys >= at - left
    if right >= 0:
        visible &= keys <= at + right
    return visible


def autograd(call: Call, dlse: Tensor | None, softcap: float = 0.0, **mask: Any) -> list[Tensor]:
    """Gradients by autograd through the whole score matrix, in fp64."""
    dout = call[0].double()
    q, k, v = (t.double().requires_grad_() for t in call[1:])
    group = q.shape[2] // k.shape[2]
    wide_k, wide_v = (t.repeat_interleave(group, 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, wide_k) / math.sqrt(q.shape[3])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    visible = seen(q.shape[1], k.shape[1], **mask)
    scores = scores.masked_fill(~visible, -1e200)
    lse = torch.logsumexp(scores, -1)
    probs = torch.where(visible, torch.exp(scores - lse[..., None]), 0.0)
    loss = (torch.einsum("bhij,bjhd->bihd", probs, wide_v) * dout).sum()
    if dlse is not None:
        loss = loss + torch.where(visible.any(-1), lse * dlse, 0.0).sum()
    return list(torch.autograd.grad(loss, (q, k, v)))


def assert_same(got: Any, want: Any, tolerance: float) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("lengths", [(3, 5), (5, 3), (1, 7), (6, 11), (11, 6)])
def test_both_follow_the_definition(lengths, mask, softcap):
    call = inputs(*lengths)
    options = {**mask, "softcap": softcap}
    for dlse in (None, torch.randn(2, 4, lengths[0])):
        want = autograd(call, dlse, **options)
        assert_same(attention_backward_reference(*call, dlse=dlse, **options), want, 1e-12)
        assert_same(naive_attention_backward(*call, dlse=dlse, **options), want, 2e-5)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_baseline_is_what_autograd_of_naive_attention_gives(dtype, mask):
    for lengths in ((12, 9), (9, 12)):
        dout, *leaves = inputs(*lengths, dtype)
        leaves = [t.requires_grad_() for t in leaves]
        out, _ = naive_attention(*leaves, **mask)
        want = torch.autograd.grad(out, leaves, dout)
        got = naive_attention_backward(dout, *leaves, **mask)
        assert all(t.dtype == dtype and not t.requires_grad for t in got)
        assert_same(got, want, 1e-6 if dtype == torch.float32 else 0.0)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("scores", [1, 40, 300])
def test_blocks_change_nothing(monkeypatch, scores, mask):
    call = inputs(33, 50)
    want = attention_backward_reference(*call, **mask)
    baseline = naive_attention_backward(*call, **mask)
    monkeypatch.setitem(blocks.SCORES, "cpu", scores)
    assert_same(attention_backward_reference(*call, **mask), want, 1e-13)
    assert_same(naive_attention_backward(*call, **mask), baseline, 1e-5)


def test_in_16_bits_blocks_do_not_round_more(monkeypatch):
    call = inputs(64, 64, torch.bfloat16)
    want = naive_attention_backward(*call, causal=True)
    monkeypatch.setitem(blocks.SCORES, "cpu", 64 * 3)
    got = naive_attention_backward(*call, causal=True)
    for a, b in zip(got, want, strict=True):
        assert (a != b).double().mean() < 0.01  # other orders of the same sums in fp32


@pytest.mark.parametrize("lengths", [(5, 3), (4, 0), (0, 4), (0, 0)])
def test_what_sees_nothing_and_is_not_seen_has_gradient_zero(lengths):
    call = inputs(*lengths)
    mask = {"causal": True, "window": (1, -1)}
    rows, keys = live_rows_and_keys(call[1], call[2], **mask)
    visible = seen(*lengths, **mask)
    assert torch.equal(rows, visible.any(1)) and torch.equal(keys, visible.any(0))
    for fn in (attention_backward_reference, naive_attention_backward):
        dq, dk, dv = fn(*call, dlse=torch.randn(2, 4, lengths[0]), **mask)
        assert (dq[:, ~rows] == 0).all() and (dk[:, ~keys] == 0).all() and (dv[:, ~keys] == 0).all()
        assert all(t.isfinite().all() for t in (dq, dk, dv))


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("lengths", [(7, 4), (4, 7), (1, 9), (9, 1), (6, 6)])
def test_live_rows_and_keys_follow_the_definition(lengths, mask):
    _, q, k, _ = inputs(*lengths)
    rows, keys = live_rows_and_keys(q, k, **mask)
    visible = seen(*lengths, **mask)
    assert torch.equal(rows, visible.any(1)) and torch.equal(keys, visible.any(0))


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_what_a_row_does_not_see_may_hold_anything(poison):
    dout, q, k, v = inputs(12, 12)
    clean = attention_backward_reference(dout, q, k, v, causal=True, window=(4, -1))
    for at, t in ((0, k), (0, v), (11, q), (11, dout)):
        t[:, at] = poison
    got = attention_backward_reference(dout, q, k, v, causal=True, window=(4, -1))
    exact = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(got[0][:, 5:11], clean[0][:, 5:11], **exact)
    torch.testing.assert_close(got[1][:, 5:7], clean[1][:, 5:7], **exact)
    torch.testing.assert_close(got[2][:, 5:7], clean[2][:, 5:7], **exact)
    assert got[0][:, 11].isnan().all() and got[1][:, 7:].isnan().any()


def test_packed_is_dense_for_every_segment():
    lengths_q, lengths_k = [0, 5, 3, 1, 0], [4, 0, 9, 7, 0]
    dout, q = torch.randn(11, 4, 8), torch.randn(11, 4, 16)
    k, v = torch.randn(23, 2, 16), torch.randn(23, 2, 8)
    dlse = torch.randn(4, 11)
    for t in (dout, q, k, v):
        t[20:] = NAN  # rows of no segment
    dout[9:], q[9:] = NAN, NAN
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    for fn in (attention_backward_reference, naive_attention_backward):
        dq, dk, dv = fn(dout, q, k, v, cu_q, cu_k, dlse=dlse, causal=True)
        zeros = [torch.zeros_like(t) for t in (dq, dk, dv)]
        for b in range(5):
            (q0, q1), (k0, k1) = (cu.tolist()[b : b + 2] for cu in (cu_q, cu_k))
            rows, keys = slice(q0, q1), slice(k0, k1)
            if q1 > q0 and k1 > k0:
                segment = (t[None] for t in (dout[rows], q[rows], k[keys], v[keys]))
                want = fn(*segment, dlse=dlse[None, :, rows], causal=True)
                zeros[0][rows], zeros[1][keys], zeros[2][keys] = (t[0] for t in want)
        assert_same((dq, dk, dv), zeros, 1e-6 if fn is naive_attention_backward else 1e-12)
        rows, keys = live_rows_and_keys(q, k, cu_q, cu_k, causal=True)
        assert rows.tolist() == [False] * 5 + [True] * 4 + [False] * 2
        assert keys.tolist() == [False] * 4 + [True] * 16 + [False] * 3


def test_gradients_are_those_of_the_forward_reference():
    dout, q, k, v = (t[:1, :, :2].double() for t in inputs(7, 7))
    dq, dk, dv = attention_backward_reference(dout, q, k, v, causal=True, softcap=2.0, scale=0.3)

    def loss(*tensors: Tensor) -> float:
        out, _ = attention_reference(*tensors, causal=True, softcap=2.0, scale=0.3)
        return float((out * dout).sum())

    step = 1e-6
    for at, grad in enumerate((dq, dk, dv)):
        moved = [[t.clone() for t in (q, k, v)] for _ in range(2)]
        for sign, tensors in zip((step, -step), moved, strict=True):
            tensors[at][0, 3, 1, 5] += sign
        slope = (loss(*moved[0]) - loss(*moved[1])) / (2 * step)
        assert slope == pytest.approx(float(grad[0, 3, 1, 5]), rel=1e-6, abs=1e-9)


def test_rounding_covers_what_an_out_in_16_bits_does_to_delta():
    dout, q, k, v = (torch.randn(1, 50, 2, 32).bfloat16() for _ in range(4))
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / math.sqrt(32)
    probs = torch.softmax(scores, -1)
    out = torch.einsum("bhij,bjhd->bihd", probs, v.double())
    off = ((out.bfloat16() - out) * dout.double()).sum(-1).transpose(1, 2)
    dscores = probs * off[..., None] / math.sqrt(32)
    dq = torch.einsum("bhij,bjhd->bihd", dscores, k.double())
    dk = torch.einsum("bhij,bihd->bjhd", dscores, q.double())
    bound = backward_rounding(dout, q, k, v, sum_ulps=4.0, score_ulps=4.0)
    for error, allowed in zip((dq, dk), bound, strict=False):
        share = error.abs().amax(-1) / allowed.amax(-1)
        assert 0.2 < share.max() < 1.0


def test_errors_name_the_argument():
    dout, q, k, v = inputs(4, 4)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="window must be -1 .* got \\(-2, 0\\)"):
        attention_backward_reference(dout, q, k, v, window=(-2, 0))
    with pytest.raises(ValueError, match="cu_seqlens_q and cu_seqlens_k must be given together"):
        naive_attention_backward(dout[0], q[0], k[0], v[0], cu)
