// After the main kernel: dQ from the accumulators' order (see kernel.cuh) to rows. A warp takes 16
// rows and 64 columns, a thread block one of a consumer's parts.
#pragma once

#include "kernels/sm90_backward/epilogue.cuh"
#include "kernels/sm90_backward/shared.cuh"

namespace attnscope::sm90 {

template <class Config>
__global__ void __launch_bounds__(128 * Config::kConsumers)
    backward_postprocess_kernel(const __grid_constant__ BackwardArguments a) {
  using Element = typename Config::Element;
  __shared__ alignas(128) Element staging[4 * Config::kConsumers][16 * 64];
  const int place = blockIdx.x, head = place / a.all_queries;
  const RowBlock b = query_block<Config>(a, place - head * a.all_queries.divisor);
  const int part = threadIdx.x / 128, warp = threadIdx.x / 32;
  const int row = (Config::kSplitRows ? part * 64 : 0) + warp % 4 * 16;
  const int column = Config::kSplitRows ? 0 : part * 64;
  if (row >= b.rows) return;

  const auto* gradient = reinterpret_cast<const float4*>(
      a.gradient + int64_t{place} * Config::kGradientFloats + part * Config::kPartFloats);
  float x[32];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 value = gradient[threadIdx.x % 128 / 32 * 256 + i * 32 + threadIdx.x % 32];
    x[4 * i] = value.x;
    x[4 * i + 1] = value.y;
    x[4 * i + 2] = value.z;
    x[4 * i + 3] = value.w;
  }
  const Strides& stride = a.params.dq_stride;
  Element* out = static_cast<Element*>(a.params.dq) + b.segment.batch * stride.batch +
                 head * stride.head + (b.segment.row + b.first + row) * stride.row + column;
  store_rows<Element>(x, a.scale, ptx::shared_address(staging[warp]), out, stride.row, b.rows - row,
                      a.params.forward.head_dim - column);
}

}  // namespace attnscope::sm90
