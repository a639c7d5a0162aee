// After the main kernel: dQ from the accumulators' order (see kernel.cuh) to rows. A warp takes 16
// rows and 64 columns, a warpgroup a part.
#pragma once

#include "kernels/sm90_backward/epilogue.cuh"
#include "kernels/sm90_backward/shared.cuh"
#include "kernels/sm90_backward/sum_parts.cuh"
#include "ptx/sync.cuh"

namespace attnscope::sm90 {

// Stores dQ of a block, transposed in `gradient`, as rows of dq. A warp reads 16 columns of all
// rows; 16 lanes write a row of 128. `shared`: 20 KB of the thread block.
template <class Config>
__device__ __forceinline__ void store_transposed_query_block(const BackwardArguments& a,
                                                             const RowBlock& b, int head,
                                                             const float* gradient,
                                                             uint32_t shared) {
  using Element = typename Config::Element;
  constexpr int kRows = Config::kBlockM, kRowBytes = 2 * Config::kHeadDim;
  constexpr int kLanes = kRowBytes / 16;
  const int thread = ptx::thread(), warp = thread / 32, lane = thread % 32;
  if (b.rows <= 0) return;
  uint32_t words[kRows / 4] = {};
  if (gradient != nullptr) {
    const float4* part = reinterpret_cast<const float4*>(gradient + warp * (kRows * 16)) + lane;
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const float4 x = __ldcg(part + n * 32);
      words[2 * n] = ptx::pack<Element>(x.x * a.scale, x.y * a.scale);
      words[2 * n + 1] = ptx::pack<Element>(x.z * a.scale, x.w * a.scale);
    }
  }
  // As in store_scores: a row's chunks of 16 bytes are permuted by its number modulo 8.
  const uint32_t write =
      shared + (lane / 16 * 8 + lane % 8) * kRowBytes + ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
  for (int step = 0; step < kRows / 16; ++step) {
    const uint32_t matrices[4] = {words[4 * step], words[4 * step + 1], words[4 * step + 2],
                                  words[4 * step + 3]};
    ptx::stmatrix_x4_trans(write + step * 16 * kRowBytes, matrices);
  }
  __syncthreads();
  const Strides& stride = a.params.dq_stride;
  const int chunk = thread % kLanes;
  Element* out = static_cast<Element*>(a.params.dq) + b.segment.batch * stride.batch +
                 head * stride.head + (b.segment.row + b.first) * stride.row + chunk * 8;
#pragma unroll
  for (int row = thread / kLanes; row < kRows; row += 2 * Config::kHeadDim / kLanes) {
    const uint4 value = ptx::load_shared_v4(shared + row * kRowBytes + (chunk ^ row % 8) * 16);
    if (row < b.rows && chunk * 8 < a.params.forward.head_dim) {
      *reinterpret_cast<uint4*>(out + row * stride.row) = value;
    }
  }
}

template <class Config>
__global__ void __launch_bounds__(128 * Config::kGradientParts,
                                  kLeastBlocks<Config, 4 * Config::kGradientParts>)
    backward_postprocess_kernel(const __grid_constant__ BackwardArguments a) {
  constexpr int kWarps = 4 * Config::kGradientParts;
  static_assert(Config::kGradientFloats >= kWarps * 1024, "2 KB for each warp");
  __shared__ alignas(128) char staging[Config::kGradientFloats * 2];
  const uint32_t shared = ptx::shared_address(staging);
  const uint32_t own_staging = shared + ptx::thread() / 32 * 2048;
  ptx::await_kernel_before();
  // The first thread blocks sum parts: they take the longest.
  const int sums = Config::kParts ? gridDim.x - a.params.forward.heads_q * a.query_blocks : 0;
  const int place = blockIdx.x - sums;
  if (Config::kParts && place < 0) {
    sum_parts<Config, Config, kWarps>(a, blockIdx.x, own_staging);
    return;
  }
  const int head = place / a.all_queries;
  const RowBlock b = query_block<Config>(a, place - head * a.all_queries.divisor);
  if (b.rows <= 0) return;  // packed: nobody has written a dQ
  const auto is_seen = [&] { return a.claims == nullptr || a.claims[place] != 0; };  // by a key
  const auto gradient = [&] { return a.gradient + int64_t{place} * Config::kGradientFloats; };
  if constexpr (Config::kTransposes) {
    store_transposed_query_block<Config>(a, b, head, is_seen() ? gradient() : nullptr, shared);
  } else {
    const int part = threadIdx.x / 128;
    float x[32] = {};
    if (is_seen()) load_query_part(x, query_part<Config>(gradient(), part));
    store_query_part<Config>(a, x, b, head, part, own_staging);
  }
}

}  // namespace attnscope::sm90
