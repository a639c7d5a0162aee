// Masks of a row tile, one bit per column.
#pragma once

#include <cstdint>

#include "attn/block_range.cuh"
#include "attn/grouping.h"
#include "ptx/math.cuh"

namespace attnscope {

// Hides, in the thread's upper (half 0) or lower row, the columns outside of [begin, end); columns
// count from the thread's first.
template <int kCount>
__device__ __forceinline__ void keep_columns(float (&s)[kCount], int half, int begin, int end) {
  // How many of the thread's columns 0, 1, 8, 9, 16, 17, .. come before a column.
  const auto before = [](int column) { return max(0, column / 8 * 2 + min(column % 8, 2)); };
  const int first_seen = before(begin), end_seen = before(end);
#pragma unroll
  for (int word = 0; word < kCount / 2; word += 32) {
    // Bit i: column word + i is seen. The hardware turns seven bits at a time into predicates.
    const uint32_t seen = ptx::shift_left(~0u, max(0, first_seen - word)) &
                          ~ptx::shift_left(~0u, max(0, end_seen - word));
#pragma unroll
    for (int i = 0; i < min(32, kCount / 2 - word); ++i) {
      const int column = word + i;
      if (!(seen & 1u << i)) s[column / 2 * 4 + 2 * half + column % 2] = -INFINITY;
    }
  }
}

// Does what mask_scores (attn/scores.cuh) does in less than half the instructions, with two more
// registers; the portable kernel would spill. `row` is the thread's upper row in its sequence.
template <int kCount>
__device__ __forceinline__ void mask_scores_by_bits(float (&s)[kCount], const Window& window,
                                                    const Grouping& grouping, int row,
                                                    int first_key, int seqlen_k) {
  const int first = first_key + threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = grouping.query(row + half * 8);
    keep_columns(s, half, window.first_key(query) - first, window.end_key(query, seqlen_k) - first);
  }
}

}  // namespace attnscope
