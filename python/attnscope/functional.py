"""Attention for users: checks, defaults and the choice of an implementation around the op."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnscope import _load
from attnscope.ops import check_are_tensors, check_forward

_CUDA_STATUS = _load.library_status()["_C_cuda"]
_FORWARD = torch.ops.attnscope.forward.default

# impl -> the device it needs (None: any) and the kernel it asks the op for.
_IMPLS: dict[str | None, tuple[str | None, str]] = {
    None: (None, "auto"),
    "cpu": ("cpu", "auto"),
    "cuda": ("cuda", "auto"),
    "cuda-sm80": ("cuda", "sm80"),
    "cuda-sm90": ("cuda", "sm90"),
    "triton": (None, "auto"),
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
    """softmax(mask(cap(q k^T scale))) v, without the scores ever lying in memory.

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
        deterministic: accepted for the backward's sake. The same inputs on the same device give
            the same bits in any case.
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
    There is no backward yet: calling one raises NotImplementedError.

    Raises:
        ValueError, TypeError: an argument is not allowed; names it, its value and what is.
        RuntimeError: the tensors are on CUDA and the CUDA kernels are not built or not loaded.

    The algorithm is FlashAttention's: online softmax over tiles of keys (Dao et al. 2022,
    arXiv:2205.14135; Dao 2023, arXiv:2307.08691).
    """
    out, lse = _attention(q, k, v, {}, causal, window, scale, softcap, impl)
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
        max_seqlen_q, max_seqlen_k: the longest segment's length, or more. Rows of a segment beyond
            it are left out.

    The other arguments are those of `attention`; masks are aligned within each segment.

    Returns:
        out [Tq, Hq, Dv]; with return_lse also lse [Hq, Tq] float32. Rows of no segment have out 0
        and lse -inf.

    The contents of cu_seqlens are checked on the CPU. On CUDA that would wait for the device: they
    are checked with ATTNSCOPE_CHECK=1 in the environment, and otherwise clamped to the tensors.

    Raises: as `attention`.
    """
    check_are_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    packing = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
    out, lse = _attention(q, k, v, packing, causal, window, scale, softcap, impl)
    return (out, lse) if return_lse else out


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: dict[str, Any],
    causal: bool,
    window: tuple[int, int],
    scale: float | None,
    softcap: float,
    impl: str | None,
) -> tuple[Tensor, Tensor]:
    check_are_tensors(q=q, k=k, v=v)
    q, k, v = _autocast(q, k, v)
    if scale is None:
        scale = 1.0 / math.sqrt(max(q.shape[-1], 1)) if q.ndim else 1.0
    op, kernel = _select(impl, q)
    check_forward(
        q, k, v, scale=scale, window=window, softcap=softcap, kernel_name=kernel, **packing
    )
    left, right = window
    return op(
        q,
        k,
        v,
        scale=scale,
        causal=causal,
        window_left=left,
        window_right=right,
        softcap=softcap,
        kernel_name=kernel,
        **packing,
    )


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast does to torch's own attention: floating point becomes the autocast dtype."""
    device = tensors[0].device.type
    if device not in ("cuda", "cpu") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if _is_cast(t) else t for t in tensors)


def _is_cast(t: Tensor) -> bool:
    return t.is_floating_point() and t.dtype != torch.float64


def _select(impl: str | None, q: Tensor) -> tuple[Callable[..., tuple[Tensor, Tensor]], str]:
    """The op that an impl means, and the kernel to ask of it."""
    if impl not in _IMPLS:
        names = ", ".join(repr(name) for name in _IMPLS)
        raise ValueError(f"impl: is {impl!r}; allowed: {names}")
    device, kernel = _IMPLS[impl]
    if device is not None and q.device.type != device:
        raise ValueError(f"impl: {impl!r} takes {device} tensors; q is on {q.device}")
    if impl == "triton":
        import attnscope.triton.forward  # noqa: F401  registers the op

        return torch.ops.attnscope_triton.forward.default, kernel
    if q.device.type == "cuda" and _CUDA_STATUS != "loaded":
        raise RuntimeError(
            f"q: is on {q.device}, but the CUDA kernels are {_CUDA_STATUS}; {_load.REBUILD} where "
            "nvcc is found, or pass impl='triton'"
        )
    return _FORWARD, kernel
