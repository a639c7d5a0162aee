// After the main kernel: dV and dK of tiles with parts, see parts.cuh.
#pragma once

#include "kernels/sm90_backward/epilogue.cuh"
#include "kernels/sm90_backward/parts.cuh"
#include "kernels/sm90_backward/tiles.cuh"

namespace attnscope::sm90 {

// Thread blocks of kWarps warps that a tile takes: a piece a warp.
template <class Config, int kWarps>
inline constexpr int kSumBlocks = Config::kTile.block_n / 16 * Config::kColumnBlocks * 2 / kWarps;

// Least thread blocks an SM of a postprocess of `kWarps` warps that sums: so few that the compiler
// has registers to issue all loads of a piece before the first addition. With 64 registers the
// postprocess takes 1.1 to 1.25 times as long.
template <class Config, int kWarps>
inline constexpr int kLeastBlocks = Config::kParts ? 16 / kWarps : 0;

// Describes tile number `split` of those with parts. Warp-converged.
template <class Config>
__device__ __forceinline__ void describe_split(const BackwardArguments& a, int split, KeyTile& t) {
  const int head = split / a.order.m_blocks;  // see take_heads
  const Tile tile = a.parts_have_heads ? Tile{split - head * a.order.m_blocks, head}
                                       : find_tile(a, a.whole_tiles + split);
  describe_tile<Config>(a, tile.head, tile.m_block, t);
}

// Stores dV or dK of a piece of a tile with parts, for each warp, by way of 2 KB of shared memory.
// `block`: of those that sum.
template <class Config, class TileConfig, int kWarps>
__device__ __forceinline__ void sum_parts(const BackwardArguments& a, int block, uint32_t staging) {
  using Element = typename Config::Element;
  constexpr int kGroups = Config::kTile.block_n / 16, kColumnBlocks = Config::kColumnBlocks;
  constexpr int kPieces = kGroups * kColumnBlocks, kBlocks = kSumBlocks<Config, kWarps>;
  static_assert(kBlocks * kWarps == 2 * kPieces, "a thread block has one tile");
  __shared__ KeyTile t;
  const int warp = threadIdx.x / 32, split = block / kBlocks;
  if (warp == 0) describe_split<TileConfig>(a, split, t);
  __syncthreads();
  const int piece = block % kBlocks * kWarps + warp, column = piece % kColumnBlocks;
  const int row = piece / kColumnBlocks % kGroups * 16, number = piece / kPieces;
  if (t.begin >= t.end || row >= t.rows) return;
  const KeyGradient gradient = number == 0 ? value_gradient(a) : key_gradient(a);
  const float4* from = first_piece<Config>(a, split, 0, number, row) + column * 256;
  const int parts = part_count(a, t.begin, t.end);
  float x[32] = {};
#pragma unroll 1
  for (int i = 0; i < parts; ++i, from += 2 * kPieces * 256) {
    float part[32];
    load_query_part(part, from);
#pragma unroll
    for (int j = 0; j < 32; ++j) x[j] += part[j];
  }
  stage_rows<Element>(x, gradient.factor, staging);
  __syncwarp();
  copy_rows(ptx::lane(), staging, row_of<Element>(gradient, t, row) + column * 64,
            gradient.stride.row, t.rows - row, gradient.columns - column * 64);
}

}  // namespace attnscope::sm90
