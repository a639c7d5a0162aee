// Tiles and workspace of the Hopper backward kernels, as data. Plain C++.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "attn/params.h"
#include "kernels/sm90_backward/order.h"

namespace attnscope::sm90 {

struct BackwardTile {
  int head_dim;       // rounded up; TMA fills smaller head dims with zeros
  int block_m;        // query rows of one step
  int block_n;        // keys, 64 a consumer warpgroup; wide: 64 a thread block
  int stages;         // buffers for Q, and as many for dO
  bool early_values;  // narrow: P is rounded at once, and dV comes before dS; otherwise after it,
                      // and there is no softcap
  int long_queries;  // serves only calls without a left window and with as many queries (packed: in
                     // the longest sequence), four times as many if later keys are hidden; 0: all
  int step_time;     // on an H200, in tenths of a microsecond, see split_tiles: of a step
  int tile_time;     // of a tile's start and end
  int causal_time;   // that a causal call adds, by conjecture to load the code of its masks
  const char* reason;

  // Head dims that wide.cuh serves, by clusters of thread blocks.
  constexpr bool wide() const { return head_dim > 128; }
  constexpr int consumers() const { return block_n / 64; }
  constexpr int threads() const { return 128 * (wide() ? 4 : consumers() + 1); }
  // Wide: dO comes in parts of its columns. Buffers for parts, and for dS of both thread blocks;
  // and whether there is room for dQ on its way out. What fits.
  constexpr int dout_parts() const { return head_dim == 256 ? 2 : 1; }
  constexpr int dout_stages() const { return head_dim == 256 ? 3 : stages; }
  constexpr int score_stages() const { return head_dim == 256 ? 1 : 2; }
  constexpr bool stages_gradient() const { return head_dim != 256; }
  // dQ is computed transposed: a product has 64 rows, and 80 are no multiple of them.
  constexpr bool transposes() const { return block_m % 64 != 0; }
  // Narrow: whether thread blocks may take whole heads, see launch.cu.
  constexpr bool takes_whole_heads() const { return block_m == 64 && !wide(); }
  // Narrow: buffers for K and for V. What fits.
  constexpr int key_stages() const { return transposes() ? 1 : 2; }
  constexpr int value_stages() const { return head_dim == 64 ? 2 : 1; }
  // Narrow: buffers for dQ on its way out.
  constexpr int gradient_stages() const { return block_m * head_dim == 64 * 64 ? 2 : 1; }
  // Whether later rows of the same head dim may serve the call as well.
  constexpr bool has_rivals() const { return head_dim == 64; }
  // A thread block has K, V, Q, dO; dS; dQ on its way out; lse and delta; wide: half of the other
  // thread block's K, P, and dK on its way out; the tiles and barriers.
  constexpr int shared_bytes() const {
    const int narrow =
        2 * head_dim * ((key_stages() + value_stages()) * block_n + 2 * stages * block_m) +
        4 * block_m * block_n + 4 * gradient_stages() * block_m * head_dim + 8 * stages * block_m;
    const int wide_bytes = 2 * head_dim * 64 * (2 + stages) +
                           2 * head_dim * 64 * dout_stages() / dout_parts() +
                           score_stages() * 4 * 64 * 64 + (stages_gradient() ? 4 * 4 * 1024 : 0) +
                           8 * stages * block_m + 4 * 64 * 64 + 2 * 2 * 64 * 64;
    return ((wide() ? wide_bytes : narrow) + 768 + 1023) / 1024 * 1024;
  }
};

// Thread blocks of a cluster of wide.cuh.
inline constexpr int kWideRanks = 2;

// Deliberately not `inline`, see kForwardTiles.
constexpr BackwardTile kBackwardTiles[] = {
    {64, 64, 192, 3, false, 0, 18, 80, 0,
     "three consumers hide each other's latencies; 160 registers each"},
    {64, 64, 128, 3, false, 0, 14, 80, 0, "few tiles"},
    {64, 128, 128, 2, false, 0, 25, 95, 50, "few tiles of many steps: half as many"},
    {128, 80, 128, 2, false, 1024, 25, 80, 0,
     "1.00 to 1.05 of the speed of 64 rows: fewer waits a query"},
    {128, 64, 128, 2, true, 0, 20, 80, 0,
     "dK and dV take 128 registers, which leaves room for 64 rows"},
    {192, 64, 64 * kWideRanks, 2, false, 0, 19, 90, 0, "as head dim 256"},
    {256, 64, 64 * kWideRanks, 2, false, 0, 22, 90, 0,
     "S, dP in separate warpgroups read the fewest bytes of shared memory; two thread blocks share "
     "Q, dO and dQ"},
};
inline constexpr int kBackwardTileCount = sizeof(kBackwardTiles) / sizeof(kBackwardTiles[0]);

// The first row with room for a head dim that serves the call, with at least its long_queries; -1
// if there is none.
constexpr int first_backward_tile(int head_dim, bool softcap, int long_queries) {
  for (int i = 0; i < kBackwardTileCount; ++i) {
    const BackwardTile& t = kBackwardTiles[i];
    if (head_dim <= t.head_dim && long_queries >= t.long_queries &&
        (t.early_values || t.wide() || !softcap)) {
      return i;
    }
  }
  return -1;
}

constexpr int first_backward_tile(const ForwardParams& p) {
  return first_backward_tile(p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v, p.softcap > 0,
                             p.window_left < 0 ? p.seqlen_q / (p.window_right < 0 ? 1 : 4) : 0);
}

// How many blocks of `rows` rows a batch has. In a packed batch each sequence starts a block: at
// most one more than its rows would need, see first_block.
constexpr int64_t block_count(bool packed, int64_t total, int length, int64_t batch, int rows) {
  if (packed) return total / rows + batch;
  return batch * ceil_div(length, rows);
}

// Blocks of queries, and tiles of keys, of the whole call.
constexpr int64_t query_places(const ForwardParams& p, const BackwardTile& t) {
  return p.heads_q * block_count(p.packed(), p.total_q, p.seqlen_q, p.batch, t.block_m);
}
constexpr int64_t key_tiles(const ForwardParams& p, const BackwardTile& t) {
  return p.heads_kv * block_count(p.packed(), p.total_k, p.seqlen_k, p.batch, t.block_n);
}

constexpr bool lengths_differ(const ForwardParams& p) {
  return p.packed() && p.total_k < int64_t{p.batch} * p.seqlen_k;
}

// Tiles of a call that several thread blocks share, each with a part of the queries, see parts.cuh;
// and the time that the call is estimated to take, in tenths of a microsecond.
struct TileParts {
  int64_t whole;  // tiles before them
  int64_t split;
  int parts;  // of each
  int64_t time;
  bool have_heads;  // parts: query heads and all blocks; otherwise blocks and all query heads

  constexpr int64_t units() const { return whole + split * parts; }
  static constexpr int64_t bytes_of_part(const BackwardTile& t) {  // dV and dK in fp32
    return int64_t{t.block_n} * t.head_dim * 2 * 4;
  }
  constexpr int64_t bytes(const BackwardTile& t) const { return split * parts * bytes_of_part(t); }
};

// The tiles of a sequence, of one key head.
struct SequenceWork {
  int64_t tiles = 0;
  int64_t blocks = 0;  // of queries
  int64_t steps = 0;   // blocks of queries that see a tile, of all tiles

  // Where later keys are hidden: all blocks up to the last key that the first query sees, then
  // fewer and fewer.
  static constexpr SequenceWork causal(int64_t queries, int64_t keys, int64_t window_right,
                                       const BackwardTile& t) {
    SequenceWork w{ceil_div(keys, t.block_n), ceil_div(queries, t.block_m), 0};
    const int64_t last_key = keys - queries + window_right;
    const auto steps = [&](int64_t tile) {
      const int64_t first_query = std::max(tile * t.block_n - last_key, int64_t{0});
      return std::max(w.blocks - first_query / t.block_m, int64_t{0});
    };
    const int64_t full = last_key < 0 ? 0 : std::min(last_key / t.block_n + 1, w.tiles);
    w.steps = full * w.blocks + (w.tiles - full) * (steps(full) + steps(w.tiles - 1)) / 2;
    return w;
  }
};

// Blocks of queries that see a tile of keys of a sequence with `queries`, at most.
constexpr int64_t blocks_of_tile(const ForwardParams& p, const BackwardTile& t, int64_t queries) {
  const int64_t blocks = ceil_div(queries, t.block_m);
  if (p.window_left < 0 || p.window_right < 0) return blocks;
  const int64_t seen = int64_t{p.window_left} + p.window_right + t.block_n;
  return std::min(blocks, ceil_div(seen, t.block_m));
}

// What the estimate of a call's time knows of it.
struct TileWork {
  const BackwardTile& tile;
  bool packed, causal, has_turns;
  bool listed = false;  // packed, causal: sequences come longest first, see lists_tiles
  int64_t slots = 0;    // SMs, or clusters
  int64_t heads = 0;    // key heads
  int64_t group = 0;    // query heads of a key head
  int64_t tiles = 0;    // numbers of tiles
  int64_t runs = 0;     // tiles: in a packed batch fewer
  int64_t blocks = 0;   // of queries, of the longest tile
  int64_t average = 0;  // packed: the same of a sequence of mean length
  // Causal: the longest sequence, and the others, which are taken to be alike.
  int64_t others = 0;
  SequenceWork longest{}, other{};

  // Parts of the last `split` tiles that run.
  constexpr int64_t units(int64_t split, int64_t parts) const {
    return (packed ? runs : split) * parts;
  }
  // The time of one tile or part, in tenths of a microsecond.
  constexpr int64_t time_of(int64_t blocks) const {
    return blocks * tile.step_time + tile.tile_time;
  }
  // The same of a sequence, shared out to all slots. Parts with fewer heads than others leave SMs
  // idle, by half of what these lack: `twice` are the heads with and without it.
  constexpr int64_t time_of(const SequenceWork& w, int64_t parts, int64_t twice) const {
    return heads * (w.steps * twice * tile.step_time / 2 + w.tiles * parts * tile.tile_time) /
           slots;
  }
};

constexpr TileWork tile_work(const ForwardParams& p, const BackwardTile& t, int sms,
                             bool has_turns) {
  const int64_t batch = std::max(p.batch, 1);
  TileWork w{t, p.packed(), is_causal(p), has_turns};
  w.listed = lengths_differ(p);
  w.slots = std::max(sms / (t.wide() ? kWideRanks : 1), 1);
  w.heads = p.heads_kv * (w.packed ? 1 : batch);
  w.group = p.heads_kv > 0 ? p.heads_q / p.heads_kv : p.heads_q;
  w.tiles = w.runs = key_tiles(p, t);
  w.blocks = blocks_of_tile(p, t, p.seqlen_q);
  w.longest = SequenceWork::causal(p.seqlen_q, p.seqlen_k, p.window_right, t);
  if (w.packed) {
    w.others = batch - 1;
    const auto of_other = [&](int64_t total, int64_t longest) {
      return std::max(total - longest, int64_t{0}) / std::max(w.others, int64_t{1});
    };
    w.other = SequenceWork::causal(of_other(p.total_q, p.seqlen_q), of_other(p.total_k, p.seqlen_k),
                                   p.window_right, t);
    w.runs = std::min(w.heads * (w.longest.tiles + w.others * w.other.tiles), w.tiles);
    w.average = blocks_of_tile(p, t, p.total_q / batch);
  }
  return w;
}

// Tiles of `heads` query heads, one after the other, drift apart: then L2 does not hold what the
// other tiles of the key head need. In percent of a step; measured of packed batches at head dim
// 128. With turns up to three heads stay close, see Turns.
constexpr int64_t drift(const TileWork& w, int64_t heads) {
  if (!w.packed || w.tile.head_dim != 128) return 0;
  return w.has_turns ? std::max(heads - 3, int64_t{0}) * (heads - 1) : heads - 1;
}

// The time of a call whose last `split` tiles have parts, in tenths of a microsecond. Tiles that
// are alike run in waves over the SMs. Where later keys are hidden, the longest tiles come first
// and the others fill the gaps: the call takes as long as its longest tile, or as all tiles on all
// SMs. In a packed batch they come first within a sequence alone:
// - Where turns of the longest sequence descend, its longest tile comes last.
// - The longest tile of the last sequence ends later than its other ones.
constexpr int64_t call_time(const TileWork& w, bool have_heads, int64_t split, int64_t parts) {
  constexpr int64_t kSumTime = 5, kSumBytes = 350000;  // of the sum of parts: 0.5 us, 3.5 TB/s
  constexpr int64_t kLookTime = 3;                     // a whole tile, where others have parts
  const int64_t heads = have_heads ? ceil_div(w.group, parts) : w.group;
  int64_t part = w.time_of((have_heads ? w.blocks : ceil_div(w.blocks, parts)) * heads);
  if (have_heads && w.has_turns) part += part / 16;  // waits for turns
  const int64_t units = w.units(split, parts);
  const int64_t bytes = units * TileParts::bytes_of_part(w.tile);
  int64_t extra = w.causal ? w.tile.causal_time : 0;
  if (split > 0) extra += kSumTime + bytes / kSumBytes;
  if (w.causal) {
    const int64_t twice = w.group + (have_heads ? parts * heads : w.group);
    const int64_t first = w.time_of(w.longest, parts, twice) * (100 + drift(w, heads)) / 100;
    if (!w.packed) return std::max(part, first) + extra;
    const int64_t each = w.time_of(w.other, parts, twice) * (100 + drift(w, heads)) / 100;
    const bool descend =
        w.has_turns && !has_turns_both_ways(w.longest.tiles * w.heads * parts, w.slots);
    const int64_t start = descend ? std::max(first - part / 2, int64_t{0}) : 0;
    const int64_t rest = w.others > 0 ? w.time_of(w.other.blocks * heads) - each : 0;
    const int64_t late = std::max(rest, int64_t{0}) * (w.listed && !w.has_turns ? 2 : 3) / 4;
    return std::max(start + part, first + w.others * each + late) + extra;
  }
  if (w.packed) {
    return std::max(part, ceil_div(units, w.slots) * w.time_of(w.average * heads)) + extra;
  }
  const int64_t look = split > 0 ? kLookTime : 0;
  return ceil_div(w.tiles - split, w.slots) * (w.time_of(w.blocks * w.group) + look) +
         ceil_div(units, w.slots) * part + extra;
}

// The parts with which the call takes the least time: of tiles that are alike, of the last wave,
// which may be the only one; of others, of all tiles, if there are few.
//
// Parts of heads take turns as tiles of these heads would, and start as they do. Parts of blocks
// would wait for the first parts of other tiles: causal calls with turns have none. Nor have packed
// batches, where a tile may have few blocks.
constexpr TileParts split_tiles(const ForwardParams& p, const BackwardTile& t, int sms,
                                bool has_turns) {
  constexpr int64_t kMost = 16, kWaves = 2, kCausalWaves = 4, kPackedWaves = 17, kCausalBlocks = 4;
  const TileWork w = tile_work(p, t, sms, has_turns);
  const bool differ = w.causal || w.packed;
  const int64_t split = differ ? w.tiles : w.tiles % w.slots;
  const bool drifts = w.causal && drift(w, w.group) > 0;
  const int64_t most_units = w.slots * (drifts ? kPackedWaves : differ ? kCausalWaves : kWaves);
  const int64_t whole = call_time(w, false, 0, 1);
  TileParts best{w.tiles, 0, 1, whole, false};
  // Parts must save this share of a whole tile.
  const auto try_parts = [&](bool have_heads, int64_t most_parts, int64_t share) {
    const int64_t most_time = whole - w.time_of(w.blocks * w.group) / share;
    for (int64_t parts = 2; parts <= std::min(kMost, most_parts) && split > 0; ++parts) {
      if (w.units(split, parts) > most_units) break;
      const int64_t time = call_time(w, have_heads, split, parts);
      if (time < std::min(best.time, most_time)) {
        best = {w.tiles - split, split, static_cast<int>(parts), time, have_heads};
      }
    }
  };
  if (differ) try_parts(true, w.group, 30);
  if (w.packed || (w.causal && has_turns)) return best;
  // Short parts of a causal tile differ by half in their blocks, which the estimate does not see.
  // Where heads can be shared out instead, parts of blocks have at least kCausalBlocks. With turns
  // they wait for each other.
  try_parts(false, w.causal && w.group > 1 ? w.blocks / kCausalBlocks : w.blocks,
            has_turns ? 8 : 30);
  return best;
}

// What serves a call: a row of the table, whether tiles take turns, and its parts.
struct BackwardChoice {
  int row;
  bool has_turns;
  TileParts split;
};

// The row that takes the least time: the first one that serves the call, or a later one of its head
// dim. A head that fits in one tile gets one: it may then need no postprocess, see
// takes_whole_heads. The row is -1 if none serves the call.
constexpr BackwardChoice choose_row(const ForwardParams& p, int sms, bool has_turns) {
  const int first = first_backward_tile(p);
  if (first < 0) return {first, has_turns, {}};
  const BackwardTile& before = kBackwardTiles[first];
  BackwardChoice best{first, has_turns, split_tiles(p, before, sms, has_turns)};
  for (int row = first + 1; before.has_rivals() && row < kBackwardTileCount; ++row) {
    const BackwardTile& t = kBackwardTiles[row];
    if (t.head_dim != before.head_dim) break;
    if (p.seqlen_k > t.block_n && p.seqlen_k <= before.block_n) continue;
    if (p.seqlen_k <= t.block_n && !t.takes_whole_heads()) continue;
    const TileParts split = split_tiles(p, t, sms, has_turns);
    if (split.time < best.split.time) best = {row, has_turns, split};
  }
  return best;
}

// Whether a call without turns would be faster with them: L2 then holds what the tiles of a head
// have in common, see Turns. Measured of grouped heads at head dim 128: 0.95 to 1.00 of the time.
// But 1.04 of it with 512 queries and keys, and 1.05 where parts of queries are given up.
constexpr bool turns_are_faster(const ForwardParams& p, const BackwardChoice& without) {
  constexpr int kLeastRows = 1024;
  const bool has_parts_of_queries = without.split.split > 0 && !without.split.have_heads;
  return without.row >= 0 && kBackwardTiles[without.row].head_dim == 128 && !p.packed() &&
         is_causal(p) && p.heads_q > p.heads_kv && !has_parts_of_queries &&
         std::min(p.seqlen_q, p.seqlen_k) >= kLeastRows;
}

constexpr BackwardChoice choose_backward(const ForwardParams& p, int sms, bool deterministic) {
  const BackwardChoice choice = choose_row(p, sms, deterministic);
  return deterministic || !turns_are_faster(p, choice) ? choice : choose_row(p, sms, true);
}

// Parts of the workspace, as offsets in bytes. Per query head and block of queries:
//   statistics  block_m floats log2(e) lse, then block_m floats delta
//   gradient    dQ / scale in fp32, in the order of the accumulators, see kernel.cuh
//   tickets     of turns: how many key blocks have added, see turns.cuh
//   claims      up to head dim 128: whether the first part of dQ is stored, see claims.cuh
//   parts       of tiles with parts: dV and dK in fp32, see parts.cuh
//   tile_list   see lists_tiles
struct BackwardWorkspace {
  int64_t statistics, gradient, tickets, claims, parts, tile_list, counter, bytes;
};

// Whether the preprocess may list the tiles, see tile_list.cuh. Without turns that is where lengths
// differ: otherwise tiles come in the same order without a list.
constexpr bool lists_tiles(const ForwardParams& p, bool has_turns) {
  return p.packed() && is_causal(p) && (has_turns || lengths_differ(p));
}

inline BackwardWorkspace backward_layout(const BackwardParams& params,
                                         const BackwardChoice& choice) {
  const ForwardParams& p = params.forward;
  const BackwardTile& t = kBackwardTiles[choice.row];
  const int64_t blocks = p.heads_q * block_count(p.packed(), p.packed() ? p.total_q : p.seqlen_q,
                                                 p.seqlen_q, p.batch, t.block_m);
  const auto aligned = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  BackwardWorkspace w{};
  w.gradient = aligned(blocks * t.block_m * 2 * 4);
  w.tickets = w.gradient + aligned(blocks * t.block_m * t.head_dim * 4);
  w.claims = w.tickets + aligned(choice.has_turns ? blocks * 4 : 0);
  w.parts = w.claims + aligned(t.wide() ? 0 : blocks * 4);
  w.tile_list = w.parts + aligned(choice.split.bytes(t));
  w.counter =
      w.tile_list + aligned(lists_tiles(p, choice.has_turns) ? choice.split.units() * 8 : 0);
  w.bytes = w.counter + 256;
  return w;
}

}  // namespace attnscope::sm90
