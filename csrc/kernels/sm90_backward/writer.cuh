// The writers: for each consumer a thread that adds the consumer's part of dQ to global memory.
#pragma once

#include "kernels/sm90_backward/shared.cuh"
#include "kernels/sm90_backward/turns.cuh"
#include "ptx/tma.cuh"

namespace attnscope::sm90 {

template <class Config>
__device__ __forceinline__ void write_query_gradients(const BackwardArguments& a,
                                                      BackwardShared<Config>& s, int consumer) {
  const KeyTile& t = s.tile;
  const int heads = a.group;
  // Numbers of the part, among those of all heads.
  int part = (t.head_kv * heads * a.query_blocks + t.first_block + t.begin) * Config::kConsumers +
             consumer;
  int count = 0;
  ptx::await_kernel_before();
#pragma unroll 1
  for (int head = 0; head < heads; ++head) {
#pragma unroll 1
    for (int block = t.begin; block < t.end; ++block) {
      ptx::mbarrier_wait(ptx::shared_address(&s.dq_full[consumer]), count++ & 1);
      inject(Fault::kAdd, count);
      if (a.tickets != nullptr) Turns<Config>::await(a, t, part, block);
      ptx::bulk_add(a.gradient + int64_t{part} * Config::kPartFloats,
                    ptx::shared_address(s.dq[consumer]), Config::kPartFloats * 4);
      ptx::tma_store_commit();
      if (a.tickets != nullptr) {
        Turns<Config>::finish(a, part);
      } else {
        ptx::tma_store_wait_read<0>();
      }
      inject(Fault::kRelease, count);
      ptx::mbarrier_arrive(ptx::shared_address(&s.dq_empty[consumer]));
      part += Config::kConsumers;
    }
    part += (a.query_blocks - (t.end - t.begin)) * Config::kConsumers;
  }
}

}  // namespace attnscope::sm90
