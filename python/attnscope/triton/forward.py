"""attnscope_triton::forward: the schema and the meaning of attnscope::forward, in Triton.

Takes CUDA tensors (bfloat16, float16); with TRITON_INTERPRET=1 in the environment before the first
import, CPU tensors as well (float32 too), slowly.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from attnscope import ops, ranges
from attnscope.argument_checks import TRITON_DTYPES, check_forward
from attnscope.schemas import TRITON_FORWARD
from attnscope.triton import backward, plan
from attnscope.triton.forward_kernel import triton_forward
from attnscope.triton.interpreter import INTERPRETED
from attnscope.triton.launcher import KernelCache
from attnscope.triton.plan import Launch, Tile

# By the larger head dim, padded; docs/tuning.md has the sweep on an H200 that chose 32 to 256.
# No autotuning: the same call must run the same code every time.
TILES = {
    16: Tile(128, 64, 4, 3),
    32: Tile(64, 64, 4, 3),
    64: Tile(128, 64, 4, 3),
    128: Tile(64, 64, 4, 3),
    256: Tile(128, 64, 8, 2),
}
# For cards that give a program about 100 KB of shared memory, not the 227 KB of sm_90 and sm_100.
SMALL_TILES = TILES | {
    32: Tile(128, 64, 4, 3),
    128: Tile(128, 64, 8, 2),
    256: Tile(64, 32, 8, 2),
}


def tile(head_dim: int, head_dim_v: int, large: bool) -> tuple[Tile, int, int]:
    """The tile for a pair of head dims on a card, and what the two dims are padded to."""
    padded, padded_v = plan.padded_dims(head_dim, head_dim_v)
    return (TILES if large else SMALL_TILES)[max(padded, padded_v)], padded, padded_v


def plan_launch(
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
) -> Launch:
    """The launch for tensors that `readable` returned. Raises ValueError for too many programs."""
    (*_, rows_q, heads_q, head_dim), (*_, rows_k, heads_kv, head_dim_v) = q.shape, v.shape
    batch, seqlen_q, seqlen_k = plan.lengths(q, k, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    config, padded, padded_v = tile(head_dim, head_dim_v, plan.is_large(q.device))
    blocks_m = -(-seqlen_q // config.block_m)
    programs = plan.check_programs(batch * heads_q * blocks_m, "q", config.block_m)
    left, right = plan.mask_bounds(seqlen_q, seqlen_k, causal, window_left, window_right)
    scores, inner_scale, cap, outer_scale = _score_scales(scale, softcap)
    integers = (
        *plan.unit_strides(q), *plan.unit_strides(k), *plan.unit_strides(v),
        rows_q, rows_k, seqlen_q, seqlen_k, heads_q, heads_q // heads_kv, blocks_m, left, right,
    )  # fmt: skip
    constants = dict(
        PACKED=cu_seqlens_q is not None, HAS_LEFT=bool(left != -1), HAS_RIGHT=bool(right != -1),
        SCORES=scores, D=int(head_dim), DV=int(head_dim_v), BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, BLOCK_D=padded, BLOCK_DV=padded_v,
    )  # fmt: skip
    resources = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    return Launch(programs, (*integers, inner_scale, cap, outer_scale), constants, resources)


# An interpreted kernel cannot be traced, so there the op is opaque to the compiler.
_register = torch.library.custom_op if INTERPRETED else torch.library.triton_op


@_register("attnscope_triton::forward", mutates_args=(), schema=TRITON_FORWARD)
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
) -> tuple[Tensor, Tensor]:
    """As attnscope::forward (csrc/binding/library.cpp), traced or interpreted.

    Raises as attnscope.argument_checks.check_forward.
    """
    options: dict[str, Any] = dict(
        scale=scale, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=causal,
        window_left=window_left, window_right=window_right, softcap=softcap,
    )  # fmt: skip
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    out, lse = _outputs(q, v, cu_seqlens_q)
    dtype = q.dtype
    if INTERPRETED and dtype == torch.bfloat16:  # the interpreter multiplies its bit patterns
        q, k, v, out = q.float(), k.float(), v.float(), out.float()
    q, k, v = plan.readable(q), plan.readable(k), plan.readable(v)
    launch = plan_launch(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
    if guard_or_false(launch.programs == 0):
        return out.to(dtype), lse
    kernel = triton_forward if INTERPRETED else torch.library.wrap_triton(triton_forward)
    kernel[(launch.programs,)](
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *launch.numbers,
        **launch.constants, **launch.options,
    )  # fmt: skip
    return out.to(dtype), lse


class _Plan(NamedTuple):
    """A checked call: a later one with the same key runs the same launch without new checks."""

    copied: bool  # some input is copied first
    wide: bool  # some integer takes 64 bits
    launch: Launch


_MAX_PLANS = 4096
_PLANS: dict[Any, _Plan] = {}
_KERNELS = KernelCache(triton_forward)


def _forward_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The op on real CUDA tensors: the Python work of a call is done once for each key."""
    with ranges.nvtx_range(ranges.TRITON_FORWARD):
        device = q.get_device()
        if device == torch.cuda.current_device():
            return _launch(device, q, k, v, cu_seqlens_q, cu_seqlens_k, options)
        with torch.cuda.device(device):
            return _launch(device, q, k, v, cu_seqlens_q, cu_seqlens_k, options)


def _launch(
    device: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    key: tuple[Any, ...] = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, *options.items(),
    )  # fmt: skip
    for cu_seqlens in (cu_seqlens_q, cu_seqlens_k):
        if cu_seqlens is not None:
            key += (cu_seqlens.shape, cu_seqlens.stride(), cu_seqlens.dtype, cu_seqlens.device)
    planned = _PLANS.get(key)
    if planned is None:
        _check(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
        given, (q, k, v) = (q, k, v), (plan.readable(q), plan.readable(k), plan.readable(v))
        launch = plan_launch(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
        copied = any(a is not b for a, b in zip((q, k, v), given, strict=True))
        planned = _Plan(copied, launch.wide, launch)
        if len(_PLANS) >= _MAX_PLANS:
            _PLANS.clear()
        _PLANS[key] = planned
    elif planned.copied:
        q, k, v = plan.readable(q), plan.readable(k), plan.readable(v)
    out, lse = _outputs(q, v, cu_seqlens_q)
    if planned.launch.programs > 0:
        tensors = (q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
        if planned.wide:
            _KERNELS.launch_uncached(planned.launch, tensors)
        else:
            _KERNELS.launch(device, planned.launch, tensors)
    return out, lse


def _outputs(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    out, lse = ops.empty_outputs(q, v)
    if cu_seqlens is not None:  # rows outside all segments see no keys; no program visits them
        out.zero_()
        lse.fill_(-math.inf)
    return out, lse


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    options: dict[str, Any],
) -> None:
    check_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, dtypes=TRITON_DTYPES, **options)
    plan.check_device(q, "forward")


def _score_scales(scale: float, softcap: float) -> tuple[str, float, float, float]:
    """(SCORES, inner_scale, cap, outer_scale) of the kernel, with base-2 exponents folded in."""
    if softcap > 0:
        return plan.cap_scales(scale, softcap)
    if scale > 0:
        return "raw", 1.0, 0.0, scale * plan.LOG2E
    sign = -1.0 if scale < 0 else 0.0 * scale  # the row max differs from the max of q k
    return "scaled", sign, 0.0, -scale * plan.LOG2E if scale < 0 else 1.0


def _fake(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return ops.fake_forward(*tensors, dtypes=TRITON_DTYPES, **options)


OP = torch.ops.attnscope_triton.forward.default
_LIBRARY = torch.library.Library("attnscope_triton", "IMPL")
forward.register_fake(_fake)
_AUTOGRAD_KEYS = ("AutogradCUDA", "AutogradCPU", "AutogradMeta")
ops.register(OP, _LIBRARY, *_AUTOGRAD_KEYS)
ops.register_backward(backward.OP, OP, _LIBRARY, *_AUTOGRAD_KEYS)
if not INTERPRETED:
    _LIBRARY.impl(OP, _forward_cuda, "CUDA")
