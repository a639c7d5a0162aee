// Config and shared memory of the portable backward kernel.
#pragma once

#include "attn/tiles.cuh"
#include "kernels/sm80_backward/config.cuh"
#include "kernels/sm80_backward/key_block.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/sync.cuh"

namespace attnscope::sm80 {

constexpr int backward_row_of(int head_dim, int block_m, int block_n) {
  for (int row = 0; row < kBackwardTileCount; ++row) {
    const BackwardTile& tile = kBackwardTiles[row];
    if (tile.head_dim == head_dim && tile.block_m == block_m && tile.block_n == block_n) return row;
  }
  return -1;
}

// The threads of a block are two groups, threadIdx.y = 0 and 1. Tiles are filled by one group.
template <class Element_, int kHeadDim_, int kBlockM_, int kBlockN_>
struct BackwardConfig
    : TileShape<Element_, kHeadDim_,
                kBackwardTiles[backward_row_of(kHeadDim_, kBlockM_, kBlockN_)].threads() / 2> {
  static constexpr BackwardTile kTile =
      kBackwardTiles[backward_row_of(kHeadDim_, kBlockM_, kBlockN_)];
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kStages = kTile.stages;
  static constexpr int kGroupThreads = kTile.threads() / 2;
  static constexpr int kGroupWarps = kTile.warps / 2;

  // Warps of a group by keys and, in S, dP, by queries; in dV, dK by columns.
  static constexpr int kColumnWarps = kTile.column_warps();
  static constexpr int kQueries = kBlockM / kColumnWarps;
  static constexpr int kColumns = kHeadDim / kColumnWarps;
  // Warps by the 32 rows of dQ and its columns, which a warp computes in passes of at most 96.
  static constexpr int kRowWarps = kBlockM / 32 < kGroupWarps ? kBlockM / 32 : kGroupWarps;
  static constexpr int kRowColumnWarps = kGroupWarps / kRowWarps;
  static constexpr int kPasses = kHeadDim / kRowColumnWarps > 96 ? 2 : 1;
  static constexpr int kPassColumns = kHeadDim / kRowColumnWarps / kPasses;

  // P and dS: a row for each key, a column for each query.
  using Scores = TileShape<Element_, kBlockM, kGroupThreads>;

  static_assert(kBlockN * kColumnWarps == 32 * kGroupWarps, "a warp has 32 keys");
  static_assert(kColumnWarps == 1 || kColumnWarps == 2, "one or two warps share keys");
  static_assert(kRowWarps * 32 == kBlockM, "a warp has 32 rows of dQ");
  static_assert(kQueries % 16 == 0 && kColumns % 16 == 0 && kPassColumns % 16 == 0,
                "warps have whole 16-wide fragments");
  static_assert(kHeadDim / kPasses % TileShape<Element_, kHeadDim, 32>::kBlockCols == 0,
                "a pass has whole column blocks");
  static_assert(kStages == 1 || kStages == 2, "Q and dO are single or double buffered");
};

template <class Config>
struct BackwardShared {
  using Element = typename Config::Element;
  static constexpr int kScores = Config::kBlockM * Config::kBlockN;
  alignas(128) Element k[Config::kBlockN * Config::kHeadDim];  // also stages dK
  alignas(128) Element v[Config::kBlockN * Config::kHeadDim];  // also stages dV
  alignas(128) Element q[Config::kStages][Config::kBlockM * Config::kHeadDim];
  alignas(128) Element dout[Config::kStages][Config::kBlockM * Config::kHeadDim];
  // 0 and 1: dS / (dP - delta), which dS then replaces, of two steps; 2: P, if warps share it.
  alignas(128) Element scores[Config::kColumnWarps > 1 ? 3 : 2][kScores];
  alignas(16) float lse[Config::kStages][Config::kBlockM];
  alignas(16) float delta[Config::kStages][Config::kBlockM];
  KeyBlock<Config> at;
};

// What this warp computes of S, dP, dK and dV. Read from the thread's number, and not kept: the
// accumulators need the registers.
template <class Config>
struct WarpPlace {
  int lane;
  int key;     // the first of 32 keys
  int column;  // of the warps that share these keys
  int query;   // the first of kQueries

  __device__ __forceinline__ WarpPlace() {
    const int thread = ptx::thread(), warp = thread / 32;
    lane = thread % 32;
    key = warp / Config::kColumnWarps * 32;
    column = warp % Config::kColumnWarps;
    query = column * Config::kQueries;
  }
};

// Among the threads of one group: threadIdx.y == kGroup.
template <class Config, int kGroup>
__device__ __forceinline__ void group_barrier() {
  ptx::named_barrier(1 + kGroup, Config::kGroupThreads);
}

// Among all threads; the groups reach it at different places.
template <class Config>
__device__ __forceinline__ void block_barrier() {
  ptx::named_barrier(0, 2 * Config::kGroupThreads);
}

}  // namespace attnscope::sm80
