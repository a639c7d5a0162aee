"""Backward: gradients in fp64, those of plain PyTorch, and the rounding that no kernel avoids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnscope.reference.blocks import Options, make_options, score_blocks, segments
from attnscope.reference.forward import plain_scores, softmax_weights

Gradients = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv
# Inputs, visible [R, K] or None -> dq [n, R, D], and the rows' part of dk [n, K, D], dv [n, K, Dv].
_Math = Callable[["Inputs", Tensor | None, Options], Gradients]


class Inputs(NamedTuple):
    """Tensors of a backward call: dense, or of a block ([n, R, ..] and [n, K, ..])."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None


def attention_backward_reference(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    dlse: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
) -> Gradients:
    """Gradients (dq, dk, dv) of attention in fp64, given those of out and lse (None: zero).

    In memory linear in the sequence lengths. Rows without keys, keys that no row sees, and rows and
    keys of no segment have gradients 0; they may contain anything, NaN included, as may keys that a
    row does not see. The other arguments are those of `attention_reference`.
    """
    options = make_options(q, causal, window, scale, softcap)
    inputs = Inputs(q, k, v, dout, dlse)
    return _backward(_exact_backward, torch.float64, inputs, cu_seqlens_q, cu_seqlens_k, options)


def naive_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    dlse: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
) -> Gradients:
    """Gradients of `naive_attention` as PyTorch's autograd computes them, every step in q's dtype.

    Block by block, so that long sequences fit: dk and dv are summed over the blocks in fp32 (fp64
    for fp64) and rounded once a query head, as one product over all rows is.
    """
    options = make_options(q, causal, window, scale, softcap)
    inputs = Inputs(q, k, v, dout, dlse)
    return _backward(_plain_backward, q.dtype, inputs, cu_seqlens_q, cu_seqlens_k, options)


def backward_rounding(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    dlse: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    sum_ulps: float,
    score_ulps: float,
) -> Gradients:
    """Rounding that fused kernels have and the naive gradients may lack, element by element.

    There are three kinds; dS = P (dP - delta), dP = dout v, delta = dout out - dlse:

    - delta is computed from an out that was rounded to q's dtype: one ulp of each element of out,
      summed as independent errors over the elements, and over the rows of a key.
    - dP and delta cancel, after sums in the dtype of the scores (fp32, or fp64 for fp64):
      `sum_ulps` of it at ``|dout| (|v| + |out|) P``.
    - A score's rounding, `score_ulps` at ``|lse|``, is a relative error of P.

    Arguments as `attention_backward_reference`; returns (dq, dk, dv) of errors, fp64.
    """
    options = make_options(q, causal, window, scale, softcap)
    inputs = Inputs(q, k, v, dout, dlse)
    narrow, wide = torch.finfo(q.dtype).eps, _wide(q.dtype)
    ulp = torch.finfo(wide).eps
    errors = _Rounding(narrow, sum_ulps * ulp, score_ulps * ulp)
    return _backward(errors, torch.float64, inputs, cu_seqlens_q, cu_seqlens_k, options)


def _exact_backward(inputs: Inputs, visible: Tensor | None, options: Options) -> Gradients:
    q, k, v, dout, dlse = inputs
    probs, _, slope = softmax_weights(q, k, visible, options)
    delta = (probs @ v * dout).sum(-1)
    if dlse is not None:
        delta -= dlse
    dscores = (dout @ v.mT).sub_(delta.unsqueeze(-1)).mul_(probs)
    if slope is not None:
        dscores *= slope
    if visible is not None:
        dscores.masked_fill_(~visible, 0.0)
    dscores *= options.scale
    return dscores @ k, dscores.mT @ q, probs.mT @ dout


@dataclass(frozen=True)
class _Rounding:
    """`backward_rounding` of a block: relative errors of out's elements, of sums and of scores."""

    out: float
    sums: float
    scores: float

    def __call__(self, inputs: Inputs, visible: Tensor | None, options: Options) -> Gradients:
        q, k, v, dout, dlse = inputs
        probs, lse, slope = softmax_weights(q, k, visible, options)
        out = probs @ v
        delta = (out * dout).sum(-1)
        if dlse is not None:
            delta -= dlse
        of_score = (self.scores * lse.masked_fill(torch.isneginf(lse), 0.0).abs()).unsqueeze(-1)
        weights = probs if slope is None else probs * slope
        dscores = (dout @ v.mT).sub_(delta.unsqueeze(-1)).abs_().mul_(of_score)
        size = v.norm(dim=-1).unsqueeze(-2) + out.norm(dim=-1).unsqueeze(-1)
        dscores += size.mul_(self.sums * dout.norm(dim=-1).unsqueeze(-1))
        of_delta = self.out * (out * dout).norm(dim=-1).unsqueeze(-1)
        dq = of_delta * (weights @ k).abs()
        dk = ((weights * of_delta).square_().mT @ q.square()).sqrt_()
        dscores *= weights
        if visible is not None:
            dscores.masked_fill_(~visible, 0.0)
        dq, dk = dq + dscores @ k.abs(), dk + dscores.mT @ q.abs()
        dv = (probs * (self.sums + of_score)).mT @ dout.abs()
        return dq * options.scale, dk * options.scale, dv


def _plain_backward(inputs: Inputs, visible: Tensor | None, options: Options) -> Gradients:
    q, k, v, dout, dlse = inputs
    with torch.enable_grad():
        products = (q @ k.mT).requires_grad_()
        scores = plain_scores(products, visible, options)
        probs = torch.softmax(scores, -1)
        results, grads = [probs], [dout @ v.mT]
        if dlse is not None:
            results.append(torch.logsumexp(scores, -1))
            grads.append(dlse.to(q.dtype))
        (dproducts,) = torch.autograd.grad(results, products, grads)
    probs = probs.detach()
    if visible is not None:  # a row without keys has NaN
        probs, dproducts = (t.masked_fill(~visible, 0.0) for t in (probs, dproducts))
    wide = _wide(q.dtype)
    return dproducts @ k, dproducts.mT.to(wide) @ q.to(wide), probs.mT.to(wide) @ dout.to(wide)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _blocked_backward(fn: _Math, dtype: torch.dtype, inputs: Inputs, options: Options) -> Gradients:
    """Dense gradients: dk and dv are summed over blocks of rows in fp32 or fp64."""
    q, k, v, dout, dlse = inputs
    batch, heads = q.shape[0], q.shape[2]
    wide = _wide(dtype)
    dq, dk, dv = (
        torch.zeros(batch * heads, *t.shape[1::2], dtype=kept, device=q.device)
        for t, kept in ((q, dtype), (k, wide), (v, wide))
    )
    rows = torch.arange(q.shape[1])
    for pair, at, keys, *tensors, visible in score_blocks(q, k, v, rows, options, dout):
        if tensors[1].shape[1] == 0:
            continue
        b, h = pair[:, None] // heads, pair[:, None] % heads
        at_device = rows[at].to(q.device)
        q_block, k_block, v_block = (t.to(dtype) for t in tensors)
        dlse_block = None if dlse is None else dlse[b, h, at_device].to(wide)
        dout_block = dout[b, at_device, h].to(dtype)
        block = Inputs(q_block, k_block, v_block, dout_block, dlse_block)
        dq[pair, at], dk_part, dv_part = fn(block, visible, options)
        dk[pair, keys] += dk_part
        dv[pair, keys] += dv_part
    dq = dq.unflatten(0, (batch, heads)).transpose(1, 2).contiguous()
    shape = (batch, k.shape[2], heads // k.shape[2])
    dk, dv = (t.to(dtype).unflatten(0, shape).sum(2).transpose(1, 2).contiguous() for t in (dk, dv))
    return dq, dk, dv


@torch.no_grad()
def _backward(
    fn: _Math,
    dtype: torch.dtype,
    inputs: Inputs,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    options: Options,
) -> Gradients:
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return _blocked_backward(fn, dtype, inputs, options)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise ValueError("cu_seqlens_q and cu_seqlens_k must be given together, got one")
    q, k, v, dout, dlse = inputs
    dq, dk, dv = (torch.zeros(t.shape, dtype=dtype, device=q.device) for t in (q, k, v))
    of_q, of_k = segments(cu_seqlens_q, q.shape[0]), segments(cu_seqlens_k, k.shape[0])
    for (q0, q1), (k0, k1) in zip(of_q, of_k, strict=True):
        if q1 > q0 and k1 > k0:
            tensors = (q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], dout[None, q0:q1])
            segment = Inputs(*tensors, None if dlse is None else dlse[None, :, q0:q1])
            grads = _blocked_backward(fn, dtype, segment, options)
            dq[q0:q1], dk[k0:k1], dv[k0:k1] = (t[0] for t in grads)
    return dq, dk, dv
