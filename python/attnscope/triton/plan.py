"""What the Triton launchers share: tiles, launches, and the layouts that the kernels read."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.fx.experimental.symbolic_shapes import guard_or_false

from attnscope import ranges
from attnscope.triton.interpreter import INTERPRETED

LOG2E = math.log2(math.e)
PADDED_DIMS = (16, 32, 64, 128, 256)


class Tile(NamedTuple):
    """One program's work and resources: query rows, keys, warps, loads in flight.

    The smaller side is what a step of the loop takes in.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class Launch(NamedTuple):
    """The kernel's arguments besides tensors; depends on shapes, strides and options."""

    programs: int
    numbers: tuple[Any, ...]  # integers, then floats
    constants: dict[str, Any]  # the kernel's constexprs
    options: dict[str, int]  # num_warps and num_stages

    @property
    def wide(self) -> bool:
        """Whether some integer takes 64 bits."""
        return any(n >= 2**31 for n in self.numbers if not isinstance(n, float))


def padded_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """What the kernels pad two head dims to."""
    padded, padded_v = (next(w for w in PADDED_DIMS if d <= w) for d in (head_dim, head_dim_v))
    return padded, padded_v


@cache
def is_large(device: torch.device) -> bool:
    """Whether programs get the 227 KB of shared memory of sm_90 and sm_100, not about 100 KB."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


def check_programs(programs: int, name: str, rows: int) -> int:
    """The number of programs of a launch. Raises ValueError where it exceeds a grid's limit."""
    if guard_or_false(programs >= 2**31):
        raise ValueError(
            f"{name} must have < 2^31 tiles of {rows} rows of a head, got {programs}. Split "
            "the batch over several calls"
        )
    return programs


def lengths(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, max_seqlen_q: int, max_seqlen_k: int
) -> tuple[int, int, int]:
    """(batch, longest query sequence, longest key sequence) of a dense or packed call."""
    rows_q, rows_k = q.shape[-3], k.shape[-3]
    if cu_seqlens_q is None:
        return q.shape[0], rows_q, rows_k
    longest_q = torch.sym_min(max_seqlen_q, rows_q)
    longest_k = torch.sym_min(max_seqlen_k, rows_k)
    return cu_seqlens_q.shape[0] - 1, longest_q, longest_k


def mask_bounds(
    seqlen_q: int, seqlen_k: int, causal: bool, window_left: int, window_right: int
) -> tuple[int, int]:
    """(left, right) of the window, -1 where it is unbounded.

    A bound that reaches every key becomes unbounded; sums in the kernel then stay in 32 bits.
    """
    left, right = (
        -1 if guard_or_false(bound >= seqlen_q + seqlen_k) else bound
        for bound in (window_left, 0 if causal else window_right)
    )
    return left, right


def readable(t: Tensor) -> Tensor:
    """The tensor, or a copy where its last dimension is strided or its rows are not aligned."""
    *strides, last = t.stride()
    aligned = all(
        stride % 8 == 0 or size < 2 for stride, size in zip(strides, t.shape, strict=False)
    )
    if aligned and (last == 1 or t.shape[-1] < 2):
        return t
    return contiguous(t)


def contiguous(t: Tensor) -> Tensor:
    """The tensor, or a contiguous copy."""
    if t.is_contiguous() or is_fake(t):
        return t.contiguous()
    with ranges.nvtx_range(ranges.COPY):
        return t.contiguous()


def unit_strides(t: Tensor) -> tuple[int, int, int]:
    """(batch, row, head) in units of 8 elements; those of dimensions of size 1 do not matter."""
    *batch, row, head, _ = t.stride()
    return (batch[0] // 8 if batch else 0), row // 8, head // 8


def cap_scales(scale: float, softcap: float) -> tuple[str, float, float, float]:
    """(SCORES, inner_scale, cap, outer_scale) of the kernels for a softcap, in base 2."""
    if softcap >= 256:  # as kWideCap in csrc/attn/score_scales.h
        return "capped wide", scale, softcap, LOG2E
    return "capped", 2 * LOG2E * scale / softcap, softcap * LOG2E, 1.0


def check_device(t: Tensor, op: str) -> None:
    """Raise ValueError for a tensor on the CPU, unless kernels are interpreted."""
    if t.device.type == "cpu" and not INTERPRETED:
        raise ValueError(
            f"q must be on CUDA for attnscope_triton::{op}, got cpu. Set TRITON_INTERPRET=1 in "
            "the environment before the first import to interpret the kernel on the CPU"
        )
