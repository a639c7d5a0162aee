// Rows of a packed batch that belong to no sequence.
#pragma once

#include <cmath>

#include "attn/params.h"

namespace attnscope {

// They are rows without keys: out = 0, lse = -inf. Called by threads 0 .. threads - 1 for one head.
template <class Element>
__device__ __forceinline__ void clear_tail(const ForwardParams& p, int head, int thread,
                                           int threads) {
  const int64_t begin =
      min(max(static_cast<int64_t>(p.cu_seqlens_q[p.batch]), int64_t{0}), p.total_q);
  for (int64_t row = begin; row < p.total_q; ++row) {
    Element* out = static_cast<Element*>(p.out) + row * p.out_stride.row + head * p.out_stride.head;
    for (int d = thread; d < p.head_dim_v; d += threads) out[d] = Element(0.0f);
    if (thread == 0) p.lse[head * p.lse_head_stride + row] = -INFINITY;
  }
}

}  // namespace attnscope
