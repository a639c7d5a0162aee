"""Calls for compute-sanitizer: `python sanitized_calls.py IMPL PART SHARE`.

Inputs are copied from the host, because initcheck sees a copy's writes and racecheck fails in some
kernels of torch.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from attnscope import attention, attention_varlen
from attnscope.inputs import Case
from attnscope.stress.cases import PACKED, case

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "left": {"window": (20, -1)},
    "band": {"window": (30, 40)},
    "causal-softcap": {"causal": True, "softcap": 20.0},
}
# Each row of the Hopper tile table (the long row only without the causal mask), with more than two
# tiles per thread block on 132 SMs, so that slots of the tile ring are reused. The row that divides
# keys serves calls of fewer tiles: those are among `shapes`.
# (batch, queries, keys, heads, heads of keys, head dim, head dim of V)
REUSE = (
    (56, 100, 130, 10, 10, 64, 64), (27, 200, 260, 10, 5, 64, 64), (80, 64, 130, 10, 10, 64, 64),
    (6, 1025, 200, 10, 5, 64, 64), (27, 130, 260, 10, 5, 80, 80), (27, 130, 260, 10, 5, 96, 96),
    (14, 384, 330, 10, 5, 128, 128), (54, 64, 200, 10, 10, 128, 128),
    (27, 100, 330, 10, 5, 128, 128), (27, 130, 260, 10, 5, 192, 128),
    (27, 100, 260, 10, 5, 192, 192), (27, 100, 200, 10, 5, 256, 256),
)  # fmt: skip


def shapes() -> Iterator[Case]:
    """Odd lengths, packed batches and grouped heads, under every mask."""
    for head_dim in (40, 64, 80, 96, 128, 192, 256):
        for mask in MASKS.values():
            for seqlen_q, seqlen_k in ((1, 1), (65, 130), (257, 130), (513, 520)):
                yield case(1, seqlen_q, seqlen_k, 2, 1, head_dim, **mask)
            yield case(heads_q=2, heads_kv=1, head_dim=head_dim, seqlens=PACKED[0], **mask)
        yield case(40, 9, 130, 16, 2, head_dim, causal=True)
        yield case(heads_kv=1, head_dim=head_dim, seqlens=((3, 3), (7, 7)) * 20, causal=True)
        yield case(1, 65, 130, 2, 1, head_dim, "float16", causal=True)
    yield case(1, 65, 16384, 70, 7)  # 128 keys a step
    yield case(150, 40, 70, 8, 2, causal=True)  # three units of grouped heads in a tile
    for mask in MASKS.values():  # V narrower than K
        yield case(1, 257, 130, 2, 1, 192, head_dim_v=128, **mask)
    for mask in MASKS.values():  # two heads in a tile, and an odd one
        yield case(50, 100, 130, 5, 5, 64, **mask)


def of_reuse(shape: tuple[int, ...], mask: str) -> Case:
    return case(*shape[:-1], head_dim_v=shape[-1], **MASKS[mask])


def reuse() -> Iterator[Case]:
    """Reuse slots of the tile ring, without a mask and under masks that hide blocks."""
    for shape in REUSE:
        for name in ("full", "causal", "band"):
            yield of_reuse(shape, name)


def values() -> Iterator[Case]:
    """NaN in V: the rare path, which recomputes rows."""
    for head_dim in (64, 80, 96, 128, 256):
        for name in ("causal", "band"):
            yield case(4, 300, 300, 4, 2, head_dim, **MASKS[name])
            yield case(heads_q=2, heads_kv=1, head_dim=head_dim, seqlens=PACKED[0], **MASKS[name])
    yield case(50, 100, 130, 5, 5, 64, causal=True)


def handover() -> Iterator[Case]:
    """Many tiles with equal numbers of blocks, in which racecheck must find the planted race.

    The producer runs less than a tile ahead of the consumers, and all tiles have the same blocks.
    So a scheduler that does not wait overwrites nothing that is still needed, and no run hangs.
    """
    yield case(14, 384, 1024, 10, 5, 128)


def graph() -> Iterator[Case]:
    """A call in a CUDA graph, which has its own tile counter."""
    for shape in (REUSE[0], REUSE[3], REUSE[6], REUSE[11]):
        for name in ("full", "causal"):
            yield of_reuse(shape, name)
    yield case(heads_q=2, heads_kv=1, seqlens=PACKED[0], causal=True)


# Racecheck is slow in products: these are smaller than PACKED.
SEGMENTS = ((65, 65), (1, 130), (0, 9), (200, 130), (7, 0), (130, 200))


def gradients() -> Iterator[Case]:
    """Backward calls: odd lengths, packed batches and grouped heads, under every mask."""
    for head_dim in (40, 64, 96, 128, 192, 256):
        for mask in MASKS.values():
            yield case(1, 65, 130, 2, 1, head_dim, **mask)
            yield case(1, 200, 300, 2, 1, head_dim, **mask)
            yield case(heads_q=2, heads_kv=1, head_dim=head_dim, seqlens=SEGMENTS, **mask)
        yield case(1, 1, 1, 2, 1, head_dim)
        yield case(heads_kv=1, head_dim=head_dim, seqlens=((3, 3), (7, 7)) * 20, causal=True)
        yield case(1, 65, 130, 2, 1, head_dim, "float16", causal=True)
    yield case(1, 2050, 200, 2, 1)  # blocks of 80 queries
    yield case(heads_q=2, heads_kv=1, seqlens=((2050, 70), (1, 130)))
    for mask in MASKS.values():  # tiles of 192 keys
        yield case(6, 65, 150, 20, 20, 64, **mask)
        yield case(heads_q=40, heads_kv=40, head_dim=64, seqlens=SEGMENTS, **mask)
    for name in ("full", "left"):  # blocks of 128 queries
        yield case(2, 500, 500, 30, 15, 64, **MASKS[name])
    yield case(8, 129, 200, 12, 3, 64)
    for heads, head_dim in ((15, 64), (10, 128)):  # a dQ that is not zeroed before
        yield case(10, 65, 200, heads, heads, head_dim)


def turns() -> Iterator[Case]:
    """Deterministic backward calls: key blocks add in turns, more of them than run at once."""
    for head_dim in (64, 96, 128, 192, 256):
        for name in ("full", "causal", "band"):
            yield case(1, 200, 700, 4, 2, head_dim, **MASKS[name])
            yield case(heads_q=2, heads_kv=1, head_dim=head_dim, seqlens=SEGMENTS, **MASKS[name])
        yield case(8, 130, 400, 10, 10, head_dim, causal=True)
    yield case(1, 200, 700, 4, 2, 64, causal=True, softcap=20.0)
    yield case(1, 2050, 300, 2, 1)  # blocks of 80 queries
    yield case(2, 500, 500, 30, 15, 64)  # blocks of 128 queries
    lengths = ((200, 1300), (65, 130), (1, 9))  # turns that ascend
    for head_dim in (64, 128, 256):
        yield case(heads_q=10, heads_kv=10, head_dim=head_dim, seqlens=lengths, causal=True)
    yield case(1, 200, 400, 7, 1, causal=True)  # parts of query heads


VARIANTS = {"cuda": 0, "cuda-sm80": 80}
PARTS = {part.__name__: part for part in (shapes, reuse, values, handover, graph, gradients, turns)}
BACKWARD = ("gradients", "turns")
SHARES = {part: 8 if part in BACKWARD else 1 for part in PARTS}  # processes for a part's calls


POOL = 1 << 24  # elements of the largest tensor


class Inputs:
    """Tensors of a case on the device, from a pool of random numbers on the host."""

    def __init__(self) -> None:
        self.pool = torch.randn(POOL).bfloat16()

    def tensor(self, c: Case, not_finite: bool, *shape: int) -> torch.Tensor:
        x = self.pool[: math.prod(shape)].reshape(shape).clone()
        if not_finite:  # the first and the last key too
            rows = x.view(-1, *shape[-2:])
            rows[:: max(1, len(rows) // 7)] = float("nan")
            rows[-1] = float("inf")
        return x.to(getattr(torch, c.dtype)).cuda()

    def of_backward(
        self, c: Case, q: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """dout, out, lse and dlse of a call. Any numbers: the values are not checked."""
        *rows, heads, _ = q.shape
        dout, out = (self.tensor(c, False, *q.shape) for _ in range(2))
        lse = torch.full((*rows[:-1], heads, rows[-1]), 3.0).cuda()
        return dout, out, lse, lse.clone()

    def of(self, c: Case, not_finite: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """q, k, v and, for a packed batch, the cumulative lengths."""
        rows_q, rows_k, bounds = (c.batch, c.seqlen_q), (c.batch, c.seqlen_k), []
        if c.seqlens is not None:
            lengths = torch.tensor([(0, 0), *c.seqlens], dtype=torch.int32).cumsum(0).int()
            bounds = [lengths[:, i].contiguous().cuda() for i in range(2)]
            # Rows after the last sequence belong to no sequence.
            rows_q, rows_k = (int(lengths[-1, 0]) + 5,), (int(lengths[-1, 1]) + 3,)
        q = self.tensor(c, False, *rows_q, c.heads_q, c.head_dim)
        k = self.tensor(c, False, *rows_k, c.heads_kv, c.head_dim)
        v = self.tensor(c, not_finite, *rows_k, c.heads_kv, c.head_dim_v)
        return [q, k, v], bounds


def call(c: Case, tensors: list[torch.Tensor], bounds: list[torch.Tensor], impl: str) -> None:
    if bounds:
        attention_varlen(*tensors, *bounds, c.seqlen_q, c.seqlen_k, impl=impl, **c.options)
    else:
        attention(*tensors, impl=impl, **c.options)


def call_backward(
    c: Case,
    tensors: list[torch.Tensor],
    bounds: list[torch.Tensor],
    impl: str,
    given: tuple[torch.Tensor, ...],
    deterministic: bool,
) -> None:
    dout, out, lse, dlse = given
    torch.ops.attnscope.backward(
        dout, *tensors, out, lse, dlse, *(bounds or (None, None)), scale=c.head_dim**-0.5,
        max_seqlen_q=c.seqlen_q if bounds else 0, max_seqlen_k=c.seqlen_k if bounds else 0,
        causal=c.causal, window_left=c.window[0], window_right=c.window[1], softcap=c.softcap,
        variant=VARIANTS[impl], deterministic=deterministic,
    )  # fmt: skip


def main(impl: str, part: str, share: int) -> None:
    begin, count, inputs = time.monotonic(), 0, Inputs()
    for c in islice(PARTS[part](), share, None, SHARES[part]):
        tensors, bounds = inputs.of(c, part == "values")
        if part in BACKWARD:
            given = inputs.of_backward(c, tensors[0])
            call_backward(c, tensors, bounds, impl, given, part == "turns")
        else:
            call(c, tensors, bounds, impl)
        if part == "graph":
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                call(c, tensors, bounds, impl)
            captured.replay()
            captured.replay()
        torch.cuda.synchronize()
        count += 1
    print(f"{count} calls done in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
