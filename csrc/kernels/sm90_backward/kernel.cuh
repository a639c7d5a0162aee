// Attention backward for Hopper (sm_90a).
//
// Problem   dq, dk, dv of out = softmax(mask(cap(q k^T scale))) v, see attn/params.h.
// Roles     One thread of warpgroup 0 loads by TMA. Warpgroups 1 and 2 consume: each owns 64 keys.
// Pipeline  A thread block loops over the query heads and query blocks that see its 128 keys. S^T
//           = K Q^T and dP^T = V dO^T give P^T and dS^T in registers, as A operands of dV += P^T dO
//           and dK += dS^T Q. Shared memory passes dS on for dQ = dS K.
// Layouts   dQ of a block of queries in fp32: a part for each consumer, [8 column groups][128
//           threads][4]: each thread adds 16 bytes at a time. Its 4 are rows g and g + 8 of its
//           warp's 16, two columns each. backward_postprocess_kernel makes rows of them.
// Limits    bf16, fp16; head dims in multiples of 8 up to 128.
// Test      tests/ops/test_backward_gpu.py; bench: attnscope bench --mode backward --impl cuda.
#pragma once

#include "kernels/sm90_backward/consumer.cuh"
#include "kernels/sm90_backward/producer.cuh"
#include "kernels/sm90_backward/shared.cuh"
#include "kernels/sm90_backward/tiles.cuh"

namespace attnscope::sm90 {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArguments a) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& s = *reinterpret_cast<BackwardShared<Config>*>(shared_memory);
  using ptx::shared_address;

  if (threadIdx.x / 32 == 0) describe_tile<Config>(a, take_tile(a), s.tile);
  if (threadIdx.x == 32) {
    constexpr int kWarps = 4 * Config::kConsumers;
    ptx::mbarrier_init(shared_address(&s.k_full), 1);
    ptx::mbarrier_init(shared_address(&s.v_full), 1);
    for (int i = 0; i < Config::kStages; ++i) {
      ptx::mbarrier_init(shared_address(&s.q_full[i]), 1);
      ptx::mbarrier_init(shared_address(&s.dout_full[i]), 1);
      ptx::mbarrier_init(shared_address(&s.empty[i]), kWarps);
    }
    for (uint64_t& full : s.ds_full) ptx::mbarrier_init(shared_address(&full), kWarps);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (s.tile.rows == 0) return;

  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x == 0 && s.tile.begin < s.tile.end) produce<Config>(a, s);
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    BackwardConsumer<Config>(a, s).run();
  }
}

}  // namespace attnscope::sm90
