// The store of dK and dV.
#pragma once

#include "kernels/sm80_backward/key_block.cuh"
#include "kernels/sm80_backward/shared.cuh"
#include "ptx/address.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"

namespace attnscope::sm80 {

// Writes a group's accumulators, times `factor`, through a tile of shared memory that no thread
// reads any more.
template <class Config, int kGroup>
__device__ __forceinline__ void store_gradient(const float (&d)[2][Config::kColumns / 2],
                                               float factor, void* data, const Strides& strides,
                                               const KeyBlock<Config>& at, int head_dim,
                                               typename Config::Element* tile) {
  using Element = typename Config::Element;
  using Source = TileSource<Config>;
  constexpr int kBlockN = Config::kBlockN;
  const int lane = ptx::lane(), warp = threadIdx.x / 32;
  const FragmentStore<Config, kBlockN> staged(ptx::shared_address(tile),
                                              warp / Config::kColumnWarps * 32,
                                              warp % Config::kColumnWarps * 2, lane);
#pragma unroll
  for (int j = 0; j < Config::kColumns / 16; ++j) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* x = &d[m][8 * j + 2 * i];
        packed[i] = ptx::pack<Element>(x[0] * factor, x[1] * factor);
      }
      staged.store(packed, m, j * Config::kColumnWarps);
    }
  }
  group_barrier<Config, kGroup>();
  Element* out = static_cast<Element*>(data) + int64_t{at.seg_k.batch} * strides.batch +
                 (at.seg_k.row + at.first_key()) * strides.row + at.head_kv * strides.head;
  const int first_row = Source::lane_row(), chunk = Source::lane_chunk();
  const char* from =
      reinterpret_cast<const char*>(tile) + tile_offset<Config, kBlockN>(first_row, chunk);
  const int rows = at.end_key() - at.first_key();
  constexpr int kBlocks = Config::kCols / Config::kBlockCols;
#pragma unroll
  for (int i = 0; i < Source::template kOwnChunks<kBlockN>; ++i) {
    const int row = first_row + i / kBlocks * Source::kRowStep;
    const int column = i % kBlocks * Config::kBlockCols + chunk * 8;
    if (row < rows && column < head_dim) {
      *reinterpret_cast<uint4*>(out + row * strides.row + column) =
          *reinterpret_cast<const uint4*>(from + Source::template own_chunk<kBlockN>(i));
    }
  }
}

}  // namespace attnscope::sm80
