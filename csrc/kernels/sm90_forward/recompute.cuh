// Recomputes rows whose O is not finite, key by key: a rare path.
//
// In a block that only some rows of a tile see, P V computes 0 times V for the other rows, and 0
// times NaN or infinity is NaN. The main loop does not check for that. A warp checks O before it
// stores its rows. If an element is not finite, the warp computes its row again from the keys that
// the row sees, and replaces such elements. An element stays NaN or infinite if its row sees one.
#pragma once

#include <cfloat>

#include "attn/scores.cuh"
#include "kernels/sm90_forward/shared.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"

namespace attnscope::sm90 {

// A lane's elements of a row, lane, lane + 32, .. below `dim`, and zeros. `row` is at the lane's
// first.
template <class Element, int kCount>
__device__ __forceinline__ void read_row(float (&x)[kCount], const Element* row, int dim) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = ptx::lane() + 32 * i < dim ? static_cast<float>(row[32 * i]) : 0.0f;
  }
}

// Replaces what is not finite in the 16 rows that the warp has stored. Warp-converged.
template <class Config>
__device__ __forceinline__ void recompute_rows(const ForwardArguments& a, const TileWork& w,
                                               int consumer) {
  using Element = typename Config::Element;
  constexpr int kElements = (Config::kHeadDim + 31) / 32;  // per lane
  const ForwardParams& p = a.params;
  const Window window{w.shift, p.window_left, p.window_right};
  // [row, dim] of one head, at the lane's first element.
  const auto of_head = [&](const void* data, const Strides& stride, int head) {
    return static_cast<const Element*>(data) + w.batch * stride.batch + head * stride.head +
           ptx::lane();
  };
  const Unit& unit = w.unit[consumer];
  const int head_kv = unit.head / a.heads_per_key;
  const Element* keys = of_head(p.k, p.k_stride, head_kv) + w.k_row * p.k_stride.row;
  const Element* values = of_head(p.v, p.v_stride, head_kv) + w.k_row * p.v_stride.row;
  const int first_row = threadIdx.x % 128 / 32 * 16;
  if (ptx::lane() == 0) ptx::tma_store_wait<0>();
  ptx::fence_proxy_async_global();
  __syncwarp();
  // Bounds in uniform registers: a loop that might diverge would cost the main loop its own.
  const int end_row = ptx::uniform(min(first_row + 16, unit.rows));
#pragma unroll 1
  for (int row = ptx::uniform(first_row); row < end_row; ++row) {
    const int64_t query = unit.q_row + grouping<Config>(a).query(row);
    const int head = unit.head + grouping<Config>(a).head(row);
    const int in_sequence = grouping<Config>(a).query(unit.first_row + row);
    float q[kElements], o[kElements] = {}, maximum = -FLT_MAX, sum = 0.0f;
    read_row(q, of_head(p.q, p.q_stride, head) + query * p.q_stride.row, p.head_dim);
    const int end_key = ptx::uniform(window.end_key(in_sequence, w.seqlen_k));
#pragma unroll 1
    for (int key = ptx::uniform(window.first_key(in_sequence)); key < end_key; ++key) {
      float x[kElements], score[1] = {};
      read_row(x, keys + key * p.k_stride.row, p.head_dim);
#pragma unroll
      for (int i = 0; i < kElements; ++i) score[0] += q[i] * x[i];
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        score[0] += __shfl_xor_sync(0xffffffffu, score[0], distance);
      }
      if (a.scores.transform) cap_to_reciprocals(score, a.scores);
      const float scaled = score[0] * a.scores.scale_log2;
      const float new_maximum = fmaxf(maximum, scaled);
      const float factor = ptx::exp2_approx(maximum - new_maximum);
      const float weight = ptx::exp2_approx(scaled - new_maximum);
      maximum = new_maximum;
      sum = sum * factor + weight;
      read_row(x, values + key * p.v_stride.row, p.head_dim_v);
#pragma unroll
      for (int i = 0; i < kElements; ++i) o[i] = o[i] * factor + weight * x[i];
    }
    auto* out = const_cast<Element*>(of_head(p.out, p.out_stride, head) + query * p.out_stride.row);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (ptx::lane() + 32 * i < p.head_dim_v &&
          !(fabsf(static_cast<float>(out[32 * i])) <= FLT_MAX)) {
        out[32 * i] = Element(o[i] * inverse);
      }
    }
  }
}

}  // namespace attnscope::sm90
