// After the wide kernel: dQ from the accumulators' order (see wide.cuh) to rows. A warp takes 16
// rows and 64 columns.
#pragma once

#include "kernels/sm90_backward/epilogue.cuh"
#include "kernels/sm90_backward/sum_parts.cuh"
#include "kernels/sm90_backward/wide_shared.cuh"
#include "ptx/sync.cuh"

namespace attnscope::sm90 {

inline constexpr int kWidePostprocessThreads = 128;

template <class Config>
__global__ void __launch_bounds__(kWidePostprocessThreads, kLeastBlocks<Config, 4>)
    wide_postprocess_kernel(const __grid_constant__ BackwardArguments a) {
  using Element = typename Config::Element;
  __shared__ alignas(128) Element staging[4][16 * 64];
  ptx::await_kernel_before();
  // The first thread blocks sum parts: they take the longest.
  const int sums = Config::kParts ? gridDim.x - a.params.forward.heads_q * a.query_blocks : 0;
  const int place = blockIdx.x - sums;
  if (Config::kParts && place < 0) {
    sum_parts<Config, WideTileConfig<true>, 4>(a, blockIdx.x,
                                               ptx::shared_address(staging[threadIdx.x / 32]));
    return;
  }
  const int head = place / a.all_queries;
  const RowBlock b = query_block<Config>(a, place - head * a.all_queries.divisor);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp * 16;
  if (row >= b.rows) return;

  const auto* gradient = reinterpret_cast<const float4*>(
      a.gradient + int64_t{place} * Config::kGradientFloats + warp * 1024);
  const Strides& stride = a.params.dq_stride;
  Element* out = static_cast<Element*>(a.params.dq) + b.segment.batch * stride.batch +
                 head * stride.head + (b.segment.row + b.first + row) * stride.row;
#pragma unroll
  for (int column = 0; column < Config::kColumnBlocks; ++column) {
    float x[32];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 value = gradient[column * (Config::kPartFloats / 4) + i * 32 + lane];
      x[4 * i] = value.x;
      x[4 * i + 1] = value.y;
      x[4 * i + 2] = value.z;
      x[4 * i + 3] = value.w;
    }
    store_rows<Element>(x, a.scale, ptx::shared_address(staging[warp]), out + column * 64,
                        stride.row, b.rows - row, a.params.forward.head_dim - column * 64);
  }
}

}  // namespace attnscope::sm90
