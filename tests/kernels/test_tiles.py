"""The choice of a tile for a call: pure functions of the tile tables, compiled on the host."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CXX = shutil.which("g++")

HOPPER = """
#define __CUDACC__
#define __device__ constexpr
#define __forceinline__ inline
constexpr int min(int a, int b) { return a < b ? a : b; }
#include "attn/tile_order.cuh"
#include "kernels/sm90_forward/config.cuh"
using attnscope::first_unit_of;
using namespace attnscope::sm90;
constexpr ForwardCall call(HeadDims dims, int queries, int heads_q, int heads_kv, int batch,
                           bool causal, bool packed = false, int keys = 0) {
  return {dims, queries, keys > 0 ? keys : queries, heads_q, heads_kv, batch, causal, packed};
}
constexpr ForwardCall windowed(HeadDims dims, int queries, int heads, int window) {
  ForwardCall c = call(dims, queries, heads, heads, 1, false);
  c.window = window;
  return c;
}
constexpr ForwardCall packed(int head_dim, int queries, int heads_q, int heads_kv, int batch,
                             long long total_q) {
  ForwardCall c = call(head_dim, queries, heads_q, heads_kv, batch, true, true);
  c.total_q = total_q;
  return c;
}
constexpr const ForwardTile& tile(const ForwardCall& c, int sms = 132) {
  return kForwardTiles[choose_forward(c, sms).row];
}
constexpr const ForwardTile& tile(HeadDims dims, int rows, bool causal, int heads = 1000,
                                  int sms = 132) {
  return tile(call(dims, rows, heads, heads, 1, causal), sms);
}
constexpr int grouping(const ForwardCall& c, int sms = 132) { return choose_grouping(c, sms); }
constexpr bool grouped(int head_dim, int block_m, int log2) {
  const ForwardChoice choice = choose_forward(call(head_dim, 16, 32, 4, 64, true), 132);
  return kForwardTiles[choice.row].block_m == block_m && choice.grouping == log2;
}
constexpr bool every_tile_fits() {
  for (const ForwardTile& t : kForwardTiles) {
    const int registers =
        128 * (t.producer_registers() + t.consumers() * t.consumer_registers());
    if (t.blocks_per_sm * (t.shared_bytes() + 1024) > 233472 || t.blocks_per_sm * registers > 65536)
      return false;
    if (t.consumers() > kMaxConsumers || t.blocks_per_sm * t.threads() > 2048) return false;
    if (t.consumer_registers() % 8 != 0 || t.consumer_registers() > 240) return false;
  }
  return true;
}
static_assert(every_tile_fits(), "a tile does not fit a multiprocessor");
static_assert(tile(8, 1, false).head_dim == 64 && tile(64, 1 << 30, true).head_dim == 64);
static_assert(tile(72, 1, false).head_dim == 80 && tile(88, 1 << 30, true).head_dim == 96);
static_assert(tile(104, 1, false).head_dim == 128 && tile(128, 1 << 30, true).head_dim == 128);
static_assert(tile(136, 1, false).head_dim == 192 && tile(192, 1 << 30, true).head_dim == 192);
static_assert(tile(200, 1, false).head_dim == 256 && tile(256, 1 << 30, true).head_dim == 256);
static_assert(tile({192, 128}, 1, true).head_dim_v == 128);
static_assert(tile({136, 8}, 1, true).head_dim_v == 128);
static_assert(tile({192, 136}, 1, true).head_dim_v == 192);
static_assert(tile({64, 128}, 1, true).head_dim == 128);
static_assert(choose_forward(call(264, 1, 8, 8, 1, false), 132).row == -1, "no tile is that wide");
static_assert(tile(windowed(64, 8192, 64, 128)).block_m == 256, "64 rows see 191 keys");
static_assert(tile(windowed(64, 8192, 64, 4096)).block_m == 192);
static_assert(tile(windowed(64, 8192, 1, 64)).heads_per_tile == 1);
static_assert(tile(64, 512, true).block_m == 256 && tile(64, 1 << 14, true).block_m == 192);
static_assert(tile(128, 2048, true).block_m == 192 && tile(128, 2048, false).block_m == 192);
static_assert(tile(64, 64, false).block_m == 64 && tile(64, 129, false).block_m == 256);
static_assert(tile(64, 65, true).heads_per_tile == 2 && tile(64, 128, false).heads_per_tile == 2);
static_assert(tile(64, 128, true, 1).heads_per_tile == 1, "no other head to share the tile with");
static_assert(tile(64, 128, true, 32).block_m == 64, "16 tiles of 256 rows for 64 of 64");
static_assert(tile(call(64, 128, 8, 8, 64, true, true)).block_m == 64);
static_assert(tile(128, 256, true).block_m == 128, "two of 192 leave a third empty");
static_assert(tile(128, 257, true).block_m == 192);
static_assert(tile(64, 512, true, 65).block_m == 256, "130 tiles; 520 of 64 rows: four rounds");
static_assert(tile(64, 512, true, 32).block_m == 64, "two rounds of 64 rows for one of 192");
static_assert(tile(64, 1024, true, 32).block_m == 64, "128 tiles of 256 rows: the longest is late");
static_assert(tile(64, 768, false, 64).block_m == 192, "192 tiles of 256 rows");
static_assert(tile(128, 512, true, 16).key_parts == 2 && tile(128, 512, true, 40).key_parts == 1);
static_assert(tile(128, 1024, true, 8).key_parts == 2 && tile(128, 128, true, 16).key_parts == 1);
static_assert(tile(128, 2048, false, 16).block_m == 128, "176 tiles of 192 rows: two rounds");
static_assert(tile(128, 2048, false, 16, 176).block_m == 192, "one round of 176 SMs");
static_assert(tile(128, 192, false, 1000).block_m == 192, "128 rows leave a quarter empty");
static_assert(tile(call(128, 2048, 16, 16, 1, false, true)).block_m == 192,
              "a packed batch may have fewer tiles than are counted");
static_assert(tile(call(128, 1, 16, 16, 1, true, false, 4096)).key_parts == 2,
              "few queries of many keys");
static_assert(tile(call(128, 512, 32, 8, 1, true, false, 1 << 17)).block_m == 128,
              "all queries of a chunk see most keys");
static_assert(tile(128, 1 << 14, false, 1).block_m == 128, "128 tiles, or 256 in two rounds");
static_assert(tile(128, 128, true, 16).block_m == 64 && tile(128, 100, true).block_m == 128);
static_assert(tile(64, 512, true, 65, 66).block_m == 256, "two rounds of 66 SMs");
static_assert(tile(64, 512, true, 32, 64).block_m == 256, "64 tiles of 256 rows fill 64 SMs");
static_assert(grouping(call(128, 1, 32, 8, 4, true), 114) == 2, "128 heads for 114 SMs");
static_assert(tile(256, 1, true, 1).block_m == 128, "no tile is smaller");
static_assert(grouped(64, 64, 3) && grouped(128, 128, 3) && grouped(96, 192, 3));
static_assert(grouping(call(128, 64, 32, 8, 64, true)) == 2);
static_assert(grouping(call(128, 112, 32, 8, 64, true)) == 2, "seven units for eight");
static_assert(grouping(call(128, 113, 32, 8, 64, true)) == 0, "eight for eight");
static_assert(grouping(call(64, 96, 32, 8, 64, true)) == 2, "six for eight");
static_assert(tile(call(64, 128, 32, 8, 64, true)).block_m == 256, "heads of a key head together");
static_assert(tile(call(128, 128, 32, 8, 64, true)).block_m == 192);
static_assert(grouping(call(128, 1, 32, 8, 4, true)) == 0, "every head has a multiprocessor");
static_assert(grouping(call(128, 1, 12, 1, 64, true)) == 2);
static_assert(grouping(call(128, 1, 7, 1, 64, true)) == 0);
static_assert(grouping(call(128, 1, 64, 1, 64, true)) == 4);
static_assert(grouping(call(128, 1, 0, 0, 64, true)) == 0);
static_assert(grouping(packed(128, 70, 32, 8, 100, 3500)) == 2, "35 queries on average");
static_assert(grouping(packed(128, 128, 32, 8, 100, 10000)) == 0, "100 on average");
static_assert(grouping(packed(128, 8192, 32, 8, 1000, 17000)) == 0, "one sequence is long");
constexpr const ForwardTile& packed_tile(int sequences, long long total_k) {
  ForwardCall c = packed(128, 70, 32, 8, sequences, 35 * sequences);
  c.keys = 2300;
  c.total_k = total_k;
  return tile(c);
}
static_assert(packed_tile(150, 150 * 600).block_m == 192 && packed_tile(150, 0).grouped_only());
static_assert(packed_tile(10, 10 * 600).key_parts == 2 && packed_tile(10, 0).grouped_only());
constexpr long long count(const ForwardTile& t, const ForwardCall& c, int log2 = 0) {
  return tiles_of(t, log2, c).count();
}
static_assert(count(kForwardTiles[0], call(64, 100, 9, 9, 100, true)) == 500, "five pairs");
static_assert(count(forward_tile(128, 128), call(128, 33, 32, 8, 64, true), 2) == 1024, "132 rows");
static_assert(count(forward_tile(128, 192), call(128, 0, 8, 8, 8, true)) == 0, "no queries");
static_assert(count(forward_tile(128, 192), call(128, 512, 32, 8, 2, true)) == 2 * 8 * 11);
static_assert(count(forward_tile(128, 192), call(128, 512, 8, 8, 2, true)) == 2 * 8 * 3);
static_assert(count(forward_tile(128, 192), call(128, 1, 0, 0, 2, true)) == 0, "no heads");
// 72 units of each of 24 heads on 132 SMs: 576 tiles of three are five rounds, 14 units at least.
constexpr BalancedTiles kBalanced =
    balanced(forward_tile(128, 192), 0, call(128, 4608, 24, 24, 1, false), 132);
static_assert(kBalanced.tiles.last_sets == 2 && kBalanced.tiles.last_m_blocks == 36);
static_assert(kBalanced.rounds > 14 / 3.0 && kBalanced.rounds < 5);
static_assert(kBalanced.tiles.count() == 22 * 24 + 2 * 36);
constexpr bool units_are_covered(int units, int m_blocks, int per_tile) {
  for (int i = 0; i < m_blocks; ++i) {
    const int has = first_unit_of(i + 1, m_blocks, units, per_tile) -
                    first_unit_of(i, m_blocks, units, per_tile);
    if (has < 1 || has > per_tile) return false;
  }
  return first_unit_of(0, m_blocks, units, per_tile) == 0 &&
         first_unit_of(m_blocks, m_blocks, units, per_tile) == units;
}
constexpr bool every_unit_has_one_tile() {
  for (int per_tile = 1; per_tile <= 4; ++per_tile) {
    for (int units = 1; units < 60; ++units) {
      const int low = per_tile > 1 ? per_tile - 1 : 1;
      if (!units_are_covered(units, (units + per_tile - 1) / per_tile, per_tile)) return false;
      if (!units_are_covered(units, (units + low - 1) / low, per_tile)) return false;
    }
  }
  return true;
}
static_assert(every_unit_has_one_tile());
// The SM with the least load takes the next tile.
constexpr bool load_is_right(int sms) {
  for (int high = 0; high < 4 * sms; ++high) {
    for (int low = 0; low < 4 * sms; ++low) {
      long long load[8] = {}, most = 0;
      for (int i = 0; i < high + low; ++i) {
        int least = 0;
        for (int j = 1; j < sms; ++j) least = load[j] < load[least] ? j : least;
        load[least] += i < high ? 30 : 21;
        most = load[least] > most ? load[least] : most;
      }
      if (most != most_load(high, low, 3, sms)) return false;
    }
  }
  return true;
}
static_assert(load_is_right(1) && load_is_right(5));
static_assert(tile(64, 0, true, 0).block_m == 64, "an empty call has a tile");
static_assert(tile(128, 0, true, 0).head_dim == 128);
"""


@pytest.mark.skipif(CXX is None, reason="no g++")
def test_the_hopper_tile_table():
    command = [CXX, "-std=c++17", "-fsyntax-only", "-x", "c++", f"-I{ROOT / 'csrc'}", "-"]
    result = subprocess.run(command, input=HOPPER, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


BACKWARD = """
#include "kernels/sm80_backward/config.cuh"
#include "kernels/sm90_backward/config.cuh"
#include "kernels/sm90_backward/order.h"
using namespace attnscope;
constexpr int kMost = 232448;  // shared memory of a thread block on Hopper
constexpr bool every_hopper_tile_fits() {
  for (const sm90::BackwardTile& t : sm90::kBackwardTiles) {
    if (t.shared_bytes() > kMost || t.threads() > 1024) return false;
    if (t.wide() && t.block_n != 64 * sm90::kWideRanks) return false;
  }
  return true;
}
static_assert(every_hopper_tile_fits(), "a tile does not fit a multiprocessor");
constexpr int hopper(int head_dim, bool softcap, int long_queries = 0) {
  const int row = sm90::first_backward_tile(head_dim, softcap, long_queries);
  return row < 0 ? 0 : sm90::kBackwardTiles[row].head_dim;
}
static_assert(hopper(8, false) == 64 && hopper(64, false) == 64 && hopper(72, false) == 128);
static_assert(hopper(64, true) == 128, "the tile of head dim 64 has no room for softcap");
static_assert(hopper(128, true) == 128 && hopper(136, false) == 192 && hopper(192, true) == 192);
constexpr int rows(int head_dim, bool softcap, int long_queries) {
  return sm90::kBackwardTiles[sm90::first_backward_tile(head_dim, softcap, long_queries)].block_m;
}
static_assert(rows(72, false, 1024) == 80 && rows(128, false, 9000) == 80);
static_assert(rows(128, false, 1023) == 64 && rows(128, true, 9000) == 64);
static_assert(rows(64, false, 9000) == 64 && rows(136, false, 9000) == 64);
// The tile that serves `heads` heads of a dense call.
constexpr sm90::BackwardTile tile(int head_dim, int seqlen_k, int heads, int sms = 132,
                                  bool causal = false) {
  ForwardParams p{};
  p.batch = 1;
  p.heads_q = p.heads_kv = heads;
  p.head_dim = p.head_dim_v = head_dim;
  p.seqlen_q = p.seqlen_k = seqlen_k;
  p.window_left = -1;
  p.window_right = causal ? 0 : -1;
  return sm90::kBackwardTiles[sm90::choose_backward(p, sms, false).row];
}
constexpr int keys(int head_dim, int seqlen_k, int heads, int sms = 132) {
  return tile(head_dim, seqlen_k, heads, sms).block_n;
}
static_assert(keys(64, 512, 32) == 128, "one wave either way: the smaller tiles are done first");
static_assert(keys(64, 512, 1024) == 192, "24 waves of 192 keys, 32 of 128");
static_assert(keys(64, 1024, 32) == 128 && keys(64, 4096, 32) == 192, "two waves; six and eight");
static_assert(keys(64, 160, 32) == 192 && keys(64, 128, 32) == 128, "a head in one tile");
static_assert(keys(64, 197, 1000) == 128, "two tiles a head, of 192 keys with a third empty");
static_assert(keys(64, 517, 32) == 192 && keys(64, 517, 32, 160) == 128, "160 tiles of 128 keys");
static_assert(keys(128, 100, 1) == 128 && keys(256, 100, 1) == 128, "no row is alike");
static_assert(tile(64, 1024, 12).block_m == 128, "one wave either way, of half as many steps");
static_assert(tile(64, 2048, 32).block_n == 192, "three waves, or four of 128 keys");
static_assert(tile(64, 1024, 32).block_m == 128 && tile(64, 192, 32).block_m == 64);
static_assert(tile(64, 100, 32).block_m == 64, "a head in one tile is taken whole");
static_assert(tile(64, 2048, 12, 132, true).block_n == 128, "the longest of 132 tiles of 192 keys");
static_assert(tile(64, 2048, 12, 132, true).block_m == 64, "masks of 128 queries are more code");
static_assert(tile(64, 8192, 12, 132, true).block_n == 192, "all tiles take longer than one");
// Heads of a section on 132 SMs, where the Q, dO and dQ of `most` heads fit in L2.
constexpr int section(int heads, int blocks, bool has_turns = false, int most = 8) {
  return sm90::choose_section({blocks, heads, std::min(most, heads), 0}, 132, has_turns);
}
static_assert(section(128, 16) == 8 && section(8, 32, true) == 4 && section(14, 64) == 7);
static_assert(section(12, 32, false, 2) == 6, "three heads would not fill the SMs");
static_assert(section(10, 32) == 5 && section(28, 32) == 7 && section(60, 16, false, 16) == 15);
static_assert(section(10, 64, false, 4) == 5, "four sections would not be equal");
static_assert(section(9, 32) == 9 && section(9, 32, true) == 5, "few tiles of an odd number");
static_assert(section(85, 16, false, 16) == 15, "six sections: the last one has 10 heads");
static_assert(section(1, 500) == 1 && section(1, 500, true) == 1);
constexpr int section_of_turns(int heads, int blocks, int slots, bool wide) {
  return sm90::choose_section_of_turns({blocks, heads, 1, 0}, slots, wide);
}
static_assert(section_of_turns(128, 16, 132, false) == 8, "one wave");
static_assert(section_of_turns(16, 128, 132, false) == 4, "at least four heads");
static_assert(section_of_turns(8, 128, 66, true) == 1 && section_of_turns(2, 900, 1, true) == 1);
// Of a packed batch of sequences as long as the longest one, but for one tile of each.
constexpr int section_of_packed(int heads, int batch, int longest, int total, bool causal,
                                bool has_turns = false) {
  ForwardParams p{};
  p.batch = batch;
  p.seqlen_k = longest;
  p.total_k = total;
  p.window_left = -1;
  p.window_right = causal ? 0 : -1;
  const TileOrder order{total / 128 + batch, heads, 1, 0};
  return sm90::choose_section_of_packed(order, p, 128, 132, has_turns);
}
static_assert(section_of_packed(16, 8, 2048, 16384, true) == 8, "one wave of 16 tiles a head");
static_assert(section_of_packed(16, 8, 2048, 16384, false) == 1);
static_assert(section_of_packed(7, 8, 2048, 16384, true) == 7, "952 tiles");
static_assert(section_of_packed(7, 8, 2048, 16384, false) == 7);
static_assert(section_of_packed(16, 8, 2048, 16384, false, true) == 16);
constexpr int section_of_sequence(int heads, int blocks) {
  return sm90::section_of_sequence(blocks, heads, 132);
}
static_assert(section_of_sequence(8, 32) == 4, "two sections of 128 tiles");
static_assert(section_of_sequence(8, 27) == 8, "216 tiles are less than five thirds of a wave");
static_assert(section_of_sequence(8, 28) == 4);
static_assert(section_of_sequence(14, 32) == 7, "two sections, since four differ");
static_assert(section_of_sequence(15, 32) == 4, "sections of 4, 4, 4 and 3 heads");
static_assert(section_of_sequence(16, 64) == 2, "eight sections");
static_assert(section_of_sequence(4, 256) == 1 && section_of_sequence(1, 256) == 1);
// Parts of the last tiles of a call, and how many thread blocks those are.
constexpr int64_t parts(int row, int seqlen, int heads, int group, int sms = 132,
                        int window = -1, bool causal = false, bool has_turns = false) {
  ForwardParams p{};
  p.batch = 1;
  p.heads_kv = heads;
  p.heads_q = heads * group;
  p.seqlen_q = p.seqlen_k = seqlen;
  p.window_left = window;
  p.window_right = causal ? 0 : window;
  const sm90::TileParts split =
      sm90::split_tiles(p, sm90::kBackwardTiles[row], sms, has_turns);
  return 1000 * split.parts + split.split * split.parts;
}
static_assert(parts(3, 4096, 64, 1) == 3000 + 3 * 68, "15 waves, and 68 of 2,048 tiles");
static_assert(parts(3, 4096, 33, 1) == 1000, "eight whole waves");
static_assert(parts(3, 512, 8, 4) == 4000 + 4 * 32 && parts(4, 60, 8, 1) == 1000, "one block");
static_assert(parts(6, 512, 4, 4) == 4000 + 4 * 16, "66 clusters");
static_assert(parts(3, 4096, 1, 4, 132, 100) == 3000 + 3 * 32, "five blocks see a tile");
static_assert(parts(6, 512, 4, 4, 1) == 1000, "no room for a cluster");
// Where later keys are hidden: one of 128 tiles takes twice as long as all of them on all SMs.
static_assert(parts(4, 2048, 8, 4, 132, -1, true) == 2000 + 2 * 128);
static_assert(parts(4, 2048, 9, 4, 132, -1, true) == 2000 + 2 * 144);
static_assert(parts(4, 2048, 16, 4, 132, -1, true) == 1000, "the other tiles fill the gaps");
static_assert(parts(4, 512, 16, 1, 132, -1, true) == 2000 + 2 * 64);
static_assert(parts(4, 256, 32, 1, 132, -1, true) == 1000, "the sum would take longer");
static_assert(parts(4, 2048, 5, 1, 132, -1, true) == 3000 + 3 * 80);
static_assert(parts(4, 2048, 5, 1, 132, -1, true, true) == 1000, "parts would wait for turns");
static_assert(parts(4, 2048, 8, 4, 132, -1, true, true) == 2000 + 2 * 128);
static_assert(parts(4, 2048, 1, 8, 132, -1, true) == 8000 + 8 * 16, "a head each");
static_assert(parts(3, 8192, 4, 7, 132, -1, true) == 1000, "too many parts");
// What parts have: of tiles of heads, or of one head, under a causal mask.
constexpr bool have_heads(int group, bool causal, bool has_turns, bool packed) {
  ForwardParams p{};
  p.batch = 1;
  p.heads_kv = 1;
  p.heads_q = group;
  p.seqlen_q = p.seqlen_k = p.total_q = p.total_k = 4096;
  p.window_left = -1;
  p.window_right = causal ? 0 : -1;
  constexpr int32_t kNoBounds = 0;
  if (packed) p.cu_seqlens_q = p.cu_seqlens_k = &kNoBounds;
  const auto split = sm90::split_tiles(p, sm90::kBackwardTiles[3], 132, has_turns);
  return split.parts > 1 && split.have_heads;
}
static_assert(have_heads(8, true, false, false) && have_heads(8, true, true, false));
static_assert(!have_heads(8, false, false, false) && !have_heads(1, true, false, false));
static_assert(have_heads(8, false, false, true) && have_heads(8, true, true, true));
static_assert(!have_heads(1, true, false, true), "a packed tile has no parts of queries");
// A causal packed batch; its longest sequence and the sum of all.
constexpr ForwardParams packed_batch(int batch, int longest, int total) {
  ForwardParams p{};
  p.batch = batch;
  p.seqlen_q = p.seqlen_k = longest;
  p.total_q = p.total_k = total;
  p.window_left = -1;
  constexpr int32_t kNoBounds = 0;
  p.cu_seqlens_q = p.cu_seqlens_k = &kNoBounds;
  return p;
}
constexpr int packed_parts(int row, int heads, int group, int batch, int longest, int total,
                           bool has_turns) {
  ForwardParams p = packed_batch(batch, longest, total);
  p.heads_kv = heads;
  p.heads_q = heads * group;
  return sm90::split_tiles(p, sm90::kBackwardTiles[row], 132, has_turns).parts;
}
static_assert(packed_parts(4, 4, 7, 10, 3287, 8192, false) == 2, "its longest tile is late");
static_assert(packed_parts(4, 4, 7, 10, 3287, 8192, true) == 4, "seven heads drift apart too");
static_assert(packed_parts(4, 4, 7, 13, 3515, 32768, false) == 1, "many tiles: the sum costs more");
static_assert(packed_parts(4, 4, 7, 13, 3515, 32768, true) == 2);
static_assert(packed_parts(4, 8, 4, 10, 1977, 8192, true) == 1, "four heads drift less");
static_assert(packed_parts(4, 8, 4, 3, 3000, 9000, true) == 1);
static_assert(packed_parts(0, 8, 4, 4, 2048, 8192, true) == 1, "at most four waves at head dim 64");
static_assert(packed_parts(4, 16, 1, 5, 3210, 8192, true) == 1, "one head");
// Whether the preprocess may list the tiles of a batch of four, at most 2,048 long.
constexpr bool listed(int total, bool causal, bool has_turns) {
  ForwardParams p = packed_batch(4, 2048, total);
  p.window_right = causal ? 0 : -1;
  return sm90::lists_tiles(p, has_turns);
}
static_assert(listed(8000, true, false) && !listed(8000, false, false), "lengths differ");
static_assert(!listed(8192, true, false) && listed(8192, true, true) && !listed(8192, false, true));
// Whether a call takes turns that it need not take.
constexpr bool turns(int head_dim, int seqlen, int heads_q, int heads_kv, int batch,
                     bool causal = true, int window = -1) {
  ForwardParams p{};
  p.batch = batch;
  p.heads_q = heads_q;
  p.heads_kv = heads_kv;
  p.seqlen_q = p.seqlen_k = seqlen;
  p.head_dim = p.head_dim_v = head_dim;
  p.window_left = window;
  p.window_right = causal ? 0 : -1;
  return sm90::choose_backward(p, 132, false).has_turns;
}
static_assert(turns(128, 1024, 32, 8, 16) && turns(80, 16384, 32, 8, 1));
static_assert(turns(128, 8192, 8, 1, 1), "parts of heads");
static_assert(!turns(128, 1023, 32, 8, 16) && !turns(128, 2048, 32, 32, 8), "no room to gain");
static_assert(!turns(64, 2048, 32, 8, 8) && !turns(256, 2048, 32, 8, 8));
static_assert(!turns(128, 2048, 32, 8, 8, false) && !turns(128, 2048, 32, 8, 8, true, 500));
static_assert(!turns(128, 2048, 28, 4, 1) && turns(128, 8192, 28, 4, 1), "parts of queries");
static_assert(hopper(200, true) == 256 && hopper(256, false) == 256 && hopper(264, false) == 0);

constexpr int kA100 = 166912, kAda = 101376;  // shared memory of a thread block
constexpr bool portable(int head_dim, int shared_bytes, int tile, int block_m, int block_n) {
  const sm80::BackwardTile& t = sm80::kBackwardTiles[sm80::backward_row(head_dim, shared_bytes)];
  return t.head_dim == tile && t.block_m == block_m && t.block_n == block_n;
}
constexpr bool every_head_dim_has_a_tile(int shared_bytes) {
  for (int head_dim = 8; head_dim <= 256; head_dim += 8) {
    if (sm80::backward_row(head_dim, shared_bytes) < 0) return false;
  }
  return true;
}
static_assert(every_head_dim_has_a_tile(kMost) && every_head_dim_has_a_tile(kA100));
static_assert(every_head_dim_has_a_tile(kAda) && sm80::backward_row(256, 65536) < 0);
static_assert(portable(64, kMost, 64, 128, 128) && portable(64, kA100, 64, 128, 128));
static_assert(portable(64, kAda, 64, 64, 128) && portable(72, kAda, 128, 32, 64));
static_assert(portable(72, kA100, 96, 64, 128) && portable(128, kA100, 128, 64, 128));
static_assert(portable(136, kMost, 192, 64, 64) && portable(136, kA100, 256, 32, 64));
static_assert(portable(256, kMost, 256, 64, 64) && portable(256, kAda, 256, 32, 32));
static_assert(sm80::backward_row(264, kMost) < 0, "no tile is that wide");
"""


@pytest.mark.skipif(CXX is None, reason="no g++")
def test_the_backward_tile_tables():
    command = [CXX, "-std=c++17", "-fsyntax-only", "-x", "c++", f"-I{ROOT / 'csrc'}", "-"]
    result = subprocess.run(command, input=BACKWARD, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


DIVISOR = """
#include <cstdint>
#include <initializer_list>
static uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t{a} * b >> 32; }
#define __CUDACC__
#define __device__
#define __forceinline__ inline
#include "attn/divisor.h"
int main() {
  constexpr int64_t kMost = INT32_MAX;
  for (int64_t d = 1; d <= kMost; d += d < 2000 ? 1 : d / 19) {
    const attnscope::Divisor by = attnscope::Divisor::of(static_cast<int>(d));
    for (int64_t n = 0; n <= kMost; n += n < 20000 ? 1 : n / 53 + 7) {
      for (int64_t near : {n, n / d * d, n / d * d + d - 1, kMost}) {
        if (near <= kMost && static_cast<int>(near) / by != near / d) return 1;
      }
    }
  }
  return 0;
}
"""


@pytest.mark.skipif(CXX is None, reason="no g++")
def test_a_divisor_divides(tmp_path):
    program = tmp_path / "divisor"
    command = [CXX, "-O1", "-std=c++17", "-x", "c++", f"-I{ROOT / 'csrc'}", "-o", program, "-"]
    subprocess.run(command, input=DIVISOR, text=True, check=True)
    assert subprocess.run([program]).returncode == 0
