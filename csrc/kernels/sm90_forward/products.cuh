// The products of a consumer: S = Q K^T and O += P V by wgmma; S again by mma.sync.
#pragma once

#include "kernels/sm90_forward/shared.cuh"
#include "kernels/sm90_forward/softmax.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/wgmma.cuh"

namespace attnscope::sm90 {

// S [64, kBlockN] = Q [64, kHeadDim] K^T, one wgmma group.
template <class Config>
__device__ __forceinline__ void issue_scores(Fragments<Config>& f, ptx::WgmmaDescriptor q,
                                             ptx::WgmmaDescriptor k) {
  constexpr int kQBlock = 64 * Config::kRowBytes, kKBlock = Config::kBlockN * Config::kRowBytes;
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < Config::kHeadDim / 16; ++step) {
    ptx::WgmmaShared<typename Config::Element, Config::kBlockN>::mma(
        f.s, q.at(step / 4 * kQBlock + step % 4 * 32), k.at(step / 4 * kKBlock + step % 4 * 32),
        step > 0);
  }
  ptx::wgmma_commit();
}

// The address of a lane's 16 bytes for ldmatrix in a swizzled tile of `tile_rows` rows.
template <class Config>
__device__ __forceinline__ uint32_t lane_address(uint32_t tile, int tile_rows, int row, int chunk) {
  return tile + (chunk / 8 * tile_rows + row) * Config::kRowBytes + ((chunk ^ row) & 7) * 16;
}

// Recomputes S of this warp's 16 rows by mma.sync: wgmma needs all four warps of a warpgroup, and
// perhaps only some of them need S again.
template <class Config>
__device__ __forceinline__ void recompute_scores(Fragments<Config>& f, uint32_t q, uint32_t k) {
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int n = 0; n < Config::kBlockN / 16; ++n) {
    float* s = &f.s[8 * n];
#pragma unroll
    for (int i = 0; i < 8; ++i) s[i] = 0.0f;
#pragma unroll 1
    for (int step = 0; step < Config::kHeadDim / 16; ++step) {
      uint32_t a[4], b[4];
      ptx::ldmatrix_x4(a, lane_address<Config>(q, 64, row, 2 * step + lane / 16));
      ptx::ldmatrix_x4(b,
                       lane_address<Config>(k, Config::kBlockN, n * 16 + lane % 8 + lane / 16 * 8,
                                            2 * step + lane / 8 % 2));
      ptx::mma_m16n8k16<typename Config::Element>(s, a, b[0], b[1]);
      ptx::mma_m16n8k16<typename Config::Element>(s + 4, a, b[2], b[3]);
    }
  }
}

// O [64, kValueDim] += P [64, kBlockN] V, one wgmma group; P from registers.
template <class Config>
__device__ __forceinline__ void issue_output(Fragments<Config>& f, const Probabilities<Config>& p,
                                             ptx::WgmmaDescriptor v) {
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < Config::kBlockN / 16; ++step) {
    ptx::WgmmaRegister<typename Config::Element, Config::kValueDim>::mma(
        f.o, &p[4 * step], v.at(step * 16 * Config::kRowBytes));
  }
  ptx::wgmma_commit();
}

}  // namespace attnscope::sm90
