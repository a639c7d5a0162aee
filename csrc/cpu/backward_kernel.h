// Attention backward of one block, for every dtype. Included by block_kernels.h alone.
//
// A query block computes dq: vector lanes are queries, as in the forward. It also leaves three
// numbers per query row: the row max, the weight w in P = e^(score - max) w, and delta. A key block
// computes dk and dv from these: vector lanes are keys, and the tiles that it visits are of Q and
// dO. Both compute S and dP again, so no gradient is summed by two threads.
#pragma once

#include "cpu/block.h"
#include "cpu/score_gradients.h"

namespace attnscope::cpu::ATTNSCOPE_ISA {
namespace {

// Row max and weight of each query of the block from one pass over its keys; then delta.
template <class T, class Element, int kVectors>
void compute_statistics(const BackwardParams& params, const Block& block, int64_t columns,
                        const T* queries, T* scores, T* k_copy, T* numbers,
                        const Statistics<T>& of_columns, const Statistics<T>& of_rows) {
  const ForwardParams& p = params.forward;
  const RowState<T> state{of_columns.maximum, of_columns.weight, numbers};
  for (int64_t i = 0; i < columns; ++i) {
    state.maximum[i] = static_cast<T>(-HUGE_VAL);
    state.sum[i] = 0;
    of_columns.delta[i] = 0;
  }
  const ScoreMap<T> map = score_map<T>(p);
  const Visible visible = visible_keys(p, block);
  const int64_t last = block.rows - 1;
  const int64_t end = min(block.seqlen_k, last + visible.end);
  const int64_t head_kv = block.head / (p.heads_q / p.heads_kv);
  for (int64_t key = max(0, visible.begin); key < end; key += kBlockK) {
    const int64_t keys = min(kBlockK, end - key);
    const Element* k = head_rows<Element>(p.k, p.k_stride, block, head_kv, block.k_begin + key);
    const Tile<T> tile = load_tile<T>(k, p.k_stride.row, keys, p.head_dim, k_copy);
    multiply_rows<T, kVectors>(tile, keys, p.head_dim, queries, columns, scores);
    if (map.softcap > 0) cap(scores, keys * columns, map.before_cap, map.softcap);
    if (key < last + visible.begin || key + keys > visible.end) {
      mask(scores, key, keys, columns, visible);
    }
    softmax<T, kVectors>(scores, keys, columns, map.factor, state);
  }

  const int64_t first = block.q_begin + block.row;
  const Element* out = head_rows<Element>(p.out, p.out_stride, block, block.head, first);
  const Element* dout =
      head_rows<Element>(params.dout, params.dout_stride, block, block.head, first);
  const int64_t lse = block.batch * p.lse_batch_stride + block.head * p.lse_head_stride + first;
  for (int64_t i = 0; i < columns; ++i) {
    const bool exists = i < block.rows;
    const bool sees_keys = exists && state.maximum[i] != static_cast<T>(-HUGE_VAL);
    state.sum[i] = sees_keys ? static_cast<T>(row_weight(state.maximum[i] * score_scale(p).factor,
                                                         state.sum[i], p.lse[lse + i]))
                             : T{0};
    if (!sees_keys) state.maximum[i] = 0;
    if (!exists) continue;
    double delta = params.dlse ? -static_cast<double>(params.dlse[lse + i]) : 0;
    for (int64_t d = 0; d < p.head_dim_v; ++d) {
      delta += static_cast<double>(to_compute(out[i * p.out_stride.row + d])) *
               to_compute(dout[i * params.dout_stride.row + d]);
    }
    of_columns.delta[i] = static_cast<T>(delta);
    of_rows.maximum[i] = state.maximum[i];
    of_rows.weight[i] = state.sum[i];
    of_rows.delta[i] = of_columns.delta[i];
  }
}

template <class T, class Element, int kVectors>
void query_gradient_columns(const BackwardParams& params, const Block& block, int64_t columns,
                            T* scratch, T* planes) {
  const ForwardParams& p = params.forward;
  const int64_t head_dim = p.head_dim, head_dim_v = p.head_dim_v;
  T* queries = scratch;
  T* douts = queries + kBlockQ * head_dim;
  T* scores = douts + kBlockQ * head_dim_v;
  T* grads = scores + kBlockQ * kBlockK;
  T* acc = grads + kBlockQ * kBlockK;
  T* k_copy = acc + kBlockQ * head_dim;
  T* v_copy = k_copy + kBlockK * head_dim;
  T* numbers = v_copy + kBlockK * head_dim_v;
  const Statistics<T> of_columns{numbers, numbers + kBlockQ, numbers + 2 * kBlockQ};

  const int64_t first = block.q_begin + block.row;
  transpose(head_rows<Element>(p.q, p.q_stride, block, block.head, first), p.q_stride.row,
            block.rows, head_dim, columns, static_cast<T>(score_scale(p).query), queries);
  transpose(head_rows<Element>(params.dout, params.dout_stride, block, block.head, first),
            params.dout_stride.row, block.rows, head_dim_v, columns, T{1}, douts);
  for (int64_t i = 0; i < columns * head_dim; ++i) acc[i] = 0;
  compute_statistics<T, Element, kVectors>(params, block, columns, queries, scores, k_copy,
                                           numbers + 3 * kBlockQ, of_columns,
                                           row_statistics(p, block, block.head, block.row, planes));

  const ScoreMap<T> map = score_map<T>(p);
  const Visible visible = visible_keys(p, block);
  const int64_t end = min(block.seqlen_k, block.rows - 1 + visible.end);
  const int64_t head_kv = block.head / (p.heads_q / p.heads_kv);
  for (int64_t key = max(0, visible.begin); key < end; key += kBlockK) {
    const int64_t keys = min(kBlockK, end - key);
    const Band band = band_of_keys(visible, key);
    const Band* const hides = band.hides_any(keys, block.rows) ? &band : nullptr;
    const int64_t row = block.k_begin + key;
    const Tile<T> k_tile = load_tile<T>(head_rows<Element>(p.k, p.k_stride, block, head_kv, row),
                                        p.k_stride.row, keys, head_dim, k_copy);
    const Tile<T> v_tile = load_tile<T>(head_rows<Element>(p.v, p.v_stride, block, head_kv, row),
                                        p.v_stride.row, keys, head_dim_v, v_copy);
    multiply_rows<T, kVectors>(k_tile, keys, head_dim, queries, columns, scores);
    if (map.softcap > 0) cap(scores, keys * columns, map.before_cap, map.softcap);
    multiply_rows<T, kVectors>(v_tile, keys, head_dim_v, douts, columns, grads);
    score_gradients<T, false>(scores, grads, keys, columns, map, of_columns, hides);
    accumulate<T, kVectors>(k_tile, keys, head_dim, grads, columns, hides, k_copy, acc);
  }
  store_gradient(acc, columns, block.rows, head_dim, static_cast<T>(p.scale),
                 static_cast<Element*>(params.dq) + block.batch * params.dq_stride.batch +
                     block.head * params.dq_stride.head + first * params.dq_stride.row,
                 params.dq_stride.row);
}

template <class T, class Element, int kVectors>
void key_gradient_columns(const BackwardParams& params, const Block& block, int64_t columns,
                          T* scratch, T* planes) {
  const ForwardParams& p = params.forward;
  const int64_t head_dim = p.head_dim, head_dim_v = p.head_dim_v;
  T* keys = scratch;
  T* values = keys + kBlockK * head_dim;
  T* scores = values + kBlockK * head_dim_v;
  T* grads = scores + kBlockQ * kBlockK;
  T* dk = grads + kBlockQ * kBlockK;
  T* dv = dk + kBlockK * head_dim;
  T* q_copy = dv + kBlockK * head_dim_v;
  T* dout_copy = q_copy + kBlockQ * head_dim;

  const int64_t first = block.k_begin + block.row;
  transpose(head_rows<Element>(p.k, p.k_stride, block, block.head, first), p.k_stride.row,
            block.rows, head_dim, columns, static_cast<T>(score_scale(p).query), keys);
  transpose(head_rows<Element>(p.v, p.v_stride, block, block.head, first), p.v_stride.row,
            block.rows, head_dim_v, columns, T{1}, values);
  for (int64_t i = 0; i < columns * head_dim; ++i) dk[i] = 0;
  for (int64_t i = 0; i < columns * head_dim_v; ++i) dv[i] = 0;

  // Query i sees keys i + shift - left .. i + shift + right.
  const ScoreMap<T> map = score_map<T>(p);
  const int64_t shift = block.seqlen_k - block.seqlen_q, last = block.row + block.rows - 1;
  const int64_t begin = p.window_right < 0 ? 0 : max(0, block.row - shift - p.window_right);
  const int64_t end =
      p.window_left < 0 ? block.seqlen_q : min(block.seqlen_q, last - shift + p.window_left + 1);
  const int64_t group = p.heads_q / p.heads_kv;
  for (int64_t head = block.head * group; head < (block.head + 1) * group; ++head) {
    for (int64_t row = begin; row < end; row += kBlockQ) {
      const int64_t rows = min(kBlockQ, end - row);
      Block tile = block;
      tile.row = row;
      const Band band = band_of_queries(visible_keys(p, tile), block.row);
      const Band* const hides = band.hides_any(rows, block.rows) ? &band : nullptr;
      const int64_t at = block.q_begin + row;
      const Tile<T> q_tile = load_tile<T>(head_rows<Element>(p.q, p.q_stride, block, head, at),
                                          p.q_stride.row, rows, head_dim, q_copy);
      const Tile<T> dout_tile =
          load_tile<T>(head_rows<Element>(params.dout, params.dout_stride, block, head, at),
                       params.dout_stride.row, rows, head_dim_v, dout_copy);
      multiply_rows<T, kVectors>(q_tile, rows, head_dim, keys, columns, scores);
      if (map.softcap > 0) cap(scores, rows * columns, map.before_cap, map.softcap);
      multiply_rows<T, kVectors>(dout_tile, rows, head_dim_v, values, columns, grads);
      score_gradients<T, true>(scores, grads, rows, columns, map,
                               row_statistics(p, block, head, row, planes), hides);
      accumulate<T, kVectors>(dout_tile, rows, head_dim_v, scores, columns, hides, dout_copy, dv);
      accumulate<T, kVectors>(q_tile, rows, head_dim, grads, columns, hides, q_copy, dk);
    }
  }
  store_gradient(dk, columns, block.rows, head_dim, static_cast<T>(p.scale),
                 static_cast<Element*>(params.dk) + block.batch * params.dk_stride.batch +
                     block.head * params.dk_stride.head + first * params.dk_stride.row,
                 params.dk_stride.row);
  store_gradient(dv, columns, block.rows, head_dim_v, T{1},
                 static_cast<Element*>(params.dv) + block.batch * params.dv_stride.batch +
                     block.head * params.dv_stride.head + first * params.dv_stride.row,
                 params.dv_stride.row);
}

template <class T, class Element>
void query_gradients(const BackwardParams& p, const Block& block, T* scratch, T* planes) {
  if (block.rows <= kLanes<T>) {
    query_gradient_columns<T, Element, 1>(p, block, kLanes<T>, scratch, planes);
  } else {
    query_gradient_columns<T, Element, ATTNSCOPE_TILE_VECTORS>(p, block, kBlockQ, scratch, planes);
  }
}

template <class T, class Element>
void key_gradients(const BackwardParams& p, const Block& block, T* scratch, T* planes) {
  if (block.rows <= kLanes<T>) {
    key_gradient_columns<T, Element, 1>(p, block, kLanes<T>, scratch, planes);
  } else {
    key_gradient_columns<T, Element, ATTNSCOPE_TILE_VECTORS>(p, block, kBlockQ, scratch, planes);
  }
}

}  // namespace
}  // namespace attnscope::cpu::ATTNSCOPE_ISA
