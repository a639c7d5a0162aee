"""The backward kernels in Triton: statistics of each row, then dQ, then dK and dV.

Problem   the gradients of forward_kernel.py: same masks, packing and head dims. P is computed again
          from the scores and lse. No atomics: each gradient is written once, by one program.
Work      backward_dq: one program per BLOCK_M query rows of a head, a loop over their keys.
          backward_dkdv: one program per BLOCK_N keys of a key head, a loop over the query rows that
          see them, for each query head of the group. Both compute S and dP: 7 products, not 5.
Loop      one loop over all blocks; a branch masks those where a mask or the sequence ends. The
          pipeline never drains, and fewer registers spill than with a loop per kind of block.
          fp32 sums; P and dS in the inputs' dtype for the tensor cores.
NaN       rows that no pair of the tile uses are read as 0, and masked pairs are selected to 0. A
          row that a pair of the tile uses can spread NaN to the whole tile.
Layout    pointers, strides and names as in forward_kernel.py.
Tests     tests/ops/test_triton_backward.py. Algorithm: Dao 2023 (arXiv:2307.08691).
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from attnscope.triton.forward_kernel import cap_wide, sequence


def _symbol(kind: str) -> Any:
    def symbol(specialization: Any) -> str:
        constants, dtype = specialization.constants, specialization.signature["q"].lstrip("*")
        mask = "causal_or_right" if constants["HAS_RIGHT"] else "full"
        return (
            f"attnscope_triton_backward_{kind}_{dtype}_d{constants['D']}_dv{constants['DV']}_{mask}"
            f"{'_left' if constants['HAS_LEFT'] else ''}{'_packed' if constants['PACKED'] else ''}"
        )

    return symbol


def _stats_symbol(specialization: Any) -> str:
    dtype = specialization.signature["out"].lstrip("*")
    return f"attnscope_triton_backward_stats_{dtype}_dv{specialization.constants['DV']}"


# Rows of stats of a sequence: padded to a multiple, so that blocks are aligned and never end early.
STATS_BLOCK = tl.constexpr(128)


@triton.jit
def _stats_row(i_b, i_h, first_q, heads_q, stats_rows, PACKED: tl.constexpr):
    """Where a sequence's statistics of a head begin in each of the two planes of stats."""
    if PACKED:
        first = (first_q + i_b.to(tl.int64) * STATS_BLOCK) // STATS_BLOCK * STATS_BLOCK
        return i_h.to(tl.int64) * stats_rows + first
    return (i_b.to(tl.int64) * heads_q + i_h) * stats_rows


STATS_INTEGERS = """
    do_batch do_row do_head total_q seqlen_q heads_q blocks stats_rows stats_size
""".split()


@triton.jit(repr=_stats_symbol, do_not_specialize=STATS_INTEGERS)
def backward_stats(
    out, dout, lse, dlse, stats, cu_seqlens_q,
    do_batch, do_row, do_head, total_q, seqlen_q, heads_q, blocks, stats_rows, stats_size,
    PACKED: tl.constexpr, HAS_DLSE: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """stats[0] = lse log2(e), or +inf for rows without keys; stats[1] = out . dout - dlse.

    The rows that pad a sequence have +inf, 0. BLOCK_M divides STATS_BLOCK.
    """
    stats_rows = stats_rows // STATS_BLOCK * STATS_BLOCK
    i_h, i_bm = tl.program_id(0) % heads_q, tl.program_id(0) // heads_q
    i_b, i_m = i_bm // blocks, i_bm % blocks
    first_q, len_q = sequence(cu_seqlens_q, i_b, seqlen_q, total_q, PACKED)
    if i_m * BLOCK_M >= tl.cdiv(len_q, STATS_BLOCK) * STATS_BLOCK:
        return
    batch, head = i_b.to(tl.int64), i_h.to(tl.int64)
    o_m, o_dv = i_m * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_DV)
    in_tensor = o_m < len_q
    mask = in_tensor[:, None] & (o_dv[None, :] < DV)
    if PACKED:
        row, at = first_q + o_m, head * total_q + first_q + o_m
    else:
        row, at = batch * seqlen_q + o_m, (batch * heads_q + head) * seqlen_q + o_m
    p_o = out + (row[:, None] * heads_q + head) * DV + o_dv[None, :]
    p_do = dout + batch * do_batch * 8 + head * do_head * 8
    p_do += (first_q + o_m)[:, None] * (tl.cast(do_row, tl.int64) * 8) + o_dv[None, :]
    b_o = tl.load(p_o, mask=mask, other=0.0).to(tl.float32)
    b_do = tl.load(p_do, mask=mask, other=0.0).to(tl.float32)
    b_delta = tl.sum(b_o * b_do, 1)
    if HAS_DLSE:
        b_delta -= tl.load(dlse + at, mask=in_tensor, other=0.0)
    b_lse = tl.load(lse + at, mask=in_tensor, other=float("-inf"))
    b_lse = tl.where(b_lse == float("-inf"), float("inf"), b_lse * 1.4426950408889634)
    p_stats = stats + _stats_row(i_b, i_h, first_q, heads_q, stats_rows, PACKED) + o_m
    tl.store(p_stats, b_lse)
    tl.store(p_stats + stats_size, b_delta)


@triton.jit
def _probabilities(b_s, b_lse, inner_scale, cap, outer_scale, SCORES: tl.constexpr):
    """(P, d capped score / d score) from raw scores. A row whose lse is +inf gets P = 0."""
    if SCORES == "raw":
        b_t, b_slope = b_s * outer_scale, 1.0
    elif SCORES == "capped":  # tanh(x) = 1 - 2 r, r = 1 / (e^2x + 1); its derivative is 4 r (1 - r)
        b_r = 1 / (tl.exp2(b_s * inner_scale) + 1)
        b_t, b_slope = cap - 2 * cap * b_r, 4 * b_r * (1 - b_r)
    else:
        b_t = cap_wide(b_s * inner_scale, cap)
        b_slope = 1 - (b_t / cap) * (b_t / cap)
        b_t *= outer_scale
    return tl.exp2(b_t - b_lse), b_slope


@triton.jit
def _load(p, stride, o_row, begin, end, o_d, HAS_BEGIN: tl.constexpr, D: tl.constexpr):
    """Rows [rows, D padded] of a tensor; 0 in the padding and outside [begin, end).

    `stride` is in units of 8 elements. Widening products of 32-bit numbers need no registers that
    live through the loop, which offsets of a tile would.
    """
    in_range = o_row < end
    if HAS_BEGIN:
        in_range = in_range & (o_row >= begin)
    mask = in_range[:, None]
    if D < o_d.shape[0]:
        mask = mask & (o_d[None, :] < D)
    p += o_row[:, None].to(tl.int64) * stride * 8 + o_d[None, :]
    return tl.load(p, mask=mask, other=0.0)


@triton.jit
def _add_keys(
    b_dq, b_q, b_do, b_lse, b_delta, k, v, k_row, v_row, o_row, begin, whole_begin, whole_end,
    key_begin, key_end, left, right, inner_scale, cap, outer_scale,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORES: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Add dS K of the key blocks from `begin` on to dq, which lacks the factor `scale`.

    o_row: the key on each row's diagonal. [key_begin, key_end): the keys that some row sees. Blocks
    outside [whole_begin, whole_end) are masked.
    """
    o_n, o_d, o_dv = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    for start in tl.range(begin, key_end, BLOCK_N):
        o_key = start + o_n
        b_k = _load(k, k_row, o_key, key_begin, key_end, o_d, HAS_LEFT, D)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        b_v = _load(v, v_row, o_key, key_begin, key_end, o_dv, HAS_LEFT, DV)
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision="ieee")
        b_p, b_slope = _probabilities(b_s, b_lse[:, None], inner_scale, cap, outer_scale, SCORES)
        b_ds = b_p * (b_dp - b_delta[:, None]) * b_slope
        if (start < whole_begin) | (start >= whole_end):
            visible = (o_key < key_end)[None, :]
            if HAS_LEFT:
                visible = visible & (o_key[None, :] >= (o_row - left)[:, None])
            if HAS_RIGHT:
                visible = visible & (o_key[None, :] <= (o_row + right)[:, None])
            b_ds = tl.where(visible, b_ds, 0.0)
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision="ieee")
    return b_dq


@triton.jit
def _add_queries(
    b_dk, b_dv, b_k, b_v, q, dout, stats, q_row, q_head, do_row, do_head, stats_rows, stats_size,
    o_key, group, steps, begin, whole_begin, whole_end, row_begin, row_end,
    left, right, inner_scale, cap, outer_scale,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORES: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Add dS^T Q and P^T dO of `steps` query blocks of each head to dk (without `scale`) and dv.

    q, dout and stats begin at the group's first head. o_key: the row on each key's diagonal.
    [row_begin, row_end): the rows that see some key. Blocks outside [whole_begin, whole_end) are
    masked. S^T and dP^T are [BLOCK_N, BLOCK_M]: P^T and dS^T are operands straight from registers.
    """
    o_m, o_d, o_dv = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    # One step ahead, in registers: copies to shared memory would take an address for each element.
    p_stats = stats + begin + o_m
    b_lse, b_delta = tl.load(p_stats), tl.load(p_stats + stats_size)
    start = begin
    for _ in tl.range(0, group * steps):
        o_row = start + o_m
        b_q = _load(q, q_row, o_row, row_begin, row_end, o_d, HAS_RIGHT, D)
        b_s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee")
        b_do = _load(dout, do_row, o_row, row_begin, row_end, o_dv, HAS_RIGHT, DV)
        b_dp = tl.dot(b_v, tl.trans(b_do), input_precision="ieee")
        b_p, b_slope = _probabilities(b_s, b_lse[None, :], inner_scale, cap, outer_scale, SCORES)
        b_ds = b_p * (b_dp - b_delta[None, :]) * b_slope
        if (start < whole_begin) | (start >= whole_end):
            visible = (o_row < row_end)[None, :]
            if HAS_LEFT:
                visible = visible & (o_row[None, :] <= (o_key + left)[:, None])
            if HAS_RIGHT:
                visible = visible & (o_row[None, :] >= (o_key - right)[:, None])
            b_p = tl.where(visible, b_p, 0.0)
            b_ds = tl.where(visible, b_ds, 0.0)
        ends = start + BLOCK_M >= row_end
        start = tl.where(ends, begin, start + BLOCK_M)
        q += tl.where(ends, q_head, 0).to(tl.int64) * 8
        dout += tl.where(ends, do_head, 0).to(tl.int64) * 8
        stats += tl.where(ends, stats_rows, 0)
        p_stats = stats + start + o_m
        b_lse, b_delta = tl.load(p_stats), tl.load(p_stats + stats_size)
        b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision="ieee")
        b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision="ieee")
    return b_dk, b_dv


INTEGERS = """
    q_batch q_row q_head k_batch k_row k_head v_batch v_row v_head do_batch do_row do_head
    total_q total_k seqlen_q seqlen_k heads_q group blocks stats_rows stats_size left right
""".split()


@triton.jit(repr=_symbol("dq"), do_not_specialize=INTEGERS)
def backward_dq(
    q, k, v, dout, stats, dq, cu_seqlens_q, cu_seqlens_k,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    do_batch, do_row, do_head,
    total_q, total_k, seqlen_q, seqlen_k, heads_q, group, blocks, stats_rows, stats_size,
    left, right, scale, inner_scale, cap, outer_scale,
    PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORES: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """dq is contiguous. SCORES and the score scales as in triton_forward, without "scaled"."""
    # torch.compile passes Python floats as fp64.
    scale, inner_scale = tl.full((), scale, tl.float32), tl.full((), inner_scale, tl.float32)
    cap, outer_scale = tl.full((), cap, tl.float32), tl.full((), outer_scale, tl.float32)
    q_row, k_row = tl.cast(q_row, tl.int64), tl.cast(k_row, tl.int64)
    v_row, do_row = tl.cast(v_row, tl.int64), tl.cast(do_row, tl.int64)
    stats_rows = stats_rows // STATS_BLOCK * STATS_BLOCK
    stats_size = stats_size // STATS_BLOCK * STATS_BLOCK
    i_bh, i_m = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if HAS_RIGHT:
        i_m = blocks - 1 - i_m  # longest first: short tiles balance the tail
    i_b, i_h = i_bh // heads_q, i_bh % heads_q
    first_q, len_q = sequence(cu_seqlens_q, i_b, seqlen_q, total_q, PACKED)
    first_k, len_k = sequence(cu_seqlens_k, i_b, seqlen_k, total_k, PACKED)
    row_begin = i_m * BLOCK_M
    if row_begin >= len_q:
        return

    batch, head, head_kv = i_b.to(tl.int64), i_h.to(tl.int64), (i_h // group).to(tl.int64)
    p_k = k + batch * k_batch * 8 + first_k * k_row * 8 + head_kv * k_head * 8
    p_v = v + batch * v_batch * 8 + first_k * v_row * 8 + head_kv * v_head * 8
    o_d, o_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    o_q = row_begin + tl.arange(0, BLOCK_M)
    p_q = q + batch * q_batch * 8 + first_q * q_row * 8 + head * q_head * 8
    b_q = _load(p_q, q_row, o_q, 0, len_q, o_d, False, D)
    p_do = dout + batch * do_batch * 8 + first_q * do_row * 8 + head * do_head * 8
    b_do = _load(p_do, do_row, o_q, 0, len_q, o_dv, False, DV)
    p_lse = stats + _stats_row(i_b, i_h, first_q, heads_q, stats_rows, PACKED) + o_q
    b_lse, b_delta = tl.load(p_lse), tl.load(p_lse + stats_size)

    # Keys seen by some row: [key_begin, key_end); by every row: [all_begin, all_end).
    shift = len_k - len_q
    row_last = tl.minimum(row_begin + BLOCK_M, len_q) - 1
    key_begin, all_begin, key_end, all_end = 0, 0, len_k, len_k
    if HAS_LEFT:
        key_begin = tl.maximum(row_begin + shift - left, 0)
        all_begin = tl.maximum(row_last + shift - left, 0)
    if HAS_RIGHT:
        key_end = tl.minimum(tl.maximum(row_last + shift + right + 1, 0), len_k)
        all_end = tl.minimum(tl.maximum(row_begin + shift + right + 1, 0), len_k)
    begin = key_begin // BLOCK_N * BLOCK_N
    whole_begin = tl.minimum(tl.cdiv(all_begin, BLOCK_N), tl.cdiv(key_end, BLOCK_N)) * BLOCK_N
    whole_begin = tl.maximum(whole_begin, begin)
    whole_end = tl.maximum(all_end // BLOCK_N * BLOCK_N, whole_begin)
    o_row = o_q + shift

    b_dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    b_dq = _add_keys(
        b_dq, b_q, b_do, b_lse, b_delta, p_k, p_v, k_row, v_row, o_row, begin, whole_begin,
        whole_end, key_begin, key_end, left, right, inner_scale, cap, outer_scale,
        HAS_LEFT, HAS_RIGHT, SCORES, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
    if PACKED:
        row = first_q + o_q
    else:
        row = batch * seqlen_q + o_q
    p_dq = dq + (row[:, None] * heads_q + head) * D + o_d[None, :]
    mask = (o_q < len_q)[:, None] & (o_d[None, :] < D)
    tl.store(p_dq, (b_dq * scale).to(dq.dtype.element_ty), mask=mask)


@triton.jit(repr=_symbol("dkdv"), do_not_specialize=INTEGERS)
def backward_dkdv(
    q, k, v, dout, stats, dk, dv, cu_seqlens_q, cu_seqlens_k,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    do_batch, do_row, do_head,
    total_q, total_k, seqlen_q, seqlen_k, heads_q, group, blocks, stats_rows, stats_size,
    left, right, scale, inner_scale, cap, outer_scale,
    PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORES: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """dk and dv are contiguous; the rest as in backward_dq."""
    scale, inner_scale = tl.full((), scale, tl.float32), tl.full((), inner_scale, tl.float32)
    cap, outer_scale = tl.full((), cap, tl.float32), tl.full((), outer_scale, tl.float32)
    q_row, k_row = tl.cast(q_row, tl.int64), tl.cast(k_row, tl.int64)
    v_row, do_row = tl.cast(v_row, tl.int64), tl.cast(do_row, tl.int64)
    stats_rows = stats_rows // STATS_BLOCK * STATS_BLOCK
    stats_size = stats_size // STATS_BLOCK * STATS_BLOCK
    heads_kv = heads_q // group
    i_bh, i_n = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    i_b, i_h = i_bh // heads_kv, i_bh % heads_kv
    first_q, len_q = sequence(cu_seqlens_q, i_b, seqlen_q, total_q, PACKED)
    first_k, len_k = sequence(cu_seqlens_k, i_b, seqlen_k, total_k, PACKED)
    key_begin = i_n * BLOCK_N
    if key_begin >= len_k:
        return

    batch, head_kv = i_b.to(tl.int64), i_h.to(tl.int64)
    o_d, o_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    o_k = key_begin + tl.arange(0, BLOCK_N)
    p_k = k + batch * k_batch * 8 + first_k * k_row * 8 + head_kv * k_head * 8
    b_k = _load(p_k, k_row, o_k, 0, len_k, o_d, False, D)
    p_v = v + batch * v_batch * 8 + first_k * v_row * 8 + head_kv * v_head * 8
    b_v = _load(p_v, v_row, o_k, 0, len_k, o_dv, False, DV)

    # Rows that see some key: [row_begin, row_end); every key: [all_begin, all_end).
    shift = len_k - len_q
    key_last = tl.minimum(key_begin + BLOCK_N, len_k) - 1
    row_begin, all_begin, row_end, all_end = 0, 0, len_q, len_q
    if HAS_RIGHT:
        row_begin = tl.maximum(key_begin - shift - right, 0)
        all_begin = tl.maximum(key_last - shift - right, 0)
    if HAS_LEFT:
        row_end = tl.minimum(tl.maximum(key_last - shift + left + 1, 0), len_q)
        all_end = tl.minimum(tl.maximum(key_begin - shift + left + 1, 0), len_q)
    begin = row_begin // BLOCK_M * BLOCK_M
    whole_begin = tl.minimum(tl.cdiv(all_begin, BLOCK_M), tl.cdiv(row_end, BLOCK_M)) * BLOCK_M
    whole_begin = tl.maximum(whole_begin, begin)
    whole_end = tl.maximum(all_end // BLOCK_M * BLOCK_M, whole_begin)
    o_key = o_k - shift

    b_dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_DV], dtype=tl.float32)
    head = head_kv * group
    p_q = q + batch * q_batch * 8 + first_q * q_row * 8 + head * q_head * 8
    p_do = dout + batch * do_batch * 8 + first_q * do_row * 8 + head * do_head * 8
    p_stats = stats + _stats_row(i_b, head, first_q, heads_q, stats_rows, PACKED)
    steps = tl.cdiv(tl.maximum(row_end - begin, 0), BLOCK_M)
    if steps > 0:
        b_dk, b_dv = _add_queries(
            b_dk, b_dv, b_k, b_v, p_q, p_do, p_stats, q_row, q_head, do_row, do_head, stats_rows,
            stats_size, o_key, group, steps, begin, whole_begin, whole_end, row_begin, row_end,
            left, right, inner_scale, cap, outer_scale,
            HAS_LEFT, HAS_RIGHT, SCORES, D, DV, BLOCK_M, BLOCK_D, BLOCK_DV,
        )  # fmt: skip

    if PACKED:
        row = first_k + o_k
    else:
        row = batch * seqlen_k + o_k
    in_tensor = o_k < len_k
    mask = in_tensor[:, None] & (o_d[None, :] < D)
    p_dk = dk + (row[:, None] * heads_kv + head_kv) * D + o_d[None, :]
    tl.store(p_dk, (b_dk * scale).to(dk.dtype.element_ty), mask=mask)
    p_dv = dv + (row[:, None] * heads_kv + head_kv) * DV + o_dv[None, :]
    mask = in_tensor[:, None] & (o_dv[None, :] < DV)
    tl.store(p_dv, b_dv.to(dv.dtype.element_ty), mask=mask)
