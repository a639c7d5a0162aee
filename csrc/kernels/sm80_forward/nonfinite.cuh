// NaN and infinity in V at keys that some row of the tile does not see. 0 times either is NaN, so
// the product skips them; rows that see the key get them by addition.
#pragma once

#include "attn/block_range.cuh"
#include "attn/nonfinite.cuh"
#include "kernels/sm80_forward/tiles.cuh"
#include "ptx/address.cuh"

namespace attnscope::sm80 {

// Whether the chunks that this thread copied contain NaN or infinity. After the wait for the
// thread's own copies no barrier is needed.
template <class Config>
__device__ __forceinline__ bool own_chunks_nonfinite(const char* tile) {
  using Source = TileSource<Config>;
  tile += tile_offset<Config, Config::kBlockN>(Source::lane_row(), Source::lane_chunk());
  NonfiniteSearch<typename Config::Element> search;
#pragma unroll
  for (int i = 0; i < Source::template kOwnChunks<Config::kBlockN>; ++i) {
    search.add(
        *reinterpret_cast<const uint4*>(tile + Source::template own_chunk<Config::kBlockN>(i)));
  }
  return search.found();
}

// Replaces NaN and infinity by 0 in the chunks of a tile that this thread copied.
template <class Config>
__device__ __forceinline__ void clear_nonfinite(char* tile) {
  using Source = TileSource<Config>;
  tile += tile_offset<Config, Config::kBlockN>(Source::lane_row(), Source::lane_chunk());
#pragma unroll 1
  for (int i = 0; i < Source::template kOwnChunks<Config::kBlockN>; ++i) {
    auto* chunk =
        reinterpret_cast<uint32_t*>(tile + Source::template own_chunk<Config::kBlockN>(i));
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      chunk[word] = finite_part<typename Config::Element>(chunk[word]);
    }
  }
}

// Adds the NaN and infinities of a V tile to O in the rows that see the key. The weight is
// omitted: it is positive, and p * inf = inf. `row` is the thread's first row in its sequence,
// `first_key` the tile's first key.
template <class Config>
__device__ __forceinline__ void add_nonfinite(float (&o)[Config::kRowTiles][Config::kHeadDim / 2],
                                              const char* tile, const Window& window, int row,
                                              int first_key, int seqlen_k) {
#pragma unroll 1
  for (int key = 0; key < Config::kBlockN; ++key) {
    bool seen[Config::kRows];
#pragma unroll
    for (int r = 0; r < Config::kRows; ++r) {
      const int query = row + r / 2 * 16 + r % 2 * 8;
      seen[r] = first_key + key >= window.first_key(query) &&
                first_key + key < window.end_key(query, seqlen_k);
    }
#pragma unroll
    for (int d = 0; d < Config::kHeadDim / 8; ++d) {
      const char* word = tile + tile_offset<Config, Config::kBlockN>(key, d) + threadIdx.x % 4 * 4;
      const float2 x =
          nonfinite_part<typename Config::Element>(*reinterpret_cast<const uint32_t*>(word));
#pragma unroll
      for (int r = 0; r < Config::kRows; ++r) {
        if (seen[r]) {
          o[r / 2][4 * d + r % 2 * 2] += x.x;
          o[r / 2][4 * d + r % 2 * 2 + 1] += x.y;
        }
      }
    }
  }
}

}  // namespace attnscope::sm80
