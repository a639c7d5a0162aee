// The products of a consumer, each one wgmma group.
//
// Tiles in shared memory are column blocks of [rows][64] elements: a row is 128 bytes, its eight
// 16-byte chunks permuted by the row number modulo 8 (TMA's 128-byte swizzle), and 8 rows are one
// 1024-byte atom. A product 16 deep reads such a tile in one of two ways.
//   K-major  the 16 are columns: 32 bytes further in each row. Four products cross an atom's row;
//            then comes the next column block. M or N runs down the rows, atoms 1024 bytes apart.
//   N-major  the 16 are rows: two atoms, 1024 bytes apart. The next product starts 2048 bytes
//            later. N runs along a row and on into the next column block, rows * 128 bytes further
//            (the descriptor's leading bytes). The forward reads V in this way.
#pragma once

#include "kernels/sm90_backward/shared.cuh"
#include "ptx/wgmma.cuh"

namespace attnscope::sm90 {

// Zeroes the rows of a tile from `first` on, before a consumer's products read them. `barrier` is
// the consumer's: each one does so, and none has to wait for another.
template <class Config, int kRows>
__device__ __forceinline__ void clear_rows(typename Config::Element* tile, int first, int barrier) {
  constexpr int kChunks = Config::kRowBytes / 16;
#pragma unroll 1
  for (int i = first * kChunks + threadIdx.x % 128; i < kRows * kChunks; i += 128) {
#pragma unroll
    for (int columns = 0; columns < Config::kHeadDim / 64; ++columns) {
      reinterpret_cast<uint4*>(tile)[columns * kRows * kChunks + i] = uint4{};
    }
  }
  ptx::fence_proxy_async();
  ptx::named_barrier(barrier, 128);
}

// S^T or dP^T [64 keys, kBlockM] = K or V, times Q or dO transposed. `keys` is the consumer's first
// row of a tile of kBlockN rows. Part of it: kBlocks column blocks from number kFirst on, where
// `queries` begins; it is added to the parts before.
template <class Config, int kFirst = 0, int kBlocks = Config::kHeadDim / 64>
__device__ __forceinline__ void issue_scores(float (&d)[Config::kBlockM / 2],
                                             ptx::WgmmaDescriptor keys,
                                             ptx::WgmmaDescriptor queries) {
  constexpr int kKeyColumns = Config::kBlockN * Config::kRowBytes;
  constexpr int kQueryColumns = Config::kBlockM * Config::kRowBytes;
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4 * kBlocks; ++step) {
    ptx::WgmmaShared<typename Config::Element, Config::kBlockM>::mma(
        d, keys.at((kFirst + step / 4) * kKeyColumns + step % 4 * 32),
        queries.at(step / 4 * kQueryColumns + step % 4 * 32), kFirst + step > 0);
  }
  ptx::wgmma_commit();
}

// dV or dK [64 keys, kHeadDim] += P^T or dS^T, from registers, times dO or Q, N-major.
template <class Config>
__device__ __forceinline__ void issue_key_gradient(float (&d)[Config::kHeadDim / 2],
                                                   const uint32_t (&scores)[Config::kBlockM / 4],
                                                   ptx::WgmmaDescriptor queries) {
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < Config::kBlockM / 16; ++step) {
    ptx::WgmmaRegister<typename Config::Element, Config::kHeadDim>::mma(
        d, &scores[4 * step], queries.at(step * 16 * Config::kRowBytes));
  }
  ptx::wgmma_commit();
}

// A unit's dQ [64, kHeadDim] = dS [64, kBlockN], a column block for each consumer's keys, times K,
// N-major.
template <class Config>
__device__ __forceinline__ void issue_query_gradient(float (&d)[Config::kHeadDim / 2],
                                                     ptx::WgmmaDescriptor ds,
                                                     ptx::WgmmaDescriptor keys) {
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < Config::kBlockN / 16; ++step) {
    ptx::WgmmaSharedNMajor<typename Config::Element, Config::kHeadDim>::mma(
        d, ds.at(step / 4 * Config::kScoreBytes + step % 4 * 32),
        keys.at(step * 16 * Config::kRowBytes), step > 0);
  }
  ptx::wgmma_commit();
}

// Column block number `column_block` of dQ, transposed [64, kBlockM] = K transposed, M-major, times
// dS transposed.
template <class Config>
__device__ __forceinline__ void issue_transposed_query_gradient(float (&d)[Config::kBlockM / 2],
                                                                ptx::WgmmaDescriptor keys,
                                                                int column_block,
                                                                ptx::WgmmaDescriptor ds) {
  constexpr int kColumns = Config::kBlockN * Config::kRowBytes;
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < Config::kBlockN / 16; ++step) {
    ptx::WgmmaSharedMMajor<typename Config::Element, Config::kBlockM>::mma(
        d, keys.at(column_block * kColumns + step * 16 * Config::kRowBytes),
        ds.at(step / 4 * Config::kScoreBytes + step % 4 * 32), step > 0);
  }
  ptx::wgmma_commit();
}

}  // namespace attnscope::sm90
