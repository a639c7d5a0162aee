// Products of a warp with mma.sync: 32 rows, operands from swizzled tiles.
#pragma once

#include "attn/tiles.cuh"
#include "kernels/sm80_backward/shared.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"

namespace attnscope::sm80 {

template <int kCount>
__device__ __forceinline__ void clear(float (&d)[2][kCount]) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) d[m][i] = 0.0f;
  }
}

// d += a b for 16 columns; b as ldmatrix_x4 returns it.
template <class Element>
__device__ __forceinline__ void multiply16(float* d0, float* d1, const uint32_t (&a)[2][4],
                                           const uint32_t (&b)[4]) {
  ptx::mma_m16n8k16<Element>(d0, a[0], b[0], b[1]);
  ptx::mma_m16n8k16<Element>(d0 + 4, a[0], b[2], b[3]);
  ptx::mma_m16n8k16<Element>(d1, a[1], b[0], b[1]);
  ptx::mma_m16n8k16<Element>(d1 + 4, a[1], b[2], b[3]);
}

// d = keys rows^T over the head dim: the warp's 32 rows of K or V by its kQueries rows of Q or dO.
template <class Config>
__device__ __forceinline__ void multiply_rows(float (&d)[2][Config::kQueries / 2],
                                              uint32_t shared_keys, uint32_t shared_rows) {
  const WarpPlace<Config> place;
  const int lane = place.lane;
  const FragmentAddress<Config, Config::kBlockN> a(shared_keys, place.key + lane % 16, lane / 16);
  const FragmentAddress<Config, Config::kBlockM> b(
      shared_rows, place.query + lane % 8 + lane / 16 * 8, lane / 8 % 2);
  clear(d);
#pragma unroll
  for (int step = 0; step < Config::kHeadDim / 16; ++step) {
    uint32_t fa[2][4];
    ptx::ldmatrix_x4(fa[0], a.at(0, step));
    ptx::ldmatrix_x4(fa[1], a.at(1, step));
#pragma unroll
    for (int n = 0; n < Config::kQueries / 16; ++n) {
      uint32_t fb[4];
      ptx::ldmatrix_x4(fb, b.at(n, step));
      multiply16<typename Config::Element>(&d[0][8 * n], &d[1][8 * n], fa, fb);
    }
  }
}

// d += a b over the queries: P^T dO or dS^T Q, 32 keys by the warp's columns. `a(f, n)` gives the
// fragments of 16 queries.
template <class Config, class Fragments>
__device__ __forceinline__ void multiply_queries(
    float (&d)[2][Config::kColumns / 2], const Fragments& a,
    const FragmentAddress<Config, Config::kBlockM>& b) {
#pragma unroll
  for (int n = 0; n < Config::kBlockM / 16; ++n) {
    uint32_t fa[2][4];
    a(fa, n);
#pragma unroll
    for (int j = 0; j < Config::kColumns / 16; ++j) {
      uint32_t fb[4];
      ptx::ldmatrix_x4_trans(fb, b.at(n, j * Config::kColumnWarps));
      multiply16<typename Config::Element>(&d[0][8 * j], &d[1][8 * j], fa, fb);
    }
  }
}

// d = a b over the keys: 32 rows of dS times some columns of K.
template <class Config>
__device__ __forceinline__ void multiply_keys(
    float (&d)[2][Config::kPassColumns / 2],
    const FragmentAddress<typename Config::Scores, Config::kBlockN>& a,
    const FragmentAddress<Config, Config::kBlockN>& b) {
  clear(d);
#pragma unroll
  for (int n = 0; n < Config::kBlockN / 16; ++n) {
    uint32_t fa[2][4];
    ptx::ldmatrix_x4_trans(fa[0], a.at(n, 0));
    ptx::ldmatrix_x4_trans(fa[1], a.at(n, 1));
#pragma unroll
    for (int j = 0; j < Config::kPassColumns / 16; ++j) {
      uint32_t fb[4];
      ptx::ldmatrix_x4_trans(fb, b.at(n, j * Config::kRowColumnWarps));
      multiply16<typename Config::Element>(&d[0][8 * j], &d[1][8 * j], fa, fb);
    }
  }
}

}  // namespace attnscope::sm80
