// Rows of a packed batch that no tile covers.
#pragma once

#include <cmath>

#include "attn/params.h"

namespace attnscope {

template <class Element>
__device__ __forceinline__ void clear_row(const ForwardParams& p, int head, int64_t row, int thread,
                                          int threads) {
  Element* out = static_cast<Element*>(p.out) + row * p.out_stride.row + head * p.out_stride.head;
  for (int d = thread; d < p.head_dim_v; d += threads) out[d] = Element(0.0f);
  if (thread == 0) p.lse[head * p.lse_head_stride + row] = -INFINITY;
}

// Rows before the first sequence, past the last, and past max_seqlen_q of a longer one are rows
// without keys: out = 0, lse = -inf. Called by threads 0 .. threads - 1 for one head.
template <class Element>
__device__ __forceinline__ void clear_uncovered(const ForwardParams& p, int head, int thread,
                                                int threads) {
  const auto bound = [&](int i) {
    return min(max(static_cast<int64_t>(p.cu_seqlens_q[i]), int64_t{0}), p.total_q);
  };
  for (int64_t row = 0; row < bound(0); ++row) clear_row<Element>(p, head, row, thread, threads);
  for (int64_t row = bound(p.batch); row < p.total_q; ++row)
    clear_row<Element>(p, head, row, thread, threads);
  for (int batch = thread; batch < p.batch; batch += threads) {
    const int64_t end = bound(batch + 1);
    for (int64_t row = bound(batch) + p.seqlen_q; row < end; ++row)
      clear_row<Element>(p, head, row, 0, 1);
  }
}

}  // namespace attnscope
