"""Attention for users: checks, defaults and the choice of an implementation around the op."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnscope import _load, argument_checks, ops
from attnscope.argument_checks import (
    check_are_tensors,
    check_contents,
    check_forward,
    reads_contents,
)
from attnscope.autograd import (
    TracedForward,
    apply_functional,
    apply_with_grad,
    below_autograd,
    call_deterministic,
)

_CUDA_STATUS = _load.library_status()["_C_cuda"]
_FORWARD = torch.ops.attnscope.forward.default
_functorch_level = torch._C._functorch.maybe_current_level
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled

# impl -> the device type that it needs (None: any) and the op's variant.
_IMPLS: dict[str | None, tuple[str | None, int]] = {
    None: (None, 0),
    "cpu": ("cpu", 0),
    "cuda": ("cuda", 0),
    "cuda-sm80": ("cuda", 80),
    "cuda-sm90": ("cuda", 90),
    "triton": (None, 0),
}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(mask(cap(q k^T scale))) v without writing the scores to memory.

    Args:
        q: [B, Sq, Hq, D]. bfloat16 or float16; on the CPU float32 and float64 too.
        k: [B, Sk, Hkv, D], q's dtype and device. Hq is a multiple of Hkv: query head h reads
            key/value head h // (Hq / Hkv).
        v: [B, Sk, Hkv, Dv]. D and Dv are multiples of 8 up to 256, and may differ.
        causal: query i sees keys j <= i + Sk - Sq (aligned to the bottom right corner).
        window: (left, right); query i sees keys j with
            i + Sk - Sq - left <= j <= i + Sk - Sq + right. -1 is unbounded; causal sets right to 0.
        scale: factor of the scores; 1 / sqrt(D) by default.
        softcap: scores s become softcap * tanh(s / softcap), before the mask. 0 is none.
        return_lse: return (out, lse).
        deterministic: the backward of this call gives the same bits every time, which may take
            longer; so does torch.use_deterministic_algorithms. The forward always does.
        impl: None (the best kernel for the tensors' device), "cuda" (the best CUDA kernel),
            "cuda-sm80" (the portable CUDA kernel), "cuda-sm90" (the Hopper kernel), "triton",
            "cpu".

    Returns:
        out [B, Sq, Hq, Dv], contiguous, in q's dtype; with return_lse also lse [B, Hq, Sq] float32,
        the natural logarithm of the sum of exponentials of the scaled, capped and visible scores.
        A query that sees no key has out 0 and lse -inf.

    Tensors are read through their strides: a [B, H, S, D] tensor is passed as x.transpose(1, 2).
    Only where the last dimension is not contiguous, or rows are not aligned to 16 bytes, is a
    tensor copied first (NVTX range attnscope::copy). Memory grows linearly with Sq and Sk.

    Inside torch.autocast q, k and v are cast to the autocast dtype, as for torch's own attention.

    Raises:
        ValueError, TypeError: an argument is not allowed. The message names the argument, the rule
            and the value. Nothing was launched.
        RuntimeError: the tensors are on CUDA and the CUDA kernels are not built or not loaded.
        NotImplementedError: there is no second derivative, no forward-mode derivative and no vmap
            rule.

    The algorithm is FlashAttention's: online softmax over tiles of keys (Dao et al. 2022,
    arXiv:2205.14135; Dao 2023, arXiv:2307.08691).
    """
    out, lse = _attention(q, k, v, None, causal, window, scale, softcap, impl, deterministic)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a packed batch: sequences of different lengths, end to end, without padding.

    Args:
        q: [Tq, Hq, D]; k: [Tk, Hkv, D]; v: [Tk, Hkv, Dv]; the rest as for `attention`.
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1] on q's device, beginning with 0: segment b is rows
            cu_seqlens[b] to cu_seqlens[b + 1]. Segments may be empty, rows after the last one
            belong to nobody (and may hold NaN).
        max_seqlen_q, max_seqlen_k: the longest segment's length, or more. Further rows of a segment
            are ignored.

    The other arguments are those of `attention`; masks are aligned within each segment.

    Returns:
        out [Tq, Hq, Dv]; with return_lse also lse [Hq, Tq] float32. Rows of no segment have out 0
        and lse -inf.

    The contents of cu_seqlens are checked on the CPU. On CUDA that would wait for the device: they
    are checked with ATTNSCOPE_CHECK=1 in the environment, and otherwise clamped to the tensors.

    Raises: as `attention`.
    """
    packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = _attention(q, k, v, packing, causal, window, scale, softcap, impl, deterministic)
    return (out, lse) if return_lse else out


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: tuple[Tensor, Tensor, int, int] | None,
    causal: bool,
    window: tuple[int, int],
    scale: float | None,
    softcap: float,
    impl: str | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """Call an impl's op on the cheapest path that has the same visible result.

    The op checks its arguments. Only when it refuses them does `_check_call` name the reason.
    """
    if torch.compiler.is_compiling():
        return _trace(q, k, v, packing, causal, window, scale, softcap, impl, deterministic)
    try:
        op, variant = (_FORWARD, 0) if impl is None else _select(impl, q)
        options: dict[str, Any] = {
            "scale": 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
        }
        # A keyword costs 0.2 us in the dispatcher: defaults are omitted.
        if causal is True:
            options["causal"] = True
        elif causal is not False:  # the dispatcher would take None for False
            raise TypeError(f"causal must be a bool, got {causal!r}")
        if window != (-1, -1):
            options["window_left"], options["window_right"] = window
        if softcap != 0:
            options["softcap"] = softcap
        if variant:
            options["variant"] = variant
        tensors: tuple[Any, ...] = (q, k, v)
        if packing is not None:
            *cu_seqlens, options["max_seqlen_q"], options["max_seqlen_k"] = packing
            tensors = (q, k, v, *cu_seqlens)
        if op is _FORWARD and _CUDA_STATUS != "loaded" and q.device.type == "cuda":
            _refuse_cuda(q)
        if (packing is not None or argument_checks.CHECK_CONTENTS) and reads_contents(q):
            _check_call(q, k, v, packing, causal, window, scale, softcap, impl)
        if forward_ad._current_level < 0:
            if _functorch_level() is not None:
                return apply_functional(op, (*tensors, None, None)[:5], options, deterministic)
            if deterministic:
                return call_deterministic(op, tensors, options)
            if type(q) is type(k) is type(v) is Tensor:
                needs_grad = q.requires_grad or k.requires_grad or v.requires_grad
                if not (needs_grad and torch.is_grad_enabled()):
                    with below_autograd():
                        return op(*tensors, **options)
                if not _is_any_autocast_enabled():
                    return apply_with_grad(op, tensors, options)
        return op(*tensors, **options)
    except Exception:
        refusal = _explain(q, k, v, packing, causal, window, scale, softcap, impl)
        if refusal is None:
            raise
        raise refusal from None


def _trace(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: tuple[Tensor, Tensor, int, int] | None,
    causal: bool,
    window: tuple[int, int],
    scale: float | None,
    softcap: float,
    impl: str | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """The call under a compiler: no branch on a value that may be symbolic."""
    op, variant = (_FORWARD, 0) if impl is None else _select(impl, q)
    left, right = window
    options: dict[str, Any] = {"variant": variant} if variant else {}
    tensors: tuple[Any, ...] = (q, k, v)
    if packing is not None:
        *cu_seqlens, options["max_seqlen_q"], options["max_seqlen_k"] = packing
        tensors = (q, k, v, *cu_seqlens)
    options |= {
        "scale": 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale,
        "causal": causal,
        "window_left": left,
        "window_right": right,
        "softcap": softcap,
    }
    needs_grad = q.requires_grad or k.requires_grad or v.requires_grad
    if deterministic and needs_grad and torch.is_grad_enabled():
        # The graph has the op alone, whose autograd kernel could not see the request. Views,
        # because dynamo refuses a tensor that is passed twice.
        views = [t.view_as(t) for t in tensors]
        return TracedForward.apply(op, options, True, *views)
    return op(*tensors, **options)


def _select(impl: str, q: Tensor) -> tuple[Any, int]:
    """The op of an impl, and its variant."""
    if impl not in _IMPLS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, _IMPLS))}, got {impl!r}")
    device, variant = _IMPLS[impl]
    if device is not None and q.device.type != device:
        raise ValueError(f"q must be on {device} for impl {impl!r}, got {q.device}")
    if impl == "triton":
        from attnscope.triton.forward import OP

        return OP, variant
    return _FORWARD, variant


def _refuse_cuda(q: Tensor) -> NoReturn:
    raise RuntimeError(
        f"q must be on the CPU, got {q.device}: the CUDA kernels are {_CUDA_STATUS}. Pass "
        f"impl='triton', or {_load.REBUILD} where nvcc is found"
    )


def _check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: tuple[Tensor, Tensor, int, int] | None,
    causal: bool,
    window: tuple[int, int],
    scale: float | None,
    softcap: float,
    impl: str | None,
) -> None:
    """Raise TypeError or ValueError if the arguments of a call are not allowed.

    Reads the contents of tensors where argument_checks.reads_contents allows it.
    """
    check_are_tensors(q=q, k=k, v=v)
    if q.device.type in ops.AUTOCAST_DEVICES and torch.is_autocast_enabled(q.device.type):
        q, k, v = ops.cast_for_autocast(q, k, v)
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"window must be two ints, (left, right), got {window!r}")
    if len(window) != 2:
        raise ValueError(f"window must be (left, right), got {window!r}")
    cu_seqlens_q, cu_seqlens_k, *longest = (None, None, 0, 0) if packing is None else packing
    if packing is not None:
        check_are_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    lengths: Any = dict(zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True))
    dtypes = argument_checks.TRITON_DTYPES if impl == "triton" else argument_checks.DTYPES
    if scale is None:
        scale = 1.0 / math.sqrt(max(q.shape[-1], 1)) if q.ndim else 1.0
    check_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        scale=scale,
        causal=causal,
        window_left=window[0],
        window_right=window[1],
        softcap=softcap,
        dtypes=dtypes,
        **lengths,
    )
    if reads_contents(q):
        check_contents(q, k, v, cu_seqlens_q, cu_seqlens_k, **lengths)


def _explain(*call: Any) -> Exception | None:
    """The exception that names the argument for which an op refused a call; None if none does."""
    try:
        _check_call(*call)
    except (TypeError, ValueError) as refusal:
        return refusal
    return None
