// Online-softmax attention of one query block, for every dtype. Included by block_kernels.h alone.
//
// Vector lanes are queries. So scores [key][query] = K Q^T and out [dim][query] = V^T P share one
// product: the left matrix is read element by element in its given layout, the right one by
// vectors. The softmax needs no operation across lanes. Scores stay unscaled; only the distance
// from the row max is scaled. Scaling large scores first would round away their differences.
#pragma once

#include "attn/params.h"
#include "cpu/block.h"
#include "cpu/half.h"
#include "cpu/product.h"
#include "cpu/simd.h"

namespace attnscope::cpu::ATTNSCOPE_ISA {
namespace {

// Longest chain of additions. Longer sums add up partial sums of this length, which rounds less.
constexpr int64_t kSumLength = 64;

// Keys [begin, end) of query i are i + begin .. i + end - 1, cut to the segment.
struct Visible {
  int64_t begin;  // of row 0 of the block; kUnbounded where the window has no left edge
  int64_t end;
  static constexpr int64_t kUnbounded = int64_t{1} << 40;  // beyond any row, and far from overflow
};

Visible visible_keys(const ForwardParams& p, const Block& block) {
  const int64_t diagonal = block.row + block.seqlen_k - block.seqlen_q;  // bottom-right aligned
  return {p.window_left < 0 ? -Visible::kUnbounded : diagonal - p.window_left,
          p.window_right < 0 ? Visible::kUnbounded : diagonal + p.window_right + 1};
}

// scores[key][query] = -infinity where the query does not see the key.
template <class T>
[[gnu::noinline]] void mask(T* scores, int64_t first_key, int64_t keys, int64_t columns,
                            const Visible& visible) {
  for (int64_t j = 0; j < keys; ++j) {
    // Query i sees the key where i + begin <= key < i + end.
    const T last = static_cast<T>(max(-1, min(columns, first_key + j - visible.begin)));
    const T first = static_cast<T>(max(-1, min(columns, first_key + j - visible.end + 1)));
    Vec<T> query;
    for (int i = 0; i < kLanes<T>; ++i) query[i] = static_cast<T>(i);
    for (int64_t col = 0; col < columns; col += kLanes<T>, query += static_cast<T>(kLanes<T>)) {
      T* at = scores + j * columns + col;
      const auto hidden = (query < first) | (query > last);
      store(at, hidden ? broadcast(static_cast<T>(-HUGE_VAL)) : load(at));
    }
  }
}

// Whether the tile contains NaN or infinity: x * 0 is NaN for those and 0 otherwise.
template <class T>
[[gnu::noinline]] bool has_nonfinite(const Tile<T>& tile, int64_t keys, int64_t dim) {
  constexpr int64_t kStep = 8;  // divides every head dim
  T zeros[kStep] = {};
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t d = 0; d < dim; d += kStep) {
      for (int64_t i = 0; i < kStep; ++i) zeros[i] += tile.data[j * tile.stride + d + i] * 0;
    }
  }
  bool found = false;
  for (const T zero : zeros) found |= zero != 0;
  return found;
}

// Writes the tile to `copy` with 0 for NaN and infinity. A converted tile is already in `copy`.
template <class T>
[[gnu::noinline]] Tile<T> finite_tile(const Tile<T>& tile, int64_t keys, int64_t dim, T* copy) {
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t d = 0; d < dim; ++d) {
      const T x = tile.data[j * tile.stride + d];
      copy[j * dim + d] = x - x == 0 ? x : T{0};
    }
  }
  return {copy, dim};
}

// Adds the NaN and infinities of V's rows to acc [dim][query] for the queries that see the key.
// The weight is omitted: it is positive, and p * inf = inf.
template <class T, class Element>
[[gnu::noinline]] void add_nonfinite(const Element* rows, int64_t stride, int64_t first_key,
                                     int64_t keys, int64_t dim, int64_t columns,
                                     const Visible& visible, T* acc) {
  for (int64_t j = 0; j < keys; ++j) {
    const int64_t first = max(0, first_key + j - visible.end + 1);
    const int64_t end = min(columns, first_key + j - visible.begin + 1);
    for (int64_t d = 0; d < dim; ++d) {
      const T x = to_compute(rows[j * stride + d]);
      if (x - x == 0) continue;
      for (int64_t i = first; i < end; ++i) acc[d * columns + i] += x;
    }
  }
}

template <class T>
[[gnu::noinline]] void cap(T* scores, int64_t count, T scale, T size) {
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    store(scores + i, size * tanh(load(scores + i) * scale));
  }
}

// scores [row][column] = rows of `tile` times `right` [dim][column].
template <class T, int kVectors>
void multiply_rows(const Tile<T>& tile, int64_t rows, int64_t dim, const T* right, int64_t columns,
                   T* scores) {
  for (int64_t d = 0; d < dim; d += kSumLength) {
    multiply<T, kVectors>(tile.data + d, tile.stride, 1, rows, right + d * columns,
                          min(kSumLength, dim - d), columns, d == 0 ? Store::kSet : Store::kAdd,
                          scores, scores);
  }
}

// Maps scores (after the product and the softcap) to exponents. `factor` is positive, so the
// greatest score has the greatest exponent whatever the sign of the scale.
struct ScoreScale {
  double query;   // multiplies Q: 1, 0 or the sign of the scale
  double factor;  // natural exponent = score * factor
};

ScoreScale score_scale(const ForwardParams& p) {
  if (p.softcap > 0) return {1, 1};
  if (p.scale == 0) return {0, 1};
  return {p.scale > 0 ? 1.0 : -1.0, std::fabs(p.scale)};
}

// Softmax state of each query in the block.
template <class T>
struct RowState {
  T* maximum;
  T* sum;
  T* rescale;  // multiplies earlier sums after this step's new maximum
};

// scores -> probabilities relative to the running maximum: e^((score - maximum) * factor).
template <class T, int kVectors>
void softmax(T* scores, int64_t keys, int64_t columns, T factor, const RowState<T>& state) {
  for (int64_t col = 0; col < columns; col += kVectors * kLanes<T>) {
    Vec<T> before[kVectors], maximum[kVectors], base[kVectors], sum[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      maximum[v] = before[v] = load(state.maximum + col + v * kLanes<T>);
    }
    for (int64_t j = 0; j < keys; ++j) {
      for (int v = 0; v < kVectors; ++v) {
        const Vec<T> s = load(scores + j * columns + col + v * kLanes<T>);
        maximum[v] = s > maximum[v] ? s : maximum[v];
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = col + v * kLanes<T>;
      // No key seen yet: use any finite base; -infinity would give NaN.
      base[v] = maximum[v] == static_cast<T>(-HUGE_VAL) ? Vec<T>{} : maximum[v];
      const Vec<T> rescale = exp((before[v] - base[v]) * factor);
      sum[v] = Vec<T>{};
      store(state.sum + at, load(state.sum + at) * rescale);
      store(state.rescale + at, rescale);
      store(state.maximum + at, maximum[v]);
    }
    for (int64_t j = 0; j < keys; ++j) {
      for (int v = 0; v < kVectors; ++v) {
        T* at = scores + j * columns + col + v * kLanes<T>;
        const Vec<T> probability = exp((load<T>(at) - base[v]) * factor);
        sum[v] += probability;
        store(at, probability);
      }
    }
    // Sum this step's keys separately: small terms would be lost next to a large running sum.
    for (int v = 0; v < kVectors; ++v) {
      T* at = state.sum + col + v * kLanes<T>;
      store(at, load(at) + sum[v]);
    }
  }
}

template <class T, class Element>
[[gnu::noinline]] void store_rows(const ForwardParams& p, const Block& block, const T* acc,
                                  int64_t columns, double factor, const RowState<T>& state) {
  Element* out = static_cast<Element*>(p.out) + block.batch * p.out_stride.batch +
                 block.head * p.out_stride.head;
  float* lse = p.lse + block.batch * p.lse_batch_stride + block.head * p.lse_head_stride;
  for (int i = 0; i < block.rows; ++i) {
    const int64_t row = block.q_begin + block.row + i;
    const T sum = state.sum[i];
    const T inverse = sum == 0 ? 0 : 1 / sum;  // 0: a row without keys
    for (int64_t d = 0; d < p.head_dim_v; ++d) {
      from_compute(acc[d * columns + i] * inverse, out + row * p.out_stride.row + d);
    }
    lse[row] = static_cast<float>(state.maximum[i] * factor + ::log(static_cast<double>(sum)));
  }
}

template <class T, class Element, int kVectors>
void forward_columns(const ForwardParams& p, const Block& block, int64_t columns, T* scratch) {
  const int64_t head_dim = p.head_dim, head_dim_v = p.head_dim_v;
  T* queries = scratch;
  T* scores = queries + kBlockQ * head_dim;
  T* acc = scores + kBlockQ * kBlockK;
  T* k_copy = acc + kBlockQ * head_dim_v;
  T* v_copy = k_copy + kBlockK * head_dim;
  T* rows = v_copy + kBlockK * head_dim_v;
  const RowState<T> state{rows, rows + kBlockQ, rows + 2 * kBlockQ};

  const int64_t head_kv = block.head / (p.heads_q / p.heads_kv);
  const auto* q = static_cast<const Element*>(p.q) + block.batch * p.q_stride.batch +
                  block.head * p.q_stride.head + (block.q_begin + block.row) * p.q_stride.row;
  const auto* k = static_cast<const Element*>(p.k) + block.batch * p.k_stride.batch +
                  head_kv * p.k_stride.head + block.k_begin * p.k_stride.row;
  const auto* v = static_cast<const Element*>(p.v) + block.batch * p.v_stride.batch +
                  head_kv * p.v_stride.head + block.k_begin * p.v_stride.row;

  const ScoreScale scale = score_scale(p);
  for (int64_t i = 0; i < columns; ++i) {
    for (int64_t d = 0; d < head_dim; ++d) {
      queries[d * columns + i] =
          i < block.rows ? to_compute(q[i * p.q_stride.row + d]) * static_cast<T>(scale.query)
                         : T{0};
    }
    state.maximum[i] = static_cast<T>(-HUGE_VAL);
    state.sum[i] = 0;
  }
  for (int64_t i = 0; i < columns * head_dim_v; ++i) acc[i] = 0;

  const Visible visible = visible_keys(p, block);
  const int64_t last = block.rows - 1;
  const int64_t end = min(block.seqlen_k, last + visible.end);
  for (int64_t key = max(0, visible.begin); key < end; key += kBlockK) {
    const int64_t keys = min(kBlockK, end - key);
    const bool masked = key < last + visible.begin || key + keys > visible.end;
    const Tile<T> k_tile =
        load_tile<T>(k + key * p.k_stride.row, p.k_stride.row, keys, head_dim, k_copy);
    Tile<T> v_tile =
        load_tile<T>(v + key * p.v_stride.row, p.v_stride.row, keys, head_dim_v, v_copy);

    multiply_rows<T, kVectors>(k_tile, keys, head_dim, queries, columns, scores);
    if (p.softcap > 0) {
      cap(scores, keys * columns, static_cast<T>(p.scale / p.softcap), static_cast<T>(p.softcap));
    }
    if (masked) mask(scores, key, keys, columns, visible);
    softmax<T, kVectors>(scores, keys, columns, static_cast<T>(scale.factor), state);
    // A masked key has weight 0, but 0 * NaN is NaN: take non-finite values out of the product.
    const bool split = masked && has_nonfinite(v_tile, keys, head_dim_v);
    if (split) v_tile = finite_tile(v_tile, keys, head_dim_v, v_copy);
    multiply<T, kVectors>(v_tile.data, 1, v_tile.stride, head_dim_v, scores, keys, columns,
                          Store::kRescale, state.rescale, acc);
    if (split) {
      add_nonfinite(v + key * p.v_stride.row, p.v_stride.row, key, keys, head_dim_v, columns,
                    visible, acc);
    }
  }
  store_rows<T, Element>(p, block, acc, columns, scale.factor, state);
}

template <class T, class Element>
void forward_as(const ForwardParams& p, const Block& block, T* scratch) {
  // Few queries (decoding) fill one vector; a full block uses as many vectors as registers allow.
  if (block.rows <= kLanes<T>) {
    forward_columns<T, Element, 1>(p, block, kLanes<T>, scratch);
  } else {
    forward_columns<T, Element, ATTNSCOPE_TILE_VECTORS>(p, block, kBlockQ, scratch);
  }
}

}  // namespace
}  // namespace attnscope::cpu::ATTNSCOPE_ISA
