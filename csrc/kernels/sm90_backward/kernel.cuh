// Attention backward for Hopper (sm_90a).
//
// Problem   dq, dk, dv of out = softmax(mask(cap(q k^T scale))) v, see attn/params.h.
// Roles     In warpgroup 0 one thread loads by TMA, two add dQ by TMA, and one warp takes tiles.
//           The other warpgroups consume: each owns 64 keys.
// Pipeline  A thread block takes tiles of 128 or 192 keys one after the other, and loops over the
//           query heads and blocks of 64, 80 or 128 queries that see them. S^T = K Q^T and dP^T = V
//           dO^T give P^T and dS^T in registers, as A operands of dV += P^T dO and dK += dS^T Q.
//           Shared memory passes dS on: the consumers take turns at dQ = dS K.
// Layouts   dQ of a block of queries in fp32: column blocks of 64, each [4 warps][8 column groups]
//           [32 lanes][4], in shared memory as in global memory. A lane's 4 are rows g and g + 8 of
//           its warp's 16, two columns each. A block of 128 queries is two of 64. One of 80 is
//           transposed: column blocks of [4 warps][10 row groups][32 lanes][4], where a warp has 16
//           columns, and a lane's 4 are columns g and g + 8, two rows each.
//           backward_postprocess_kernel makes rows of them.
// Limits    bf16, fp16; head dims in multiples of 8 up to 128.
// Test      tests/ops/test_backward_gpu.py; bench: attnscope bench --mode backward --impl cuda.
#pragma once

#include "kernels/sm90_backward/consumer.cuh"
#include "kernels/sm90_backward/producer.cuh"
#include "kernels/sm90_backward/scheduler.cuh"
#include "kernels/sm90_backward/shared.cuh"
#include "kernels/sm90_backward/writers.cuh"

namespace attnscope::sm90 {

template <class Config>
__device__ __forceinline__ void init_barriers(BackwardShared<Config>& s) {
  const auto init = [](uint64_t& barrier, int arrivals) {
    ptx::mbarrier_init(ptx::shared_address(&barrier), arrivals);
  };
  constexpr int kWarps = 4 * Config::kConsumers, kArrivals = kWarps * kWarpArrivals;
  for (uint64_t& barrier : s.tile_full) init(barrier, kWarpArrivals);
  for (uint64_t& barrier : s.tile_empty) init(barrier, kArrivals + 3);
  init(s.tile_wanted, 1);
  for (uint64_t& barrier : s.k_full) init(barrier, 1);
  for (uint64_t& barrier : s.k_empty) init(barrier, kArrivals);
  for (uint64_t& barrier : s.v_full) init(barrier, 1);
  for (uint64_t& barrier : s.v_empty) init(barrier, kArrivals);
  for (uint64_t& barrier : s.q_full) init(barrier, 1);
  for (uint64_t& barrier : s.dout_full) init(barrier, 1);
  for (uint64_t& barrier : s.empty) init(barrier, kArrivals);
  for (uint64_t& barrier : s.ds_full) init(barrier, kArrivals);
  for (uint64_t& barrier : s.ds_empty) init(barrier, 4 * kWarpArrivals);
  for (uint64_t& barrier : s.dq_full) init(barrier, 4 * kWarpArrivals);
  for (uint64_t& barrier : s.dq_empty) init(barrier, 1);
  for (uint64_t& barrier : s.dq_taken) init(barrier, 1);
  init(s.dq_done, 1);
  ptx::fence_mbarrier_init();
  init_late_loads(s);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArguments a) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& s = *reinterpret_cast<BackwardShared<Config>*>(shared_memory);

  if (threadIdx.x == 0) init_barriers<Config>(s);
  Timeline::begin(threadIdx.x == 0);
  __syncthreads();
  const int warp = threadIdx.x / 32;
  if (warp < 4) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (warp == 3) {
      schedule<Config>(a, s);
    } else if (threadIdx.x == 0) {
      produce<Config>(a, s);
    } else if (threadIdx.x == 32 || threadIdx.x == 64) {
      write_query_gradients<Config>(a, s, threadIdx.x / 64);
#ifdef ATTNSCOPE_FAULTS
    } else if (threadIdx.x == 80) {
      issue_late_loads(s, [&](const LateLoad& copy) { issue_late_load<Config>(a, s, copy); });
#endif
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    BackwardConsumer<Config>(a, s).run();
  }
}

}  // namespace attnscope::sm90
