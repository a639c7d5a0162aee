// Attention backward for Hopper (sm_90a).
//
// Problem   dq, dk, dv of out = softmax(mask(cap(q k^T scale))) v, see attn/params.h.
// Roles     In warpgroup 0 one thread loads by TMA, and one for each consumer adds dQ by TMA.
//           Warpgroups 1 and 2 consume: each owns 64 keys.
// Pipeline  A thread block loops over the query heads and query blocks that see its 128 keys. S^T
//           = K Q^T and dP^T = V dO^T give P^T and dS^T in registers, as A operands of dV += P^T dO
//           and dK += dS^T Q. Shared memory passes dS on for dQ = dS K.
// Layouts   dQ of a block of queries in fp32: a part for each consumer, [4 warps][8 column groups]
//           [32 lanes][4], in shared memory as in global memory. A lane's 4 are rows g and g + 8 of
//           its warp's 16, two columns each. backward_postprocess_kernel makes rows of them.
// Limits    bf16, fp16; head dims in multiples of 8 up to 128.
// Test      tests/ops/test_backward_gpu.py; bench: attnscope bench --mode backward --impl cuda.
#pragma once

#include "kernels/sm90_backward/consumer.cuh"
#include "kernels/sm90_backward/producer.cuh"
#include "kernels/sm90_backward/shared.cuh"
#include "kernels/sm90_backward/tiles.cuh"
#include "kernels/sm90_backward/writer.cuh"

namespace attnscope::sm90 {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArguments a) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& s = *reinterpret_cast<BackwardShared<Config>*>(shared_memory);
  using ptx::shared_address;

  if (a.tickets != nullptr) ptx::await_kernel_before();
  if (threadIdx.x / 32 == 0) describe_tile<Config>(a, take_tile(a), s.tile);
  if (threadIdx.x == 32) {
    constexpr int kWarps = 4 * Config::kConsumers;
    ptx::mbarrier_init(shared_address(&s.k_full), 1);
    ptx::mbarrier_init(shared_address(&s.v_full), 1);
    for (int i = 0; i < Config::kStages; ++i) {
      ptx::mbarrier_init(shared_address(&s.q_full[i]), 1);
      ptx::mbarrier_init(shared_address(&s.dout_full[i]), 1);
      ptx::mbarrier_init(shared_address(&s.empty[i]), kWarps * kWarpArrivals);
    }
    for (int i = 0; i < Config::kConsumers; ++i) {
      ptx::mbarrier_init(shared_address(&s.dq_full[i]), 4);
      ptx::mbarrier_init(shared_address(&s.dq_empty[i]), 1);
    }
    for (uint64_t& full : s.ds_full) {
      ptx::mbarrier_init(shared_address(&full), kWarps * kWarpArrivals);
    }
    ptx::fence_mbarrier_init();
    init_late_loads(s);
  }
  __syncthreads();
  // The kernel before writes the statistics and zeroes dQ. Each thread block waits for it, even if
  // it needs neither: this kernel must not end before that one.
  if (s.tile.rows == 0 || s.tile.begin >= s.tile.end) ptx::await_kernel_before();
  if (s.tile.rows == 0) return;

  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x % 32 != 0 || s.tile.begin >= s.tile.end) return;
    const int warp = threadIdx.x / 32;
    if (warp == 0) {
      produce<Config>(a, s);
    } else if (warp <= Config::kConsumers) {
      write_query_gradients<Config>(a, s, warp - 1);
    }
#ifdef ATTNSCOPE_FAULTS
    if (warp == 3) {
      issue_late_loads(s, [&](const LateLoad& copy) { issue_late_load<Config>(a, s, copy); });
    }
#endif
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    BackwardConsumer<Config>(a, s).run();
  }
}

}  // namespace attnscope::sm90
