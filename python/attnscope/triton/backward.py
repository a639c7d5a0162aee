"""attnscope_triton::backward: the schema and the meaning of attnscope::backward, in Triton.

Three launches: the statistics of each row, then dQ, then dK and dV. No atomics, so every call is
deterministic. Takes what attnscope_triton::forward takes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from attnscope import ops, ranges
from attnscope.argument_checks import TRITON_DTYPES, check_backward
from attnscope.schemas import TRITON_BACKWARD
from attnscope.triton import plan
from attnscope.triton.backward_kernel import STATS_BLOCK, backward_dkdv, backward_dq, backward_stats
from attnscope.triton.interpreter import INTERPRETED
from attnscope.triton.launcher import KernelCache
from attnscope.triton.plan import Launch, Tile

Gradients = tuple[Tensor, Tensor, Tensor]

# By the larger head dim, padded. dQ keeps block_m rows and takes block_n keys in a step.
DQ_TILES = {
    16: Tile(128, 64, 4, 3),
    32: Tile(128, 64, 4, 3),
    64: Tile(128, 64, 8, 3),
    128: Tile(128, 64, 8, 3),
    256: Tile(64, 64, 8, 2),
}
# dK and dV keep block_n keys and take block_m rows in a step.
DKDV_TILES = {
    16: Tile(64, 128, 8, 3),
    32: Tile(64, 128, 8, 3),
    64: Tile(64, 128, 8, 3),
    128: Tile(64, 128, 8, 3),
    256: Tile(32, 64, 8, 3),
}
# For cards that give a program about 100 KB of shared memory, not the 227 KB of sm_90 and sm_100.
SMALL_DQ_TILES = DQ_TILES | {128: Tile(64, 64, 8, 2), 256: Tile(64, 32, 8, 1)}
SMALL_DKDV_TILES = DKDV_TILES | {
    64: Tile(32, 128, 8, 3),
    128: Tile(32, 64, 8, 2),
    256: Tile(32, 32, 8, 1),
}
_PADDED_ROWS = STATS_BLOCK.value


def tiles(head_dim: int, head_dim_v: int, large: bool) -> tuple[Tile, Tile]:
    """The tiles for a pair of head dims on a card: of dQ, and of dK and dV."""
    width = max(plan.padded_dims(head_dim, head_dim_v))
    of_dq, of_dkdv = (DQ_TILES, DKDV_TILES) if large else (SMALL_DQ_TILES, SMALL_DKDV_TILES)
    return of_dq[width], of_dkdv[width]


class Launches(NamedTuple):
    """The launches of a call, and the floats that their workspace has."""

    stats: Launch
    dq: Launch
    dkdv: Launch
    workspace: int


def plan_launches(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    has_dlse: bool = False,
    scale: float,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
) -> Launches:
    """The launches for tensors that `_readable` returned.

    Raises ValueError for too many programs.
    """
    (*_, rows_q, heads_q, head_dim), (*_, rows_k, heads_kv, head_dim_v) = q.shape, v.shape
    batch, seqlen_q, seqlen_k = plan.lengths(q, k, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    packed = cu_seqlens_q is not None
    stats_rows = -(-rows_q // _PADDED_ROWS) * _PADDED_ROWS + (batch * _PADDED_ROWS if packed else 0)
    stats_size = heads_q * stats_rows * (1 if packed else batch)

    padded, padded_v = plan.padded_dims(head_dim, head_dim_v)
    block = 32 if padded_v > 128 else 64
    blocks = -(-seqlen_q // _PADDED_ROWS) * (_PADDED_ROWS // block)
    stats = Launch(
        plan.check_programs(batch * heads_q * blocks, "q", block),
        (*plan.unit_strides(dout), rows_q, seqlen_q, heads_q, blocks, stats_rows, stats_size),
        dict(
            PACKED=packed, HAS_DLSE=has_dlse, DV=int(head_dim_v), BLOCK_M=block, BLOCK_DV=padded_v
        ),
        dict(num_warps=4, num_stages=1),
    )

    left, right = plan.mask_bounds(seqlen_q, seqlen_k, causal, window_left, window_right)
    raw = ("raw", 1.0, 0.0, scale * plan.LOG2E)
    scores, *factors = plan.cap_scales(scale, softcap) if softcap > 0 else raw
    strides = [stride for t in (q, k, v, dout) for stride in plan.unit_strides(t)]

    def launch(tile: Tile, heads: int, blocks: int, name: str, rows: int) -> Launch:
        numbers = (
            *strides, rows_q, rows_k, seqlen_q, seqlen_k, heads_q, heads_q // heads_kv, blocks,
            stats_rows, stats_size, left, right, float(scale), *factors,
        )  # fmt: skip
        constants = dict(
            PACKED=packed, HAS_LEFT=bool(left != -1), HAS_RIGHT=bool(right != -1), SCORES=scores,
            D=int(head_dim), DV=int(head_dim_v), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            BLOCK_D=padded, BLOCK_DV=padded_v,
        )  # fmt: skip
        programs = plan.check_programs(batch * heads * blocks, name, rows)
        resources = dict(num_warps=tile.num_warps, num_stages=tile.num_stages)
        return Launch(programs, numbers, constants, resources)

    of_dq, of_dkdv = tiles(head_dim, head_dim_v, plan.is_large(q.device))
    dq = launch(of_dq, heads_q, -(-seqlen_q // of_dq.block_m), "q", of_dq.block_m)
    dkdv = launch(of_dkdv, heads_kv, -(-seqlen_k // of_dkdv.block_n), "k", of_dkdv.block_n)
    # backward_dkdv loads the statistics of a step that it does not take: those of another head.
    return Launches(stats, dq, dkdv, 2 * stats_size + stats_rows + 2 * _PADDED_ROWS)


# An interpreted kernel cannot be traced, so there the op is opaque to the compiler.
_register = torch.library.custom_op if INTERPRETED else torch.library.triton_op


@_register("attnscope_triton::backward", mutates_args=(), schema=TRITON_BACKWARD)
def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None = None,
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
    deterministic: bool = False,
) -> Gradients:
    """As attnscope::backward (csrc/binding/library.cpp), traced or interpreted.

    Raises as attnscope.argument_checks.check_backward.
    """
    options: dict[str, Any] = dict(
        scale=scale, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=causal,
        window_left=window_left, window_right=window_right, softcap=softcap,
    )  # fmt: skip
    cu_seqlens = (cu_seqlens_q, cu_seqlens_k)
    _check((dout, q, k, v, out, lse, dlse, *cu_seqlens), options)
    dtype = q.dtype
    if INTERPRETED and dtype == torch.bfloat16:  # the interpreter multiplies its bit patterns
        dout, q, k, v, out = (t.float() for t in (dout, q, k, v, out))
    gradients = _gradients(q, k, v, cu_seqlens_q)
    tensors = _readable((dout, q, k, v, out, lse, dlse))
    options |= dict(cu_seqlens_q=cu_seqlens_q, has_dlse=dlse is not None)
    launches = plan_launches(*tensors[:4], **options)
    stats = q.new_empty(launches.workspace, dtype=torch.float32)
    calls = _calls(launches, tensors, cu_seqlens, stats, gradients)
    kernels = (backward_stats, backward_dq, backward_dkdv)
    for kernel, (launch, arguments) in zip(kernels, calls, strict=True):
        if guard_or_false(launch.programs == 0):
            continue
        launcher = kernel if INTERPRETED else torch.library.wrap_triton(kernel)
        launcher[(launch.programs,)](
            *arguments, *launch.numbers, **launch.constants, **launch.options
        )
    dq, dk, dv = gradients
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


class _Plan(NamedTuple):
    """A checked call: a later one with the same key runs the same launches without new checks."""

    copied: bool  # some input is copied first
    launches: Launches
    wide: tuple[bool, bool, bool]  # for each launch: some integer takes 64 bits


_MAX_PLANS = 4096
_PLANS: dict[Any, _Plan] = {}
_KERNELS = tuple(KernelCache(kernel) for kernel in (backward_stats, backward_dq, backward_dkdv))


def _backward_cuda(*tensors: Tensor | None, **options: Any) -> Gradients:
    """The op on real CUDA tensors: the Python work of a call is done once for each key."""
    with ranges.nvtx_range(ranges.TRITON_BACKWARD):
        tensors += (None,) * (9 - len(tensors))
        options.pop("deterministic", None)
        _, q, *_ = tensors
        assert q is not None
        device = q.get_device()
        if device == torch.cuda.current_device():
            return _launch(device, tensors, options)
        with torch.cuda.device(device):
            return _launch(device, tensors, options)


def _launch(device: int, given: tuple[Any, ...], options: dict[str, Any]) -> Gradients:
    key = (
        *((t.shape, t.stride(), t.dtype, t.device) for t in given if t is not None),
        *(t is None for t in given[6:]),
        *options.items(),
    )
    planned = _PLANS.get(key)
    tensors, cu_seqlens_q, cu_seqlens_k = given[:7], *given[7:]
    if planned is None:
        _check(given, options)
        tensors = _readable(tensors)
        packing = dict(cu_seqlens_q=cu_seqlens_q, has_dlse=tensors[6] is not None)
        launches = plan_launches(*tensors[:4], **(options | packing))
        copied = any(a is not b for a, b in zip(tensors, given[:7], strict=True))
        is_wide = (launches.stats.wide, launches.dq.wide, launches.dkdv.wide)
        planned = _Plan(copied, launches, is_wide)
        if len(_PLANS) >= _MAX_PLANS:
            _PLANS.clear()
        _PLANS[key] = planned
    elif planned.copied:
        tensors = _readable(tensors)
    launches = planned.launches
    q, k, v = tensors[1:4]
    gradients = _gradients(q, k, v, cu_seqlens_q)
    stats = q.new_empty(launches.workspace, dtype=torch.float32)
    calls = _calls(launches, tensors, (cu_seqlens_q, cu_seqlens_k), stats, gradients)
    for kernel, wide, (launch, arguments) in zip(_KERNELS, planned.wide, calls, strict=True):
        if launch.programs == 0:
            continue
        if wide:
            kernel.launch_uncached(launch, arguments)
        else:
            kernel.launch(device, launch, arguments)
    return gradients


def _calls(
    launches: Launches,
    tensors: Any,
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    stats: Tensor,
    gradients: Gradients,
) -> tuple[tuple[Launch, tuple[Tensor | None, ...]], ...]:
    """Each launch and its kernel's tensors, in the order of the launches."""
    dout, q, k, v, out, lse, dlse = tensors
    dq, dk, dv = gradients
    return (
        (launches.stats, (out, dout, lse, dlse, stats, cu_seqlens[0])),
        (launches.dq, (q, k, v, dout, stats, dq, *cu_seqlens)),
        (launches.dkdv, (q, k, v, dout, stats, dk, dv, *cu_seqlens)),
    )


def _gradients(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Gradients:
    """Memory for dq, dk and dv: zeros in packed batches, some of whose rows no program visits."""
    gradients = ops.empty_gradients(q, k, v)
    if cu_seqlens is not None:
        for gradient in gradients:
            gradient.zero_()
    return gradients


def _readable(tensors: Any) -> Any:
    """dout, q, k, v, out, lse and dlse in layouts that the kernels read."""
    dout, q, k, v, *rest = tensors
    copied = [t if t is None else plan.contiguous(t) for t in rest]
    return plan.readable(dout), *(plan.readable(t) for t in (q, k, v)), *copied


def _check(tensors: tuple[Any, ...], options: dict[str, Any]) -> None:
    check_backward(*tensors, dtypes=TRITON_DTYPES, **options)
    plan.check_device(tensors[1], "backward")


def _fake(*tensors: Any, **options: Any) -> Gradients:
    return ops.fake_backward(*tensors, dtypes=TRITON_DTYPES, **options)


# forward.py registers autograd for both ops.
OP = torch.ops.attnscope_triton.backward.default
_LIBRARY = torch.library.Library("attnscope_triton", "IMPL")
backward.register_fake(_fake)
if not INTERPRETED:
    _LIBRARY.impl(OP, _backward_cuda, "CUDA")
