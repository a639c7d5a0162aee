"""Forward: the fp64 reference, and matmul, softmax, matmul in the dtype of the inputs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attnscope.reference.blocks import (
    Options,
    make_options,
    row_intervals,
    score_blocks,
    segments,
)

# q [n, R, D], k [n, K, D], v [n, K, Dv], visible [R, K] or None -> out [n, R, Dv], lse [n, R].
_Math = Callable[[Tensor, Tensor, Tensor, Tensor | None, Options], tuple[Tensor, Tensor]]


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention in fp64, on the tensors' device, in memory linear in the sequence lengths.

    `scale` defaults to 1/sqrt(D), `softcap` 0 is none, a window of -1 is unbounded. `rows` (int64
    [R], dense only) selects query rows; to select heads, index the inputs. Keys that a row does not
    see may contain anything, NaN included. Returns (out, lse), both fp64.
    """
    options = make_options(q, causal, window, scale, softcap)
    return _attention(_exact, torch.float64, q, k, v, cu_seqlens_q, cu_seqlens_k, options, rows)


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention as one writes it in PyTorch: matmul, softmax, matmul, every step in q's dtype.

    Materialises the whole score matrix. Arguments as in `attention_reference`; returns out in q's
    dtype and lse in fp32 (of the scores as rounded to q's dtype).
    """
    options = make_options(q, causal, window, scale, softcap)
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        return _packed(_naive_dense, q.dtype, q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    return _naive_dense(q, k, v, options)


def naive_attention_blocked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The arithmetic of `naive_attention`, block by block: long sequences fit, `rows` as above."""
    options = make_options(q, causal, window, scale, softcap)
    return _attention(_plain, q.dtype, q, k, v, cu_seqlens_q, cu_seqlens_k, options, rows)


def _exact(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    probs, lse, _ = softmax_weights(q, k, visible, options)
    return probs @ v, lse


def softmax_weights(
    q: Tensor, k: Tensor, visible: Tensor | None, options: Options
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Softmax weights, lse, and the derivative of the softcap (None without one)."""
    scores, slope = (q * options.scale) @ k.mT, None
    if options.softcap:
        capped = scores.div_(options.softcap).tanh_()
        slope = 1.0 - capped.square()
        scores = capped.mul_(options.softcap)
    if visible is not None:
        scores.masked_fill_(~visible, -math.inf)
    lse = torch.logsumexp(scores, -1)
    dead = torch.isneginf(lse)
    return scores.sub_(lse.masked_fill(dead, 0.0).unsqueeze(-1)).exp_(), lse, slope


def _plain(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    scores = plain_scores(q @ k.mT, visible, options)
    out = torch.softmax(scores, -1) @ v
    lse = torch.logsumexp(scores.detach().float(), -1)
    return out.masked_fill(torch.isneginf(lse).unsqueeze(-1), 0.0), lse


def plain_scores(products: Tensor, visible: Tensor | None, options: Options) -> Tensor:
    scores = products * options.scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    return scores if visible is None else scores.masked_fill(~visible, -math.inf)


def _naive_dense(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    group = q.shape[2] // k.shape[2]
    dead = 0  # the first rows that see no key: autograd of their softmax would give NaN
    if options.right >= 0 or k.shape[1] == 0:
        dead = max(0, min(q.shape[1], q.shape[1] - k.shape[1] - max(options.right, 0)))
    qh, kh, vh = (t.transpose(1, 2) for t in (q[:, dead:], k, v))
    if group > 1:
        kh, vh = (t.repeat_interleave(group, dim=1) for t in (kh, vh))
    visible = None
    if options.left >= 0 or options.right >= 0 or k.shape[1] == 0:
        # A copy from the CPU would synchronize.
        rows = torch.arange(dead, q.shape[1], device=q.device)
        first, last = row_intervals(rows, q.shape[1], k.shape[1], options).unsqueeze(-1)
        keys = torch.arange(k.shape[1], device=q.device)
        visible = (keys >= first) & (keys < last)
    out, lse = _plain(qh, kh, vh, visible, options)
    if dead:
        out = torch.nn.functional.pad(out, (0, 0, dead, 0))
        lse = torch.nn.functional.pad(lse, (dead, 0), value=-math.inf)
    return out.transpose(1, 2), lse


def _blocked(
    fn: _Math, dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, options: Options, rows: Tensor
) -> tuple[Tensor, Tensor]:
    batch, heads = q.shape[0], q.shape[2]
    lse_dtype = torch.promote_types(dtype, torch.float32)
    out = torch.zeros(batch * heads, rows.numel(), v.shape[3], dtype=dtype, device=q.device)
    lse = torch.full(out.shape[:2], -math.inf, dtype=lse_dtype, device=q.device)
    for pair, at, _, *tensors, visible in score_blocks(q, k, v, rows, options):
        if tensors[1].shape[1] == 0:
            continue  # no row of the block sees a key
        q_block, k_block, v_block = (t.to(dtype) for t in tensors)
        out[pair, at], block_lse = fn(q_block, k_block, v_block, visible, options)
        lse[pair, at] = block_lse.to(lse_dtype)
    out = out.view(batch, heads, rows.numel(), v.shape[3])
    return out.transpose(1, 2).contiguous(), lse.view(batch, heads, rows.numel())


def _attention(
    fn: _Math,
    dtype: torch.dtype,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    options: Options,
    rows: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if cu_seqlens_q is None and cu_seqlens_k is None:
        rows = torch.arange(q.shape[1]) if rows is None else rows.cpu()
        return _blocked(fn, dtype, q, k, v, options, rows)
    if rows is not None:
        raise ValueError(
            "rows must be None for a packed batch, got a tensor. Slice the segment out"
        )

    def whole(qs: Tensor, ks: Tensor, vs: Tensor, opts: Options) -> tuple[Tensor, Tensor]:
        return _blocked(fn, dtype, qs, ks, vs, opts, torch.arange(qs.shape[1]))

    return _packed(whole, dtype, q, k, v, cu_seqlens_q, cu_seqlens_k, options)


def _packed(
    dense: Callable[[Tensor, Tensor, Tensor, Options], tuple[Tensor, Tensor]],
    dtype: torch.dtype,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise ValueError("cu_seqlens_q and cu_seqlens_k must be given together, got one")
    tokens, heads, _ = q.shape
    lse_dtype = torch.promote_types(dtype, torch.float32)
    out = torch.zeros(tokens, heads, v.shape[2], dtype=dtype, device=q.device)
    lse = torch.full((heads, tokens), -math.inf, dtype=lse_dtype, device=q.device)
    of_q, of_k = segments(cu_seqlens_q, tokens), segments(cu_seqlens_k, k.shape[0])
    for (q0, q1), (k0, k1) in zip(of_q, of_k, strict=True):
        if q1 > q0 and k1 > k0:
            seg_out, seg_lse = dense(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], options)
            out[q0:q1], lse[:, q0:q1] = seg_out[0], seg_lse[0].to(lse_dtype)
    return out, lse
