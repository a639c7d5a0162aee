// The producers: a thread that loads K and V by TMA, and one that loads Q.
#pragma once

#include "kernels/sm90_forward/shared.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"

namespace attnscope::sm90 {

// A box of K or V: [rows, kColumns], swizzled 128 bytes.
template <class Config, int kColumns>
__device__ __forceinline__ void load_box(uint32_t shared, const TensorMap& tensor, uint32_t barrier,
                                         int rows, int row, int head, int batch) {
#pragma unroll
  for (int column = 0; column < kColumns; column += 64) {
    ptx::tma_load_4d(shared + column / 64 * rows * Config::kRowBytes, &tensor.map, barrier,
                     ptx::CachePolicy::kEvictLast, column, row, head * tensor.head_step,
                     batch * tensor.batch_step);
  }
}

#ifdef ATTNSCOPE_FAULTS
__device__ __forceinline__ int volatile_load(int& shared) {
  return *static_cast<volatile int*>(&shared);
}

__device__ __forceinline__ void volatile_store(int& shared, int value) {
  *static_cast<volatile int*>(&shared) = value;
}

// True if the copy waits in the mailbox, which has room for one.
template <class Config>
__device__ __forceinline__ bool is_late(const ForwardArguments& a, ForwardShared<Config>& s,
                                        bool is_k, int count, uint32_t full, const TileWork& w,
                                        int row) {
  const uint32_t cycles = fault_cycles(Fault::kLateCopy, 2 * count + is_k);
  if (cycles == 0 || volatile_load(s.late_copy.ready)) return false;
  const Slot<Config::kStages> slot(count);
  LateCopy& copy = s.late_copy;
  copy.is_k = is_k;
  copy.stage = slot.stage;
  copy.row = row;
  copy.head = w.head;
  copy.head_kv = w.head_kv;
  copy.batch = w.batch;
  copy.full = full;
  copy.start = ptx::clock_low();
  copy.cycles = cycles;
  __threadfence_block();
  volatile_store(copy.ready, 1);
  return true;
}

// Issues each copy in the mailbox once its delay is over. A separate thread runs this.
template <class Config>
__device__ __forceinline__ void issue_late_copies(const ForwardArguments& a,
                                                  ForwardShared<Config>& s) {
  while (true) {
    const bool done = volatile_load(s.late_copy.done);
    if (!volatile_load(s.late_copy.ready)) {
      if (done) break;
      continue;
    }
    __threadfence_block();
    const LateCopy copy = s.late_copy;
    while (ptx::clock_low() - copy.start < copy.cycles) {
    }
#pragma unroll 1
    for (int i = 0; i < Config::kKeyBuffers; ++i) {
      const int of_tile = i / Config::kKeyParts, part = i % Config::kKeyParts;
      const int head = of_tile == 0 ? copy.head_kv : (copy.head + of_tile) / a.heads_per_key;
      const int row = copy.row + part * Config::kBlockN;
      if (copy.is_k) {
        load_box<Config, Config::kColumns>(ptx::shared_address(s.k[copy.stage][i]), a.k, copy.full,
                                           Config::kBlockN, row, head, copy.batch);
      } else {
        load_box<Config, Config::kValueColumns>(ptx::shared_address(s.v[copy.stage][i]), a.v,
                                                copy.full, Config::kBlockN, row, head, copy.batch);
      }
    }
    volatile_store(s.late_copy.ready, 0);
  }
}
#endif

// The Q of a unit.
template <class Config>
__device__ __forceinline__ void load_queries(const ForwardArguments& a, ForwardShared<Config>& s,
                                             const TileWork& w, int stage, int number) {
  const Unit& unit = w.unit[number * Config::kKeyParts];
  const uint32_t full = ptx::shared_address(&s.q_full[stage][number]);
  ptx::mbarrier_arrive_expect_tx(full, Config::kQBytes);
#pragma unroll
  for (int column = 0; column < Config::kColumns; column += 64) {
    ptx::tma_load_5d(ptx::shared_address(s.q[stage][number]) + column / 64 * 64 * Config::kRowBytes,
                     &a.q.map, full, ptx::CachePolicy::kEvictFirst, column, 0, unit.q_row,
                     (unit.head >> grouping<Config>(a).log2) * a.q.head_step,
                     w.batch * a.q.batch_step);
  }
}

// A block of K or V, whose bytes `barrier` expects already.
template <class Config, class Buffers>
__device__ __forceinline__ void load_keys(const ForwardArguments& a, const TensorMap& tensor,
                                          Buffers& buffers, uint32_t barrier, const TileWork& w,
                                          int block) {
  constexpr int kColumns = sizeof(buffers[0]) / sizeof(buffers[0][0]) / Config::kBlockN;
#pragma unroll
  for (int i = 0; i < Config::kKeyBuffers; ++i) {  // past the last head: zeros
    const int head = key_head<Config>(a, w, i / Config::kKeyParts);
    load_box<Config, kColumns>(
        ptx::shared_address(buffers[i]), tensor, barrier, Config::kBlockN,
        w.k_row + (block * Config::kKeyParts + i % Config::kKeyParts) * Config::kBlockN, head,
        w.batch);
  }
}

template <class Config>
__device__ __forceinline__ void produce(const ForwardArguments& a, ForwardShared<Config>& s) {
  using ptx::shared_address;
  constexpr int kStages = Config::kStages;
  int tiles = 0, blocks = 0;  // uses of the rings so far
  const Timeline timeline(Lane::kProducer, true);
  while (true) {
    timeline.tile(tiles, ProducerTile::kAwaitTile);
    const Slot<ForwardShared<Config>::kTiles> slot(tiles++);
    ptx::mbarrier_wait(shared_address(&s.tile_full[slot.stage]), slot.parity);
    const TileWork w = s.tile[slot.stage];
    inject(Fault::kReleaseTile, tiles);
    ptx::mbarrier_arrive(shared_address(&s.tile_empty[slot.stage]));
    if (w.stop) break;
    const int blocks_here = w.range.end - w.range.begin;
    // Ask for the next tile two blocks before the end: that covers the scheduler's latency. A
    // scheduler that prefetches waits for no request.
    const int ask_at = a.prefetch_tiles  ? INT_MAX
                       : blocks_here > 2 ? w.range.begin + 1
                                         : w.range.end - 1;
    const auto load = [&](const TensorMap& tensor, auto& buffers, uint64_t& full, uint64_t& empty,
                          int count, int block) {
      const Slot<kStages> slot(count);
      const bool is_k = &tensor == &a.k;
      timeline.step(count, is_k ? ProducerStep::kAwaitKSlot : ProducerStep::kAwaitVSlot);
      // What another thread loads may have been released already: a wait for the buffer before that
      // would be for a phase later.
      const bool loading = is_k && w.loading && block == w.range.end - 1;
      if (!loading) ptx::mbarrier_wait(shared_address(&empty), slot.parity ^ 1);
      timeline.step(count, is_k ? ProducerStep::kIssueK : ProducerStep::kIssueV);
      if (loading) return;
      inject(Fault::kCopy, 2 * count + is_k);
      const uint32_t barrier = shared_address(&full);
      ptx::mbarrier_arrive_expect_tx(barrier, sizeof(buffers[slot.stage]));
#ifdef ATTNSCOPE_FAULTS
      const int row = w.k_row + block * Config::kKeyParts * Config::kBlockN;
      if (is_late<Config>(a, s, is_k, count, barrier, w, row)) return;
#endif
      load_keys<Config>(a, tensor, buffers[slot.stage], barrier, w, block);
    };

    // K runs one block ahead of V, as in the consumers.
#pragma unroll 1
    for (int block = w.range.end - 1; block >= w.range.begin - 1; --block) {
      if (block == ask_at) ptx::mbarrier_arrive(shared_address(&s.tile_wanted));
      if (block >= w.range.begin) {
        const int stage = Slot<kStages>(blocks).stage;
        load(a.k, s.k, s.k_full[stage], s.k_empty[stage], blocks, block);
      }
      if (block < w.range.end - 1) {
        const int stage = Slot<kStages>(blocks - 1).stage;
        load(a.v, s.v, s.v_full[stage], s.v_empty[stage], blocks - 1, block + 1);
      }
      ++blocks;
    }
    --blocks;
  }
#ifdef ATTNSCOPE_FAULTS
  volatile_store(s.late_copy.done, 1);
#endif
  timeline.finish(tiles - 1, blocks);
}

// Loads each consumer's Q as soon as that consumer has released the rows before. A separate thread:
// K and V must not wait for a consumer's Q.
template <class Config>
__device__ __forceinline__ void produce_queries(const ForwardArguments& a,
                                                ForwardShared<Config>& s) {
  using ptx::shared_address;
  const Timeline timeline(Lane::kQueries, true);
  int tiles = 0;
  while (true) {
    timeline.tile(tiles, QueriesTile::kAwaitTile);
    const Slot<Config::kQStages> q_slot(tiles);
    const Slot<ForwardShared<Config>::kTiles> slot(tiles++);
    ptx::mbarrier_wait(shared_address(&s.tile_full[slot.stage]), slot.parity);
    const TileWork& w = s.tile[slot.stage];
    if (w.stop) break;
    timeline.tile(tiles - 1, QueriesTile::kAwaitSlot);
#pragma unroll 1
    for (int unit = 0; unit < Config::kUnits && !w.loading; ++unit) {
      ptx::mbarrier_wait(shared_address(&s.q_empty[q_slot.stage][unit]), q_slot.parity ^ 1);
      if (unit == 0) timeline.tile(tiles - 1, QueriesTile::kIssue);
      inject(Fault::kQuery, tiles * Config::kUnits + unit);
      load_queries<Config>(a, s, w, q_slot.stage, unit);
    }
    if (w.loading) timeline.tile(tiles - 1, QueriesTile::kIssue);
    inject(Fault::kReleaseTile, tiles);
    ptx::mbarrier_arrive(shared_address(&s.tile_empty[slot.stage]));
  }
  timeline.finish(tiles - 1, 0);
}

}  // namespace attnscope::sm90
