// Before the main kernel: delta = sum of out * dout - dlse, and lse in base 2, per query; zeroes
// what the main kernel adds to. A thread block takes the kBlockM rows of one head.
#pragma once

#include "attn/nonfinite.cuh"
#include "kernels/sm90_backward/shared.cuh"
#include "kernels/sm90_backward/tile_list.cuh"
#include "ptx/sync.cuh"

namespace attnscope::sm90 {

inline constexpr int kPreprocessThreads = 256;

// Thread blocks of the preprocess on an SM. For more, ptxas spills.
template <class Config>
inline constexpr int kPreprocessBlocks = Config::kHeadDim > 128 ? 2 : 4;

// Zeroes the rows of a packed gradient that no sequence covers: before the first one, past the
// last, and past the longest length of a longer one.
template <class Element>
__device__ __forceinline__ void clear_uncovered_rows(void* data, const Strides& stride, int heads,
                                                     int dim, const int32_t* cu_seqlens,
                                                     int64_t total, int batch, int max_length) {
  const auto bound = [&](int i) {
    return min(max(static_cast<int64_t>(cu_seqlens[i]), int64_t{0}), total);
  };
  const auto clear = [&](int64_t begin, int64_t end, int head) {
    for (int64_t row = begin; row < end; ++row) {
      Element* out = static_cast<Element*>(data) + row * stride.row + head * stride.head;
      for (int d = threadIdx.x; d < dim; d += blockDim.x) out[d] = Element(0.0f);
    }
  };
  for (int head = blockIdx.x; head < heads; head += gridDim.x) {
    clear(0, bound(0), head);
    for (int i = 0; i < batch; ++i) clear(bound(i) + max_length, bound(i + 1), head);
    clear(bound(batch), total, head);
  }
}

template <class Config>
__global__ void __launch_bounds__(kPreprocessThreads, kPreprocessBlocks<Config>)
    backward_preprocess_kernel(const __grid_constant__ BackwardArguments a) {
  using Element = typename Config::Element;
  // The threads of a row, a power of two.
  constexpr int kLanes = Config::kHeadDim == 192 ? 32 : Config::kHeadDim / 8;
  constexpr int kRows = kPreprocessThreads / kLanes;
  constexpr int kPasses = Config::kBlockM / kRows;
  const ForwardParams& p = a.params.forward;
  const int thread = threadIdx.x;
  ptx::launch_dependents();
  inject(Fault::kTile, 2);
  if (a.packed) {
    clear_uncovered_rows<Element>(a.params.dq, a.params.dq_stride, p.heads_q, p.head_dim,
                                  p.cu_seqlens_q, p.total_q, p.batch, p.seqlen_q);
    clear_uncovered_rows<Element>(a.params.dk, a.params.dk_stride, p.heads_kv, p.head_dim,
                                  p.cu_seqlens_k, p.total_k, p.batch, p.seqlen_k);
    clear_uncovered_rows<Element>(a.params.dv, a.params.dv_stride, p.heads_kv, p.head_dim_v,
                                  p.cu_seqlens_k, p.total_k, p.batch, p.seqlen_k);
    if (a.tile_list != nullptr) list_tiles(a, Config::kTile.block_n);
  }
  if (blockIdx.x == 0) {
    bool disordered = false;
    for (int i = thread; a.packed && i < p.batch; i += kPreprocessThreads) {
      disordered |=
          p.cu_seqlens_q[i + 1] < p.cu_seqlens_q[i] || p.cu_seqlens_k[i + 1] < p.cu_seqlens_k[i];
    }
    disordered = __syncthreads_or(disordered);
    if (thread == 0) {
      a.counter[0] = 0;
      a.counter[1] = disordered;
    }
  }
  const int place = blockIdx.x, head = place / a.all_queries;
  if (head >= p.heads_q || p.batch == 0) return;
  if (a.claims != nullptr && thread == 0) a.claims[place] = 0;
  const RowBlock b = query_block<Config>(a, place - head * a.all_queries.divisor);
  if (b.rows <= 0) return;

  auto* gradient = reinterpret_cast<float4*>(a.gradient + int64_t{place} * Config::kGradientFloats);
  if (!a.whole_heads && a.claims == nullptr) {
#pragma unroll
    for (int i = 0; i < Config::kGradientFloats / 4 / kPreprocessThreads; ++i) {
      gradient[i * kPreprocessThreads + thread] = float4{};
    }
  }
  if (a.tickets != nullptr && thread == 0) a.tickets[place] = 0;

  // The first lane of a row stores its statistics. It loads lse with the row, not when delta is
  // there: the thread block then waits once.
  const int column = thread % kLanes * 8;
  const int64_t first =
      b.segment.batch * p.lse_batch_stride + head * p.lse_head_stride + b.segment.row + b.first;
  uint4 out[kPasses], dout[kPasses];
  float lse[kPasses];
  const auto rows_of = [&](const void* data, const Strides& stride) {
    return static_cast<const Element*>(data) + b.segment.batch * stride.batch + head * stride.head +
           (b.segment.row + b.first) * stride.row + column;
  };
  const Element* const out_rows = rows_of(p.out, p.out_stride);
  const Element* const dout_rows = rows_of(a.params.dout, a.params.dout_stride);
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = pass * kRows + thread / kLanes;
    const bool valid = row < b.rows && column < p.head_dim_v;
    out[pass] = dout[pass] = uint4{};
    if (valid) {
      out[pass] = *reinterpret_cast<const uint4*>(out_rows + row * p.out_stride.row);
      dout[pass] = *reinterpret_cast<const uint4*>(dout_rows + row * a.params.dout_stride.row);
    }
    // Rows past the end are as rows without keys.
    lse[pass] = row < b.rows && column == 0 ? p.lse[first + row] : -INFINITY;
  }
  float* statistics = a.statistics + int64_t{place} * (2 * Config::kBlockM);
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = pass * kRows + thread / kLanes;
    const uint32_t* x = &out[pass].x;
    const uint32_t* y = &dout[pass].x;
    float delta = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 o = unpack<Element>(x[i]), g = unpack<Element>(y[i]);
      delta = fmaf(o.x, g.x, fmaf(o.y, g.y, delta));
    }
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      delta += __shfl_xor_sync(0xffffffffu, delta, distance);
    }
    if (column == 0) {
      const bool sees_keys = lse[pass] != -INFINITY;
      if (sees_keys && a.params.dlse != nullptr) delta -= a.params.dlse[first + row];
      if (!sees_keys) delta = 0.0f;
      statistics[row] = sees_keys ? lse[pass] * 1.4426950408889634f : INFINITY;  // +inf: P = 0
      statistics[Config::kBlockM + row] = delta;
    }
  }
}

}  // namespace attnscope::sm90
