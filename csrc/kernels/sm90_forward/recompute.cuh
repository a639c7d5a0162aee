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

// A lane's elements of a row: lane, lane + 32, .. below `dim`, and zeros.
template <class Config>
__device__ __forceinline__ void read_row(float (&x)[Config::kHeadDim / 32], const void* data,
                                         int64_t offset, int dim) {
  const auto* row = static_cast<const typename Config::Element*>(data) + offset;
#pragma unroll
  for (int i = 0; i < Config::kHeadDim / 32; ++i) {
    const int column = ptx::lane() + 32 * i;
    x[i] = column < dim ? static_cast<float>(row[column]) : 0.0f;
  }
}

// Replaces elements that are not finite in the 16 rows that the warp has stored. Warp-converged.
template <class Config>
__device__ __forceinline__ void recompute_rows(const ForwardArguments& a, const TileWork& w,
                                               int consumer) {
  constexpr int kElements = Config::kHeadDim / 32;  // per lane
  const ForwardParams& p = a.params;
  const Window window{w.shift, p.window_left, p.window_right};
  const int first_row = Config::unit_of(consumer) * 64 + threadIdx.x % 128 / 32 * 16;
  if (ptx::lane() == 0) ptx::tma_store_wait<0>();
  ptx::fence_proxy_async_global();
  __syncwarp();
  // Bounds in uniform registers: with a loop that might diverge, the compiler takes the main loop's
  // values off the uniform datapath.
  const int end_row = ptx::uniform(min(first_row + 16, w.end_row - w.first_row));
#pragma unroll 1
  for (int row = ptx::uniform(first_row); row < end_row; ++row) {
    const int64_t query = w.q_row + grouping<Config>(a).query(row),
                  head = w.head + Config::head_of(consumer) + grouping<Config>(a).head(row);
    const int64_t head_kv = key_head<Config>(a, w, Config::head_of(consumer));
    const int in_sequence = grouping<Config>(a).query(w.first_row + row);
    float q[kElements], o[kElements] = {}, maximum = -FLT_MAX, sum = 0.0f;
    read_row<Config>(q, p.q,
                     w.batch * p.q_stride.batch + query * p.q_stride.row + head * p.q_stride.head,
                     p.head_dim);
    const int end_key = ptx::uniform(window.end_key(in_sequence, w.seqlen_k));
#pragma unroll 1
    for (int key = ptx::uniform(window.first_key(in_sequence)); key < end_key; ++key) {
      const int64_t k_row = w.k_row + key;
      float k[kElements], v[kElements], score[1] = {};
      read_row<Config>(
          k, p.k, w.batch * p.k_stride.batch + k_row * p.k_stride.row + head_kv * p.k_stride.head,
          p.head_dim);
#pragma unroll
      for (int i = 0; i < kElements; ++i) score[0] += q[i] * k[i];
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        score[0] += __shfl_xor_sync(0xffffffffu, score[0], distance);
      }
      if (a.scores.transform) transform_scores<false>(score, a.scores);
      const float scaled = score[0] * a.scores.scale_log2;
      const float new_maximum = fmaxf(maximum, scaled);
      const float factor = ptx::exp2_approx(maximum - new_maximum);
      const float weight = ptx::exp2_approx(scaled - new_maximum);
      maximum = new_maximum;
      sum = sum * factor + weight;
      read_row<Config>(
          v, p.v, w.batch * p.v_stride.batch + k_row * p.v_stride.row + head_kv * p.v_stride.head,
          p.head_dim_v);
#pragma unroll
      for (int i = 0; i < kElements; ++i) o[i] = o[i] * factor + weight * v[i];
    }
    auto* out = static_cast<typename Config::Element*>(p.out) + w.batch * p.out_stride.batch +
                query * p.out_stride.row + head * p.out_stride.head;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int column = ptx::lane() + 32 * i;
      if (column < p.head_dim_v && !(fabsf(static_cast<float>(out[column])) <= FLT_MAX)) {
        out[column] = typename Config::Element(sum == 0.0f ? 0.0f : o[i] / sum);
      }
    }
  }
}

}  // namespace attnscope::sm90
