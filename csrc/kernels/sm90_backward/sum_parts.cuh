// After the main kernel: dV and dK of tiles with parts, see parts.cuh.
#pragma once

#include "kernels/sm90_backward/epilogue.cuh"
#include "kernels/sm90_backward/parts.cuh"
#include "kernels/sm90_backward/tiles.cuh"

namespace attnscope::sm90 {

// Thread blocks of kWarps warps that a tile takes: a piece a warp.
template <class Config, int kWarps>
inline constexpr int kSumBlocks = Config::kTile.block_n / 16 * Config::kColumnBlocks * 2 / kWarps;

// Stores dV and dK of the piece that warp number `number` of the call has, by way of 2 KB of shared
// memory. The warps of a thread block have the same tile.
template <class Config, class TileConfig, int kWarps>
__device__ __forceinline__ void sum_parts(const BackwardArguments& a, int block, uint32_t staging) {
  using Element = typename Config::Element;
  constexpr BackwardTile kTile = Config::kTile;
  constexpr int kBlocks = kSumBlocks<Config, kWarps>, kColumnBlocks = Config::kColumnBlocks;
  static_assert(kBlocks * kWarps * 32 == kTile.block_n * kTile.head_dim / 16, "whole blocks");
  __shared__ KeyTile t;
  const int warp = threadIdx.x / 32, split = block / kBlocks;
  const int first_part = a.whole_tiles + split * a.parts.divisor;
  if (warp == 0) describe_tile<TileConfig>(a, first_part, 0, t);
  __syncthreads();
  const int piece = block % kBlocks * kWarps + warp, column = piece % kColumnBlocks;
  const int row = piece / kColumnBlocks % (kTile.block_n / 16) * 16;
  const int number = piece / kColumnBlocks / (kTile.block_n / 16);
  if (t.begin >= t.end || row >= t.rows) return;
  float x[32] = {};
#pragma unroll 2
  for (int index = 0; index < a.parts.divisor; ++index) {
    const Part part = part_of(a, t.begin, t.end, index);
    if (part.begin >= part.end) continue;
    const float4* from = first_piece<Config>(a, split, index, number, row) + column * 256;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 y = __ldcg(from + i * 32);
      x[4 * i] += y.x;
      x[4 * i + 1] += y.y;
      x[4 * i + 2] += y.z;
      x[4 * i + 3] += y.w;
    }
  }
  const KeyGradient gradient = number == 0 ? value_gradient(a) : key_gradient(a);
  store_rows<Element>(x, gradient.factor, staging, row_of<Element>(gradient, t, row) + column * 64,
                      gradient.stride.row, t.rows - row, gradient.columns - column * 64);
}

}  // namespace attnscope::sm90
