// Config and shared memory of the portable forward kernel, and its reads of Q.
#pragma once

#include "attn/tiles.cuh"
#include "kernels/sm80_forward/config.cuh"
#include "ptx/ldmatrix.cuh"

namespace attnscope::sm80 {

template <class Element_, int kHeadDim_>
struct ForwardConfig
    : TileShape<Element_, kHeadDim_, kForwardTiles[forward_row(kHeadDim_)].threads()> {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr ForwardTile kTile = kForwardTiles[forward_row(kHeadDim)];
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kWarps = kTile.warps;
  static constexpr int kStages = kTile.stages;
  static constexpr int kRowTiles = kBlockM / kWarps / 16;  // m16 tiles per warp
  static constexpr int kRows = 2 * kRowTiles;              // rows per thread
  static constexpr bool kQInRegisters = kTile.q_in_registers;

  static_assert(kTile.head_dim == kHeadDim, "the tile table has no row for this head dim");
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
