"""Gradients of attention by torch's autograd, and checks of results against them.

The truth is attention written with matmul and softmax in fp64; the baseline is the same in the
dtype of the inputs. A gradient passes when its error is at most twice the baseline's, plus some
ulps of its largest value: where terms cancel, the baseline may have no error at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import Target
from torch import Tensor

from attnscope.reference import segments

Gradients = tuple[Tensor, Tensor, Tensor]


def visible(seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int]) -> Tensor:
    """[Sq, Sk]: whether a query sees a key."""
    left, right = window
    right = 0 if causal else right
    i = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k)[None]
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left >= 0:
        mask &= j >= i - left
    if right >= 0:
        mask &= j <= i + right
    return mask


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one dense call, differentiable, in the dtype of the inputs."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    q = q.transpose(1, 2)
    s = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    mask = visible(q.shape[2], k.shape[2], causal, window).to(q.device)
    dead = ~mask.any(1)  # their scores are replaced so that no NaN enters the graph
    s = s.masked_fill(~(mask | dead[:, None]), -math.inf)
    p = torch.softmax(s, -1).masked_fill(dead[:, None], 0)
    lse = torch.logsumexp(s, -1).masked_fill(dead, -math.inf)
    return (p @ v).transpose(1, 2), lse


def naive_gradients(
    dtype: torch.dtype, tensors: tuple[Tensor, ...], packing: tuple[Any, ...], **options: Any
) -> Gradients:
    """dq, dk, dv in `dtype` for tensors q, k, v, dout and dlse, dense or packed."""
    q, k, v, dout, dlse = (x.to(dtype) for x in tensors)
    grads = tuple(torch.zeros_like(x) for x in (q, k, v))
    if not packing:
        return _add(grads, (q, k, v, dout, dlse), options)
    cu_q, cu_k, *_ = packing
    for (q0, q1), (k0, k1) in zip(segments(cu_q, len(q)), segments(cu_k, len(k)), strict=True):
        part = tuple(x[None] for x in (q[q0:q1], k[k0:k1], v[k0:k1], dout[q0:q1], dlse[:, q0:q1]))
        rows = ((q0, q1), (k0, k1), (k0, k1))
        _add(tuple(g[a:b][None] for g, (a, b) in zip(grads, rows, strict=True)), part, options)
    return grads


def _add(grads: tuple[Tensor, ...], tensors: tuple[Tensor, ...], options: Any) -> Any:
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    if q.numel() and k.numel():
        with torch.enable_grad():
            out, lse = naive(q, k, v, **options)
        seen = lse.isfinite()
        dlse = torch.where(seen, tensors[4], 0)
        lse = torch.where(seen, lse, 0)
        for grad, g in zip(
            grads, torch.autograd.grad((out, lse), (q, k, v), (tensors[3], dlse)), strict=True
        ):
            grad.copy_(g)
    return grads


def leaves(*tensors: Tensor) -> list[Tensor]:
    """The same memory in the same layout, as tensors that need a gradient."""
    return [x.detach().requires_grad_() for x in tensors]


def gradients(
    t: Target,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *packing: Any,
    dout: Tensor,
    dlse: Tensor | None = None,
    **options: Any,
) -> Gradients:
    """dq, dk, dv of an implementation; skips the test where no kernel takes the call."""
    inputs = leaves(q, k, v)
    with skip_if_refused():
        out, lse = t(*inputs, *packing, **options)
        if dlse is None:
            return torch.autograd.grad(out, inputs, dout)
        return torch.autograd.grad((out, lse), inputs, (dout, dlse))
    raise AssertionError("unreachable")


@contextmanager
def skip_if_refused() -> Iterator[None]:
    """Skip the test, with the reason, where a forced CUDA kernel does not take a call."""
    try:
        yield
    except RuntimeError as error:
        message = str(error).splitlines()[0]
        if "variant must be 0 or 80 for this call" in message:
            pytest.skip(message)
        raise


def upstream(t: Target, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Random dout and dlse for a call with this q and v."""
    *rows, heads, _ = q.shape
    dout = t.randn(*rows, heads, v.shape[-1])
    return dout, torch.randn(*rows[:-1], heads, rows[-1], device=t.device)


def assert_close(got: Gradients, want: Gradients, baseline: Gradients, dtype: torch.dtype) -> None:
    """Check dq, dk and dv of `dtype` against fp64 by the rule above."""
    eps = torch.finfo(dtype).eps
    for name, g, w, b in zip(("dq", "dk", "dv"), got, want, baseline, strict=True):
        assert g.shape == w.shape and g.dtype == dtype and g.is_contiguous(), name
        if g.numel() == 0:
            continue
        assert g.isfinite().all(), f"{name} has nan or inf"
        error = (g.double() - w).abs().max().item()
        ulps = 32 if eps < 1e-4 else 2  # 16-bit gradients are sums in float32
        bound = 2 * (b.double() - w).abs().max().item() + ulps * eps * w.abs().max().item()
        bound += 1e-4 if eps > 1e-4 else 16 * eps * eps
        assert error <= bound, f"{name}: error {error:.3g}, bound {bound:.3g}"


def assert_same_but_for_rounding(got: Tensor, want: Tensor) -> None:
    """Check that results of one kernel in two tilings agree."""
    eps = torch.finfo(got.dtype).eps
    size = want.abs().max().item() if want.numel() else 0.0
    torch.testing.assert_close(got, want, atol=4 * eps * size, rtol=4 * eps)


def assert_gradients_match(
    t: Target,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *packing: Any,
    use_dlse: bool = True,
    deterministic: bool = False,
    **options: Any,
) -> Gradients:
    """Check an implementation on a call with random dout (and dlse); return its gradients.

    `deterministic` calls are made three times, and must give the same bits.
    """
    dout, dlse = upstream(t, q, v)
    tensors = (q, k, v, dout, dlse if use_dlse else torch.zeros_like(dlse))
    call: dict[str, Any] = {"dout": dout, "dlse": dlse if use_dlse else None, **options}
    got = gradients(t, q, k, v, *packing, deterministic=deterministic, **call)
    for _ in range(2 * deterministic):
        again = gradients(t, q, k, v, *packing, deterministic=True, **call)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    want = naive_gradients(torch.float64, tensors, packing, **options)
    baseline = naive_gradients(t.dtype, tensors, packing, **options)
    assert_close(got, want, baseline, t.dtype)
    return got
