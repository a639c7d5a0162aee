// Tiles of the Hopper forward kernel, as data. Plain C++.
#pragma once

#include <climits>

namespace attnscope::sm90 {

struct ForwardTile {
  int head_dim;       // rounded up; smaller head dims are zero-filled by the copy engine
  int block_m;        // query rows of a head in a tile, 64 a consumer warpgroup
  int block_n;        // keys of one step
  int q_stages;       // Q tiles in flight: the present one and the next, or one
  int stages;         // K and V tiles in flight
  int blocks_per_sm;  // at a time
  int own_heads;      // heads of a tile, each with rows and keys of its own
  bool keep_scores;   // through the softmax; else they are computed again when the maximum rose
  int over_rows;      // serves calls of more than so many query rows
  int full_rows;      // and of no more than so many,
  int causal_rows;    // causal ones of no more than so many
  const char* reason;

  // As they lie in shared memory: column blocks of 64.
  constexpr int columns() const { return (head_dim + 63) / 64 * 64; }
  constexpr int consumers() const { return own_heads * block_m / 64; }
  // Column blocks of O on the way out.
  constexpr int out_stages() const { return columns() > 64 ? 2 : 1; }
  constexpr int threads() const { return 128 * (consumers() + 1); }
  // A thread's registers: what the feeding warps can spare goes to the consumers.
  constexpr int producer_registers() const { return consumers() == 2 ? 24 : 32; }
  constexpr int consumer_registers() const {
    const int launched = 65536 / (blocks_per_sm * threads()) / 8 * 8;
    const int rest = launched * (consumers() + 1) - producer_registers();
    const int each = rest / consumers() / 8 * 8;
    return each < 240 ? each : 240;
  }
  constexpr int shared_bytes() const {
    return 2 * columns() * own_heads * (q_stages * block_m + 2 * stages * block_n) +  // Q, K, V
           2 * 64 * own_heads * block_m * out_stages() + 1024;  // O on its way, barriers
  }
};

inline constexpr int kAnyRows = INT_MAX;
// Reasons: TFLOP/s, or the geometric mean of the speed over the best peer's, on an H200
// (docs/perf-log.md).
// Not inline: that would be one table for all libraries of a process, whichever was loaded first.
constexpr ForwardTile kForwardTiles[] = {
    {64, 128, 64, 2, 3, 1, 2, false, 64, 128, 128,
     "S = 128, causal: 246, 123; 64 rows of one head, three blocks an SM: 207, 102"},
    {64, 256, 64, 2, 4, 1, 1, false, 128, 1024, 4096,
     "causal S = 512, 1024: 278, 373; 192 rows of 128 keys: 241, 327"},
    {64, 64, 64, 2, 3, 3, 1, true, 0, 128, 128,
     "causal S = 128: 97; 128 rows of 128 keys, one block an SM: 86"},
    {64, 192, 128, 2, 3, 1, 1, false, 0, kAnyRows, kAnyRows,
     "S = 8192: 587; 256 rows of 64 keys: 560"},
    {96, 192, 64, 1, 4, 1, 1, true, 0, kAnyRows, kAnyRows,
     "over FlashAttention-3 1.09; 128 rows of 128 keys 1.03, as head dim 128 1.01"},
    {128, 192, 64, 1, 4, 1, 1, true, 256, kAnyRows, kAnyRows,
     "S = 2048, causal 1024: 714, 466; 128 rows of 128 keys: 681, 446"},
    {128, 64, 64, 2, 2, 2, 1, true, 0, 64, 64,
     "S = 64: 123, causal 62; 128 rows of 64 keys: 114, 55; few tiles: 16 heads, S = 512: 144"},
    {128, 128, 64, 2, 4, 1, 1, true, 0, kAnyRows, kAnyRows,
     "S = 128, 256, causal: 241, 392, 121, 205; 128 keys, one Q: 233, 382, 115, 191"},
    {192, 128, 64, 1, 3, 1, 1, true, 0, kAnyRows, kAnyRows,
     "over FlashAttention-3 1.05; 96 keys 1.02, as head dim 256 0.85"},
    {256, 128, 64, 1, 2, 1, 1, true, 0, kAnyRows, kAnyRows, "1.04; 80 keys, scores not kept: 0.98"},
};
inline constexpr int kForwardTileCount = sizeof(kForwardTiles) / sizeof(kForwardTiles[0]);
inline constexpr int kMaxConsumers = 4;
inline constexpr int kMultiprocessors = 132;  // of an H100 or H200
inline constexpr int kEagerKeys = 256;        // up to here tiles are taken ahead
inline constexpr int kGroupedQueries = 64;    // calls of up to so many may have heads grouped

// The power of two of query heads that lie side by side in a tile: as many as may of those that
// share a key head, where tiles would else be mostly empty and too many to all run at once. O
// leaves 16 rows at a time, so there are at most 16.
constexpr int choose_grouping(int queries, int heads_q, int heads_kv, long long batch) {
  if (queries > kGroupedQueries || batch * heads_q <= kMultiprocessors) return 0;
  int log2 = 0;
  while (log2 < 4 && heads_q / heads_kv % (2 << log2) == 0) ++log2;
  return log2;
}

// The head dim of the rows that serve one: rounded up; 0 if none does.
constexpr int tile_head_dim(int head_dim) {
  for (const ForwardTile& t : kForwardTiles) {
    if (head_dim <= t.head_dim) return t.head_dim;
  }
  return 0;
}

// Of the rows for a head dim of the table the one with the largest tile of one head and up to
// `most` query rows; -1 if there is none.
constexpr int largest_tile(int head_dim, int most) {
  int found = -1;
  for (int i = 0; i < kForwardTileCount; ++i) {
    const ForwardTile& t = kForwardTiles[i];
    if (t.head_dim != head_dim || t.block_m > most || t.own_heads > 1) continue;
    if (found < 0 || t.block_m > kForwardTiles[found].block_m) found = i;
  }
  return found;
}

// The one row for a head dim of the table that grouped heads may come to; the others are spared the
// arithmetic.
constexpr int grouped_tile(int head_dim) {
  const int found = largest_tile(head_dim, 128);
  return found >= 0 ? found : largest_tile(head_dim, kAnyRows);
}

// How a call is served: by which row of the table (-1: none), and with 1 << grouping heads in a
// tile.
struct ForwardChoice {
  int row;
  int grouping;
};

// The first row that takes so many queries (tiles of several heads: of a dense call that has them);
// but where its tiles would leave multiprocessors idle, the one that leaves the fewest query rows
// to the busiest, of those with tiles no larger.
constexpr ForwardChoice choose_forward(int head_dim, int queries, int heads_q, int heads_kv,
                                       long long batch, bool causal, bool packed = false) {
  const int dim = tile_head_dim(head_dim);
  const int grouping = choose_grouping(queries, heads_q, heads_kv, batch);
  if (grouping > 0) return {grouped_tile(dim), grouping};
  int row = -1;
  for (int i = 0; i < kForwardTileCount && row < 0; ++i) {
    const ForwardTile& t = kForwardTiles[i];
    const int most = causal ? t.causal_rows : t.full_rows;
    const bool enough = queries > t.over_rows || t.over_rows == 0;
    const bool fits = t.own_heads == 1 || (!packed && heads_q >= t.own_heads);
    if (t.head_dim == dim && enough && fits && queries <= most) row = i;
  }
  const auto rounds = [&](int i) {  // of tiles, a tile an SM
    const ForwardTile& t = kForwardTiles[i];
    const int heads = (heads_q + t.own_heads - 1) / t.own_heads;
    const long long tiles = ((queries - 1LL) / t.block_m + 1) * batch * heads;
    return (tiles + kMultiprocessors - 1) / kMultiprocessors;
  };
  const auto rows = [&](int i) { return rounds(i) * kForwardTiles[i].consumers() * 64; };
  if (row >= 0 && rounds(row) <= 1) {
    for (int i = row; i >= 0; i = largest_tile(dim, kForwardTiles[i].block_m - 1)) {
      if (rows(i) < rows(row)) row = i;
    }
  }
  return {row, 0};
}

constexpr ForwardTile forward_tile(int head_dim, int block_m) {
  for (const ForwardTile& t : kForwardTiles) {
    if (head_dim == t.head_dim && block_m == t.block_m) return t;
  }
  return {};
}

}  // namespace attnscope::sm90
