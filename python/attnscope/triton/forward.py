"""attnscope_triton::forward: the schema and the meaning of attnscope::forward, in Triton.

Takes CUDA tensors (bfloat16, float16, float32); with TRITON_INTERPRET=1 in the environment before
the first import, CPU tensors as well, slowly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils.flop_counter import register_flop_formula

from attnscope import ops, ranges
from attnscope.triton.forward_kernel import forward_kernel
from attnscope.triton.interpreter import INTERPRETED

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, *, "
    "float scale, int max_seqlen_q=0, int max_seqlen_k=0, bool causal=False, int window_left=-1, "
    'int window_right=-1, float softcap=0.0, str kernel_name="auto") -> (Tensor out, Tensor lse)'
)
_LOG2E = math.log2(math.e)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Tile(NamedTuple):
    """One program's work and resources: query rows, keys a step, warps, loads in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By the larger head dim, padded. No autotuning: the same call must run the same code every time.
TILES = {
    16: Tile(128, 64, 4, 3),
    32: Tile(128, 64, 4, 3),
    64: Tile(128, 64, 4, 3),
    128: Tile(128, 128, 8, 2),
    256: Tile(128, 32, 8, 2),
}
# For cards that give a program about 100 KB of shared memory, not the 227 KB of sm_90 and sm_100.
SMALL_TILES = TILES | {128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2)}


def tile(head_dim: int, head_dim_v: int, large: bool) -> tuple[Tile, int, int]:
    """The tile for a pair of head dims on a card, and what the two dims are padded to."""
    padded, padded_v = (next(w for w in TILES if d <= w) for d in (head_dim, head_dim_v))
    return (TILES if large else SMALL_TILES)[max(padded, padded_v)], padded, padded_v


@cache
def _is_large(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


# An interpreted kernel cannot be traced, so there the op is opaque to the compiler.
_register = torch.library.custom_op if INTERPRETED else torch.library.triton_op


@_register("attnscope_triton::forward", mutates_args=(), schema=_SCHEMA)
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    scale: float,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    kernel_name: str = "auto",
) -> tuple[Tensor, Tensor]:
    """As attnscope::forward (csrc/binding/library.cpp). Raises as attnscope.ops.check_forward."""
    _check(q, kernel_name)
    with _scope(q):
        packed = cu_seqlens_q is not None
        out, lse = _outputs(q, v, packed)
        dtype = q.dtype
        if INTERPRETED and dtype == torch.bfloat16:  # the interpreter multiplies its bit patterns
            q, k, v, out = q.float(), k.float(), v.float(), out.float()
        q, k, v = _readable(q), _readable(k), _readable(v)
        (*_, rows_q, heads_q, head_dim), (*_, rows_k, heads_kv, head_dim_v) = q.shape, v.shape
        batch, seqlen_q, seqlen_k = q.shape[0], rows_q, rows_k
        if cu_seqlens_q is not None:
            batch = cu_seqlens_q.shape[0] - 1
            seqlen_q, seqlen_k = min(max_seqlen_q, rows_q), min(max_seqlen_k, rows_k)
        config, padded, padded_v = tile(head_dim, head_dim_v, _is_large(q.device))
        blocks_m = -(-seqlen_q // config.block_m)
        programs = batch * heads_q * blocks_m
        if programs >= 2**31:
            raise ValueError(f"q: {programs} tiles of {config.block_m} rows; allowed: below 2^31")
        if programs == 0:
            return out.to(dtype), lse
        # A bound that reaches every key is none; the sums in the kernel then stay in 32 bits.
        left, right = (
            -1 if bound >= seqlen_q + seqlen_k else bound
            for bound in (window_left, 0 if causal else window_right)
        )
        scores, inner_scale, cap, outer_scale = _score_scales(scale, softcap)
        launch = forward_kernel if INTERPRETED else torch.library.wrap_triton(forward_kernel)
        launch[(programs,)](
            q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k,
            *_strides(q), *_strides(k), *_strides(v),
            rows_q, rows_k, seqlen_q, seqlen_k, heads_q, heads_q // heads_kv, blocks_m,
            left, right, inner_scale, cap, outer_scale,
            PACKED=packed, HAS_LEFT=bool(left >= 0), HAS_RIGHT=bool(right >= 0), SCORES=scores,
            D=int(head_dim), DV=int(head_dim_v), BLOCK_D=padded, BLOCK_DV=padded_v,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        return out.to(dtype), lse


@contextmanager
def _scope(q: Tensor) -> Iterator[None]:
    """The NVTX range of the call, and its device; neither while a compiler traces it."""
    if is_fake(q):
        yield
        return
    with ranges.nvtx_range(ranges.TRITON_FORWARD), torch.cuda.device_of(q):
        yield


def _outputs(q: Tensor, v: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    out, lse = ops._fake_forward(q, q, v)
    if packed:  # rows of no segment are rows without keys, and no program visits them
        out.zero_()
        lse.fill_(-math.inf)
    return out, lse


def _check(q: Tensor, kernel_name: str) -> None:
    if kernel_name != "auto":
        raise ValueError(
            f"kernel_name: is {kernel_name!r}; allowed for attnscope_triton::forward: 'auto'"
        )
    if q.dtype not in _DTYPES:
        allowed = ", ".join(map(str, _DTYPES))
        raise TypeError(f"q: dtype is {q.dtype}; allowed for attnscope_triton::forward: {allowed}")
    if q.device.type != "cuda" and not INTERPRETED:
        raise ValueError(
            f"q: is on {q.device}; attnscope_triton::forward takes CUDA tensors, and CPU tensors "
            "where TRITON_INTERPRET=1 is in the environment"
        )


def _readable(t: Tensor) -> Tensor:
    """The tensor, or a copy where its last dimension is strided or its rows are not aligned."""
    *strides, last = t.stride()
    aligned = all(
        stride % 8 == 0 or size < 2 for stride, size in zip(strides, t.shape, strict=False)
    )
    if aligned and (last == 1 or t.shape[-1] < 2):
        return t
    if is_fake(t):
        return t.contiguous()
    with ranges.nvtx_range(ranges.COPY):
        return t.contiguous()


def _strides(t: Tensor) -> tuple[int, int, int]:
    """(batch, row, head) in units of 8 elements; those of dimensions of size 1 do not matter."""
    *batch, row, head, _ = t.stride()
    return (batch[0] // 8 if batch else 0), row // 8, head // 8


def _score_scales(scale: float, softcap: float) -> tuple[str, float, float, float]:
    """(SCORES, inner_scale, cap, outer_scale) of the kernel, with base-2 exponents folded in."""
    if softcap >= 256:  # as kWideCap in csrc/attn/score_scales.h
        return "capped wide", scale, softcap, _LOG2E
    if softcap > 0:
        return "capped", 2 * _LOG2E * scale / softcap, softcap * _LOG2E, 1.0
    if scale > 0:
        return "raw", 1.0, 0.0, scale * _LOG2E
    sign = -1.0 if scale < 0 else 0.0 * scale  # the maximum is not that of q k
    return "scaled", sign, 0.0, -scale * _LOG2E if scale < 0 else 1.0


forward.register_fake(ops._fake_forward)
forward.register_autograd(ops._no_backward)
forward.register_vmap(ops._no_vmap)
register_flop_formula(torch.ops.attnscope_triton.forward, get_raw=True)(ops.forward_flop_formula)
