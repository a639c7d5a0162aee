// Tiles of the Hopper forward kernel, as data. Plain C++.
#pragma once

#include <climits>

#include "attn/params.h"

namespace attnscope::sm90 {

// Elements of a row of Q and K, and of V and O.
struct HeadDims {
  int q, v;
  constexpr HeadDims(int q_, int v_) : q(q_), v(v_) {}
  constexpr HeadDims(int both) : q(both), v(both) {}
};

struct ForwardTile {
  int head_dim;        // of Q and K, rounded up; TMA fills smaller head dims with zeros
  int head_dim_v;      // of V and O
  int block_m;         // query rows per head, 64 a consumer warpgroup
  int block_n;         // keys of one step
  int q_stages;        // buffers for Q: this tile's and the next one's, or one
  int stages;          // buffers for K, and as many for V
  int blocks_per_sm;   // resident at a time
  int heads_per_tile;  // heads with rows and keys of their own
  int key_parts;       // consumers that divide the keys of the same rows
  bool scores_live;    // keep S through the softmax; otherwise recompute S if the row max rises
  bool takes_groups;   // may have heads of a group side by side, see choose_grouping
  int min_queries;     // exclusive; 0: none
  int max_queries;     // not causal
  int max_queries_causal;
  const char* reason;

  constexpr HeadDims dims() const { return {head_dim, head_dim_v}; }
  constexpr bool has(HeadDims d) const { return head_dim == d.q && head_dim_v == d.v; }
  // In shared memory: column blocks of 64.
  constexpr int columns() const { return (head_dim + 63) / 64 * 64; }
  constexpr int value_columns() const { return (head_dim_v + 63) / 64 * 64; }
  // Serves grouped heads only. The rows for other calls are compiled without the arithmetic.
  constexpr bool grouped_only() const { return takes_groups && max_queries == 0; }
  // Whether two consumers issue their products in turns. With 128 keys a step they may fall in step
  // otherwise: both wait for S, then both compute the softmax, and the tensor cores idle.
  constexpr bool takes_turns() const { return consumers() == 2 && block_n == 128; }
  // Units of 64 rows, of a head.
  constexpr int head_units() const { return block_m / 64; }
  constexpr int consumers() const { return heads_per_tile * key_parts * head_units(); }
  // Column blocks of O on the way out. Wider keys leave no room for two.
  constexpr int out_stages() const {
    return value_columns() > 64 && columns() == value_columns() ? 2 : 1;
  }
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
    return 2 * heads_per_tile *
               (q_stages * block_m * columns() +
                stages * key_parts * block_n * (columns() + value_columns())) +  // Q, K, V
           2 * 64 * heads_per_tile * block_m * out_stages() +                    // O on its way
           (key_parts - 1) * 8 * block_m * (head_dim_v / 2 + 4) +  // O of other consumers
           1024;                                                   // barriers
  }
};

inline constexpr int kAnyQueries = INT_MAX;
// Reasons: TFLOP/s, or the geometric mean of the speed over the best peer's, on an H200
// (docs/perf-log.md).
// Deliberately not `inline`: the dynamic linker would merge the tables of two builds loaded in one
// process, such as the instrumented one.
constexpr ForwardTile kForwardTiles[] = {
    {64, 64, 128, 64, 2, 3, 1, 2, 1, false, false, 64, 128, 128,
     "S = 128, causal: 246, 123; 64 rows of one head, three blocks an SM: 207, 102"},
    {64, 64, 256, 64, 2, 4, 1, 1, 1, false, false, 128, 1024, 4096,
     "causal S = 512, 1024: 278, 373; 192 rows of 128 keys: 241, 327"},
    {64, 64, 64, 64, 2, 3, 3, 1, 1, true, true, 0, 128, 128,
     "causal S = 128: 97; 128 rows of 128 keys, one block an SM: 86"},
    {64, 64, 192, 128, 2, 3, 1, 1, 1, false, false, 0, kAnyQueries, kAnyQueries,
     "S = 8192: 587; 256 rows of 64 keys: 560"},
    {80, 80, 192, 64, 1, 4, 1, 1, 1, true, true, 0, kAnyQueries, kAnyQueries,
     "head dims 72 and 80: 1.03 to 1.05 of the tile of 96"},
    {96, 96, 192, 64, 1, 4, 1, 1, 1, true, true, 0, kAnyQueries, kAnyQueries,
     "over FlashAttention-3 1.09; 128 rows of 128 keys 1.03, as head dim 128 1.01"},
    {128, 128, 192, 64, 1, 4, 1, 1, 1, true, false, 256, kAnyQueries, kAnyQueries,
     "S = 2048, causal 1024: 714, 466; 128 rows of 128 keys: 681, 446"},
    {128, 128, 64, 64, 2, 2, 2, 1, 1, true, false, 0, 64, 64,
     "S = 64: 123, causal 62; 128 rows of 64 keys: 114, 55; few tiles: 16 heads, S = 512: 144"},
    {128, 128, 64, 64, 1, 2, 1, 1, 2, true, false, 0, 0, 0,
     "few tiles: 8 heads, S = 1024, causal and full: 1.13 and 1.15 of 64 rows of 64 keys"},
    {128, 128, 192, 64, 1, 4, 1, 1, 1, true, true, 0, 0, 0,
     "grouped, 47 to 154 sequences: 1.05 of 128 rows"},
    {128, 128, 64, 64, 1, 2, 1, 1, 2, true, true, 0, 0, 0,
     "grouped, 7 to 15 sequences: 1.20 to 1.36 of 128 rows"},
    {128, 128, 128, 64, 2, 4, 1, 1, 1, true, true, 0, 0, 0,
     "grouped, 18 sequences: 1.05 of 192 rows, 1.13 of divided keys"},
    {128, 128, 128, 64, 2, 4, 1, 1, 1, true, false, 0, kAnyQueries, kAnyQueries,
     "S = 128, 256, causal: 241, 392, 121, 205; 128 keys, one Q: 233, 382, 115, 191"},
    {128, 128, 128, 128, 2, 2, 1, 1, 1, true, false, 0, 0, 0,
     "chunks of 512 and 2048 queries on a long cache: 1.10 and 1.05 of 64 keys a step"},
    {192, 128, 192, 64, 1, 3, 1, 1, 1, true, true, 0, kAnyQueries, kAnyQueries,
     "S = 4096 and 16384, causal: 1.18 and 1.19 of the tile of 192"},
    {192, 192, 128, 64, 1, 3, 1, 1, 1, true, true, 0, kAnyQueries, kAnyQueries,
     "over FlashAttention-3 1.05; 96 keys 1.02, as head dim 256 0.85"},
    {256, 256, 128, 64, 1, 2, 1, 1, 1, true, true, 0, kAnyQueries, kAnyQueries,
     "1.04; 80 keys, scores not kept: 0.98"},
};
inline constexpr int kForwardTileCount = sizeof(kForwardTiles) / sizeof(kForwardTiles[0]);
inline constexpr int kMaxConsumers = 4;
inline constexpr int kPrefetchKeys = 256;       // calls with at most this many keys prefetch tiles
inline constexpr int kNarrowKeys = 4096;        // up to which the L2 reads 128 bytes at a time
inline constexpr int kShortSection = 32;        // heads whose long tiles come first in such calls
inline constexpr int kOrderedSequences = 1024;  // most of a packed batch that come longest first
inline constexpr int kSequenceTurns = 4;        // of which each has half as many keys
inline constexpr int kGroupedQueries = 64;  // calls with at most this many queries may group heads

// What the choice of a tile depends on.
struct ForwardCall {
  HeadDims dims;
  int queries, keys;  // of a packed batch: the most
  int heads_q, heads_kv;
  long long batch;
  bool causal;  // later rows see more keys
  bool packed;
  long long total_q = 0;  // packed: of all sequences, if known
  long long total_k = 0;
  int window = kAnyQueries;  // keys that a row sees at most

  // Keys that the 64 rows of a unit see at most.
  constexpr int keys_seen() const { return window < keys - 63 ? window + 63 : keys; }
  // Whether the sequences of a packed batch are known to have fewer queries and keys on average.
  constexpr bool has_means() const { return packed && batch > 0 && total_q > 0; }
  // Whether no tile takes much longer than another.
  constexpr bool tiles_alike() const { return !causal || keys / 4 >= queries; }
};

// The base-2 logarithm of the query heads side by side in a tile. Heads that share a key head are
// grouped if they would not all run at once, and their tiles would be mostly empty or more: an
// eighth, or in a packed batch, whose sequences are taken to have the mean length, a quarter. At
// most 16 heads: a warp stores 16 rows of O at a time.
constexpr int choose_grouping(const ForwardCall& c, int sms) {
  if (c.queries > 2 * kGroupedQueries || c.batch * c.heads_q <= sms) return 0;
  int log2 = 0;
  while (log2 < 4 && c.heads_q / c.heads_kv % (2 << log2) == 0) ++log2;
  const double queries = c.has_means() ? static_cast<double>(c.total_q) / c.batch : c.queries;
  if (queries <= kGroupedQueries) return log2;
  const auto units = [&](double rows) {
    return c.has_means() ? rows / 64 + 0.5 : static_cast<int>((rows + 63) / 64);
  };
  const double grouped = units(queries * (1 << log2)), apart = units(queries) * (1 << log2);
  return grouped <= apart * (c.has_means() ? 0.8 : 0.875) ? log2 : 0;
}

// The head dims of the table that serve a call's: rounded up; 0 if there are none.
constexpr HeadDims tile_dims(HeadDims dims) {
  for (const ForwardTile& t : kForwardTiles) {
    if (dims.q <= t.head_dim && dims.v <= t.head_dim_v) return t.dims();
  }
  return 0;
}

// The choice for a call: a row of the table (-1: none), and 1 << grouping heads side by side.
struct ForwardChoice {
  int row;
  int grouping;
};

// The query heads whose rows, 64 at a time, may come together in a tile: those of a key head. Then
// only the last tile of a key head leaves consumers idle. Rows of grouped heads are together
// anyway, and heads with keys of their own in a tile are not of one key head.
constexpr int heads_together(const ForwardTile& t, int grouping, int heads_q, int heads_kv) {
  return grouping == 0 && t.heads_per_tile == 1 && heads_kv > 0 ? heads_q / heads_kv : 1;
}

// The first row whose bounds include the call; -1 if there is none. A window is like a short call.
// Rows of several heads need a dense call that has them, each with keys of its own and one tile.
constexpr int first_tile(const ForwardCall& c) {
  const HeadDims dims = tile_dims(c.dims);
  const int rows = c.window < c.keys && c.keys_seen() < c.queries ? c.keys_seen() : c.queries;
  for (int i = 0; i < kForwardTileCount; ++i) {
    const ForwardTile& t = kForwardTiles[i];
    const int max_queries = c.causal ? t.max_queries_causal : t.max_queries;
    // Heads that come together fill a tile with fewer queries.
    const int together = heads_together(t, 0, c.heads_q, c.heads_kv);
    const bool enough =
        t.min_queries == 0 || static_cast<long long>(rows) * together > t.min_queries;
    const bool has_heads =
        t.heads_per_tile == 1 || (!c.packed && c.heads_q >= t.heads_per_tile &&
                                  c.heads_q == c.heads_kv && c.queries <= t.block_m);
    if (t.has(dims) && enough && has_heads && rows <= max_queries && !t.grouped_only()) return i;
  }
  return -1;
}

// How many tiles a call has. A set of heads comes together in tiles.
struct ForwardTiles {
  long long units;      // of 64 rows, of a set of heads
  long long m_blocks;   // tiles of a set
  long long sets;       // times the batch
  long long last_sets;  // of these: at the end of the launch, their tiles in an order of their own
  long long last_m_blocks;  // tiles of each of those

  constexpr long long count() const {
    return m_blocks * (sets - last_sets) + last_m_blocks * last_sets;
  }
};

constexpr ForwardTiles tiles_of(const ForwardTile& t, int grouping, const ForwardCall& c) {
  const int together = heads_together(t, grouping, c.heads_q, c.heads_kv);
  const long long rows = static_cast<long long>(c.queries) << grouping;
  const long long units = (rows + 63) / 64 * (together > 0 ? together : 1);
  const int per_tile = t.head_units(), side_by_side = t.heads_per_tile << grouping;
  const int sets = together > 1 ? c.heads_kv : (c.heads_q + side_by_side - 1) / side_by_side;
  const long long m_blocks = (units + per_tile - 1) / per_tile;
  return {units, m_blocks, c.batch * sets, 0, m_blocks};
}

// Tenths of a unit on the SM with the most of them. SMs take `high` tiles of `units` units, then
// `low` tiles of one unit less, where a unit takes slightly longer.
constexpr long long most_load(long long high, long long low, int units, int sms) {
  const long long sms_with[] = {sms - high % sms, high % sms};
  long long load[] = {10 * units * (high / sms), 10 * units * ((high + sms - 1) / sms)};
  while (low > 0) {
    const int less = load[1] < load[0];
    load[less] += 10 * (units - 1) + 1;
    low -= sms_with[less];
  }
  return load[0] > load[1] ? load[0] : load[1];
}

// Tiles of a dense call that all take the same time. With few rounds of tiles most SMs may idle in
// the last one. Then the last heads get more tiles, of one unit less, if SMs end earlier so.
struct BalancedTiles {
  ForwardTiles tiles;
  double rounds;  // of whole tiles, on the SM with the most
};
inline constexpr int kLeastToBalance = 12;  // tiles of a set: with fewer it brings nothing

constexpr BalancedTiles balanced(const ForwardTile& t, int grouping, const ForwardCall& c,
                                 int sms) {
  ForwardTiles tiles = tiles_of(t, grouping, c);
  const int units = t.head_units();
  const long long all = tiles.count();
  if (units < 3 || t.blocks_per_sm > 1 || t.heads_per_tile > 1 ||
      tiles.m_blocks < kLeastToBalance || all <= sms) {
    const long long on_each = (all + sms - 1) / sms;
    const long long at_once = on_each < t.blocks_per_sm ? on_each : t.blocks_per_sm;
    return {tiles, at_once == 0 ? 0.0 : double((on_each + at_once - 1) / at_once)};
  }
  long long least = most_load(all, 0, units, sms);
  const long long low = (tiles.units + units - 2) / (units - 1);
  for (long long sets = 1; sets <= tiles.sets && (sets - 1) * low < units * sms; ++sets) {
    const long long load = most_load((tiles.sets - sets) * tiles.m_blocks, sets * low, units, sms);
    if (load >= least) continue;
    least = load;
    tiles.last_sets = sets;
    tiles.last_m_blocks = low;
  }
  return {tiles, least / (10.0 * units)};
}

// Roughly how many cycles of an SM a call takes with a row of the table, to compare rows. The
// constants fit 200 calls with every row on an H200 (docs/perf-log.md).
//
// A step of 64 keys takes at least kLeastStep; where an SM has more consumers, they share the
// tensor cores. What else a tile does takes kTileCycles, and kMeetingCycles where two consumers
// share rows. Causal, or packed with grouped heads: the longest tiles come first and the SMs end
// together, unless the longest tile alone takes longer. Otherwise tiles take the same time, and the
// last round may have few.
inline constexpr int kLeastStep = 500, kTileCycles = 8000, kMeetingCycles = 500;
inline constexpr double kWideStep = 0.89;  // 128 keys in a step of live scores, over two of 64
inline constexpr int kManyKeys = 16384;    // from which that was measured
inline constexpr long long kFewRounds = 8;

constexpr double estimated_cycles(const ForwardTile& t, int grouping, const ForwardCall& c,
                                  int sms) {
  double tiles = tiles_of(t, grouping, c).count();
  const bool means = grouping > 0 && c.has_means();
  if (means) {  // the last tile of a sequence is half empty
    tiles = (static_cast<double>(c.total_q << grouping) / t.block_m + 0.5 * c.batch) *
            (c.heads_q >> grouping);
  }
  const long long on_each = static_cast<long long>((tiles + sms - 1) / sms);
  const int at_once = on_each < t.blocks_per_sm ? static_cast<int>(on_each) : t.blocks_per_sm;
  // Cycles of a step.
  const bool wide = t.block_n > 64 && t.scores_live && c.keys >= kManyKeys;
  const double products =
      (12 * t.consumers() + t.key_parts) * (t.head_dim + t.head_dim_v) / 8 * (wide ? kWideStep : 1);
  const auto step = [&](int blocks) -> double {
    return products * blocks > kLeastStep ? products * blocks : kLeastStep;
  };
  const int keys = c.keys_seen();
  const auto steps_of = [&](long long k) { return ((k + 63) / 64 + 1) / t.key_parts + 1; };
  const long long steps = steps_of(keys);
  const int rest = kTileCycles + (t.key_parts - 1) * kMeetingCycles;
  if (at_once == 0) return 0;  // no tile
  const int unseen =
      c.causal ? (c.queries < keys ? c.queries : keys) / 128 / t.key_parts : 0;  // on average
  const double each =
      (means ? steps_of(c.total_k / c.batch) : steps - unseen) * step(at_once) + rest;
  if (c.tiles_alike() && !means) return balanced(t, grouping, c, sms).rounds * each;
  const double all = tiles * each / (sms * at_once);
  const double longest = steps * step(1) + rest;
  return all > longest ? all : longest;
}

// Grouped heads: the row with the least estimate.
constexpr int grouped_row(const ForwardCall& c, int grouping, int sms) {
  int row = -1;
  double least = 0;
  for (int i = 0; i < kForwardTileCount; ++i) {
    const ForwardTile& t = kForwardTiles[i];
    if (!t.has(tile_dims(c.dims)) || !t.takes_groups) continue;
    const double cycles = estimated_cycles(t, grouping, c, sms);
    if (row >= 0 && cycles >= least) continue;
    least = cycles;
    row = i;
  }
  return row;
}

// The row is `first_tile`, unless another row of one head saves a tenth by the estimate: where
// tiles are few, or the last round has few. In a call of many rounds it must save a fifth: there
// the estimate is no better. A packed batch has fewer tiles than are counted, so only if all of
// them fit at once.
constexpr ForwardChoice choose_forward(const ForwardCall& c, int sms) {
  const int grouping = choose_grouping(c, sms);
  if (grouping > 0) return {grouped_row(c, grouping, sms), grouping};
  int row = first_tile(c);
  if (row < 0) return {row, 0};
  const long long tiles = tiles_of(kForwardTiles[row], 0, c).count();
  if (c.packed && tiles > sms) return {row, 0};
  double least =
      estimated_cycles(kForwardTiles[row], 0, c, sms) * (tiles <= kFewRounds * sms ? 0.9 : 0.8);
  for (int i = 0; i < kForwardTileCount; ++i) {
    const ForwardTile& t = kForwardTiles[i];
    if (!t.has(tile_dims(c.dims)) || t.heads_per_tile > 1 || t.grouped_only()) continue;
    const double cycles = estimated_cycles(t, 0, c, sms);
    if (cycles >= least) continue;
    least = cycles;
    row = i;
  }
  return {row, 0};
}

// Heads of an expanded q cannot be grouped: each counts as a group.
inline ForwardCall forward_call(const ForwardParams& p) {
  ForwardCall c{{p.head_dim, p.head_dim_v},
                p.seqlen_q,
                p.seqlen_k,
                p.heads_q,
                p.heads_kv,
                p.batch,
                is_causal(p),
                p.packed()};
  if (p.q_stride.head == 0) c.heads_kv = p.heads_q;
  if (p.packed()) {
    c.total_q = p.total_q;
    c.total_k = p.total_k;
  }
  if (p.window_left >= 0 && p.window_right >= 0) c.window = p.window_left + 1 + p.window_right;
  return c;
}

constexpr ForwardTile forward_tile(int head_dim, int block_m, int block_n = 64, int key_parts = 1,
                                   bool grouped_only = false) {
  for (const ForwardTile& t : kForwardTiles) {
    if (head_dim == t.head_dim && block_m == t.block_m && block_n == t.block_n &&
        key_parts == t.key_parts && grouped_only == t.grouped_only()) {
      return t;
    }
  }
  return {};
}

}  // namespace attnscope::sm90
