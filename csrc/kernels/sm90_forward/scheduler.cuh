// The scheduler: a warp that takes tiles and describes them for the other roles.
#pragma once

#include "kernels/sm90_forward/shared.cuh"
#include "ptx/sync.cuh"

namespace attnscope::sm90 {

// The units of the heads that come together in tiles, in a sequence of `queries`. Their order: the
// first 64 rows of each head, the next 64 rows of each head, and so on.
template <class Config>
__device__ __forceinline__ int units_of(const ForwardArguments& a, int queries) {
  return (grouping<Config>(a).rows(queries) + 63) / 64 * a.together.divisor;
}

// Sequences of a packed batch with more than half as many keys as the longest come first, then
// those with more than a quarter, and so on: short tiles balance the end.
__device__ __forceinline__ int turn_of(const ForwardArguments& a, int sequence) {
  const Segment k = segment(a.params.cu_seqlens_k, a.params.total_k, a.params.seqlen_k, sequence);
  int turn = 0;
  for (int64_t keys = 2 * int64_t{k.length}; turn < a.turns - 1 && keys <= a.params.seqlen_k;
       keys *= 2)
    ++turn;
  return turn;
}

// Tiles of a packed batch come sequence after sequence; within one, in the order of a dense call.
// Counts the tiles of 32 sequences, after `first` tiles of the sequences before. The counts
// saturate: cu_seqlens may hold anything.
template <class Config>
__device__ __forceinline__ void count_tiles(const ForwardArguments& a, TileQueue& s, int first) {
  const int lane = ptx::lane();
  int tiles = 0;
  if (s.batch + lane < a.params.batch && (a.turns == 1 || turn_of(a, s.batch + lane) == s.turn)) {
    const Segment q =
        segment(a.params.cu_seqlens_q, a.params.total_q, a.params.seqlen_q, s.batch + lane);
    const int units = units_of<Config>(a, q.length);
    tiles = (units + Config::kHeadUnits - 1) / Config::kHeadUnits * a.heads.divisor;
    if (units == a.long_units) tiles = a.long_tiles;
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

// Finds tile number `index`, which never decreases. False past the last tile. Without kMayBePacked:
// for dense calls. Warp-converged.
template <class Config, bool kMayBePacked>
__device__ __forceinline__ bool find_tile(const ForwardArguments& a, TileQueue& s, TileWork& w) {
  const int lane = ptx::lane();
  int index = s.index;
  if (index >= a.tiles) return false;
  Tile tile;
  TileOrder order = a.order;
  int sequence = 0;
  if (kMayBePacked && a.packed) {
    while (index >= s.through[32]) {
      const int first = s.through[32], next = s.batch + 32;
      const bool more = next < a.params.batch;
      const int turn = s.turn + !more;
      if (turn == a.turns) return false;
      __syncwarp();
      if (lane == 0) s.batch = more ? next : 0;
      if (lane == 0) s.turn = turn;
      __syncwarp();
      count_tiles<Config>(a, s, first);
    }
    const int here = __ffs(__ballot_sync(0xffffffffu, index < s.through[lane + 1])) - 1;
    const int first = s.through[here];
    const int tiles = s.through[here + 1] - first;
    const bool is_long = tiles == a.long_tiles;  // no other sequence has as many
    order = {is_long ? order.m_blocks : tiles / a.heads, a.heads.divisor,
             min(order.section, a.heads.divisor), is_long ? order.last : 0};
    sequence = s.batch + here;
    tile = tile_at(order, index - first);
  } else {
    tile = tile_at(order, index, a.section_tiles, a.section);
  }
  if (lane == 0) {
    const int batch = tile.head / a.heads;  // 0 in a packed batch
    s.sequence = sequence + batch;
    // The heads at the end may have tiles of their own number.
    const bool at_end = tile.head >= order.heads - order.last;
    s.m_blocks = at_end ? a.last_m_blocks : order.m_blocks;
    s.m_block = tile.m_block + s.m_blocks - order.m_blocks;
    w.head = (tile.head - batch * a.heads.divisor) * Config::kHeadsPerTile * a.together.divisor
             << grouping<Config>(a).log2;
  }
  return true;
}

// Fills in the rest of a tile: one lane for each consumer's unit, one for the tile's blocks.
// Warp-converged.
template <class Config, bool kMayBePacked>
__device__ __forceinline__ void describe_tile(const ForwardArguments& a, const TileQueue& s,
                                              TileWork& w) {
  const ForwardParams& p = a.params;
  constexpr int kTileLane = Config::kConsumers;
  const int lane = ptx::lane();
  const bool is_consumer = lane < kTileLane;
  const Segment seg_q =
      segment(kMayBePacked ? p.cu_seqlens_q : nullptr, p.total_q, p.seqlen_q, s.sequence);
  const Segment seg_k =
      segment(kMayBePacked ? p.cu_seqlens_k : nullptr, p.total_k, p.seqlen_k, s.sequence);
  const Window window{seg_k.length - seg_q.length, p.window_left, p.window_right};
  constexpr int kUnits = Config::kHeadUnits;
  const int rows = grouping<Config>(a).rows(seg_q.length);
  const int units = units_of<Config>(a, seg_q.length);
  const int first_unit = first_unit_of(s.m_block, s.m_blocks, units, kUnits);
  const int end_unit = first_unit_of(s.m_block + 1, s.m_blocks, units, kUnits);
  const int unit = first_unit + (is_consumer ? Config::unit_of(lane) % kUnits : 0);
  const int last_unit = is_consumer ? unit : end_unit - 1;
  const int place = unit / a.together;  // of its 64 rows in the sequence
  const int begin_row = 64 * place;
  const int end_row = min(64 * (last_unit / a.together) + 64, rows);
  bool absent = unit >= end_unit;
  if (is_consumer) {
    const int head = w.head + unit - place * a.together.divisor +
                     (Config::kHeadsPerTile > 1 ? lane / kUnits : 0);
    if (Config::kHeadsPerTile > 1) absent = absent || head >= p.heads_q;
    Unit& u = w.unit[lane];
    u.head = head;
    u.q_row = static_cast<int>(seg_q.row) + grouping<Config>(a).query(begin_row);
    u.first_row = begin_row;
    u.rows = absent ? 0 : end_row - begin_row;
  }
  BlockRange range =
      block_range(window, grouping<Config>(a).query(begin_row),
                  grouping<Config>(a).query(end_row - 1) + 1, seg_k.length, Config::kBlockN);
  if constexpr (Config::kKeyParts > 1) {
    if (is_consumer) {
      range = of_part(range, Config::part_of(lane), Config::kKeyParts);
    } else {
      range.begin /= Config::kKeyParts;
      range.end = (range.end + Config::kKeyParts - 1) / Config::kKeyParts;
    }
  }
  const int tile_begin = __shfl_sync(0xffffffffu, range.begin, kTileLane);
  if (is_consumer) {
    if (absent || range.begin >= range.end) range.begin = range.end = tile_begin;
    w.unit[lane].range = range;
  }
  if (lane == kTileLane) {
    w.range = range;
    w.head_kv = w.head / a.heads_per_key;
    w.batch = seg_q.batch;
    w.k_row = static_cast<int>(seg_k.row);
    w.seqlen_k = seg_k.length;
    w.shift = window.shift;
    w.first_unit = first_unit;
    w.end_unit = end_unit;
    w.loading = false;
  }
}

// A tile whose rows see no key: out = 0, lse = -inf. Warp-converged.
template <class Config>
__device__ __forceinline__ void store_empty(const ForwardArguments& a, const TileWork& w) {
  const ForwardParams& p = a.params;
  const int lane = ptx::lane();
#pragma unroll 1
  for (int i = 0; i < Config::kUnits * 64; ++i) {
    const Unit& unit = w.unit[i / 64 * Config::kKeyParts];
    const int row = i % 64;
    if (row >= unit.rows) continue;
    const int64_t query = unit.q_row + grouping<Config>(a).query(row),
                  head = unit.head + grouping<Config>(a).head(row);
    auto* out = static_cast<typename Config::Element*>(p.out) +
                int64_t{w.batch} * p.out_stride.batch + query * p.out_stride.row +
                head * p.out_stride.head;
    if (lane * 8 < p.head_dim_v) *reinterpret_cast<uint4*>(out + lane * 8) = uint4{};
    if (lane == 0) {
      p.lse[int64_t{w.batch} * p.lse_batch_stride + head * p.lse_head_stride + query] = -INFINITY;
    }
  }
}

__device__ __forceinline__ void note_tile(const Timeline& timeline, int tile, const TileWork& w) {
  timeline.note(tile, SchedulerTile::kHead, w.head);
  timeline.note(tile, SchedulerTile::kBatch, w.batch);
  timeline.note(tile, SchedulerTile::kFirstUnit, w.first_unit);
  timeline.note(tile, SchedulerTile::kBegin, w.range.begin);
  timeline.note(tile, SchedulerTile::kEnd, w.range.end);
  timeline.note(tile, SchedulerTile::kFullBegin, w.range.full_begin);
  timeline.note(tile, SchedulerTile::kFullEnd, w.range.full_end);
  timeline.note(tile, SchedulerTile::kEndUnit, w.end_unit);
}

// Finds and describes the tile of the queue's index. False if there is none. Warp-converged.
template <class Config, bool kMayBePacked>
__device__ __forceinline__ bool fill_in(const ForwardArguments& a, TileQueue& queue, TileWork& w) {
  if (!find_tile<Config, kMayBePacked>(a, queue, w)) return false;
  __syncwarp();
  describe_tile<Config, kMayBePacked>(a, queue, w);
  __syncwarp();
  return true;
}

// Hands out tiles until none is left. It takes a tile only when the producer nears the end of the
// tile before: the next tile goes to the block that is free first, which balances long tiles. With
// prefetch_tiles it takes a tile as soon as a slot is free: for short tiles latency counts more.
// Stores tiles without keys itself. Warp-converged.
template <class Config>
__device__ __forceinline__ void schedule(const ForwardArguments& a, ForwardShared<Config>& s) {
  using ptx::shared_address;
  const bool elected = threadIdx.x % 32 == 0;
  const bool counts = a.counter != nullptr;  // otherwise each block has one tile at most
  if (!Config::kPackedAtEntry && a.packed) count_tiles<Config>(a, s.queue, 0);
  const auto take_index = [&] {
    s.queue.index = counts ? gridDim.x + ptx::atomic_add(&a.counter->taken, 1) : a.tiles;
  };
  const Timeline timeline(Lane::kScheduler, elected);
  using TileSlot = Slot<ForwardShared<Config>::kTiles>;
  while (true) {
    const int tiles = s.queue.tiles;
    const TileSlot slot(tiles);
    TileWork& w = s.tile[slot.stage];
    timeline.tile(tiles, SchedulerTile::kAwaitRequest);
    // See describe_first_tile.
    bool described = tiles == 0 && (Config::kPackedAtEntry || !a.packed);
    if (tiles > 0) {
      if (!a.prefetch_tiles) ptx::mbarrier_wait(shared_address(&s.tile_wanted), tiles - 1 & 1);
      timeline.tile(tiles, SchedulerTile::kTake);
      if (elected) take_index();
      __syncwarp();
      timeline.tile(tiles, SchedulerTile::kAwaitSlot);
      if constexpr (kGuardedTiles) {
        ptx::mbarrier_wait(shared_address(&s.tile_empty[slot.stage]), slot.parity ^ 1);
      }
    }
    timeline.tile(tiles, SchedulerTile::kHand);
    if (described && w.loading) {  // handed out by hand_first_tile
      note_tile(timeline, tiles, w);
      __syncwarp();
      if (elected) ++s.queue.tiles;
      __syncwarp();
      continue;
    }
    bool stop;
    while (true) {
      if (described) {
        stop = w.stop;
      } else {
        stop = !fill_in<Config, true>(a, s.queue, w);
        if (elected) w.stop = stop;
      }
      if (stop || w.range.begin < w.range.end) break;
      store_empty<Config>(a, w);
      __syncwarp();
      if (elected) take_index();
      __syncwarp();
      described = false;
    }
    if (stop) {
      timeline.finish(s.queue.tiles, 0);
    } else {
      note_tile(timeline, s.queue.tiles, w);
    }
    inject(Fault::kTile, s.queue.tiles);
    __syncwarp();  // every lane wrote a part
    if (kEveryLaneArrives || elected) {
      ptx::mbarrier_arrive(shared_address(&s.tile_full[TileSlot(s.queue.tiles).stage]));
    }
    if (stop) break;
    __syncwarp();
    if (elected) ++s.queue.tiles;
    __syncwarp();
  }
  // The last block to get here leaves the counter at zero.
  if (elected && counts && ptx::atomic_add(&a.counter->finished, 1) == gridDim.x - 1) {
    a.counter->taken = 0;
    a.counter->finished = 0;
  }
}

}  // namespace attnscope::sm90
