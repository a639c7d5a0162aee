"""Behaviour that every implementation of the backward must show, as functions of a Target.

CASES lists them for parametrize; test_backward_cpu.py and test_backward_gpu.py run them.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from backward_reference import (
    assert_gradients_match,
    assert_same_but_for_rounding,
    gradients,
    naive_gradients,
    skip_if_refused,
    upstream,
)
from forward_cases import make_params, op_call
from helpers import Target

NAN, INF = math.nan, math.inf


def causal_is_aligned_to_the_bottom_right(t: Target, seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = t.qkv(1, seqlen_q, seqlen_k, 2, 2)
    dq, _, _ = assert_gradients_match(t, q, k, v, causal=True)
    dead = max(seqlen_q - seqlen_k, 0)
    assert (dq[:, :dead] == 0).all()


def left_window_ends_at_its_key(t: Target, left: int) -> None:
    q, k, v = t.qkv(1, 513, 513, 1, 1)
    assert_gradients_match(t, q, k, v, causal=True, window=(left, 0))
    if left == 0:  # out is v
        dout, _ = upstream(t, q, v)
        dq, dk, dv = gradients(t, q, k, v, dout=dout, causal=True, window=(0, 0))
        assert torch.equal(dv, dout)
        small = 1e-4 * dout.abs().max()
        assert dq.abs().max() <= small and dk.abs().max() <= small


def band_that_starts_after_the_first_tile(t: Target) -> None:
    q, k, v = t.qkv(1, 129, 65, 1, 1)
    dq, _, _ = assert_gradients_match(t, q, k, v, window=(8, 16))
    assert (dq[:, :48] == 0).all()


def keys_that_no_query_sees_have_no_gradient(t: Target) -> None:
    q, k, v = t.qkv(1, 20, 300, 4, 2)  # query i sees keys 280 + i - 3 to 280 + i + 2
    _, dk, dv = assert_gradients_match(t, q, k, v, window=(3, 2))
    assert (dk[:, :277] == 0).all() and (dv[:, :277] == 0).all()


def zero_length_segments(t: Target, dim: int) -> None:
    q, k, v = t.randn(9, 4, dim), t.randn(20, 1, dim), t.randn(20, 1, dim)
    cu_q, cu_k = t.cu_seqlens(0, 0, 5, 9, 9), t.cu_seqlens(0, 6, 6, 13, 20)
    for options in ({}, {"causal": True}):
        dq, dk, dv = assert_gradients_match(t, q, k, v, cu_q, cu_k, 5, 7, **options)
        assert (dq[:5] == 0).all()
        for grad in (dk, dv):
            assert (grad[:6] == 0).all() and (grad[13:] == 0).all()


def batch_of_empty_segments(t: Target) -> None:
    q, k = t.randn(0, 4, 64), t.randn(0, 2, 64)
    for cu in (t.cu_seqlens(0, 0, 0, 0), t.cu_seqlens(0)):
        dq, dk, _ = gradients(t, q, k, k.clone(), cu, cu, 0, 0, dout=torch.zeros_like(q))
        assert dq.shape == q.shape and dk.shape == k.shape


def empty_dimension(t: Target, batch: int, seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = t.qkv(batch, seqlen_q, seqlen_k, 2, 2)
    dout, dlse = upstream(t, q, v)
    for grad, x in zip(gradients(t, q, k, v, dout=dout, dlse=dlse), (q, k, v), strict=True):
        assert (grad.shape, grad.dtype, grad.device) == (x.shape, x.dtype, x.device)
        assert (grad == 0).all()


def many_batches(t: Target) -> None:
    q, k, v = t.qkv(65536, 4, 4, 1, 1, 16)
    _many(t, q, k, v, lambda x: x[[0, 34534, 65535]])


def many_heads(t: Target) -> None:
    q, k, v = t.qkv(1, 4, 4, 65536, 65536, 16)
    _many(t, q, k, v, lambda x: x[:, :, [0, 34534, 65535]])


def _many(t: Target, q, k, v, some) -> None:
    dout = t.randn(*q.shape)
    got = gradients(t, q, k, v, dout=dout)
    q, k, v, dout = (some(x) for x in (q, k, v, dout))
    dlse = torch.zeros(q.shape[0], q.shape[2], q.shape[1], device=t.device)
    want = naive_gradients(torch.float64, (q, k, v, dout, dlse), ())
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(some(g).double(), w, atol=2e-2, rtol=2e-2)


def many_segments(t: Target) -> None:
    q, k, v = (t.randn(70000, 1, 16) for _ in range(3))
    cu = torch.arange(70001, dtype=torch.int32, device=t.device)
    dout = t.randn(*v.shape)
    dq, dk, dv = gradients(t, q, k, v, cu, cu, 1, 1, dout=dout)
    assert torch.equal(dv, dout)  # one key with weight 1
    small = 1e-4 * dout.abs().max()
    assert dq.abs().max() <= small and dk.abs().max() <= small


def small_tensors_of_a_large_batch(t: Target) -> None:
    q, k, v = t.qkv(8400, 1, 1, 16, 16, 128)
    dout = t.randn(*q.shape)
    assert torch.equal(gradients(t, q, k, v, dout=dout)[2], dout)


def dout_of_any_layout(t: Target, layout: str) -> None:
    q, k, v = t.qkv(2, 33, 33, 4, 2)
    dout = {
        "scalar": lambda: torch.ones((), dtype=t.dtype, device=t.device).expand(q.shape),
        "heads first": lambda: t.randn(2, 4, 33, 64).transpose(1, 2),
        "every second row": lambda: t.randn(2, 66, 4, 64)[:, ::2],
        "last dimension strided": lambda: t.randn(2, 33, 64, 4).mT,
        "one row": lambda: t.randn(1, 1, 4, 64).expand(q.shape),
        "misaligned": lambda: t.randn(q.numel() + 1)[1:].view(q.shape),
        "rows not aligned": lambda: t.randn(2, 33, 4, 67)[..., :64],
    }[layout]()
    assert not dout.is_contiguous() or layout == "misaligned"
    # The order of sums may differ from call to call on a GPU, unless it is asked for.
    got = gradients(t, q, k, v, dout=dout, causal=True, deterministic=True)
    want = gradients(t, q, k, v, dout=dout.clone().contiguous(), causal=True, deterministic=True)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)


def inputs_of_any_layout(t: Target) -> None:
    q, k, v = t.qkv(2, 130, 70, 4, 2)
    dout, dlse = upstream(t, q, v)
    upstreams = {"dout": dout, "dlse": dlse, "causal": True, "deterministic": True}
    want = gradients(t, q, k, v, **upstreams)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    strided = [x.mT.contiguous().mT for x in (q, k, v)]
    for views in (heads_first, strided):
        for g, w in zip(gradients(t, *views, **upstreams), want, strict=True):
            assert_same_but_for_rounding(g, w)


def rows_past_the_last_segment_do_not_leak(t: Target, poison: float) -> None:
    q, k, v = t.randn(150, 4, 64), t.randn(140, 2, 64), t.randn(140, 2, 64)
    cu_q, cu_k = t.cu_seqlens(0, 61, 128), t.cu_seqlens(0, 70, 103)
    dout, dlse = upstream(t, q, v)

    def run(rubbish: float) -> tuple[torch.Tensor, ...]:
        q[128:], k[103:], v[103:], dout[128:], dlse[:, 128:] = (rubbish,) * 5
        return gradients(t, q, k, v, cu_q, cu_k, 67, 70, dout=dout, dlse=dlse, deterministic=True)

    clean, poisoned = run(0.0), run(poison)
    for grad, want, end in zip(poisoned, clean, (128, 103, 103), strict=True):
        _assert_unaffected(t, grad, want)
        assert (grad[end:] == 0).all()


def segments_do_not_see_each_other(t: Target, poison: float) -> None:
    q, k, v = t.randn(130, 4, 64), t.randn(130, 2, 64), t.randn(130, 2, 64)
    cu = t.cu_seqlens(0, 30, 60, 130)
    dout, dlse = upstream(t, q, v)
    packing = (cu, cu, 70, 70)
    options: dict[str, Any] = {"dout": dout, "dlse": dlse, "deterministic": True}
    clean = gradients(t, q, k, v, *packing, **options)
    for x in (q, k, v, dout):
        x[30:60] = poison
    poisoned = gradients(t, q, k, v, *packing, **options)
    for grad, want in zip(poisoned, clean, strict=True):
        for rows in (slice(0, 30), slice(60, 130)):
            _assert_unaffected(t, grad[rows], want[rows])


def _assert_unaffected(t: Target, got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits on a CPU; GPU forwards compute doubtful rows of a tile another way."""
    if t.device == "cpu":
        assert torch.equal(got, want)
    else:
        assert_same_but_for_rounding(got, want)


def rubbish_in_cu_seqlens_stays_in_bounds(t: Target, *bounds: int) -> None:
    q, k, v = t.randn(64, 2, 32), t.randn(64, 1, 32), t.randn(64, 1, 32)
    options = {"scale": 0.1, "max_seqlen_q": 64, "max_seqlen_k": 64}
    for cu in (t.cu_seqlens(*bounds), t.cu_seqlens(0, 64)):  # the second call must still work
        out, lse = t.op(q, k, v, cu, cu, **options, **t.forced)
        dout = t.randn(*out.shape)
        with skip_if_refused():
            grads = backward_op(t)(dout, q, k, v, out, lse, None, cu, cu, **options, **t.forced)
        if t.device == "cuda":
            torch.cuda.synchronize()
    dlse = torch.zeros_like(lse)
    want = naive_gradients(torch.float64, (q, k, v, dout, dlse), (cu, cu), scale=0.1)
    for g, w in zip(grads, want, strict=True):
        torch.testing.assert_close(g.double(), w, atol=2e-2, rtol=2e-2)


def lengths_beyond_max_seqlen_are_cut(t: Target) -> None:
    q, k, v = t.randn(90, 2, 32), t.randn(90, 1, 32), t.randn(90, 1, 32)
    cu = t.cu_seqlens(0, 90)
    options = {"scale": 0.1, "max_seqlen_q": 40, "max_seqlen_k": 50}
    out, lse = t.op(q, k, v, cu, cu, **options, **t.forced)
    dout = t.randn(*out.shape)
    with skip_if_refused():
        got = backward_op(t)(dout, q, k, v, out, lse, None, cu, cu, **options, **t.forced)
    want = gradients(t, q[None, :40], k[None, :50], v[None, :50], dout=dout[None, :40], scale=0.1)
    for g, w, end in zip(got, want, (40, 50, 50), strict=True):
        assert_same_but_for_rounding(g[:end], w[0])
        assert (g[end:] == 0).all()


def any_finite_scale(t: Target, scale: float) -> None:
    q, k, v = t.qkv(1, 66, 90, 2, 1, 32)
    for options in ({}, {"causal": True, "softcap": 7.0}, {"softcap": 300.0}):
        grads = assert_gradients_match(t, q, k, v, scale=scale, **options)
        if scale == 0:
            assert (grads[0] == 0).all() and (grads[1] == 0).all()


def packed_equals_dense(t: Target) -> None:
    q, k, v = t.qkv(3, 50, 80, 4, 2)
    dout, _ = upstream(t, q, v)
    cu_q, cu_k = t.cu_seqlens(0, 50, 100, 150), t.cu_seqlens(0, 80, 160, 240)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    options = {"causal": True, "window": (30, -1)}
    packed = gradients(t, *flat, cu_q, cu_k, 50, 80, dout=dout.flatten(0, 1), **options)
    dense = gradients(t, q, k, v, dout=dout, **options)
    for p, d in zip(packed, dense, strict=True):
        assert_same_but_for_rounding(p, d.flatten(0, 1))


def deterministic_calls_give_the_same_bits(t: Target) -> None:
    q, k, v = t.qkv(2, 700, 900, 8, 2)
    dout, dlse = upstream(t, q, v)
    options: dict[str, Any] = {"dout": dout, "dlse": dlse, "causal": True, "deterministic": True}
    first = gradients(t, q, k, v, **options)
    for _ in range(5):
        for g, w in zip(gradients(t, q, k, v, **options), first, strict=True):
            assert torch.equal(g, w)


def backward_op(t: Target) -> Any:
    """The backward op behind an implementation."""
    namespace = torch.ops.attnscope_triton if t.impl == "triton" else torch.ops.attnscope
    return namespace.backward.default


def backward_call(t: Target, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a direct call of the backward op; BACKWARD_CALLS are the names."""
    dlse_given = name.endswith("with dlse")
    name = name.removesuffix(" with dlse")
    (q, k, v, *cu), options = op_call(t, "plain" if name == "dout expanded" else name)
    options |= t.forced
    out, lse = t.op(q, k, v, *cu, **options)
    dout = t.randn(*out.shape)
    if name == "dout expanded":
        dout = t.randn(1).expand(out.shape)
    dlse = torch.randn_like(lse) if dlse_given else None
    return (dout, q, k, v, out, lse, dlse, *cu), options


BACKWARD_CALLS = (
    "plain", "plain with dlse", "dout expanded", "transposed", "one query", "value dim",
    "no queries", "no keys", "no batch", "last dim strided", "packed", "packed with dlse",
)  # fmt: skip


def _params() -> list[pytest.param]:
    table = {
        causal_is_aligned_to_the_bottom_right: [(3, 5), (5, 3), (1, 7), (200, 72), (72, 200)],
        left_window_ends_at_its_key: [(left,) for left in (0, 1, 63, 64, 127, 512, 513)],
        band_that_starts_after_the_first_tile: [()],
        keys_that_no_query_sees_have_no_gradient: [()],
        zero_length_segments: [(64,), (128,), (256,)],
        batch_of_empty_segments: [()],
        empty_dimension: [(0, 3, 3), (1, 0, 3), (1, 3, 0), (0, 0, 0)],
        many_batches: [()],
        many_heads: [()],
        many_segments: [()],
        small_tensors_of_a_large_batch: [()],
        dout_of_any_layout: [
            (layout,)
            for layout in (
                "scalar", "heads first", "every second row", "last dimension strided", "one row",
                "misaligned", "rows not aligned",
            )
        ],
        inputs_of_any_layout: [()],
        rows_past_the_last_segment_do_not_leak: [(NAN,), (INF,)],
        segments_do_not_see_each_other: [(NAN,), (INF,)],
        rubbish_in_cu_seqlens_stays_in_bounds: [
            (0, 50, 20, 64),
            (-7, 10, 1 << 30, 64),
            (64, 0, 64, 5),
            (-(1 << 31), -5, 70, 3),
        ],
        lengths_beyond_max_seqlen_are_cut: [()],
        any_finite_scale: [(0.0,), (-0.3,), (2.0,)],
        packed_equals_dense: [()],
        deterministic_calls_give_the_same_bits: [()],
    }  # fmt: skip
    return make_params(table)


CASES = _params()
