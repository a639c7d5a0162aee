// Parts: thread blocks that share a tile of keys, each with some of its blocks of queries, or with
// some of its query heads, see split_tiles. Parts of heads are tiles of the order of their own.
//
// A part leaves its dV and dK in fp32: of 16 rows and 64 columns each, a piece in the accumulators'
// order. The postprocess adds up the parts in their order, so that the sums do not depend on who
// ended first. No thread block waits for another one's part.
#pragma once

#include "kernels/sm90_backward/shared.cuh"
#include "ptx/sync.cuh"

namespace attnscope::sm90 {

struct Part {
  int begin, end;  // blocks of queries
};

// How many parts of the blocks [begin, end), of which there are some, have blocks: the first ones.
__device__ __forceinline__ int part_count(const BackwardArguments& a, int begin, int end) {
  return a.parts_have_heads ? a.parts.divisor : min(a.parts.divisor, end - begin);
}

// Part number `part` of the blocks [begin, end).
__device__ __forceinline__ Part part_of(const BackwardArguments& a, int begin, int end, int part) {
  if (a.parts_have_heads) return {begin, end};
  const int blocks = max(end - begin, 0);
  if (blocks < a.parts.divisor) return {min(begin + part, end), min(begin + part + 1, end)};
  const auto cut = [&](int number) { return begin + blocks * number / a.parts; };
  return {cut(part), cut(part + 1)};
}

// The tile that `unit` is, or is a part of. Units are the whole tiles, then the parts of the
// others.
__device__ __forceinline__ int tile_of(const BackwardArguments& a, int unit) {
  const bool is_whole = unit < a.whole_tiles || a.parts_have_heads;
  return is_whole ? unit : a.whole_tiles + (unit - a.whole_tiles) / a.parts;
}

// The key head of a tile of `order`, where each part of a key head's query heads is a head.
__device__ __forceinline__ int take_heads(const BackwardArguments& a, const Tile& tile, bool stores,
                                          KeyTile& t) {
  const int head = tile.head / a.parts;
  if (stores) {
    t.split = head * a.order.m_blocks + tile.m_block;
    t.part = tile.head - head * a.parts.divisor;
  }
  return head;
}

// Turns the description of the tile into one of `unit`. If no query sees the tile, its first part
// clears the keys. One lane.
__device__ __forceinline__ void take_part(const BackwardArguments& a, int unit, KeyTile& t) {
  t.first_head = t.head_kv * a.group;
  t.end_head = t.first_head + a.group;
  if (a.parts_have_heads) {
    t.end_head = t.first_head + a.group * (t.part + 1) / a.parts;
    t.first_head += a.group * t.part / a.parts;
    if (t.part > 0 && t.begin >= t.end) t.rows = 0;
    return;
  }
  const int number = unit - a.whole_tiles;
  if (number < 0) {
    t.split = -1;
    return;
  }
  const int split = number / a.parts, index = number - split * a.parts.divisor;
  const int begin = t.begin, end = t.end;
  const Part part = part_of(a, begin, end, index);
  t.split = split;
  t.part = index;
  if (part.begin >= part.end && (index > 0 || begin < end)) t.rows = 0;
  t.start = part.begin + (t.start - begin) % max(part.end - part.begin, 1);
  t.begin = part.begin;
  t.end = part.end;
}

// A lane's first four of the first piece of a warp's rows of dV (`gradient` 0) or dK (1).
template <class Config>
__device__ __forceinline__ float4* first_piece(const BackwardArguments& a, int split, int part,
                                               int gradient, int first_row) {
  constexpr BackwardTile kTile = Config::kTile;
  constexpr int kPieces = kTile.block_n / 16 * Config::kColumnBlocks;
  const int64_t of_part = int64_t{split} * a.parts.divisor + part;
  return reinterpret_cast<float4*>(a.partial) +
         ((of_part * 2 + gradient) * kPieces + first_row / 16 * Config::kColumnBlocks) * 256 +
         ptx::lane();
}

__device__ __forceinline__ void store_piece(float4* piece, const float* x) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    piece[i * 32] = {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
  }
}

}  // namespace attnscope::sm90
