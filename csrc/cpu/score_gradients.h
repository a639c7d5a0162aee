// Parts of the backward's query and key blocks: masks as bands, scores to P and dS, products that
// keep hidden NaN out. Included by backward_kernel.h alone.
//
// Hidden pairs: P and dS are set to 0. In products with K, Q and dO, 0 * NaN would still be NaN, so
// a tile with hidden pairs contributes its NaN and infinities apart from the product.
#pragma once

#include <cfloat>

#include "cpu/block.h"
#include "cpu/forward_kernel.h"

namespace attnscope::cpu::ATTNSCOPE_ISA {
namespace {

// Row r of a tile sees columns [begin + r, end + r) of the block.
struct Band {
  int64_t begin;
  int64_t end;

  bool hides_any(int64_t rows, int64_t columns) const {
    return begin + rows - 1 > 0 || end < columns;
  }
};

// The band of a tile of keys from `first_key` on, whose columns are the queries of a block.
Band band_of_keys(const Visible& visible, int64_t first_key) {
  return {first_key - visible.end + 1, first_key - visible.begin + 1};
}

// The band of a tile of queries, the first of which sees `visible`. Columns are keys from
// `first_key` on.
Band band_of_queries(const Visible& visible, int64_t first_key) {
  return {visible.begin - first_key, visible.end - first_key};
}

// The statistics of query rows: one number per column of a query block, or per row of a tile.
template <class T>
struct Statistics {
  T* maximum;  // 0 where no score is above -infinity
  T* weight;
  T* delta;
};

// Statistics of the query rows from `row` of the segment on, in the layout of lse.
template <class T>
Statistics<T> row_statistics(const ForwardParams& p, const Block& block, int64_t head, int64_t row,
                             T* planes) {
  const int64_t plane = p.total_q * p.heads_q;
  T* const first =
      planes + block.batch * p.lse_batch_stride + head * p.lse_head_stride + block.q_begin + row;
  return {first, first + plane, first + 2 * plane};
}

// How scores become P and dS.
template <class T>
struct ScoreMap {
  T factor;      // natural exponent = score * factor
  T softcap;     // 0: none
  T before_cap;  // scale / softcap
};

template <class T>
ScoreMap<T> score_map(const ForwardParams& p) {
  return {static_cast<T>(score_scale(p).factor), static_cast<T>(p.softcap),
          p.softcap > 0 ? static_cast<T>(p.scale / p.softcap) : T{0}};
}

// scores, dP -> P, dS. Statistics belong to the columns, or with kOfRows to the rows.
template <class T, bool kOfRows>
void score_gradients(T* scores, T* grads, int64_t rows, int64_t columns, const ScoreMap<T>& map,
                     const Statistics<T>& statistics, const Band* band) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t begin = band ? max(0, min(columns, band->begin + r)) : 0;
    const int64_t end = band ? max(0, min(columns, band->end + r)) : columns;
    Vec<T> column;
    for (int i = 0; i < kLanes<T>; ++i) column[i] = static_cast<T>(i);
    for (int64_t col = 0; col < columns; col += kLanes<T>, column += static_cast<T>(kLanes<T>)) {
      const auto of = [&](const T* numbers) {
        return kOfRows ? broadcast(numbers[r]) : load(numbers + col);
      };
      const int64_t at = r * columns + col;
      const Vec<T> score = load(scores + at);
      Vec<T> p = exp((score - of(statistics.maximum)) * map.factor) * of(statistics.weight);
      Vec<T> ds = p * (load(grads + at) - of(statistics.delta));
      if (map.softcap > 0) {
        const Vec<T> capped = score / map.softcap;
        ds *= static_cast<T>(1) - capped * capped;
      }
      if (band) {
        const auto hidden = (column < static_cast<T>(begin)) | (column >= static_cast<T>(end));
        p = hidden ? Vec<T>{} : p;
        ds = hidden ? Vec<T>{} : ds;
      }
      store(scores + at, p);
      store(grads + at, ds);
    }
  }
}

// acc [dim][column] += sum over rows of tile (row, d) * weights [row][column], visible pairs only.
// Where `band` is given, `copy` may receive a finite copy of the tile.
template <class T, int kVectors>
void accumulate(Tile<T> tile, int64_t rows, int64_t dim, const T* weights, int64_t columns,
                const Band* band, T* copy, T* acc) {
  if (band && has_nonfinite(tile, rows, dim)) {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t begin = max(0, band->begin + r), end = min(columns, band->end + r);
      for (int64_t d = 0; d < dim; ++d) {
        const T x = tile.data[r * tile.stride + d];
        if (x - x == 0) continue;
        for (int64_t i = begin; i < end; ++i) acc[d * columns + i] += x * weights[r * columns + i];
      }
    }
    tile = finite_tile(tile, rows, dim, copy);
  }
  multiply<T, kVectors>(tile.data, 1, tile.stride, dim, weights, rows, columns, Store::kAdd, acc,
                        acc);
}

// transposed [dim][column] = factor * rows; columns past the last row are 0.
template <class T, class Element>
[[gnu::noinline]] void transpose(const Element* rows, int64_t stride, int64_t count, int64_t dim,
                                 int64_t columns, T factor, T* transposed) {
  for (int64_t i = 0; i < columns; ++i) {
    for (int64_t d = 0; d < dim; ++d) {
      transposed[d * columns + i] = i < count ? to_compute(rows[i * stride + d]) * factor : T{0};
    }
  }
}

template <class T, class Element>
[[gnu::noinline]] void store_gradient(const T* acc, int64_t columns, int64_t count, int64_t dim,
                                      T factor, Element* rows, int64_t stride) {
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t d = 0; d < dim; ++d) {
      from_compute(acc[d * columns + i] * factor, rows + i * stride + d);
    }
  }
}

// w in P = e^(score - max) w for a row whose lse the caller gives. If that is this call's own lse,
// rounded to float32, the sum is exact where e^(max - lse) is not. It is another one where keys are
// spread over several calls.
double row_weight(double maximum, double sum, double lse) {
  if (sum == 0 || lse == -HUGE_VAL) return 0;  // a row without keys
  const double own = maximum + ::log(sum);
  const double rounding = FLT_EPSILON * (::fabs(own) + 1);
  return ::fabs(own - lse) <= rounding ? 1 / sum : ::exp(maximum - lse);
}

// Element pointers of one head.
template <class Element>
const Element* head_rows(const void* tensor, const Strides& stride, const Block& block,
                         int64_t head, int64_t row) {
  return static_cast<const Element*>(tensor) + block.batch * stride.batch + head * stride.head +
         row * stride.row;
}

}  // namespace
}  // namespace attnscope::cpu::ATTNSCOPE_ISA
