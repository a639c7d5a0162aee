"""Query rows and the keys that they see, in blocks whose scores fit into memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Scores in memory at a time: 0.5 GB of fp64 on a GPU, 32 MB (about a last-level cache) on a CPU.
SCORES = {"cuda": 1 << 26, "cpu": 1 << 22}


@dataclass(frozen=True)
class Options:
    left: int
    right: int
    scale: float
    softcap: float


class Block(NamedTuple):
    """Query rows of some pairs (a pair is one head of one batch entry, counted batch first)."""

    pair: Tensor
    rows: slice
    keys: slice
    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor | None


def segments(cu_seqlens: Tensor, total: int) -> list[tuple[int, int]]:
    """(begin, end) of every packed sequence, clamped to [0, total] with begin <= end."""
    bounds = cu_seqlens.tolist()
    begins = [min(max(bound, 0), total) for bound in bounds[:-1]]
    return [
        (begin, max(begin, min(end, total))) for begin, end in zip(begins, bounds[1:], strict=True)
    ]


def make_options(
    q: Tensor, causal: bool, window: tuple[int, int], scale: float | None, softcap: float
) -> Options:
    left, right = window
    if left < -1 or right < -1:
        raise ValueError(f"window must be -1 (unbounded) or more on either side, got {window}")
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    return Options(left, 0 if causal else right, scale, softcap)


def row_intervals(rows: Tensor, seqlen_q: int, seqlen_k: int, options: Options) -> Tensor:
    """The first key and the key past the last that each row sees: int64 [2, R], where `rows` is."""
    diagonal = rows + (seqlen_k - seqlen_q)
    unbounded = torch.zeros_like(rows)
    first = diagonal - options.left if options.left >= 0 else unbounded
    last = diagonal + options.right + 1 if options.right >= 0 else unbounded + seqlen_k
    return torch.stack((first, last)).clamp_(0, seqlen_k)


def live_rows_and_keys(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
) -> tuple[Tensor, Tensor]:
    """Which rows see a key, and which keys a row sees, in any head: bool [rows] and [keys]."""
    options = make_options(q, causal, window, None, 0.0)
    of_q, of_k = [(0, q.shape[-3])], [(0, k.shape[-3])]
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        of_q, of_k = segments(cu_seqlens_q, q.shape[0]), segments(cu_seqlens_k, k.shape[0])
    rows, keys = (torch.zeros(t.shape[-3], dtype=torch.bool) for t in (q, k))
    for (q0, q1), (k0, k1) in zip(of_q, of_k, strict=True):
        first, last = row_intervals(torch.arange(q1 - q0), q1 - q0, k1 - k0, options)
        live = first < last
        rows[q0:q1] = live
        if bool(live.any()):  # intervals of neighbouring rows overlap or adjoin
            keys[k0 + int(first[live].min()) : k0 + int(last[live].max())] = True
    return rows.to(q.device), keys.to(q.device)


def score_blocks(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, options: Options, dout: Tensor | None = None
) -> Iterator[Block]:
    """Blocks whose scores fit the budget; `dout` if gradients are computed."""
    pairs, seqlen_k = q.shape[0] * q.shape[2], k.shape[1]
    group = q.shape[2] // k.shape[2]
    budget = SCORES["cuda" if q.is_cuda else "cpu"] // max(seqlen_k, 1)
    row_step = max(1, min(rows.numel(), budget))
    pair_step = max(1, budget // max(row_step, q.shape[3] + v.shape[3]))
    for pair in torch.arange(pairs, device=q.device).split(pair_step):
        b, h = pair // q.shape[2], pair % q.shape[2]
        key_pair, value_pair = k[b, :, h // group], v[b, :, h // group]
        # 0 * NaN: with one row to a block the keys are the visible ones and nothing else.
        factors = [value_pair]
        if dout is not None:
            factors += [key_pair, q[b, :, h], dout[b, :, h]]
        step = row_step if all(bool(torch.isfinite(t).all()) for t in factors) else 1
        for start in range(0, rows.numel(), step):
            at = slice(start, start + step)
            first, last = row_intervals(rows[at], q.shape[1], seqlen_k, options)
            lo, hi = int(first.min()), int(last.max())
            visible = None
            if bool((first > lo).any()) or bool((last < hi).any()):
                keys = torch.arange(lo, hi, device=q.device)
                first, last = torch.stack((first, last)).to(q.device).unsqueeze(-1)
                visible = (keys >= first) & (keys < last)
            q_block = q[b[:, None], rows[at].to(q.device), h[:, None]]
            seen = slice(lo, hi)
            yield Block(pair, at, seen, q_block, key_pair[:, seen], value_pair[:, seen], visible)
