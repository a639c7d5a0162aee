// The writers: two threads, which add dQ of every other block each to global memory, or store it.
// One waits for the end of its operation, and publishes it, while the other one has the next block.
//
// They pass the ring of dQ to each other (`dq_taken`) after the wait for dq_full: a barrier is read
// only after its phase before has been waited for.
#pragma once

#include "kernels/sm90_backward/claims.cuh"
#include "kernels/sm90_backward/marks.cuh"
#include "kernels/sm90_backward/shared.cuh"
#include "kernels/sm90_backward/turns.cuh"
#include "ptx/tma.cuh"

namespace attnscope::sm90 {

// A block of dQ on its way out: number `count` of the thread block, in place `place` of all heads.
template <class Config>
struct QueryGradient {
  const BackwardArguments& a;
  BackwardShared<Config>& s;
  const Timeline& timeline;
  int count, place;
  Slot<Config::kGradientStages> slot{count};

  __device__ __forceinline__ void mark(BackwardWriterStep::Mark mark) const {
    timeline.step(count, mark);
  }
  __device__ __forceinline__ void take_ring() const {
    const int writer = count & 1;
    wait(s.dq_taken[writer], (count >> 1 & 1) ^ writer ^ 1);  // writer 0 has it first
  }
  __device__ __forceinline__ void pass_ring() const {
    ptx::mbarrier_arrive(ptx::shared_address(&s.dq_taken[count & 1 ^ 1]));
  }
  __device__ __forceinline__ void await() const { wait(s.dq_full[slot.stage], slot.parity); }
  // Stores the block, or adds it, and releases the buffer when TMA has read it. Two branches: with
  // predicates each addition would pass by the instructions of the store.
  __device__ __forceinline__ void send(bool stores) const {
    if (stores) {
      send<true>();
    } else {
      send<false>();
    }
  }
  template <bool kStores>
  __device__ __forceinline__ void send() const {
    mark(BackwardWriterStep::kIssue);
    inject(Fault::kAdd, count);
    float* const gradient = a.gradient + int64_t{place} * Config::kGradientFloats;
    const uint32_t staged = ptx::shared_address(s.dq[slot.stage]);
    constexpr int kBytes = Config::kGradientFloats * 4;
    if constexpr (kStores) {
      ptx::bulk_store(gradient, staged, kBytes);
    } else {
      ptx::bulk_add(gradient, staged, kBytes);
    }
    ptx::tma_store_commit();
    mark(BackwardWriterStep::kAwaitRead);
    ptx::tma_store_wait_read<0>();
    inject(Fault::kRelease, count);
    ptx::mbarrier_arrive(ptx::shared_address(&s.dq_empty[slot.stage]));
  }
  // Until the operation is complete, not only read.
  __device__ __forceinline__ void complete() const {
    ptx::tma_store_wait<0>();
    ptx::fence_proxy_async_global();
  }
};

// Calls without turns, see claims.cuh.
template <class Config>
__device__ __forceinline__ void send_claimed(const QueryGradient<Config>& g) {
  const BackwardArguments& a = g.a;
  bool stores = a.claims != nullptr && !is_stored(a, g.place);
  g.take_ring();
  // Whether the block has its first part is found out while the consumers work on it.
  const uint32_t full = ptx::shared_address(&g.s.dq_full[g.slot.stage]);
  while (stores && !ptx::mbarrier_test(full, g.slot.parity)) stores = !is_stored(a, g.place);
  g.await();
  g.pass_ring();
  g.mark(BackwardWriterStep::kClaim);
  if (stores && claim(a, g.place)) {
    g.template send<true>();
    g.mark(BackwardWriterStep::kPublish);
    publish_claim(a, g.place);
  } else {
    g.template send<false>();
  }
}

// Calls with turns, see turns.cuh.
template <class Config>
__device__ __forceinline__ void send_in_turn(const QueryGradient<Config>& g, const KeyTile& t,
                                             int block) {
  const BackwardArguments& a = g.a;
  const bool is_first = Turns<Config>::number(a, t, block) == 0;
  Turns<Config>::await(a, t, g.place, block);
  ptx::fence_proxy_async_global();
  g.take_ring();
  g.await();
  g.pass_ring();
  g.send(is_first);
  if (is_first) a.claims[g.place] = kStored;
  g.complete();
  inject(Fault::kTurn, g.place);
  ptx::release_add(a.tickets + g.place);
}

// Whole heads. The operation before may have been on the same block: so a writer keeps the ring
// until its own is complete.
template <class Config>
__device__ __forceinline__ void send_of_head(const QueryGradient<Config>& g, const KeyTile& t,
                                             int block) {
  const bool is_first = Turns<Config>::number(g.a, t, block) == 0;
  g.take_ring();
  g.await();
  ptx::fence_proxy_async_global();
  g.mark(BackwardWriterStep::kClaim);
  g.send(is_first);
  g.complete();
  g.pass_ring();
}

// Writer number `writer`. One thread.
template <class Config>
__device__ __forceinline__ void write_query_gradients(const BackwardArguments& a,
                                                      BackwardShared<Config>& s, int writer) {
  const Timeline timeline(BackwardLane::kWriter + writer, true);
  const bool whole_heads = Config::kWholeHeads && a.whole_heads;
  int count = 0;
  ptx::await_kernel_before();
  const auto send_tile = [&](const KeyTile& t, uint64_t& empty) {
    int head = first_head<Config>(a, t);
#pragma unroll 1
    do {
      int n = t.start;
#pragma unroll 1
      do {
        if ((count & 1) == writer) {
          const int block = t.block_at(n, head);
          // Number of the block among those of all heads; whole heads: in the thread block's place.
          const int place =
              whole_heads ? ((blockIdx.x - t.head_kv) * a.group + head) * a.dense_queries.divisor
                          : head * a.query_blocks + t.first_block;
          const QueryGradient<Config> g{a, s, timeline, count, place + block};
          g.mark(BackwardWriterStep::kAwaitGradient);
          if (whole_heads) {
            send_of_head(g, t, block);
          } else if (a.tickets != nullptr) {
            send_in_turn(g, t, block);
          } else {
            send_claimed(g);
          }
        }
        ++count;
        n = t.place_after(n);
      } while (n != t.start);
    } while (++head < end_head<Config>(a, t));
    // The last operation of a head ends after all others.
    if (whole_heads && t.key_block == 0 && (count & 1) != writer) {
      ptx::mbarrier_arrive(ptx::shared_address(&s.dq_done));
    }
    ptx::mbarrier_arrive(ptx::shared_address(&empty));
  };
  const int tiles = for_each_tile(s, send_tile, &timeline);
  timeline.finish(tiles, count);
}

}  // namespace attnscope::sm90
