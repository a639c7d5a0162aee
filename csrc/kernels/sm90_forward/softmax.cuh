// Scores to probabilities in a consumer's registers.
#pragma once

#include <cfloat>
#include <cstdint>

#include "attn/mask_bits.cuh"
#include "attn/scores.cuh"
#include "kernels/sm90_forward/shared.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"

namespace attnscope::sm90 {

// A thread's rows are g and g + 8 of its warp's 16 rows, g = lane / 4. Its columns of every 8 are
// 2 (lane % 4) and the next: element 4 n + 2 half + i.
template <class Config>
struct Fragments {
  float o[Config::kValueDim / 2];
  float s[Config::kBlockN / 2];
  float row_max[2];  // what P and row_sum refer to, times scale_log2; starts at -FLT_MAX
  float row_sum[2];  // this thread's columns only
};

// P of a block, packed as the A operand of P V.
template <class Config>
using Probabilities = uint32_t[Config::kBlockN / 4];

// Stores a pair of probabilities. With live scores: packed, in registers of their own. Otherwise in
// place of the scores, to be packed once P V has read the probabilities before.
template <class Config>
__device__ __forceinline__ void put(Fragments<Config>& f, Probabilities<Config>& p, int i,
                                    float low, float high) {
  if constexpr (Config::kScoresLive) {
    p[i] = ptx::pack<typename Config::Element>(low, high);
  } else {
    f.s[2 * i] = low;
    f.s[2 * i + 1] = high;
  }
}

// How large a sum of a thread's probabilities of a block and row may get before the row maximum is
// raised. It costs nothing: fp32 sums hold it, fp16 holds each probability, and P has the same
// relative precision at any scale.
constexpr float kMostSum = 0x1p12f;

// Probabilities by the row maximum in use, and this thread's sums of them. Nothing looks for a new
// maximum: a probability is at most the sum that it is part of, so small sums show that all are
// small.
template <class Config>
__device__ __forceinline__ void softmax(Fragments<Config>& f, Probabilities<Config>& p,
                                        float scale_log2, float (&sum)[2]) {
  sum[0] = sum[1] = 0.0f;
#pragma unroll
  for (int i = 0; i < Config::kBlockN / 4; ++i) {
    const int half = i % 2;
    const float p_low = ptx::exp2_approx(fmaf(f.s[2 * i], scale_log2, -f.row_max[half]));
    const float p_high = ptx::exp2_approx(fmaf(f.s[2 * i + 1], scale_log2, -f.row_max[half]));
    sum[half] += p_low + p_high;
    put<Config>(f, p, i, p_low, p_high);
  }
}

// False if a sum of the warp exceeds kMostSum: then raise_maximum must repeat the block from its
// scores.
template <class Config>
__device__ __forceinline__ bool add_sums(Fragments<Config>& f, const float (&sum)[2]) {
  if (__any_sync(0xffffffffu, fmaxf(sum[0], sum[1]) > kMostSum)) return false;
  f.row_sum[0] += sum[0];
  f.row_sum[1] += sum[1];
  return true;
}

// Probabilities and sums by the true maximum; O must be scaled by `factor`. True if a row maximum
// of the warp is giant: then the blocks that follow must come here too.
template <class Config>
__device__ __forceinline__ bool raise_maximum(Fragments<Config>& f, Probabilities<Config>& p,
                                              float scale_log2, float (&factor)[2]) {
  float new_max[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    new_max[half] = fmaxf(f.row_max[half], row_maximum(f.s, half) * scale_log2);
  }
  // Giant scores are scaled before the maximum is taken off: the largest then gives 2^0.
  const bool giant = __any_sync(0xffffffffu, is_giant(new_max[0]) || is_giant(new_max[1]));
  if (__builtin_expect(giant, false)) {
#pragma unroll
    for (int i = 0; i < Config::kBlockN / 2; ++i) f.s[i] *= scale_log2;
    scale_log2 = 1.0f;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    factor[half] = ptx::exp2_approx(f.row_max[half] - new_max[half]);
    f.row_max[half] = new_max[half];
    float sum = f.row_sum[half] * factor[half];
#pragma unroll
    for (int i = half; i < Config::kBlockN / 4; i += 2) {
      const float p_low = ptx::exp2_approx(fmaf(f.s[2 * i], scale_log2, -f.row_max[half]));
      const float p_high = ptx::exp2_approx(fmaf(f.s[2 * i + 1], scale_log2, -f.row_max[half]));
      sum += p_low;
      sum += p_high;
      put<Config>(f, p, i, p_low, p_high);
    }
    f.row_sum[half] = sum;
  }
  return giant;
}

template <class Config>
__device__ __forceinline__ void pack_probabilities(const Fragments<Config>& f,
                                                   Probabilities<Config>& p) {
#pragma unroll
  for (int i = 0; i < Config::kBlockN / 4; ++i) {
    p[i] = ptx::pack<typename Config::Element>(f.s[2 * i], f.s[2 * i + 1]);
  }
}

template <class Config>
__device__ __forceinline__ void rescale_output(Fragments<Config>& f, const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < Config::kValueDim / 2; ++i) f.o[i] *= factor[i / 2 % 2];
}

}  // namespace attnscope::sm90
