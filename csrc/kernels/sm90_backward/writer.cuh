// The writer: a thread that adds dQ of a block to global memory, or stores it. In a deterministic
// call two threads do, see turn_writers.cuh.
#pragma once

#include "kernels/sm90_backward/claims.cuh"
#include "kernels/sm90_backward/marks.cuh"
#include "kernels/sm90_backward/shared.cuh"
#include "kernels/sm90_backward/turns.cuh"
#include "ptx/tma.cuh"

namespace attnscope::sm90 {

// Adds dQ of one tile. `count` counts the blocks that were added.
template <class Config>
__device__ __forceinline__ void write_tile(const BackwardArguments& a, BackwardShared<Config>& s,
                                           const KeyTile& t, int& count, const Timeline& timeline) {
  // Numbers of the block, among those of all heads; whole heads: of the thread block's place.
  const int blocks = a.whole_heads ? a.dense_queries.divisor : a.query_blocks;
  const int first = a.whole_heads ? blockIdx.x * a.group * blocks : first_place<Config>(a, t);
  const int heads = head_count<Config>(a, t);
#pragma unroll 1
  for (int head = 0; head < heads; ++head) {
    int block = t.start;
#pragma unroll 1
    do {
      const int place = first + head * blocks + block;
      timeline.step(count, BackwardWriterStep::kAwaitGradient);
      const bool is_first = a.whole_heads && Turns<Config>::number(a, t, block) == 0;
      const Slot<Config::kGradientStages> slot(count++);
      const uint32_t full = ptx::shared_address(&s.dq_full[slot.stage]);
      // Whether the block has its first part is found out while the consumers work on it.
      bool stores = a.claims != nullptr;
      while (stores && !ptx::mbarrier_test(full, slot.parity)) stores = !is_stored(a, place);
      ptx::mbarrier_wait(full, slot.parity);
      timeline.step(count - 1, BackwardWriterStep::kClaim);
      const uint32_t staged = ptx::shared_address(s.dq[slot.stage]);
      inject(Fault::kAdd, count);
      float* gradient = a.gradient + int64_t{place} * Config::kGradientFloats;
      constexpr int kBytes = Config::kGradientFloats * 4;
      // Whole heads: after the operation before, which may have been on the same block.
      if (a.whole_heads) ptx::tma_store_wait<0>();
      stores = a.whole_heads ? is_first : stores && claim(a, place);
      timeline.step(count - 1, BackwardWriterStep::kIssue);
      if (stores) {
        ptx::bulk_store(gradient, staged, kBytes);
      } else {
        ptx::bulk_add(gradient, staged, kBytes);
      }
      ptx::tma_store_commit();
      timeline.step(count - 1, BackwardWriterStep::kAwaitRead);
      ptx::tma_store_wait_read<0>();
      inject(Fault::kRelease, count);
      ptx::mbarrier_arrive(ptx::shared_address(&s.dq_empty[slot.stage]));
      if (stores && !a.whole_heads) {
        timeline.step(count - 1, BackwardWriterStep::kPublish);
        publish_claim(a, place);
      }
      block = t.block_after(block);
    } while (block != t.start);
  }
  if (a.whole_heads && t.key_block == 0) {
    ptx::tma_store_wait<0>();
    ptx::fence_proxy_async_global();
    ptx::mbarrier_arrive(ptx::shared_address(&s.dq_done));
  }
}

template <class Config>
__device__ __forceinline__ void write_query_gradients(const BackwardArguments& a,
                                                      BackwardShared<Config>& s) {
  int count = 0;
  const Timeline timeline(BackwardLane::kWriter, true);
  ptx::await_kernel_before();
#pragma unroll 1
  for (int n = 0;; ++n) {
    const Slot<kTileBuffers> slot(n);
    const KeyTile& t = s.tile[slot.stage];
    timeline.tile(n, BackwardWriterTile::kAwaitTile);
    ptx::mbarrier_wait(ptx::shared_address(&s.tile_full[slot.stage]), slot.parity);
    if (t.rows == 0) {
      timeline.finish(n, count);
      return;
    }
    write_tile<Config>(a, s, t, count, timeline);
    ptx::mbarrier_arrive(ptx::shared_address(&s.tile_empty[slot.stage]));
  }
}

}  // namespace attnscope::sm90
