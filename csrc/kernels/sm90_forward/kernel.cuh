// Attention forward for Hopper (sm_90a).
//
// Problem   out = softmax(mask(cap(q k^T scale))) v and its log-sum-exp, see attn/params.h.
// Roles     Warpgroup 0: a thread loads K and V by TMA, another loads Q, a warp schedules tiles.
//           Warpgroups 1.. consume: each owns 64 query rows; S and O stay in its registers. For
//           calls with few tiles two own the same rows, with half of the keys each.
// Pipeline  A consumer issues S(j+1) = Q K(j+1)^T, then O += P(j) V(j). While the tensor cores work
//           on O, or on another consumer's products, it computes the softmax of S(j+1).
// Schedule  Persistent: a block takes tile after tile. Q and K of the next tile are fetched while
//           the consumers finish this one. O leaves a warp at a time, by TMA.
// Limits    bf16, fp16; head dims in multiples of 8 up to 256.
// Test      tests/ops/test_forward_gpu.py, attnscope stress; bench: attnscope bench --impl cuda.
#pragma once

#include "kernels/sm90_forward/consumer.cuh"
#include "kernels/sm90_forward/first_tile.cuh"
#include "kernels/sm90_forward/producer.cuh"
#include "kernels/sm90_forward/scheduler.cuh"
#include "kernels/sm90_forward/shared.cuh"

namespace attnscope::sm90 {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    forward_kernel(const __grid_constant__ ForwardArguments a) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& s = *reinterpret_cast<ForwardShared<Config>*>(shared_memory);

  if (threadIdx.x == 0) init_barriers<Config>(s);
  if (threadIdx.x / 32 == 1) describe_first_tile<Config>(a, s);
  if (threadIdx.x == 64) {
    ptx::prefetch_tensor_map(&a.q.map);
    ptx::prefetch_tensor_map(&a.k.map);
    ptx::prefetch_tensor_map(&a.v.map);
    ptx::prefetch_tensor_map(&a.out.map);
  }
  Timeline::begin(threadIdx.x == 0);
  __syncthreads();
  if (threadIdx.x / 32 == 1) hand_first_tile<Config>(a, s);

  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x == 0) produce<Config>(a, s);
    if (threadIdx.x / 32 == 1) schedule<Config>(a, s);
    if (threadIdx.x == 64) produce_queries<Config>(a, s);
#ifdef ATTNSCOPE_FAULTS
    if (threadIdx.x == 96) issue_late_copies<Config>(a, s);
#endif
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    Consumer<Config>(a, s).run();
  }
}

}  // namespace attnscope::sm90
