// Tiles and workspace of the Hopper backward kernels, as data. Plain C++.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "attn/params.h"

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
  int step_time;     // of a step, relative to rows alike but for block_n
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
  // Narrow: buffers for K and for V. What fits.
  constexpr int key_stages() const { return transposes() ? 1 : 2; }
  constexpr int value_stages() const { return head_dim == 64 ? 2 : 1; }
  // Narrow: buffers for dQ on its way out.
  constexpr int gradient_stages() const { return head_dim == 64 ? 2 : 1; }
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
    {64, 64, 192, 3, false, 0, 6,
     "three consumers hide each other's latencies; 160 registers each"},
    {64, 64, 128, 3, false, 0, 5,
     "where it needs fewer rounds of tiles; a step takes 5/6 of the time"},
    {128, 80, 128, 2, false, 1024, 1, "1.00 to 1.05 of the speed of 64 rows: fewer waits a query"},
    {128, 64, 128, 2, true, 0, 1, "dK and dV take 128 registers, which leaves room for 64 rows"},
    {192, 64, 64 * kWideRanks, 2, false, 0, 1, "as head dim 256"},
    {256, 64, 64 * kWideRanks, 2, false, 0, 1,
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
  return batch * ((int64_t{length} + rows - 1) / rows);
}

// Blocks of queries, and tiles of keys, of the whole call.
constexpr int64_t query_places(const ForwardParams& p, const BackwardTile& t) {
  return p.heads_q * block_count(p.packed(), p.total_q, p.seqlen_q, p.batch, t.block_m);
}
constexpr int64_t key_tiles(const ForwardParams& p, const BackwardTile& t) {
  return p.heads_kv * block_count(p.packed(), p.total_k, p.seqlen_k, p.batch, t.block_n);
}

// The tiles of the last wave over the SMs, each shared by thread blocks that take a part of its
// queries: where that makes the wave shorter. Calls with few tiles have no other wave. See
// parts.cuh.
struct TileParts {
  int64_t whole;  // tiles before them
  int64_t split;
  int parts;  // of each

  constexpr int64_t units() const { return whole + split * parts; }
  constexpr int64_t bytes(const BackwardTile& t) const {  // dV and dK in fp32
    return split * parts * t.block_n * t.head_dim * 2 * 4;
  }
};

constexpr TileParts split_tiles(const ForwardParams& p, const BackwardTile& t, int sms) {
  constexpr int64_t kMost = 16, kRounds = 2, kPartSteps = 4;
  const int64_t slots = std::max(sms / (t.wide() ? kWideRanks : 1), 1);
  const int64_t tiles = key_tiles(p, t), last = tiles % slots;
  TileParts best{tiles, 0, 1};
  // Where later tiles are shorter, they balance the end. A packed batch has tiles of all lengths.
  if (p.packed() || last == 0 || (p.window_right >= 0 && tiles > last)) return best;
  const auto blocks_of = [&](int64_t rows) { return (rows + t.block_m - 1) / t.block_m; };
  int64_t blocks = blocks_of(p.seqlen_q);  // of queries that see a tile
  if (p.window_left >= 0 && p.window_right >= 0) {
    blocks = std::min(blocks, blocks_of(int64_t{p.window_left} + p.window_right + t.block_n));
  }
  const int64_t group = p.heads_q / p.heads_kv;
  int64_t least = blocks * group;
  for (int64_t parts = 2; parts <= kMost && parts <= blocks; ++parts) {
    const int64_t rounds = (parts * last + slots - 1) / slots;
    if (rounds > kRounds) break;
    // A part starts and ends as a tile does: that takes as long as kPartSteps.
    const int64_t time = rounds * ((blocks + parts - 1) / parts * group + kPartSteps);
    if (time >= least) continue;
    least = time;
    best = {tiles - last, last, static_cast<int>(parts)};
  }
  return best;
}

// The row that serves a call: of the first one and those alike but for block_n, the one whose tiles
// take the least time on `sms` SMs. A head that fits in one tile gets one: it may then need no
// postprocess, see takes_whole_heads.
constexpr int choose_backward(const ForwardParams& p, int sms) {
  const int first = first_backward_tile(p);
  const auto time = [&](int row) {
    const BackwardTile& t = kBackwardTiles[row];
    return (key_tiles(p, t) + sms - 1) / sms * t.step_time;
  };
  int best = first;
  for (int i = first + 1; first >= 0 && i < kBackwardTileCount; ++i) {
    const BackwardTile &t = kBackwardTiles[i], &other = kBackwardTiles[first];
    const bool alike = t.head_dim == other.head_dim && t.block_m == other.block_m;
    const bool splits = p.seqlen_k > t.block_n && p.seqlen_k <= other.block_n;
    if (alike && !splits && time(i) < time(best)) best = i;
  }
  return best;
}

// Parts of the workspace, as offsets in bytes. Per query head and block of queries:
//   statistics  block_m floats log2(e) lse, then block_m floats delta
//   gradient    dQ / scale in fp32, in the order of the accumulators, see kernel.cuh
//   tickets     deterministic calls: how many key blocks have added, see turns.cuh
//   claims      up to head dim 128: whether the first part of dQ is stored, see claims.cuh
//   parts       of tiles with parts: dV and dK in fp32, see parts.cuh
struct BackwardWorkspace {
  int64_t statistics, gradient, tickets, claims, parts, counter, bytes;
};

inline BackwardWorkspace backward_layout(const BackwardParams& params, int sms) {
  const ForwardParams& p = params.forward;
  const BackwardTile& t = kBackwardTiles[first_backward_tile(p)];  // of all that may serve it
  const int64_t blocks = p.heads_q * block_count(p.packed(), p.packed() ? p.total_q : p.seqlen_q,
                                                 p.seqlen_q, p.batch, t.block_m);
  const auto aligned = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  BackwardWorkspace w{};
  w.gradient = aligned(blocks * t.block_m * 2 * 4);
  w.tickets = w.gradient + aligned(blocks * t.block_m * t.head_dim * 4);
  w.claims = w.tickets + aligned(params.deterministic ? blocks * 4 : 0);
  w.parts = w.claims + aligned(t.wide() ? 0 : blocks * 4);
  int64_t part_bytes = 0;
  for (const BackwardTile& row : kBackwardTiles) {
    if (row.head_dim != t.head_dim) continue;
    part_bytes = std::max(part_bytes, split_tiles(p, row, sms).bytes(row));
  }
  w.counter = w.parts + aligned(part_bytes);
  w.bytes = w.counter + 256;
  return w;
}

}  // namespace attnscope::sm90
