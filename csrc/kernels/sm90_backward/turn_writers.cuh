// The writers of a deterministic call: two threads, which add dQ of every other block each. One
// adds a block while the other one waits until its addition is complete, and passes the turn on.
//
// They share the ring of dQ. A writer waits for dq_full after the other one has waited for the
// block before (`dq_taken`): a barrier is read only after its phase before has been waited for.
#pragma once

#include "kernels/sm90_backward/claims.cuh"
#include "kernels/sm90_backward/shared.cuh"
#include "kernels/sm90_backward/turns.cuh"
#include "ptx/tma.cuh"

namespace attnscope::sm90 {

// Adds dQ of block number `block` of the tile, number `count` of the thread block and number
// `place` of all heads.
template <class Config>
__device__ __forceinline__ void add_in_turn(const BackwardArguments& a, BackwardShared<Config>& s,
                                            const KeyTile& t, int place, int block, int count) {
  const int writer = count & 1;
  const bool is_first = Turns<Config>::number(a, t, block) == 0;
  Turns<Config>::await(a, t, place, block);
  ptx::fence_proxy_async_global();
  wait(s.dq_taken[writer], (count >> 1 & 1) ^ writer ^ 1);  // the first writer begins
  const Slot<Config::kGradientStages> slot(count);
  wait(s.dq_full[slot.stage], slot.parity);
  ptx::mbarrier_arrive(ptx::shared_address(&s.dq_taken[writer ^ 1]));
  inject(Fault::kAdd, count);
  float* const gradient = a.gradient + int64_t{place} * Config::kGradientFloats;
  const uint32_t staged = ptx::shared_address(s.dq[slot.stage]);
  constexpr int kBytes = Config::kGradientFloats * 4;
  if (is_first) {
    ptx::bulk_store(gradient, staged, kBytes);
    a.claims[place] = kStored;
  } else {
    ptx::bulk_add(gradient, staged, kBytes);
  }
  ptx::tma_store_commit();
  ptx::tma_store_wait_read<0>();
  inject(Fault::kRelease, count);
  ptx::mbarrier_arrive(ptx::shared_address(&s.dq_empty[slot.stage]));
  // The turn is passed on when the addition is complete, not only read.
  ptx::tma_store_wait<0>();
  ptx::fence_proxy_async_global();
  inject(Fault::kTurn, place);
  ptx::release_add(a.tickets + place);
}

// Writer number `writer`. One thread.
template <class Config>
__device__ __forceinline__ void write_in_turns(const BackwardArguments& a,
                                               BackwardShared<Config>& s, int writer) {
  int count = 0;
  ptx::await_kernel_before();
  for_each_tile(s, [&](const KeyTile& t, uint64_t& empty) {
    int head = first_head<Config>(a, t);
#pragma unroll 1
    do {
      int block = t.start;
#pragma unroll 1
      do {
        if ((count & 1) == writer) {
          const int place = head * a.query_blocks + t.first_block + block;
          add_in_turn<Config>(a, s, t, place, block, count);
        }
        ++count;
        block = t.block_after(block);
      } while (block != t.start);
    } while (++head < end_head<Config>(a, t));
    ptx::mbarrier_arrive(ptx::shared_address(&empty));
  });
}

}  // namespace attnscope::sm90
