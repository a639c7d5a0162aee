"""The forward kernel in Triton.

Problem   out = softmax(mask(cap(q k^T scale))) v and its lse, dense or packed, GQA, any head dim
          that is a multiple of 8: padded to a power of two inside the tile, masked at the loads.
Work      one program a tile of BLOCK_M query rows of one head; all programs lie on grid axis x.
Loop      key blocks left to right: masked ones where a window begins, whole ones, masked ones where
          the mask or the sequence ends. Online softmax in base 2, fp32 sums, P in v's dtype.
Care      a tile whose result is not finite, or whose row maximum is giant, is computed again by a
          slower loop: see CAREFUL in _attend. Ordinary tiles pay one reduction at the end.
Addresses 64 bit. Strides come in units of 8 elements: multiplied by 8 here, the compiler knows that
          rows are aligned and loads 16 bytes at a time.
Names     i_ program ids, o_ offsets, p_ pointers, b_ blocks in registers.
Tests     tests/test_triton.py. Algorithm: Dao et al. 2022 (arXiv:2205.14135), 2023 (2307.08691).
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def sequence(cu_seqlens, i_b, max_seqlen, total, PACKED: tl.constexpr):
    """(first row, length) of sequence i_b; the contents of cu_seqlens are clamped."""
    first = i_b.to(tl.int64) * 0
    length = max_seqlen
    if PACKED:
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_b), 0), total)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_b + 1), begin), total)
        first = begin.to(tl.int64)
        length = tl.minimum(end - begin, max_seqlen)
    return first, length


@triton.jit
def cap_wide(b_s, cap):
    """cap * tanh(s / cap) of a cap so wide that cap - 2 cap / (e^2x + 1) would cancel."""
    b_x = b_s / cap
    b_z = b_x * b_x
    b_p = ((1.725699421e-2 * b_z - 5.305295209e-2) * b_z + 1.332598732e-1) * b_z - 3.333314838e-1
    b_large = cap * (1 - 2 / (tl.exp2(b_x * 2.885390082) + 1))
    return tl.where(tl.abs(b_x) < 0.5, b_s + b_s * b_z * b_p, b_large)


@triton.jit
def _add_nonfinite(
    b_o, p_v, v_row, o_row, o_dv, start, key_begin, key_end, left, right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the NaN and infinities of a block of values to the rows that see their keys.

    The weight is left out: it is above 0, and p * inf = inf.
    """
    for key in tl.range(start, start + BLOCK_N, num_stages=1):
        o_key = key + tl.zeros_like(o_dv)
        in_range = (o_dv < DV) & (o_key >= key_begin) & (o_key < key_end)
        b_row = tl.load(p_v + key * v_row + o_dv, mask=in_range, other=0.0).to(tl.float32)
        b_row = tl.where(tl.abs(b_row) < float("inf"), 0.0, b_row)
        seen = o_row == o_row
        if HAS_LEFT:
            seen = seen & (key >= o_row - left)
        if HAS_RIGHT:
            seen = seen & (key <= o_row + right)
        b_o += tl.where(seen[:, None], b_row[None, :], 0.0)
    return b_o


@triton.jit
def _attend(
    b_o, b_m, b_l, b_q, p_k, p_v, k_row, v_row, o_row, begin, end, key_begin, key_end,
    left, right, inner_scale, cap, outer_scale,
    MASKED: tl.constexpr, CAREFUL: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORES: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Take the key blocks in [begin, end) into (out, max, sum).

    MASKED blocks may reach outside [key_begin, key_end), the keys that the tile's rows see. Those
    are read as 0: 0 * NaN in P V would be NaN. CAREFUL (with MASKED): `max` is in units of the
    scores, which are scaled after the maximum is subtracted, so that rounding a giant maximum does
    no harm; and NaN and infinity in V reach only the rows that see their key.
    """
    STAGES: tl.constexpr = 1 if CAREFUL else None
    p_values = p_v
    o_n, o_d, o_dv = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    p_k += (begin + o_n)[None, :].to(tl.int64) * k_row + o_d[:, None]  # [BLOCK_D, BLOCK_N]
    p_v += (begin + o_n)[:, None].to(tl.int64) * v_row + o_dv[None, :]  # [BLOCK_N, BLOCK_DV]
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        o_key = start + o_n
        if MASKED:
            in_range = (o_key >= key_begin) & (o_key < key_end)
            b_k = tl.load(p_k, mask=in_range[None, :] & (o_d[:, None] < D), other=0.0)
        elif D == BLOCK_D:
            b_k = tl.load(p_k)
        else:
            b_k = tl.load(p_k, mask=o_d[:, None] < D, other=0.0)
        b_s = tl.dot(b_q, b_k, input_precision="ieee")
        if SCORES != "raw":
            b_s *= inner_scale
        if SCORES == "capped":  # tanh(x) = 1 - 2 / (e^2x + 1), right at both infinities
            b_s = cap - 2 * cap / (tl.exp2(b_s) + 1)
        if SCORES == "capped wide":
            b_s = cap_wide(b_s, cap)
        if MASKED:
            visible = in_range[None, :]
            if HAS_LEFT:
                visible = visible & (o_key[None, :] >= (o_row - left)[:, None])
            if HAS_RIGHT:
                visible = visible & (o_key[None, :] <= (o_row + right)[:, None])
            b_s = tl.where(visible, b_s, float("-inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1) * (1.0 if CAREFUL else outer_scale))
        # For a row that has seen no key, any finite maximum makes the exponentials 0.
        b_m_safe = tl.where(b_m_new == float("-inf"), 0.0, b_m_new)
        if CAREFUL:
            b_p = tl.exp2((b_s - b_m_safe[:, None]) * outer_scale)
            b_rescale = tl.exp2((b_m - b_m_safe) * outer_scale)
        else:
            b_p = tl.exp2(b_s * outer_scale - b_m_safe[:, None])
            b_rescale = tl.exp2(b_m - b_m_safe)
        b_l = b_l * b_rescale + tl.sum(b_p, 1)
        b_o = b_o * b_rescale[:, None]
        if MASKED:
            b_v = tl.load(p_v, mask=in_range[:, None] & (o_dv[None, :] < DV), other=0.0)
        elif DV == BLOCK_DV:
            b_v = tl.load(p_v)
        else:
            b_v = tl.load(p_v, mask=o_dv[None, :] < DV, other=0.0)
        if CAREFUL:
            finite = tl.abs(b_v.to(tl.float32)) < float("inf")
            b_o = tl.dot(b_p.to(b_v.dtype), tl.where(finite, b_v, 0.0), b_o, input_precision="ieee")
            if tl.max(tl.max(tl.where(finite, 0, 1), 1), 0) > 0:
                b_o = _add_nonfinite(
                    b_o, p_values, v_row, o_row, o_dv, start, key_begin, key_end, left, right,
                    HAS_LEFT, HAS_RIGHT, DV, BLOCK_N,
                )  # fmt: skip
        else:
            b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o, input_precision="ieee")
        b_m = b_m_new
        p_k += BLOCK_N * k_row
        p_v += BLOCK_N * v_row
    return b_o, b_m, b_l


# torch.compile needs the function's name in the symbol: else it takes all tensors for written, and
# copies those that are read later.
def _symbol(specialization: Any) -> str:
    constants, dtype = specialization.constants, specialization.signature["q"].lstrip("*")
    mask = "causal_or_right" if constants["HAS_RIGHT"] else "full"
    return (
        f"attnscope_triton_forward_{dtype}_d{constants['D']}_dv{constants['DV']}_{mask}"
        f"{'_left' if constants['HAS_LEFT'] else ''}{'_packed' if constants['PACKED'] else ''}"
    )


_INTEGERS = """
    q_batch q_row q_head k_batch k_row k_head v_batch v_row v_head
    total_q total_k seqlen_q seqlen_k heads_q group blocks_m left right
""".split()


@triton.jit(repr=_symbol, do_not_specialize=_INTEGERS)
def triton_forward(
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    total_q, total_k, seqlen_q, seqlen_k, heads_q, group, blocks_m,
    left, right, inner_scale, cap, outer_scale,
    PACKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SCORES: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """out [.., heads_q, DV] and lse [B, heads_q, Sq] ([heads_q, Tq] packed) are contiguous.

    SCORES: "raw", s is q k; "scaled", q k * inner_scale, which is -1 or 0; "capped",
    cap * tanh(x) with q k * inner_scale = 2 log2(e) x; "capped wide", cap * tanh(x) with
    q k * inner_scale = cap * x. The exponent is s * outer_scale, its base 2.
    """
    # torch.compile passes Python floats as fp64.
    inner_scale = tl.full((), inner_scale, tl.float32)
    cap = tl.full((), cap, tl.float32)
    outer_scale = tl.full((), outer_scale, tl.float32)
    # Not q_row.to(): where torch.compile looks for the tensors that are written, it is an int.
    q_row, k_row = tl.cast(q_row, tl.int64) * 8, tl.cast(k_row, tl.int64) * 8
    v_row = tl.cast(v_row, tl.int64) * 8
    i_bh, i_m = tl.program_id(0) // blocks_m, tl.program_id(0) % blocks_m
    if HAS_RIGHT:
        i_m = blocks_m - 1 - i_m  # longest first: short tiles balance the tail
    i_b, i_h = i_bh // heads_q, i_bh % heads_q
    first_q, len_q = sequence(cu_seqlens_q, i_b, seqlen_q, total_q, PACKED)
    first_k, len_k = sequence(cu_seqlens_k, i_b, seqlen_k, total_k, PACKED)
    row_begin = i_m * BLOCK_M
    if row_begin >= len_q:
        return

    batch, head, head_kv = i_b.to(tl.int64), i_h.to(tl.int64), (i_h // group).to(tl.int64)
    p_q = q + batch * q_batch * 8 + first_q * q_row + head * q_head * 8
    p_k = k + batch * k_batch * 8 + first_k * k_row + head_kv * k_head * 8
    p_v = v + batch * v_batch * 8 + first_k * v_row + head_kv * v_head * 8

    o_m, o_d, o_dv = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    o_q = row_begin + o_m
    p_q += o_q[:, None].to(tl.int64) * q_row + o_d[None, :]
    b_q = tl.load(p_q, mask=(o_q[:, None] < len_q) & (o_d[None, :] < D), other=0.0)
    b_o = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
    b_m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_l = tl.zeros([BLOCK_M], dtype=tl.float32)

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
    o_row = o_q + shift  # the key on each row's diagonal

    if HAS_LEFT:
        b_o, b_m, b_l = _attend(
            b_o, b_m, b_l, b_q, p_k, p_v, k_row, v_row, o_row, begin, whole_begin,
            key_begin, key_end, left, right, inner_scale, cap, outer_scale,
            True, False, HAS_LEFT, HAS_RIGHT, SCORES, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
    b_o, b_m, b_l = _attend(
        b_o, b_m, b_l, b_q, p_k, p_v, k_row, v_row, o_row, whole_begin, whole_end,
        key_begin, key_end, left, right, inner_scale, cap, outer_scale,
        False, False, HAS_LEFT, HAS_RIGHT, SCORES, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
    b_o, b_m, b_l = _attend(
        b_o, b_m, b_l, b_q, p_k, p_v, k_row, v_row, o_row, whole_end, key_end,
        key_begin, key_end, left, right, inner_scale, cap, outer_scale,
        True, False, HAS_LEFT, HAS_RIGHT, SCORES, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV,
    )  # fmt: skip

    # A giant maximum, or NaN and infinity that may come from keys that the row does not see.
    doubtful = (tl.abs(b_m) >= 1048576.0) & (tl.abs(b_m) < float("inf"))
    if HAS_LEFT or HAS_RIGHT:
        doubtful = doubtful | (tl.sum(b_o * 0.0, 1) != 0.0)
    if tl.max(tl.where(doubtful, 1, 0), 0) > 0:
        b_q = tl.load(p_q, mask=(o_q[:, None] < len_q) & (o_d[None, :] < D), other=0.0)
        b_o, b_m, b_l = _attend(
            tl.zeros_like(b_o), tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros_like(b_l),
            b_q, p_k, p_v, k_row, v_row, o_row, begin, key_end,
            key_begin, key_end, left, right, inner_scale, cap, outer_scale,
            True, True, HAS_LEFT, HAS_RIGHT, SCORES, D, DV, 16, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
        b_m *= outer_scale

    dead = b_l == 0.0
    b_o = b_o / tl.where(dead, 1.0, b_l)[:, None]
    b_lse = tl.where(dead, float("-inf"), (b_m + tl.log2(b_l)) * 0.6931471805599453)
    if PACKED:
        row, lse_row = first_q + o_q, head * total_q + first_q + o_q
    else:
        row, lse_row = batch * seqlen_q + o_q, i_bh.to(tl.int64) * seqlen_q + o_q
    in_tensor = o_q < len_q
    p_o = out + (row[:, None] * heads_q + head) * DV + o_dv[None, :]
    tl.store(p_o, b_o.to(out.dtype.element_ty), mask=in_tensor[:, None] & (o_dv[None, :] < DV))
    tl.store(lse + lse_row, b_lse, mask=in_tensor)
