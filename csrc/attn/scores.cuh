// Work on the scores of one row tile as the tensor cores leave them: a thread holds, of every 8
// columns, 2 (lane % 4) and the next, of rows lane / 4 and lane / 4 + 8: element 4 n + 2 half + i.
// mma.sync's m16n8 tiles and wgmma's m64nN tiles agree on this.
#pragma once

#include <cfloat>

#include "attn/block_range.cuh"
#include "attn/score_scales.h"
#include "ptx/math.cuh"

namespace attnscope {

// softcap * tanh(score / softcap) for a wide cap. While x is small: score * (tanh(x) / x) by a
// minimax polynomial, so that neither cancellation nor an overflow of 2 softcap costs precision.
// `inverse` is 2^32 / softcap, which is a normal number for every softcap.
__device__ __forceinline__ float cap_wide(float score, float softcap, float inverse) {
  const float x = score * 0x1p-32f * inverse;
  const bool small = fabsf(x) < 0.5f;
  float result = score;
  if (__any_sync(0xffffffffu, small)) {
    const float z = x * x;
    float p = fmaf(1.725699421e-2f, z, -5.305295209e-2f);
    p = fmaf(p, z, 1.332598732e-1f);
    p = fmaf(p, z, -3.333314838e-1f);
    result = fmaf(score * z, p, score);
  }
  if (!__all_sync(0xffffffffu, small)) {
    const float r = ptx::reciprocal_approx(ptx::exp2_approx(x * 2.885390082f) + 1.0f);
    const float large = softcap * fmaf(-2.0f, r, 1.0f);
    result = small ? result : large;
  }
  return result;
}

// Raw scores to final logits, see ScoreScales::transform. Without kWide, for calls without
// kCapWide: the code for that is long.
template <bool kWide = true, int kCount>
__device__ __forceinline__ void transform_scores(float (&s)[kCount], const ScoreScales& scales) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] *= scales.factor;
  if (kWide && scales.transform == kCapWide) {
    const float inverse = ptx::reciprocal_approx(scales.softcap * 0x1p-32f);
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = cap_wide(s[i], scales.softcap, inverse);
  } else if (scales.transform == kCap) {
    // cap tanh(x) = cap - 2 cap / (e^2x + 1); tanh.approx would cost 2^-11 of the cap.
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float e = ptx::exp2_approx(s[i]);
      s[i] = fmaf(-2.0f * scales.softcap, ptx::reciprocal_approx(e + 1.0f), scales.softcap);
    }
  }
}

// What transform_scores does, but for kCap only its reciprocal: the logit is cap + 2 cap s. A
// softmax does not see the sum, and has the factor in its scale (reciprocal_scales).
template <int kCount>
__device__ __forceinline__ void cap_to_reciprocals(float (&s)[kCount], const ScoreScales& scales) {
  if (scales.transform == kCap) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = ptx::reciprocal_approx(-1.0f - ptx::exp2_approx(s[i] * scales.factor));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] *= scales.factor;
  }
}

// P may pass 1 by this power of two before O and the sums are rescaled to a new maximum. It costs
// nothing: fp32 sums hold it, and P has the same relative precision at any scale.
constexpr float kHeadroom = 8.0f;

// A scaled row maximum so large that its rounding, up to half of 2^-3 here and more above, would
// show in 2^(s * scale_log2 - max). Then the scores are scaled, and rounded, first: the exponent of
// an equal score is exactly 0. The lowest finite float is no maximum: the row has seen no key.
__device__ __forceinline__ bool is_giant(float row_max) {
  return fabsf(row_max) >= 0x1p20f && fabsf(row_max) < FLT_MAX;
}

// The largest score of the thread's upper (half 0) or lower row, over all columns.
template <int kCount>
__device__ __forceinline__ float row_maximum(const float (&s)[kCount], int half) {
  float x = fmaxf(s[2 * half], s[2 * half + 1]);
#pragma unroll
  for (int n = 1; n < kCount / 4; ++n) {
    x = fmaxf(x, fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
  }
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// `row` is the thread's upper row in its sequence, `first_key` the key of column 0.
template <int kCount>
__device__ __forceinline__ void mask_scores(float (&s)[kCount], const Window& window, int row,
                                            int first_key, int seqlen_k) {
  const int first = first_key + threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int begin = window.first_key(row + half * 8) - first;
    const int end = window.end_key(row + half * 8, seqlen_k) - first;
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = n * 8 + i;
        if (key < begin || key >= end) s[4 * n + 2 * half + i] = -INFINITY;
      }
    }
  }
}

}  // namespace attnscope
