"""Behaviour that every implementation of the forward must show, as functions of a Target.

CASES lists them for parametrize; test_forward_cpu.py and test_forward_gpu.py run them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import Target, assert_matches, assert_unaffected

from attnscope.reference import segments

NAN, INF = math.nan, math.inf


def causal_is_aligned_to_the_bottom_right(t: Target, seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = t.qkv(1, seqlen_q, seqlen_k, 2, 2)
    out, lse = t(q, k, v, causal=True)
    assert_matches(out, lse, q, k, v, causal=True)
    dead = max(seqlen_q - seqlen_k, 0)
    assert (out[:, :dead] == 0).all()
    assert (lse[..., :dead] == -INF).all() and lse[..., dead:].isfinite().all()


def left_window_counts_its_keys(t: Target, left: int) -> None:
    q, k, v = t.qkv(1, 513, 513, 1, 1)
    out, lse = t(q, k, v, causal=True, window=(left, 0))
    assert_matches(out, lse, q, k, v, causal=True, window=(left, 0))
    # Where all scores are 0, lse is the logarithm of the number of keys seen.
    _, lse_of_zeros = t(torch.zeros_like(q), k, v, causal=True, window=(left, 0))
    keys = torch.arange(513, device=t.device).clamp(max=left) + 1
    torch.testing.assert_close(lse_of_zeros[0, 0], keys.float().log())
    if left == 0:
        assert torch.equal(out, v)
    if left >= 512:
        assert_matches(out, lse, q, k, v, causal=True)


def band_that_starts_after_the_first_tile(t: Target) -> None:
    q, k, v = t.qkv(1, 129, 65, 1, 1)
    out, lse = t(q, k, v, window=(8, 16))
    assert_matches(out, lse, q, k, v, window=(8, 16))
    assert (out[:, :48] == 0).all() and (lse[..., :48] == -INF).all()
    assert lse[..., 48:].isfinite().all()


def window_bounds_beyond_every_key_are_no_bounds(t: Target) -> None:
    q, k, v = t.qkv(1, 70, 150, 2, 1)
    for window in ((150, 70), (2**31 - 1, 2**31 - 1), (2**40, -1)):
        assert_matches(*t(q, k, v, window=window), q, k, v)


def zero_length_segments(t: Target, dim: int) -> None:
    q, k, v = t.randn(9, 4, dim), t.randn(20, 1, dim), t.randn(20, 1, dim)
    cu_q, cu_k = t.cu_seqlens(0, 0, 5, 9, 9), t.cu_seqlens(0, 6, 6, 13, 20)
    for options in ({}, {"causal": True}):
        out, lse = t(q, k, v, cu_q, cu_k, 5, 7, **options)
        assert_matches(out, lse, q, k, v, cu_q, cu_k, **options)
        assert (out[:5] == 0).all() and (lse[:, :5] == -INF).all()


def batch_of_empty_segments(t: Target) -> None:
    q, k = t.randn(0, 4, 64), t.randn(0, 2, 64)
    cu = t.cu_seqlens(0, 0, 0, 0)
    out, lse = t(q, k, k, cu, cu, 0, 0)
    assert out.shape == (0, 4, 64) and lse.shape == (4, 0)
    none = t.cu_seqlens(0)
    assert t(q, k, k, none, none, 0, 0)[0].shape == (0, 4, 64)


def empty_dimension(t: Target, batch: int, seqlen_q: int, seqlen_k: int) -> None:
    out, lse = t(*t.qkv(batch, seqlen_q, seqlen_k, 2, 2))
    assert out.shape == (batch, seqlen_q, 2, 64) and lse.shape == (batch, 2, seqlen_q)
    assert (out.dtype, lse.dtype, out.device) == (t.dtype, torch.float32, lse.device)
    if seqlen_k == 0:
        assert (out == 0).all() and (lse == -INF).all()


def many_batches(t: Target) -> None:
    q, k, v = t.qkv(65536, 4, 4, 1, 1, 16)
    out, lse = t(q, k, v)
    some = [0, 65534, 65535]
    assert_matches(out[some], lse[some], q[some], k[some], v[some])


def many_heads(t: Target) -> None:
    q, k, v = t.qkv(1, 4, 4, 65536, 65536, 16)
    out, lse = t(q, k, v)
    some = [0, 65534, 65535]
    assert_matches(out[:, :, some], lse[:, some], q[:, :, some], k[:, :, some], v[:, :, some])


def many_segments(t: Target) -> None:
    q, k, v = (t.randn(70000, 1, 16) for _ in range(3))
    cu = torch.arange(70001, dtype=torch.int32, device=t.device)
    out, lse = t(q, k, v, cu, cu, 1, 1)
    assert torch.equal(out, v)  # one key with weight 1
    scores = (q.double() * k.double()).sum(-1).T / 4
    torch.testing.assert_close(lse.double(), scores, atol=1e-5, rtol=1e-5)


def views_give_the_bits_of_copies(t: Target, layout: str) -> None:
    q, k, v = t.qkv(2, 130, 70, 4, 2)
    if layout == "heads first":
        views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    elif layout == "sequence first":
        views = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    elif layout == "misaligned":
        views = []
        for x in (q, k, v):
            buffer = x.new_full((x.numel() + 1,), NAN)
            views.append(buffer[1:].view(x.shape).copy_(x))
    elif layout == "rows not aligned":
        views = [x.new_full((*x.shape[:-1], 67), NAN)[..., :64].copy_(x) for x in (q, k, v)]
    elif layout == "last dimension strided":
        views = [x.mT.contiguous().mT for x in (q, k, v)]
    else:
        k, v = (x[:1].expand(2, -1, -1, -1).contiguous() for x in (k, v))
        views = [q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1)]
    assert all(torch.equal(a, b) for a, b in zip(views, (q, k, v), strict=True))
    for got, want in zip(t(*views, causal=True), t(q, k, v, causal=True), strict=True):
        assert torch.equal(got, want)
        assert got.is_contiguous()


def slices_of_one_packed_qkv(t: Target) -> None:
    qkv = t.randn(100, 3, 2, 64)
    q, k, v = qkv.unbind(1)
    cu = t.cu_seqlens(0, 33, 100)
    out, lse = t(q, k, v, cu, cu, 67, 67, causal=True)
    assert_matches(out, lse, q, k, v, cu, cu, causal=True)
    assert torch.equal(out, t(*(x.contiguous() for x in (q, k, v)), cu, cu, 67, 67, causal=True)[0])


def rows_past_the_last_segment_do_not_leak(t: Target, poison: float) -> None:
    q, k, v = t.randn(150, 4, 64), t.randn(140, 2, 64), t.randn(140, 2, 64)
    cu_q, cu_k = t.cu_seqlens(0, 61, 128), t.cu_seqlens(0, 70, 103)

    def run(rubbish: float) -> tuple[torch.Tensor, torch.Tensor]:
        q[128:], k[103:], v[103:] = rubbish, rubbish, rubbish
        return t(q, k, v, cu_q, cu_k, 67, 70)

    clean, poisoned = run(0.0), run(poison)
    for got, want in zip(poisoned, clean, strict=True):
        assert_unaffected(t, got, want)
    assert (poisoned[0][128:] == 0).all() and (poisoned[1][:, 128:] == -INF).all()


def segments_do_not_see_each_other(t: Target, poison: float) -> None:
    q, k, v = t.randn(130, 2, 64), t.randn(130, 2, 64), t.randn(130, 2, 64)
    cu = t.cu_seqlens(0, 30, 60, 130)
    clean = t(q, k, v, cu, cu, 70, 70)
    k[30:60], v[30:60] = poison, poison
    poisoned = t(q, k, v, cu, cu, 70, 70)
    for rows in (slice(0, 30), slice(60, 130)):
        assert_unaffected(t, poisoned[0][rows], clean[0][rows])
        assert_unaffected(t, poisoned[1][:, rows], clean[1][:, rows])


def keys_that_no_query_sees_do_not_leak(t: Target, poison: float) -> None:
    # Query i of 20 sees keys 100 + i - 3 to 100 + i + 2 of 120: nobody sees keys before 97, but the
    # tile that contains key 97 also contains some of those.
    q, k, v = t.qkv(1, 20, 120, 2, 1)
    clean = t(q, k, v, window=(3, 2))
    k[:, :97], v[:, :97] = poison, poison
    poisoned = t(q, k, v, window=(3, 2))
    for got, want in zip(poisoned, clean, strict=True):
        assert_unaffected(t, got, want)


def rubbish_in_cu_seqlens_stays_in_bounds(t: Target, *bounds: int) -> None:
    q, k, v = t.randn(64, 2, 32), t.randn(64, 1, 32), t.randn(64, 1, 32)
    cu = t.cu_seqlens(*bounds)
    out, lse = t.op(q, k, v, cu, cu, scale=0.1, max_seqlen_q=64, max_seqlen_k=64, **t.forced)
    if t.impl.startswith("cuda"):  # the result is unspecified; the kernel must not fail
        torch.cuda.synchronize()
        good = t.cu_seqlens(0, 64)
        out, lse = t.op(
            q, k, v, good, good, scale=0.1, max_seqlen_q=64, max_seqlen_k=64, **t.forced
        )
        assert_matches(out[None], lse[None], q[None], k[None], v[None], scale=0.1)
        return
    owned = torch.zeros(64, dtype=torch.bool, device=t.device)
    for begin, end in segments(cu, 64):
        owned[begin:end] = True
    assert out.isfinite().all() and lse[:, owned].isfinite().all()
    assert (out[~owned] == 0).all() and (lse[:, ~owned] == -INF).all()


def lengths_beyond_max_seqlen_are_cut(t: Target) -> None:
    q, k, v = t.randn(90, 2, 32), t.randn(90, 1, 32), t.randn(90, 1, 32)
    cu = t.cu_seqlens(0, 90)
    out, lse = t.op(q, k, v, cu, cu, scale=0.1, max_seqlen_q=40, max_seqlen_k=50, **t.forced)
    want, want_lse = t(q[None, :40], k[None, :50], v[None, :50], scale=0.1)
    torch.testing.assert_close(out[:40], want[0])
    torch.testing.assert_close(lse[:, :40], want_lse[0])
    assert (out[40:] == 0).all() and (lse[:, 40:] == -INF).all()


def any_finite_scale(t: Target, scale: float) -> None:
    q, k, v = t.qkv(1, 66, 90, 2, 1, 32)
    for options in ({}, {"causal": True, "softcap": 7.0}):
        out, lse = t(q, k, v, scale=scale, **options)
        assert_matches(out, lse, q, k, v, scale=scale, **options)


def packed_equals_dense(t: Target) -> None:
    q, k, v = t.qkv(3, 50, 80, 4, 2)
    cu_q, cu_k = t.cu_seqlens(0, 50, 100, 150), t.cu_seqlens(0, 80, 160, 240)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    out, lse = t(*flat, cu_q, cu_k, 50, 80, causal=True, window=(30, -1))
    dense, dense_lse = t(q, k, v, causal=True, window=(30, -1))
    torch.testing.assert_close(out, dense.flatten(0, 1))
    torch.testing.assert_close(lse, dense_lse.transpose(0, 1).flatten(1))


def op_call(t: Target, name: str) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Arguments of a direct call of the op; OP_CALLS are the names."""
    if name == "packed":
        q, k, v = t.randn(10, 4, 16), t.randn(10, 2, 16), t.randn(10, 2, 16)
        cu = t.cu_seqlens(0, 3, 3, 10)
        return (q, k, v, cu, cu), {"scale": 0.2, "max_seqlen_q": 7, "max_seqlen_k": 7}
    q, k, v = t.qkv(2, 6, 9, 4, 2, 16)
    if name == "transposed":
        q, v = t.randn(2, 4, 6, 16).transpose(1, 2), t.randn(2, 9, 2, 48)[..., 16:32]
    elif name == "one query":
        q = q[:, :1]
    elif name == "value dim":
        v = t.randn(2, 9, 2, 24)
    elif name == "no queries":
        q = q[:, :0]
    elif name == "no keys":
        k, v = k[:, :0], v[:, :0]
    elif name == "no batch":
        q, k, v = q[:0], k[:0], v[:0]
    elif name == "last dim strided":
        q = q.mT.contiguous().mT
    return (q, k, v), {"scale": 0.2, "causal": True, "window_left": 5}


OP_CALLS = (
    "plain", "transposed", "one query", "value dim", "no queries", "no keys", "no batch",
    "last dim strided", "packed",
)  # fmt: skip


def _params() -> list[pytest.param]:
    table = {
        causal_is_aligned_to_the_bottom_right: [(3, 5), (5, 3), (1, 7), (200, 72), (72, 200)],
        left_window_counts_its_keys: [(left,) for left in (0, 1, 63, 64, 127, 512, 513)],
        band_that_starts_after_the_first_tile: [()],
        window_bounds_beyond_every_key_are_no_bounds: [()],
        zero_length_segments: [(64,), (128,), (256,)],
        batch_of_empty_segments: [()],
        empty_dimension: [(0, 3, 3), (1, 0, 3), (1, 3, 0), (0, 0, 0)],
        many_batches: [()],
        many_heads: [()],
        many_segments: [()],
        views_give_the_bits_of_copies: [
            (layout,)
            for layout in (
                "heads first",
                "sequence first",
                "misaligned",
                "rows not aligned",
                "last dimension strided",
                "expanded",
            )
        ],
        slices_of_one_packed_qkv: [()],
        rows_past_the_last_segment_do_not_leak: [(NAN,), (INF,)],
        segments_do_not_see_each_other: [(NAN,), (INF,)],
        keys_that_no_query_sees_do_not_leak: [(NAN,), (INF,)],
        rubbish_in_cu_seqlens_stays_in_bounds: [
            (0, 50, 20, 64),
            (-7, 10, 1 << 30, 64),
            (64, 0, 64, 5),
            (-(1 << 31), -5, 70, 3),
        ],
        lengths_beyond_max_seqlen_are_cut: [()],
        any_finite_scale: [(0.0,), (-0.3,), (2.0,)],
        packed_equals_dense: [()],
    }
    return make_params(table)


def make_params(table: dict[Callable[..., None], list[tuple[Any, ...]]]) -> list[pytest.param]:
    """Cases for parametrize: each function of a table with each set of its arguments."""
    return [
        pytest.param(partial(_call, case, args), id="-".join([case.__name__, *map(str, args)]))
        for case, all_args in table.items()
        for args in all_args
    ]


def _call(case, args, target: Target) -> None:
    case(target, *args)


CASES = _params()
