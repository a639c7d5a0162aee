// The feeding roles: a warp takes tiles and works out what they are, a thread keeps the copy engine
// busy.
#pragma once

#include "kernels/sm90_forward/shared.cuh"
#include "ptx/address.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"

namespace attnscope::sm90 {

// Tiles of a packed batch come sequence after sequence, each with its heads and tiles in the order
// of a call's. This counts those of 32 sequences, after `first` tiles of the ones before. The
// counts are saturated: cu_seqlens may hold anything.
template <class Config>
__device__ __forceinline__ void count_tiles(const ForwardArguments& a, TileQueue& s, int first) {
  const int lane = ptx::lane();
  int tiles = 0;
  if (s.batch + lane < a.params.batch) {
    const Segment q =
        segment(a.params.cu_seqlens_q, a.params.total_q, a.params.seqlen_q, s.batch + lane);
    tiles = (grouping<Config>(a).rows(q.length) + Config::kBlockM - 1) / Config::kBlockM *
            a.heads.divisor;
  }
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, tiles, distance);
    if (lane >= distance) tiles = min(tiles + below, kMostTiles);
  }
  if (lane == 0) s.through[0] = first;
  s.through[lane + 1] = min(first + tiles, kMostTiles);
  __syncwarp();
}

// Where tile number `index` lies, which never decreases. False past the last. By a warp.
template <class Config>
__device__ __forceinline__ bool find_tile(const ForwardArguments& a, TileQueue& s, Work& w) {
  const int lane = ptx::lane();
  int index = s.index;
  if (index >= a.tiles) return false;
  Tile tile;
  int sequence = 0;
  if (a.packed) {
    while (index >= s.through[32]) {
      const int first = s.through[32], batch = s.batch + 32;
      if (batch >= a.params.batch) return false;
      __syncwarp();
      if (lane == 0) s.batch = batch;
      __syncwarp();
      count_tiles<Config>(a, s, first);
    }
    const int here = __ffs(__ballot_sync(0xffffffffu, index < s.through[lane + 1])) - 1;
    const int first = s.through[here];
    const TileOrder order{(s.through[here + 1] - first) / a.heads, a.heads.divisor,
                          min(a.order.section, a.heads.divisor), 0};
    sequence = s.batch + here;
    tile = tile_at(order, index - first);
  } else {
    tile = tile_at(a.order, index);
  }
  if (lane == 0) {
    const int batch = tile.head / a.heads;  // 0 in a packed batch
    s.sequence = sequence + batch;
    s.m_block = tile.m_block;
    w.head = (tile.head - batch * a.heads.divisor) * Config::kOwnHeads << grouping<Config>(a).log2;
  }
  return true;
}

// All else about a tile: a lane for each consumer's blocks, and one for those of the tile. By a
// warp.
template <class Config>
__device__ __forceinline__ void describe_tile(const ForwardArguments& a, const TileQueue& s,
                                              Work& w) {
  const ForwardParams& p = a.params;
  constexpr int kWhole = Config::kConsumers;  // the tile's lane
  const int lane = ptx::lane();
  const bool own = lane < kWhole;
  const Segment seg_q = segment(p.cu_seqlens_q, p.total_q, p.seqlen_q, s.sequence);
  const Segment seg_k = segment(p.cu_seqlens_k, p.total_k, p.seqlen_k, s.sequence);
  const Window window{seg_k.length - seg_q.length, p.window_left, p.window_right};
  // Where tiles do not divide the rows, the first ones have 64 rows less: under a causal mask,
  // where the last tiles see the most keys, those should keep all consumers at work.
  constexpr int kUnits = Config::kHeadConsumers;
  const int rows = grouping<Config>(a).rows(seg_q.length);
  const int units = (rows + 63) / 64;
  const int missing = (units + kUnits - 1) / kUnits * kUnits - units;
  const auto first_row_of = [&](int m_block) {
    return 64 * (m_block * kUnits - min(m_block, missing));
  };
  const int first_row = first_row_of(s.m_block);
  const int last_row = min(first_row_of(s.m_block + 1), rows);
  const int begin_row = first_row + (own ? 64 * (lane % kUnits) : 0);
  const int end_row = min(begin_row + (own ? 64 : Config::kBlockM), last_row);
  BlockRange range =
      block_range(window, grouping<Config>(a).query(begin_row),
                  grouping<Config>(a).query(end_row - 1) + 1, seg_k.length, Config::kBlockN);
  const int tile_begin = __shfl_sync(0xffffffffu, range.begin, kWhole);
  if (own) {
    const bool no_head = Config::kOwnHeads > 1 && w.head + lane / kUnits >= p.heads_q;
    if (no_head || begin_row >= end_row || range.begin >= range.end)
      range.begin = range.end = tile_begin;
    w.consumer[lane] = range;
  }
  if (lane == kWhole) {
    w.range = range;
    w.head_kv = w.head / a.heads_per_key;
    w.batch = seg_q.batch;
    w.q_row = static_cast<int>(seg_q.row) + grouping<Config>(a).query(begin_row);
    w.first_row = begin_row;
    w.end_row = end_row;
    w.k_row = static_cast<int>(seg_k.row);
    w.seqlen_k = seg_k.length;
    w.shift = window.shift;
    w.first_key = window.first_key(grouping<Config>(a).query(begin_row));
    w.clears = w.first_key > range.begin * Config::kBlockN ||
               (a.packed && seg_k.length < range.end * Config::kBlockN);
  }
}

// A tile whose rows see no key: out = 0, lse = -inf. By a warp.
template <class Config>
__device__ __forceinline__ void store_empty(const ForwardArguments& a, const Work& w) {
  const ForwardParams& p = a.params;
  const int lane = ptx::lane();
  const int rows = w.end_row - w.first_row;
#pragma unroll 1
  for (int i = 0; i < Config::kOwnHeads * rows; ++i) {
    const int own_head = Config::kOwnHeads == 1 ? 0 : i / rows, row = i - own_head * rows;
    const int64_t query = w.q_row + grouping<Config>(a).query(row),
                  head = w.head + own_head + grouping<Config>(a).head(row);
    if (Config::kOwnHeads > 1 && head >= p.heads_q) break;
    auto* out = static_cast<typename Config::Element*>(p.out) +
                int64_t{w.batch} * p.out_stride.batch + query * p.out_stride.row +
                head * p.out_stride.head;
    if (lane * 8 < p.head_dim_v) *reinterpret_cast<uint4*>(out + lane * 8) = uint4{};
    if (lane == 0) {
      p.lse[int64_t{w.batch} * p.lse_batch_stride + head * p.lse_head_stride + query] = -INFINITY;
    }
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
  timeline.note(tile, SchedulerTile::kEndRow, w.end_row);
}

// Takes tiles and works out what they are. A tile is taken only when the producer is near the end
// of the one before: the tiles left go to whoever is free, and the long ones, which come first,
// even out. Where all are short, they are taken as soon as there is room for them: what matters
// then is the time that taking one takes. A tile without keys is dealt with here. By a warp.
template <class Config>
__device__ __forceinline__ void schedule(const ForwardArguments& a, ForwardShared<Config>& s) {
  using ptx::shared_address;
  const bool elected = threadIdx.x % 32 == 0;
  const auto take_index = [&] {
    if (elected) s.queue.index = gridDim.x + ptx::atomic_add(&a.counter->taken, 1);
    __syncwarp();
  };
  if (elected) {
    s.queue.tiles = 0;
    s.queue.index = blockIdx.x;
    s.queue.batch = 0;
  }
  __syncwarp();
  if (a.packed) count_tiles<Config>(a, s.queue, 0);
  const Timeline timeline(Lane::kScheduler, elected);
  using TileSlot = Slot<ForwardShared<Config>::kTiles>;
  while (true) {
    const int tiles = s.queue.tiles;
    timeline.tile(tiles, SchedulerTile::kAwaitRequest);
    if (tiles > 0) {
      if (!a.eager) ptx::mbarrier_wait(shared_address(&s.tile_wanted), tiles - 1 & 1);
      timeline.tile(tiles, SchedulerTile::kTake);
      take_index();
    }
    timeline.tile(tiles, SchedulerTile::kAwaitSlot);
    ptx::mbarrier_wait(shared_address(&s.tile_empty[TileSlot(tiles).stage]),
                       TileSlot(tiles).parity ^ 1);
    timeline.tile(tiles, SchedulerTile::kHand);
    Work& w = s.tile[TileSlot(tiles).stage];
    bool stop;
    while (true) {
      stop = !find_tile<Config>(a, s.queue, w);
      if (stop) break;
      __syncwarp();
      describe_tile<Config>(a, s.queue, w);
      __syncwarp();
      if (w.range.begin < w.range.end) break;
      store_empty<Config>(a, w);
      __syncwarp();
      take_index();
    }
    if (stop) {
      timeline.finish(s.queue.tiles, 0);
    } else {
      note_tile(timeline, s.queue.tiles, w);
    }
    if (elected) w.stop = stop;
    // By every lane: each has written a part.
    ptx::mbarrier_arrive(shared_address(&s.tile_full[TileSlot(s.queue.tiles).stage]));
    if (stop) break;
    __syncwarp();
    if (elected) ++s.queue.tiles;
    __syncwarp();
  }
  // The last block to get here leaves the counter as it was found.
  if (elected && ptx::atomic_add(&a.counter->finished, 1) == gridDim.x - 1) {
    a.counter->taken = 0;
    a.counter->finished = 0;
  }
}

template <class Config>
__device__ __forceinline__ void load_box(uint32_t shared, const TensorMap& tensor, uint32_t barrier,
                                         int rows, int row, int head, int batch) {
#pragma unroll
  for (int column = 0; column < Config::kColumns; column += 64) {
    ptx::tma_load_4d(shared + column / 64 * rows * Config::kRowBytes, &tensor.map, barrier,
                     ptx::CachePolicy::kEvictLast, column, row, head * tensor.head_step,
                     batch * tensor.batch_step);
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
      ptx::mbarrier_arrive_expect_tx(barrier, Config::kOwnHeads * Config::kTileBytes);
#pragma unroll
      for (int i = 0; i < Config::kOwnHeads; ++i) {  // past the last head: zeros
        const int head = i == 0 ? w.head_kv : (w.head + i) / a.heads_per_key;
        load_box<Config>(shared_address(buffers[slot.stage][i]), tensor, barrier, kBlockN,
                         w.k_row + block * kBlockN, head, w.batch);
      }
    };

    // K runs one block ahead of V, as the consumers do.
#pragma unroll 1
    for (int block = w.range.end - 1; block >= w.range.begin - 1; --block) {
      if (block == ask_at) ptx::mbarrier_arrive(shared_address(&s.tile_wanted));
      if (block >= w.range.begin) load(a.k, s.k, s.k_full, s.k_empty, blocks, block);
      if (block < w.range.end - 1) load(a.v, s.v, s.v_full, s.v_empty, blocks - 1, block + 1);
      ++blocks;
    }
    --blocks;
  }
  timeline.finish(tiles - 1, blocks);
}

// Q, each consumer's rows as soon as it is done with the ones before. By a thread of its own: a
// wait for a consumer must not hold up K and V.
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
    const Work& w = s.tile[slot.stage];
    const bool stop = w.stop;
    const int row = w.q_row, head = w.head, batch = w.batch;
    ptx::mbarrier_arrive(shared_address(&s.tile_empty[slot.stage]));
    if (stop) break;
    timeline.tile(tiles - 1, QueriesTile::kAwaitSlot);
#pragma unroll 1
    for (int consumer = 0; consumer < Config::kConsumers; ++consumer) {
      ptx::mbarrier_wait(shared_address(&s.q_empty[q_slot.stage][consumer]), q_slot.parity ^ 1);
      if (consumer == 0) timeline.tile(tiles - 1, QueriesTile::kIssue);
      const uint32_t full = shared_address(&s.q_full[q_slot.stage][consumer]);
      ptx::mbarrier_arrive_expect_tx(full, Config::kQBytes);
#pragma unroll
      for (int column = 0; column < Config::kColumns; column += 64) {
        ptx::tma_load_5d(
            shared_address(s.q[q_slot.stage][consumer]) + column / 64 * 64 * Config::kRowBytes,
            &a.q.map, full, ptx::CachePolicy::kEvictFirst, column, 0,
            row + grouping<Config>(a).query(64 * (consumer % Config::kHeadConsumers)),
            ((head >> grouping<Config>(a).log2) + consumer / Config::kHeadConsumers) *
                a.q.head_step,
            batch * a.q.batch_step);
      }
    }
  }
  timeline.finish(tiles - 1, 0);
}

}  // namespace attnscope::sm90
