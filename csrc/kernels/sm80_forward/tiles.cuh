// Shared-memory layout of Q, K and V tiles, the copies that fill them, and fragment reads.
#pragma once

#include "attn/params.h"
#include "attn/seqlen.cuh"
#include "kernels/sm80_forward/config.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"

namespace attnscope::sm80 {

template <class Element_, int kHeadDim_>
struct ForwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr ForwardTile kTile = kForwardTiles[forward_row(kHeadDim)];
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kWarps = kTile.warps;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kStages = kTile.stages;
  static constexpr int kRowTiles = kBlockM / kWarps / 16;  // m16 tiles per warp
  static constexpr int kRows = 2 * kRowTiles;              // rows per thread
  static constexpr bool kQInRegisters = kTile.q_in_registers;

  // Shared rows are cut into column blocks of 64 elements (32 where 64 does not divide): 128-byte
  // (64-byte) rows whose 16-byte chunks are permuted by the row, so ldmatrix has no bank conflicts.
  static constexpr int kBlockCols = kHeadDim % 64 == 0 ? 64 : 32;
  static constexpr int kRowBytes = 2 * kBlockCols;

  static_assert(kTile.head_dim == kHeadDim, "the tile table has no row for this head dim");
  static_assert(kHeadDim % 32 == 0, "head dim tiles are multiples of 32");
  static_assert(kBlockM % (16 * kWarps) == 0, "each warp owns whole m16 tiles");
  static_assert(kBlockN % 16 == 0, "keys are consumed 16 at a time");
  static_assert(kStages == 1 || kStages == 2, "K and V are single or double buffered");
};

template <class Config>
struct ForwardShared {
  using Element = typename Config::Element;
  alignas(128) Element q[Config::kBlockM * Config::kHeadDim];  // also stages O
  alignas(128) Element k[Config::kStages][Config::kBlockN * Config::kHeadDim];
  alignas(128) Element v[Config::kStages][Config::kBlockN * Config::kHeadDim];
};

// Byte offset of 16-byte chunk `chunk` of row `row` in a swizzled tile of `kTileRows` rows.
template <class Config, int kTileRows>
__device__ __forceinline__ uint32_t tile_offset(int row, int chunk) {
  constexpr int kChunks = Config::kBlockCols / 8;
  const int block = chunk / kChunks;
  const int key = kChunks == 8 ? row & 7 : (row >> 1) & 3;
  return (block * kTileRows + row) * Config::kRowBytes + ((chunk % kChunks) ^ key) * 16;
}

// The rows of one head in global memory, and the chunks that this thread copies. Neighbouring
// threads copy one 128-byte (64-byte) row segment. All rows of a thread have one swizzle key, so
// its shared addresses are a base plus constants.
template <class Config>
struct TileSource {
  using Element = typename Config::Element;
  static constexpr int kChunks = Config::kBlockCols / 8;
  static constexpr int kRowStep = Config::kThreads / kChunks;

  const Element* lane_rows;  // this thread's chunk of its first row
  int64_t row_stride;
  int head_dim;

  __device__ __forceinline__ TileSource(const void* data, const Strides& strides,
                                        const Segment& segment, int head, int head_dim_)
      : row_stride(strides.row), head_dim(head_dim_) {
    lane_rows = static_cast<const Element*>(data) + int64_t{segment.batch} * strides.batch +
                head * strides.head + (segment.row + lane_row()) * row_stride + lane_chunk() * 8;
  }
  static __device__ __forceinline__ int lane_row() { return threadIdx.x / kChunks; }
  static __device__ __forceinline__ int lane_chunk() { return threadIdx.x % kChunks; }

  // Number of a tile's chunks that this thread copies, and their byte offsets from the first.
  template <int kTileRows>
  static constexpr int kOwnChunks = kTileRows / kRowStep * (Config::kHeadDim / Config::kBlockCols);
  template <int kTileRows>
  static __device__ __forceinline__ constexpr int own_chunk(int i) {
    constexpr int kBlocks = Config::kHeadDim / Config::kBlockCols;
    return (i % kBlocks * kTileRows + i / kBlocks * kRowStep) * Config::kRowBytes;
  }

  // Starts the copy of rows first_row + [0, kTileRows) into shared memory; rows outside
  // [valid_begin, valid_end) and columns past the true head dim become zero.
  template <int kTileRows>
  __device__ __forceinline__ void load(int first_row, int valid_begin, int valid_end,
                                       uint32_t shared) const {
    static_assert(kTileRows % kRowStep == 0, "every thread copies the same number of rows");
    shared += tile_offset<Config, kTileRows>(lane_row(), lane_chunk());
    const Element* from = lane_rows + first_row * row_stride;
    const bool whole = valid_begin <= 0 && valid_end >= kTileRows && head_dim == Config::kHeadDim;
#pragma unroll
    for (int i = 0; i < kTileRows / kRowStep; ++i) {
#pragma unroll
      for (int block = 0; block < Config::kHeadDim / Config::kBlockCols; ++block) {
        const uint32_t to = shared + (block * kTileRows + i * kRowStep) * Config::kRowBytes;
        if (whole) {
          ptx::cp_async_16(to, from + block * Config::kBlockCols);
        } else {
          const int row = lane_row() + i * kRowStep;
          const bool valid = row >= valid_begin && row < valid_end &&
                             block * Config::kBlockCols + lane_chunk() * 8 < head_dim;
          ptx::cp_async_16_zfill(to, valid ? from + block * Config::kBlockCols : lane_rows, valid);
        }
      }
      from += kRowStep * row_stride;
    }
  }
};

// A lane's ldmatrix addresses: A operands and V^T take rows by lane % 16 and a chunk by
// lane / 16; K takes rows by lane % 8 + 8 (lane / 16) and a chunk by lane / 8 % 2.
template <class Config, int kTileRows>
struct FragmentAddress {
  uint32_t base;
  __device__ __forceinline__ FragmentAddress(uint32_t tile, int row, int chunk)
      : base(tile + tile_offset<Config, kTileRows>(row, chunk)) {}
  // The address `row16` tiles of 16 rows down and `step` pairs of chunks to the right. Neither
  // changes the swizzle key; the chunk index is XORed in.
  __device__ __forceinline__ uint32_t at(int row16, int step) const {
    constexpr int kSteps = Config::kBlockCols / 16;
    return (base ^ (step % kSteps * 32)) +
           (step / kSteps * kTileRows + row16 * 16) * Config::kRowBytes;
  }
};

// A warp's Q as A operands: kept in registers if kQInRegisters, otherwise read from shared memory
// for every key block.
template <class Config>
struct QueryFragments {
  static constexpr int kSteps = Config::kHeadDim / 16;
  FragmentAddress<Config, Config::kBlockM> address;
  uint32_t kept[Config::kQInRegisters ? kSteps : 1][Config::kRowTiles][4];

  __device__ __forceinline__ void keep() {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) read(kept[step], step);
  }
  __device__ __forceinline__ void read(uint32_t (&a)[Config::kRowTiles][4], int step) const {
#pragma unroll
    for (int m = 0; m < Config::kRowTiles; ++m) ptx::ldmatrix_x4(a[m], address.at(m, step));
  }
  __device__ __forceinline__ void get(uint32_t (&a)[Config::kRowTiles][4], int step) const {
    if constexpr (Config::kQInRegisters) {
#pragma unroll
      for (int m = 0; m < Config::kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = kept[step][m][i];
      }
    } else {
      read(a, step);
    }
  }
};

}  // namespace attnscope::sm80
