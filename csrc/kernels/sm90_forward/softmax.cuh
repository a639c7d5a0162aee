// Scores to probabilities in a consumer's registers.
#pragma once

#include <cstdint>

#include "attn/scores.cuh"
#include "kernels/sm90_forward/shared.cuh"
#include "ptx/math.cuh"

namespace attnscope::sm90 {

// mask_scores by a bit a column, in less than half of its instructions for two more registers
// (with which the sm_80 kernel would spill).
template <int kCount>
__device__ __forceinline__ void mask_scores_by_bits(float (&s)[kCount], const Window& window,
                                                    const Grouping& grouping, int row,
                                                    int first_key, int seqlen_k) {
  const int first = first_key + threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = grouping.query(row + half * 8);
    const int begin = window.first_key(query) - first;
    const int end = window.end_key(query, seqlen_k) - first;
    // Of the thread's columns 0, 1, 8, 9, 16, 17, .. so many are before a key.
    const auto before = [](int key) { return max(0, key / 8 * 2 + min(key % 8, 2)); };
    const int first_seen = before(begin), end_seen = before(end);
#pragma unroll
    for (int word = 0; word < kCount / 2; word += 32) {
      // Bit i: column word + i is seen. The hardware turns seven bits at a time into predicates.
      const uint32_t seen = ptx::shift_left(~0u, max(0, first_seen - word)) &
                            ~ptx::shift_left(~0u, max(0, end_seen - word));
#pragma unroll
      for (int i = 0; i < min(32, kCount / 2 - word); ++i) {
        const int column = word + i;
        if (!(seen & 1u << i)) s[column / 2 * 4 + 2 * half + column % 2] = -INFINITY;
      }
    }
  }
}

// A consumer thread's rows are g and g + 8 of its warp's 16, g = lane / 4; of every 8 columns it
// holds 2 (lane % 4) and the next: element 4 n + 2 half + i.
template <class Config>
struct Fragments {
  float o[Config::kHeadDim / 2];
  float s[Config::kBlockN / 2];
  float row_max[2];  // what P and row_sum refer to, times scale_log2; from the lowest finite float
  float row_sum[2];  // this thread's columns only
};

// A block's probabilities, packed as the A operands of P V.
template <class Config>
using Probabilities = uint32_t[Config::kBlockN / 4];

// Where probabilities go: packed at once into registers of their own, the scores kept; or, where
// registers are short, in place of the scores, to be packed when P V is done with the last ones.
template <class Config>
__device__ __forceinline__ void put(Fragments<Config>& f, Probabilities<Config>& p, int i,
                                    float low, float high) {
  if constexpr (Config::kKeepScores) {
    p[i] = ptx::pack<typename Config::Element>(low, high);
  } else {
    f.s[2 * i] = low;
    f.s[2 * i + 1] = high;
  }
}

// Probabilities and partial sums by the maximum that is in use, without looking for the new one
// first: the search (a chain of comparisons and shuffles) runs beside the exponentials instead of
// before them. False where a score passed the old maximum by more than kHeadroom, in any row of the
// warp; then the sums have not changed, and raise_maximum must do the block again from its scores.
template <class Config>
__device__ __forceinline__ bool softmax(Fragments<Config>& f, Probabilities<Config>& p,
                                        float scale_log2) {
  float top = -INFINITY;
  float sum[2] = {f.row_sum[0], f.row_sum[1]};
#pragma unroll
  for (int i = 0; i < Config::kBlockN / 4; ++i) {
    const int half = i % 2;
    const float low = fmaf(f.s[2 * i], scale_log2, -f.row_max[half]);
    const float high = fmaf(f.s[2 * i + 1], scale_log2, -f.row_max[half]);
    top = fmaxf(top, fmaxf(low, high));
    const float p_low = ptx::exp2_approx(low), p_high = ptx::exp2_approx(high);
    sum[half] += p_low;
    sum[half] += p_high;
    put<Config>(f, p, i, p_low, p_high);
  }
  if (__any_sync(0xffffffffu, top > kHeadroom)) return false;
  f.row_sum[0] = sum[0];
  f.row_sum[1] = sum[1];
  return true;
}

// The same by the true maximum; `factor` is what O must be scaled by.
template <class Config>
__device__ __forceinline__ void raise_maximum(Fragments<Config>& f, Probabilities<Config>& p,
                                              float scale_log2, float (&factor)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float old_max = f.row_max[half];
    f.row_max[half] = fmaxf(old_max, row_maximum(f.s, half) * scale_log2);
    factor[half] = ptx::exp2_approx(old_max - f.row_max[half]);
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
  for (int i = 0; i < Config::kHeadDim / 2; ++i) f.o[i] *= factor[i / 2 % 2];
}

}  // namespace attnscope::sm90
