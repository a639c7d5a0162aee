// The feeding roles: a warp takes tiles and works out what they are, a thread keeps the copy engine
// busy.
#pragma once

#include "kernels/sm90_forward/shared.cuh"
#include "ptx/address.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"

namespace attnscope::sm90 {

template <class Config>
__device__ __forceinline__ void describe_tile(const ForwardArguments& a, int index, Work& w) {
  const ForwardParams& p = a.params;
  const Tile tile = tile_at(a.order, index);
  const int batch = tile.head / p.heads_q, head = tile.head - batch * p.heads_q;
  const int first_row = tile.m_block * Config::kBlockM;
  const Segment seg_q = segment(p.cu_seqlens_q, p.total_q, p.seqlen_q, batch);
  w.head = head;
  w.head_kv = head / (p.heads_q / p.heads_kv);
  w.batch = seg_q.batch;
  w.q_row = static_cast<int>(seg_q.row) + first_row;
  w.first_row = first_row;
  w.seqlen_q = seg_q.length;
  const Segment seg_k = segment(p.cu_seqlens_k, p.total_k, p.seqlen_k, batch);
  w.k_row = static_cast<int>(seg_k.row);
  w.seqlen_k = seg_k.length;
  const Window window{seg_k.length - seg_q.length, p.window_left, p.window_right};
  w.shift = window.shift;
  w.first_key = window.first_key(first_row);
  w.range = block_range(window, first_row, min(first_row + Config::kBlockM, seg_q.length),
                        seg_k.length, Config::kBlockN);
#pragma unroll 1
  for (int i = 0; i < Config::kConsumers; ++i) {
    const int begin_row = first_row + 64 * i, end_row = min(begin_row + 64, seg_q.length);
    BlockRange own = block_range(window, begin_row, end_row, seg_k.length, Config::kBlockN);
    if (begin_row >= end_row || own.begin >= own.end) own.begin = own.end = w.range.begin;
    w.consumer[i] = own;
  }
}

// A tile whose rows see no key: out = 0, lse = -inf. By a warp.
template <class Config>
__device__ __forceinline__ void store_empty(const ForwardParams& p, const Work& w) {
  const int lane = threadIdx.x % 32;
  const int rows = min(Config::kBlockM, w.seqlen_q - w.first_row);
  auto* out = static_cast<typename Config::Element*>(p.out) +
              int64_t{w.batch} * p.out_stride.batch + int64_t{w.q_row} * p.out_stride.row +
              w.head * p.out_stride.head;
  float* lse = p.lse + int64_t{w.batch} * p.lse_batch_stride + w.head * p.lse_head_stride + w.q_row;
#pragma unroll 1
  for (int row = 0; row < rows; ++row) {
    if (lane * 8 < p.head_dim_v)
      *reinterpret_cast<uint4*>(out + row * p.out_stride.row + lane * 8) = uint4{};
    if (lane == 0) lse[row] = -INFINITY;
  }
}

__device__ __forceinline__ void note_tile(const Timeline& timeline, int tile, const Work& w) {
  timeline.note(tile, SchedulerTile::kHead, w.head);
  timeline.note(tile, SchedulerTile::kBatch, w.batch);
  timeline.note(tile, SchedulerTile::kFirstRow, w.first_row);
  timeline.note(tile, SchedulerTile::kBegin, w.range.begin);
  timeline.note(tile, SchedulerTile::kEnd, w.range.end);
  timeline.note(tile, SchedulerTile::kFullBegin, w.range.full_begin);
  timeline.note(tile, SchedulerTile::kFullEnd, w.range.full_end);
}

// Takes tiles and works out what they are. A tile is taken only when the producer is near the end
// of the one before: the tiles left go to whoever is free, and the long ones, which come first,
// even out. A tile without keys is dealt with here. By a warp.
template <class Config>
__device__ __forceinline__ void schedule(const ForwardArguments& a, ForwardShared<Config>& s) {
  using ptx::shared_address;
  const bool elected = threadIdx.x % 32 == 0;
  const auto next_index = [&] {
    int taken = 0;
    if (elected) taken = ptx::atomic_add(&a.counter->taken, 1);
    return static_cast<int>(gridDim.x) + __shfl_sync(0xffffffffu, taken, 0);
  };
  int index = blockIdx.x;
  const Timeline timeline(Lane::kScheduler, elected);
  for (int tiles = 0;; ++tiles) {
    const Slot<ForwardShared<Config>::kTiles> slot(tiles);
    timeline.tile(tiles, SchedulerTile::kAwaitRequest);
    if (tiles > 0) {
      ptx::mbarrier_wait(shared_address(&s.tile_wanted), tiles - 1 & 1);
      timeline.tile(tiles, SchedulerTile::kTake);
      index = next_index();
    }
    timeline.tile(tiles, SchedulerTile::kAwaitSlot);
    ptx::mbarrier_wait(shared_address(&s.tile_empty[slot.stage]), slot.parity ^ 1);
    timeline.tile(tiles, SchedulerTile::kHand);
    Work& w = s.tile[slot.stage];
    for (; index < a.tiles; index = next_index()) {
      if (elected) describe_tile<Config>(a, index, w);
      __syncwarp();
      const bool rows = w.first_row < w.seqlen_q, keys = w.range.begin < w.range.end;
      if (rows && keys) break;
      if (rows) store_empty<Config>(a.params, w);
      __syncwarp();
    }
    const bool stop = index >= a.tiles;
    if (stop) {
      timeline.finish(tiles, 0);
    } else {
      note_tile(timeline, tiles, w);
    }
    if (elected) {
      w.stop = stop;
      ptx::mbarrier_arrive(shared_address(&s.tile_full[slot.stage]));
    }
    if (stop) break;
  }
  // The last block to get here leaves the counter as it was found.
  if (elected && ptx::atomic_add(&a.counter->finished, 1) == gridDim.x - 1) {
    a.counter->taken = 0;
    a.counter->finished = 0;
  }
}

template <class Config>
__device__ __forceinline__ void load_box(uint32_t shared, const TensorMap& tensor, uint32_t barrier,
                                         ptx::CachePolicy policy, int rows, int row, int head,
                                         int batch) {
#pragma unroll
  for (int column = 0; column < Config::kHeadDim; column += 64) {
    ptx::tma_load_4d(shared + column / 64 * rows * Config::kRowBytes, &tensor.map, barrier, policy,
                     column, row, head * tensor.head_step, batch * tensor.batch_step);
  }
}

template <class Config>
__device__ __forceinline__ void produce(const ForwardArguments& a, ForwardShared<Config>& s) {
  using ptx::shared_address;
  constexpr int kBlockN = Config::kBlockN;
  constexpr int kStages = Config::kStages;
  int tiles = 0, blocks = 0;  // uses of the rings so far
  const Timeline timeline(Lane::kProducer, true);
  while (true) {
    timeline.tile(tiles, ProducerTile::kAwaitTile);
    const Slot<Config::kQStages> q_slot(tiles);
    const Slot<ForwardShared<Config>::kTiles> slot(tiles++);
    ptx::mbarrier_wait(shared_address(&s.tile_full[slot.stage]), slot.parity);
    const Work w = s.tile[slot.stage];
    ptx::mbarrier_arrive(shared_address(&s.tile_empty[slot.stage]));
    if (w.stop) break;
    const int blocks_here = w.range.end - w.range.begin;
    // When to ask for the next tile: two blocks before the end covers the time it takes to come.
    const int ask_at = blocks_here > 2 ? w.range.begin + 1 : w.range.end - 1;
    const auto load = [&](const TensorMap& tensor, auto& buffers, uint64_t* full, uint64_t* empty,
                          int count, int block) {
      const Slot<kStages> slot(count);
      const bool is_k = full == s.k_full;
      timeline.step(count, is_k ? ProducerStep::kAwaitKSlot : ProducerStep::kAwaitVSlot);
      ptx::mbarrier_wait(shared_address(&empty[slot.stage]), slot.parity ^ 1);
      timeline.step(count, is_k ? ProducerStep::kIssueK : ProducerStep::kIssueV);
      const uint32_t barrier = shared_address(&full[slot.stage]);
      ptx::mbarrier_arrive_expect_tx(barrier, Config::kTileBytes);
      load_box<Config>(shared_address(buffers[slot.stage]), tensor, barrier,
                       ptx::CachePolicy::kEvictLast, kBlockN, w.k_row + block * kBlockN, w.head_kv,
                       w.batch);
    };

    // K runs one block ahead of V, as the consumers do; Q comes with the first K.
#pragma unroll 1
    for (int block = w.range.end - 1; block >= w.range.begin - 1; --block) {
      if (block == ask_at) ptx::mbarrier_arrive(shared_address(&s.tile_wanted));
      if (block >= w.range.begin) load(a.k, s.k, s.k_full, s.k_empty, blocks, block);
      if (block == w.range.end - 1) {
        timeline.tile(tiles - 1, ProducerTile::kAwaitQSlot);
        ptx::mbarrier_wait(shared_address(&s.q_empty[q_slot.stage]), q_slot.parity ^ 1);
        timeline.tile(tiles - 1, ProducerTile::kIssueQ);
        const uint32_t q_full = shared_address(&s.q_full[q_slot.stage]);
        ptx::mbarrier_arrive_expect_tx(q_full, Config::kQBytes);
        load_box<Config>(shared_address(s.q[q_slot.stage]), a.q, q_full,
                         ptx::CachePolicy::kEvictFirst, Config::kBlockM, w.q_row, w.head, w.batch);
      } else {
        load(a.v, s.v, s.v_full, s.v_empty, blocks - 1, block + 1);
      }
      ++blocks;
    }
    --blocks;
  }
  timeline.finish(tiles - 1, blocks);
}

}  // namespace attnscope::sm90
