// Swizzled tiles of 16-bit elements in shared memory for mma.sync, the copies that fill them, and
// fragment reads.
#pragma once

#include "attn/params.h"
#include "attn/seqlen.cuh"
#include "ptx/address.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"

namespace attnscope {

// Tiles with kCols columns, filled by kThreads threads, threadIdx.x = 0 .. kThreads - 1. Rows are
// cut into column blocks of 64 elements (32 where 64 does not divide): 128-byte (64-byte) rows
// whose 16-byte chunks are permuted by the row, so ldmatrix has no bank conflicts.
template <class Element_, int kCols_, int kThreads_>
struct TileShape {
  using Element = Element_;
  static constexpr int kCols = kCols_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kBlockCols = kCols % 64 == 0 ? 64 : 32;
  static constexpr int kRowBytes = 2 * kBlockCols;
  static_assert(kCols % 32 == 0, "tiles have a multiple of 32 columns");
};

// Byte offset of 16-byte chunk `chunk` of row `row` in a swizzled tile of `kTileRows` rows.
template <class Shape, int kTileRows>
__device__ __forceinline__ uint32_t tile_offset(int row, int chunk) {
  constexpr int kChunks = Shape::kBlockCols / 8;
  const int block = chunk / kChunks;
  const int key = kChunks == 8 ? row & 7 : (row >> 1) & 3;
  return (block * kTileRows + row) * Shape::kRowBytes + ((chunk % kChunks) ^ key) * 16;
}

// The rows of one head in global memory, and the chunks that this thread copies. Neighbouring
// threads copy one 128-byte (64-byte) row segment. All rows of a thread have one swizzle key, so
// its shared addresses are a base plus constants.
template <class Shape>
struct TileSource {
  using Element = typename Shape::Element;
  static constexpr int kChunks = Shape::kBlockCols / 8;
  static constexpr int kRowStep = Shape::kThreads / kChunks;

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
  static constexpr int kOwnChunks = kTileRows / kRowStep * (Shape::kCols / Shape::kBlockCols);
  template <int kTileRows>
  static __device__ __forceinline__ constexpr int own_chunk(int i) {
    constexpr int kBlocks = Shape::kCols / Shape::kBlockCols;
    return (i % kBlocks * kTileRows + i / kBlocks * kRowStep) * Shape::kRowBytes;
  }

  // Starts the copy of rows first_row + [0, kTileRows) into shared memory; rows outside
  // [valid_begin, valid_end) and columns past the true head dim become zero.
  template <int kTileRows>
  __device__ __forceinline__ void load(int first_row, int valid_begin, int valid_end,
                                       uint32_t shared) const {
    static_assert(kTileRows % kRowStep == 0, "every thread copies the same number of rows");
    shared += tile_offset<Shape, kTileRows>(lane_row(), lane_chunk());
    const Element* from = lane_rows + first_row * row_stride;
    const bool whole = valid_begin <= 0 && valid_end >= kTileRows && head_dim == Shape::kCols;
#pragma unroll
    for (int i = 0; i < kTileRows / kRowStep; ++i) {
#pragma unroll
      for (int block = 0; block < Shape::kCols / Shape::kBlockCols; ++block) {
        const uint32_t to = shared + (block * kTileRows + i * kRowStep) * Shape::kRowBytes;
        if (whole) {
          ptx::cp_async_16(to, from + block * Shape::kBlockCols);
        } else {
          const int row = lane_row() + i * kRowStep;
          const bool valid = row >= valid_begin && row < valid_end &&
                             block * Shape::kBlockCols + lane_chunk() * 8 < head_dim;
          ptx::cp_async_16_zfill(to, valid ? from + block * Shape::kBlockCols : lane_rows, valid);
        }
      }
      from += kRowStep * row_stride;
    }
  }
};

// A lane's ldmatrix addresses. Rows by lane % 16 and a chunk by lane / 16: A operands, and
// transposed B operands. Rows by lane % 8 + 8 (lane / 16) and a chunk by lane / 8 % 2: B operands,
// and transposed A operands.
template <class Shape, int kTileRows>
struct FragmentAddress {
  uint32_t base;
  __device__ __forceinline__ FragmentAddress(uint32_t tile, int row, int chunk)
      : base(tile + tile_offset<Shape, kTileRows>(row, chunk)) {}
  // The address `row16` tiles of 16 rows down and `step` pairs of chunks to the right. Neither
  // changes the swizzle key; the chunk index is XORed in.
  __device__ __forceinline__ uint32_t at(int row16, int step) const {
    constexpr int kSteps = Shape::kBlockCols / 16;
    return (base ^ (step % kSteps * 32)) +
           (step / kSteps * kTileRows + row16 * 16) * Shape::kRowBytes;
  }
};

// Stores 16x16 fragments: packed pairs of accumulators, in the order of an A operand.
template <class Shape, int kTileRows>
struct FragmentStore {
  FragmentAddress<Shape, kTileRows> address;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  __device__ __forceinline__ FragmentStore(uint32_t tile, int row, int chunk, int lane)
      : address(tile, row + lane / 4, chunk) {
    address.base += lane % 4 * 4;
  }
  __device__ __forceinline__ void store(const uint32_t (&a)[4], int row16, int step) const {
    const uint32_t to = address.at(row16, step);
    ptx::store_shared(to, a[0]);
    ptx::store_shared(to + 8 * Shape::kRowBytes, a[1]);
    ptx::store_shared(to ^ 16, a[2]);
    ptx::store_shared((to ^ 16) + 8 * Shape::kRowBytes, a[3]);
  }
#else
  __device__ __forceinline__ FragmentStore(uint32_t tile, int row, int chunk, int lane)
      : address(tile, row + lane % 16, chunk + lane / 16) {}
  __device__ __forceinline__ void store(const uint32_t (&a)[4], int row16, int step) const {
    ptx::stmatrix_x4(address.at(row16, step), a);
  }
#endif
};

}  // namespace attnscope
