// Attention backward for Hopper (sm_90a), head dims 136 to 256.
//
// Problem   dq, dk, dv of out = softmax(mask(cap(q k^T scale))) v, see attn/params.h.
// Roles     A cluster of two thread blocks, 64 keys each. Warpgroup 0: one thread loads by TMA, one
//           waits for turns, one passes them on, and one warp takes tiles. 1: S^T, P^T, dV. 2:
//           dP^T, dS^T, dK. 3: dQ, and its way to global memory.
// Pipeline  A cluster takes tiles of 128 keys one after the other. Steps over the query heads and
//           query blocks that see them. P^T and dS^T stay in registers as A operands of dV += P^T
//           dO and dK += dS^T Q. Through shared memory go P, to 2, and dS, to 3 of both blocks:
//           each computes half of the columns of dQ = dS K, of 128 keys. Each loads half of Q and
//           dO, for both.
// Layouts   dQ of a block of queries in fp32: column blocks of 64, each [4 warps][8 column groups]
//           [32 lanes][4]; the 4 are rows g and g + 8 of the warp's 16, two columns each.
// Limits    bf16, fp16; head dims in multiples of 8.
// Test      tests/ops/test_backward_gpu.py; bench: attnscope bench --mode backward --impl cuda.
#pragma once

#include "kernels/sm90_backward/wide_consumer.cuh"
#include "kernels/sm90_backward/wide_producer.cuh"
#include "kernels/sm90_backward/wide_query.cuh"
#include "kernels/sm90_backward/wide_scheduler.cuh"
#include "kernels/sm90_backward/wide_shared.cuh"

namespace attnscope::sm90 {

template <class Config>
__device__ __forceinline__ void init_barriers(WideShared<Config>& s, bool takes_turns) {
  using ptx::shared_address;
  const auto init = [](uint64_t& barrier, int arrivals) {
    ptx::mbarrier_init(shared_address(&barrier), arrivals);
  };
  // One warpgroup of each rank.
  constexpr int kArrivals = 4 * Config::kRanks * kWarpArrivals;
  for (uint64_t& barrier : s.tile_full) init(barrier, kWarpArrivals);
  for (uint64_t& barrier : s.tile_empty) init(barrier, 12 * kWarpArrivals + (takes_turns ? 2 : 1));
  init(s.tile_wanted, 1);
  init(s.index_full, 1);
  init(s.index_empty, 1);
  init(s.k_full, 1);
  init(s.v_full, 1);
  init(s.peer_full, 1);
  init(s.k_empty, 4 * kWarpArrivals);
  init(s.v_empty, 8 * kWarpArrivals);
  for (uint64_t& barrier : s.q_full) init(barrier, 1);
  for (uint64_t& barrier : s.q_empty) init(barrier, kArrivals);
  for (uint64_t& barrier : s.dout_full) init(barrier, 1);
  for (uint64_t& barrier : s.dout_empty) init(barrier, 2 * kArrivals);
  init(s.weights_full, 4 * kWarpArrivals);
  init(s.weights_empty, 4 * kWarpArrivals);
  for (uint64_t& barrier : s.ds_full) init(barrier, 1);
  for (uint64_t& barrier : s.ds_empty) init(barrier, kArrivals);
  init(s.turn_full, 1);
  init(s.turn_added, 4 * kWarpArrivals);
  init(s.turn_empty, 1);
  ptx::fence_mbarrier_init();
}

template <class Config>
__global__ void __cluster_dims__(Config::kRanks, 1, 1) __launch_bounds__(Config::kThreads, 1)
    wide_backward_kernel(const __grid_constant__ BackwardArguments a) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& s = *reinterpret_cast<WideShared<Config>*>(shared_memory);
  const int rank = ptx::uniform(ptx::cluster_rank());

  if (threadIdx.x == 0) {
    init_barriers<Config>(s, a.tickets != nullptr);
    init_late_loads(s);
  }
  ptx::cluster_sync();  // before a block writes to the other's shared memory

  // Each role ends with a barrier of the cluster: until then the other block may write to this
  // one's shared memory.
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x / 32 == 3) schedule_wide<Config>(a, s, rank);
    if (threadIdx.x == 0) produce_wide<Config>(a, s, rank);
    if (a.tickets != nullptr && threadIdx.x == 32) pass_turns<Config>(a, s);
    if (a.tickets != nullptr && threadIdx.x == 64) await_turns<Config>(a, s);
#ifdef ATTNSCOPE_FAULTS
    if (threadIdx.x == 80) {
      issue_late_loads(s, [&](const LateLoad& copy) { issue_late_load<Config>(a, s, rank, copy); });
    }
#endif
    __syncwarp();
    ptx::cluster_sync();
  } else if (threadIdx.x < 256) {
    ptx::setmaxnreg_inc<Config::kValueRegisters>();
    ValueConsumer<Config>(a, s, rank).run();
    ptx::cluster_sync();
  } else if (threadIdx.x < 384) {
    ptx::setmaxnreg_inc<Config::kKeyRegisters>();
    KeyConsumer<Config>(a, s, rank).run();
    ptx::cluster_sync();
  } else {
    ptx::setmaxnreg_dec<Config::kQueryRegisters>();
    QueryConsumer<Config>(a, s, rank).run();
    ptx::cluster_sync();
  }
}

}  // namespace attnscope::sm90
