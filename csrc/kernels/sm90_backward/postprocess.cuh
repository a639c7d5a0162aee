// After the main kernel: dQ from the accumulators' order (see kernel.cuh) to rows. A warp takes 16
// rows and 64 columns, a warpgroup a column block.
#pragma once

#include "kernels/sm90_backward/epilogue.cuh"
#include "kernels/sm90_backward/shared.cuh"

namespace attnscope::sm90 {

template <class Config>
__global__ void __launch_bounds__(128 * Config::kColumnBlocks)
    backward_postprocess_kernel(const __grid_constant__ BackwardArguments a) {
  __shared__ alignas(128) typename Config::Element staging[4 * Config::kColumnBlocks][16 * 64];
  const int place = blockIdx.x, head = place / a.all_queries;
  const RowBlock b = query_block<Config>(a, place - head * a.all_queries.divisor);
  const int column = threadIdx.x / 128;
  float x[32] = {};
  if (a.claims == nullptr || a.claims[place] != 0) {  // otherwise the block sees no key
    load_query_part(
        x, query_part<Config>(a.gradient + int64_t{place} * Config::kGradientFloats, column));
  }
  store_query_part<Config>(a, x, b, head, column, ptx::shared_address(staging[threadIdx.x / 32]));
}

}  // namespace attnscope::sm90
