// Tiles of K and V, and the product of a tile with the queries or probabilities of a block.
// Included by the kernels' headers alone, below the target pragma of block_<isa>.cpp.
//
// What is marked noinline is called once a tile, by many: inline, it doubles the compile time.
#pragma once

#include <cstdint>

#include "cpu/half.h"
#include "cpu/simd.h"

namespace attnscope::cpu::ATTNSCOPE_ISA {
namespace {

// Accumulator rows kept in registers; divides every head dim.
template <int kVectors>
constexpr int kTileRows = kVectors == 1 ? 8 : 4;

constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

// A tile of K or V: the caller's memory, or a converted copy.
template <class T>
struct Tile {
  const T* data;
  int64_t stride;
};

template <class T, class Element>
[[gnu::noinline]] Tile<T> load_tile(const Element* rows, int64_t stride, int64_t count, int64_t dim,
                                    T* copy) {
  if constexpr (sizeof(T) == sizeof(Element)) {
    return {rows, stride};
  } else {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t d = 0; d < dim; ++d) copy[i * dim + d] = to_compute(rows[i * stride + d]);
    }
    return {copy, dim};
  }
}

// How the product is stored: c = product, c += product, or c = c * rescale + product.
enum class Store { kSet, kAdd, kRescale };

// The product sum over steps of a(r, step) * b[step][:], for kRows rows and kVectors vectors of
// columns; a(r, step) = a[r * a_row + step * a_step].
template <class T, int kRows, int kVectors>
inline void multiply_tile(const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t steps,
                          int64_t columns, Store how, const T* rescale, T* c) {
  Vec<T> acc[kRows][kVectors] = {};
  for (int64_t step = 0; step < steps; ++step) {
    for (int v = 0; v < kVectors; ++v) {
      const Vec<T> factor = load(b + step * columns + v * kLanes<T>);
      for (int r = 0; r < kRows; ++r) {
        acc[r][v] += factor * a[r * a_row + step * a_step];
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      T* at = c + r * columns + v * kLanes<T>;
      if (how == Store::kAdd) acc[r][v] += load<T>(at);
      if (how == Store::kRescale) acc[r][v] += load<T>(at) * load(rescale + v * kLanes<T>);
      store(at, acc[r][v]);
    }
  }
}

template <class T, int kVectors>
void multiply(const T* a, int64_t a_row, int64_t a_step, int64_t rows, const T* b, int64_t steps,
              int64_t columns, Store how, const T* rescale, T* c) {
  constexpr int kRows = kTileRows<kVectors>;
  for (int64_t col = 0; col < columns; col += kVectors * kLanes<T>) {
    const T* factors = rescale + col;
    int64_t r = 0;
    for (; r + kRows <= rows; r += kRows) {
      multiply_tile<T, kRows, kVectors>(a + r * a_row, a_row, a_step, b + col, steps, columns, how,
                                        factors, c + r * columns + col);
    }
    for (; r < rows; ++r) {
      multiply_tile<T, 1, kVectors>(a + r * a_row, a_row, a_step, b + col, steps, columns, how,
                                    factors, c + r * columns + col);
    }
  }
}

}  // namespace
}  // namespace attnscope::cpu::ATTNSCOPE_ISA
