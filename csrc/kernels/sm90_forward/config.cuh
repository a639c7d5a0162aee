// Tiles of the Hopper forward kernel, as data. Plain C++.
#pragma once

#include <climits>

#include "attn/params.h"

namespace attnscope::sm90 {

struct ForwardTile {
  int head_dim;        // rounded up; TMA fills smaller head dims with zeros
  int block_m;         // query rows per head, 64 a consumer warpgroup
  int block_n;         // keys of one step
  int q_stages;        // buffers for Q: this tile's and the next one's, or one
  int stages;          // buffers for K, and as many for V
  int blocks_per_sm;   // resident at a time
  int heads_per_tile;  // heads with rows and keys of their own
  int key_parts;       // consumers that divide the keys of the same rows
  bool scores_live;    // keep S through the softmax; otherwise recompute S if the row max rises
  int min_queries;     // exclusive; 0: none
  int max_queries;     // not causal
  int max_queries_causal;
  const char* reason;

  // In shared memory: column blocks of 64.
  constexpr int columns() const { return (head_dim + 63) / 64 * 64; }
  constexpr int consumers() const { return heads_per_tile * key_parts * block_m / 64; }
  // Column blocks of O on the way out.
  constexpr int out_stages() const { return columns() > 64 ? 2 : 1; }
  constexpr int threads() const { return 128 * (consumers() + 1); }
  // Registers of a thread. The producer warpgroup gives registers up to the consumers.
  constexpr int producer_registers() const { return consumers() == 2 ? 24 : 32; }
  constexpr int consumer_registers() const {
    const int launched = 65536 / (blocks_per_sm * threads()) / 8 * 8;
    const int rest = launched * (consumers() + 1) - producer_registers();
    const int each = rest / consumers() / 8 * 8;
    return each < 240 ? each : 240;
  }
  constexpr int shared_bytes() const {
    return 2 * columns() * heads_per_tile *
               (q_stages * block_m + 2 * stages * key_parts * block_n) +  // Q, K, V
           2 * 64 * heads_per_tile * block_m * out_stages() +             // O on its way
           (key_parts - 1) * 8 * block_m * (head_dim / 2 + 4) +           // O of other consumers
           1024;                                                          // barriers
  }
};

inline constexpr int kAnyQueries = INT_MAX;
// Reasons: TFLOP/s, or the geometric mean of the speed over the best peer's, on an H200
// (docs/perf-log.md).
// Deliberately not `inline`: the dynamic linker would merge the tables of two builds loaded in one
// process, such as the instrumented one.
constexpr ForwardTile kForwardTiles[] = {
    {64, 128, 64, 2, 3, 1, 2, 1, false, 64, 128, 128,
     "S = 128, causal: 246, 123; 64 rows of one head, three blocks an SM: 207, 102"},
    {64, 256, 64, 2, 4, 1, 1, 1, false, 128, 1024, 4096,
     "causal S = 512, 1024: 278, 373; 192 rows of 128 keys: 241, 327"},
    {64, 64, 64, 2, 3, 3, 1, 1, true, 0, 128, 128,
     "causal S = 128: 97; 128 rows of 128 keys, one block an SM: 86"},
    {64, 192, 128, 2, 3, 1, 1, 1, false, 0, kAnyQueries, kAnyQueries,
     "S = 8192: 587; 256 rows of 64 keys: 560"},
    {96, 192, 64, 1, 4, 1, 1, 1, true, 0, kAnyQueries, kAnyQueries,
     "over FlashAttention-3 1.09; 128 rows of 128 keys 1.03, as head dim 128 1.01"},
    {128, 192, 64, 1, 4, 1, 1, 1, true, 256, kAnyQueries, kAnyQueries,
     "S = 2048, causal 1024: 714, 466; 128 rows of 128 keys: 681, 446"},
    {128, 64, 64, 2, 2, 2, 1, 1, true, 0, 64, 64,
     "S = 64: 123, causal 62; 128 rows of 64 keys: 114, 55; few tiles: 16 heads, S = 512: 144"},
    {128, 64, 64, 1, 2, 1, 1, 2, true, 0, 0, 0,
     "few tiles: 8 heads, S = 1024, causal and full: 1.13 and 1.15 of 64 rows of 64 keys"},
    {128, 128, 64, 2, 4, 1, 1, 1, true, 0, kAnyQueries, kAnyQueries,
     "S = 128, 256, causal: 241, 392, 121, 205; 128 keys, one Q: 233, 382, 115, 191"},
    {192, 128, 64, 1, 3, 1, 1, 1, true, 0, kAnyQueries, kAnyQueries,
     "over FlashAttention-3 1.05; 96 keys 1.02, as head dim 256 0.85"},
    {256, 128, 64, 1, 2, 1, 1, 1, true, 0, kAnyQueries, kAnyQueries,
     "1.04; 80 keys, scores not kept: 0.98"},
};
inline constexpr int kForwardTileCount = sizeof(kForwardTiles) / sizeof(kForwardTiles[0]);
inline constexpr int kMaxConsumers = 4;
inline constexpr int kPrefetchKeys = 256;   // calls with at most this many keys prefetch tiles
inline constexpr int kShortSection = 32;    // heads whose long tiles come first in such calls
inline constexpr int kGroupedQueries = 64;  // calls with at most this many queries may group heads

// The base-2 logarithm of the query heads side by side in a tile. Heads that share a key head are
// grouped if their tiles would be mostly empty and would not all run at once. At most 16 heads: a
// warp stores 16 rows of O at a time.
constexpr int choose_grouping(int queries, int heads_q, int heads_kv, long long batch, int sms) {
  if (queries > kGroupedQueries || batch * heads_q <= sms) return 0;
  int log2 = 0;
  while (log2 < 4 && heads_q / heads_kv % (2 << log2) == 0) ++log2;
  return log2;
}

// The head dim of the table that serves a head dim: rounded up; 0 if there is none.
constexpr int tile_head_dim(int head_dim) {
  for (const ForwardTile& t : kForwardTiles) {
    if (head_dim <= t.head_dim) return t.head_dim;
  }
  return 0;
}

// The row with the largest block_m up to `max_rows` for a head dim of the table, among rows of one
// head per tile; -1 if there is none.
constexpr int largest_tile(int head_dim, int max_rows) {
  int best = -1;
  for (int i = 0; i < kForwardTileCount; ++i) {
    const ForwardTile& t = kForwardTiles[i];
    if (t.head_dim != head_dim || t.block_m > max_rows || t.consumers() != t.block_m / 64) continue;
    if (best < 0 || t.block_m > kForwardTiles[best].block_m) best = i;
  }
  return best;
}

// The one row for a head dim of the table that serves grouped heads; the other rows are compiled
// without the arithmetic.
constexpr int grouped_tile(int head_dim) {
  const int row = largest_tile(head_dim, 128);
  return row >= 0 ? row : largest_tile(head_dim, kAnyQueries);
}

// The choice for a call: a row of the table (-1: none), and 1 << grouping heads side by side.
struct ForwardChoice {
  int row;
  int grouping;
};

// The first row whose bounds include the call; -1 if there is none. Rows of several heads need a
// dense call that has them. `dim` is a head dim of the table.
constexpr int first_tile(int dim, int queries, int heads_q, bool causal, bool packed) {
  for (int i = 0; i < kForwardTileCount; ++i) {
    const ForwardTile& t = kForwardTiles[i];
    const int max_queries = causal ? t.max_queries_causal : t.max_queries;
    const bool enough = queries > t.min_queries || t.min_queries == 0;
    const bool has_heads = t.heads_per_tile == 1 || (!packed && heads_q >= t.heads_per_tile);
    if (t.head_dim == dim && enough && has_heads && queries <= max_queries) return i;
  }
  return -1;
}

// The query heads whose rows, 64 at a time, may come together in a tile: those of a key head. Then
// only the last tile of a key head leaves consumers idle. Rows of grouped heads are together
// anyway, and heads with keys of their own in a tile are not of one key head.
constexpr int heads_together(const ForwardTile& t, int grouping, int heads_q, int heads_kv) {
  return grouping == 0 && t.heads_per_tile == 1 && heads_kv > 0 ? heads_q / heads_kv : 1;
}

// The tiles of a dense call. A packed batch has at most as many.
constexpr long long tile_count(const ForwardTile& t, int grouping, int queries, int heads_q,
                               int heads_kv, long long batch) {
  const int together = heads_together(t, grouping, heads_q, heads_kv);
  const long long rows = static_cast<long long>(queries) << grouping;
  const long long units = (rows + 63) / 64 * (together > 0 ? together : 1);
  const int per_tile = t.block_m / 64, side_by_side = t.heads_per_tile << grouping;
  const int heads = together > 1 ? heads_kv : (heads_q + side_by_side - 1) / side_by_side;
  return (units + per_tile - 1) / per_tile * batch * heads;
}

// Roughly how many cycles of an SM a call takes with a row of the table, to compare rows. The
// constants fit 200 calls with every row on an H200 (docs/perf-log.md).
//
// A step of 64 keys takes at least kLeastStep; where an SM has more consumers, they share the
// tensor cores. What else a tile does takes kTileCycles, and kMeetingCycles where two consumers
// share rows. Causal: the longest tiles come first and the SMs end together, unless the longest
// tile alone takes longer. Otherwise tiles take the same time, and the last round may have few.
inline constexpr int kLeastStep = 500, kTileCycles = 8000, kMeetingCycles = 500;
inline constexpr long long kFewRounds = 8;

constexpr double estimated_cycles(const ForwardTile& t, int queries, int keys, int heads_q,
                                  int heads_kv, long long batch, bool causal, int sms) {
  const long long tiles = tile_count(t, 0, queries, heads_q, heads_kv, batch);
  const long long on_each = (tiles + sms - 1) / sms;
  const int at_once = on_each < t.blocks_per_sm ? static_cast<int>(on_each) : t.blocks_per_sm;
  const int products = (12 * t.consumers() + t.key_parts) * t.head_dim / 4;  // of a step
  const auto step = [&](int blocks) -> double {
    return products * blocks > kLeastStep ? products * blocks : kLeastStep;
  };
  const int steps = ((keys + 63) / 64 + 1) / t.key_parts + 1;
  const int rest = kTileCycles + (t.key_parts - 1) * kMeetingCycles;
  if (at_once == 0) return 0;  // no tile
  if (!causal) return (on_each + at_once - 1) / at_once * (steps * step(at_once) + rest);
  const int unseen = (queries < keys ? queries : keys) / 128 / t.key_parts;  // steps, on average
  const double all = tiles * ((steps - unseen) * step(at_once) + rest) / (sms * at_once);
  const double longest = steps * step(1) + rest;
  return all > longest ? all : longest;
}

// The row is `first_tile`, unless another row of one head saves a tenth by the estimate: where
// tiles are few, or the last round has few. In a call of many rounds it must save a fifth: there
// the estimate is no better. A packed batch has fewer tiles than are counted, so only if all of
// them fit at once. `keys` 0: as many as queries.
constexpr ForwardChoice choose_forward(int head_dim, int queries, int heads_q, int heads_kv,
                                       long long batch, bool causal, bool packed, int sms,
                                       int keys = 0) {
  const int dim = tile_head_dim(head_dim);
  const int grouping = choose_grouping(queries, heads_q, heads_kv, batch, sms);
  if (grouping > 0) return {grouped_tile(dim), grouping};
  int row = first_tile(dim, queries, heads_q, causal, packed);
  const auto cycles = [&](int i) {
    return estimated_cycles(kForwardTiles[i], queries, keys > 0 ? keys : queries, heads_q, heads_kv,
                            batch, causal, sms);
  };
  if (row < 0) return {row, 0};
  const long long tiles = tile_count(kForwardTiles[row], 0, queries, heads_q, heads_kv, batch);
  if (packed && tiles > sms) return {row, 0};
  double least = cycles(row) * (tiles <= kFewRounds * sms ? 0.9 : 0.8);
  for (int i = 0; i < kForwardTileCount; ++i) {
    const ForwardTile& t = kForwardTiles[i];
    if (t.head_dim != dim || t.heads_per_tile > 1 || cycles(i) >= least) continue;
    least = cycles(i);
    row = i;
  }
  return {row, 0};
}

// Whether later rows see more keys.
constexpr bool is_causal(const ForwardParams& p) {
  return p.window_right >= 0 && p.window_left < 0;
}

// The choice for a call. Heads of an expanded q cannot be grouped: each counts as a group.
inline ForwardChoice choose_forward(const ForwardParams& p, int sms) {
  const int head_dim = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  return choose_forward(head_dim, p.seqlen_q, p.heads_q,
                        p.q_stride.head != 0 ? p.heads_kv : p.heads_q, p.batch, is_causal(p),
                        p.packed(), sms, p.seqlen_k);
}

constexpr ForwardTile forward_tile(int head_dim, int block_m, int key_parts = 1) {
  for (const ForwardTile& t : kForwardTiles) {
    if (head_dim == t.head_dim && block_m == t.block_m && key_parts == t.key_parts) return t;
  }
  return {};
}

}  // namespace attnscope::sm90
