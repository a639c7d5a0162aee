"""Attention in plain PyTorch: the fp64 reference and the same-dtype baseline.

Layouts are the op's. Dense: q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv] give out
[B, Sq, Hq, Dv] and lse [B, Hq, Sq]. Packed (cu_seqlens_* int32 [B + 1]): q [Tq, Hq, D],
k [Tk, Hkv, D], v [Tk, Hkv, Dv] give out [Tq, Hq, Dv] and lse [Hq, Tq].

Query i sees keys j with i + Sk - Sq - left <= j <= i + Sk - Sq + right: always one interval, so a
row is exact when its keys are cut to that interval. A row that sees no key has out 0, lse -inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Scores in memory at a time: 0.5 GB of fp64 on a GPU, 32 MB (about a last-level cache) on a CPU.
_SCORES = {"cuda": 1 << 26, "cpu": 1 << 22}


@dataclass(frozen=True)
class _Options:
    left: int
    right: int
    scale: float
    softcap: float


# q [n, R, D], k [n, K, D], v [n, K, Dv], visible [R, K] or None -> out [n, R, Dv], lse [n, R].
_Math = Callable[[Tensor, Tensor, Tensor, Tensor | None, _Options], tuple[Tensor, Tensor]]


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
    options = _options(q, causal, window, scale, softcap)
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
    options = _options(q, causal, window, scale, softcap)
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
    options = _options(q, causal, window, scale, softcap)
    return _attention(_plain, q.dtype, q, k, v, cu_seqlens_q, cu_seqlens_k, options, rows)


def segments(cu_seqlens: Tensor, total: int) -> list[tuple[int, int]]:
    """(begin, end) of every packed sequence, clamped to [0, total] with begin <= end."""
    bounds = cu_seqlens.tolist()
    begins = [min(max(bound, 0), total) for bound in bounds[:-1]]
    return [
        (begin, max(begin, min(end, total))) for begin, end in zip(begins, bounds[1:], strict=True)
    ]


def _options(
    q: Tensor, causal: bool, window: tuple[int, int], scale: float | None, softcap: float
) -> _Options:
    left, right = window
    if left < -1 or right < -1:
        raise ValueError(f"window is {window}; allowed: -1 (unbounded) or more on either side")
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    return _Options(left, 0 if causal else right, scale, softcap)


def _exact(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, options: _Options
) -> tuple[Tensor, Tensor]:
    scores = (q * options.scale) @ k.mT
    if options.softcap:
        scores = scores.div_(options.softcap).tanh_().mul_(options.softcap)
    if visible is not None:
        scores.masked_fill_(~visible, -math.inf)
    lse = torch.logsumexp(scores, -1)
    dead = torch.isneginf(lse)
    probs = scores.sub_(lse.masked_fill(dead, 0.0).unsqueeze(-1)).exp_()
    return probs @ v, lse


def _plain(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, options: _Options
) -> tuple[Tensor, Tensor]:
    scores = (q @ k.mT) * options.scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    out = torch.softmax(scores, -1) @ v
    lse = torch.logsumexp(scores.float(), -1)
    return out.masked_fill(torch.isneginf(lse).unsqueeze(-1), 0.0), lse


def _intervals(rows: Tensor, seqlen_q: int, seqlen_k: int, options: _Options) -> Tensor:
    """The first key and the key past the last that each row sees: int64 [2, R], where `rows` is."""
    diagonal = rows + (seqlen_k - seqlen_q)
    unbounded = torch.zeros_like(rows)
    first = diagonal - options.left if options.left >= 0 else unbounded
    last = diagonal + options.right + 1 if options.right >= 0 else unbounded + seqlen_k
    return torch.stack((first, last)).clamp_(0, seqlen_k)


def _naive_dense(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    group = q.shape[2] // k.shape[2]
    qh, kh, vh = (t.transpose(1, 2) for t in (q, k, v))
    if group > 1:
        kh, vh = (t.repeat_interleave(group, dim=1) for t in (kh, vh))
    visible = None
    if options.left >= 0 or options.right >= 0 or k.shape[1] == 0:
        rows = torch.arange(q.shape[1], device=q.device)  # a copy from the CPU would synchronize
        first, last = _intervals(rows, q.shape[1], k.shape[1], options).unsqueeze(-1)
        keys = torch.arange(k.shape[1], device=q.device)
        visible = (keys >= first) & (keys < last)
    out, lse = _plain(qh, kh, vh, visible, options)
    return out.transpose(1, 2), lse


def _blocks(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, options: _Options
) -> Iterator[tuple[Tensor, slice, Tensor, Tensor, Tensor, Tensor | None]]:
    """(pairs, slice of rows, q, k, v, visible): blocks whose scores fit the budget.

    A pair is one head of one batch entry, counted batch first.
    """
    pairs, seqlen_k = q.shape[0] * q.shape[2], k.shape[1]
    group = q.shape[2] // k.shape[2]
    budget = _SCORES["cuda" if q.is_cuda else "cpu"] // max(seqlen_k, 1)
    row_step = max(1, min(rows.numel(), budget))
    pair_step = max(1, budget // max(row_step, q.shape[3] + v.shape[3]))
    for pair in torch.arange(pairs, device=q.device).split(pair_step):
        b, h = pair // q.shape[2], pair % q.shape[2]
        key_pair, value_pair = k[b, :, h // group], v[b, :, h // group]
        # 0 * NaN: with one row to a block the keys are the visible ones and nothing else.
        step = row_step if bool(torch.isfinite(value_pair).all()) else 1
        for start in range(0, rows.numel(), step):
            at = slice(start, start + step)
            first, last = _intervals(rows[at], q.shape[1], seqlen_k, options)
            lo, hi = int(first.min()), int(last.max())
            visible = None
            if bool((first > lo).any()) or bool((last < hi).any()):
                keys = torch.arange(lo, hi, device=q.device)
                first, last = torch.stack((first, last)).to(q.device).unsqueeze(-1)
                visible = (keys >= first) & (keys < last)
            q_block = q[b[:, None], rows[at].to(q.device), h[:, None]]
            yield pair, at, q_block, key_pair[:, lo:hi], value_pair[:, lo:hi], visible


def _blocked(
    fn: _Math, dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, options: _Options, rows: Tensor
) -> tuple[Tensor, Tensor]:
    batch, heads = q.shape[0], q.shape[2]
    lse_dtype = torch.promote_types(dtype, torch.float32)
    out = torch.zeros(batch * heads, rows.numel(), v.shape[3], dtype=dtype, device=q.device)
    lse = torch.full(out.shape[:2], -math.inf, dtype=lse_dtype, device=q.device)
    for pair, at, q_block, k_block, v_block, visible in _blocks(q, k, v, rows, options):
        if k_block.shape[1] == 0:
            continue  # no row of the block sees a key
        q_block, k_block, v_block = (t.to(dtype) for t in (q_block, k_block, v_block))
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
    options: _Options,
    rows: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if cu_seqlens_q is None and cu_seqlens_k is None:
        rows = torch.arange(q.shape[1]) if rows is None else rows.cpu()
        return _blocked(fn, dtype, q, k, v, options, rows)
    if rows is not None:
        raise ValueError("rows: only for dense tensors; slice the segment out of a packed batch")

    def whole(qs: Tensor, ks: Tensor, vs: Tensor, opts: _Options) -> tuple[Tensor, Tensor]:
        return _blocked(fn, dtype, qs, ks, vs, opts, torch.arange(qs.shape[1]))

    return _packed(whole, dtype, q, k, v, cu_seqlens_q, cu_seqlens_k, options)


def _packed(
    dense: Callable[[Tensor, Tensor, Tensor, _Options], tuple[Tensor, Tensor]],
    dtype: torch.dtype,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    options: _Options,
) -> tuple[Tensor, Tensor]:
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise ValueError("cu_seqlens_q, cu_seqlens_k: give both or neither")
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
