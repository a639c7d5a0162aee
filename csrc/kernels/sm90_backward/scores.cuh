// Scores of 64 keys and kBlockM queries in a consumer's registers, transposed: a thread's rows are
// keys g and g + 8 of its warp's 16, g = lane / 4; its columns of every 8 are queries
// 2 (lane % 4) and the next. Element 4 n + 2 half + i is row g + 8 half and column
// 8 n + 2 (lane % 4) + i. Two columns of one row, packed, make a word of an A operand.
#pragma once

#include "attn/mask_bits.cuh"
#include "attn/scores.cuh"
#include "kernels/sm90_backward/shared.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"

namespace attnscope::sm90 {

// A thread's two values of each 8 columns, kAhead groups of 8 loaded before they are needed. The
// loads stay where they are written: the compiler would put them next to their use, and wait.
template <int kGroups>
struct ColumnPairs {
  static constexpr int kAhead = kGroups < 4 ? kGroups : 4;
  uint32_t address;
  float2 values[kGroups];

  // Loads the first groups.
  __device__ __forceinline__ explicit ColumnPairs(const float* columns)
      : address(ptx::shared_address(columns) + threadIdx.x % 4 * 8) {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load(n);
  }
  // The values of group `n`; loads group n + kAhead. The groups come in order.
  __device__ __forceinline__ float2 next(int n) {
    if (n + kAhead < kGroups) load(n + kAhead);
    return values[n];
  }

 private:
  __device__ __forceinline__ void load(int n) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(values[n].x), "=f"(values[n].y)
                 : "r"(address + n * 32));
  }
};

// Hides the queries that do not see the thread's keys. `key` is the thread's upper row in its
// sequence, `first_query` the query of column 0.
template <class Config>
__device__ __forceinline__ void mask_keys(float (&s)[Config::kBlockM / 2], const Window& queries,
                                          int key, int first_query, int seqlen_q, int seqlen_k) {
  const int first = first_query + threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = key + 8 * half;
    const int begin = queries.first_key(row) - first;
    const int end = row < seqlen_k ? queries.end_key(row, seqlen_q) - first : 0;
    keep_columns(s, half, begin, end);
  }
}

// P = 2^(s scale_log2 - lse_log2), with early values also packed for dV. What stays in `s` is
// dS / dT P: P, or with a softcap, which needs early values, P (1 - tanh^2).
template <class Config>
__device__ __forceinline__ void make_probabilities(const BackwardArguments& a,
                                                   float (&s)[Config::kBlockM / 2],
                                                   uint32_t (&p)[Config::kBlockM / 4],
                                                   ColumnPairs<Config::kBlockM / 8>& lse_log2) {
  const auto each = [&](auto derivative) {
#pragma unroll
    for (int n = 0; n < Config::kBlockM / 8; ++n) {
      const float2 lse = lse_log2.next(n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& low = s[4 * n + 2 * half];
        float& high = s[4 * n + 2 * half + 1];
        const float p_low = ptx::exp2_approx(fmaf(low, a.scores.scale_log2, -lse.x));
        const float p_high = ptx::exp2_approx(fmaf(high, a.scores.scale_log2, -lse.y));
        if constexpr (Config::kEarlyValues) {
          p[2 * n + half] = ptx::pack<typename Config::Element>(p_low, p_high);
        }
        low = derivative(p_low, low);
        high = derivative(p_high, high);
      }
    }
  };
  if (Config::kEarlyValues && __builtin_expect(a.scores.transform == kCap, false)) {
    each([&](float p, float logit) {
      const float tanh = fmaxf(logit * a.inverse_cap, -1.0f);  // hidden: -inf
      return p * fmaf(-tanh, tanh, 1.0f);
    });
  } else {
    each([](float p, float) { return p; });
  }
}

// Packs P, without a softcap, for dV.
template <class Config>
__device__ __forceinline__ void pack_probabilities(const float (&p)[Config::kBlockM / 2],
                                                   uint32_t (&packed)[Config::kBlockM / 4]) {
#pragma unroll
  for (int pair = 0; pair < Config::kBlockM / 4; ++pair) {
    packed[pair] = ptx::pack<typename Config::Element>(p[2 * pair], p[2 * pair + 1]);
  }
}

// dS^T = P (dP^T - delta), packed. With kHidden, 0 wherever P is 0, even if dP is NaN. `weights`
// returns words 4 n + 2 half and the next of dS / dT P, by their number 2 n + half.
template <class Config, bool kHidden, class Weights>
__device__ __forceinline__ void make_score_gradients(const Weights& weights,
                                                     const float (&dp)[Config::kBlockM / 2],
                                                     uint32_t (&ds)[Config::kBlockM / 4],
                                                     ColumnPairs<Config::kBlockM / 8>& delta) {
#pragma unroll
  for (int n = 0; n < Config::kBlockM / 8; ++n) {
    const float2 d = delta.next(n);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int pair = 2 * n + half;
      const float2 weight = weights(pair);
      float low = weight.x * (dp[2 * pair] - d.x), high = weight.y * (dp[2 * pair + 1] - d.y);
      if (kHidden) {
        low = weight.x == 0.0f ? 0.0f : low;
        high = weight.y == 0.0f ? 0.0f : high;
      }
      ds[pair] = ptx::pack<typename Config::Element>(low, high);
    }
  }
}

// Stores dS^T of a warp's 16 keys as dS [kBlockM, 64 keys of the consumer], swizzled. Four 8x8
// matrices make 16 queries by 16 keys; lane l passes the address of query 8 (l / 16) + l % 8 and
// keys 8 (l / 8 % 2) to 8 (l / 8 % 2) + 7.
template <class Config>
__device__ __forceinline__ void store_scores(uint32_t shared,
                                             const uint32_t (&ds)[Config::kBlockM / 4]) {
  // In blocks of 128 queries, what is computed from it takes no register of the loop.
  const unsigned thread = Config::kUnits > 1 ? ptx::thread() : threadIdx.x;
  const unsigned lane = thread % 32, chunk = thread % 128 / 32 * 2 + lane / 8 % 2;
  const uint32_t address =
      shared + (lane / 16 * 8 + lane % 8) * Config::kRowBytes + (chunk ^ lane % 8) * 16;
#pragma unroll
  for (int step = 0; step < Config::kBlockM / 16; ++step) {
    const uint32_t words[4] = {ds[4 * step], ds[4 * step + 1], ds[4 * step + 2], ds[4 * step + 3]};
    ptx::stmatrix_x4_trans(address + step * 16 * Config::kRowBytes, words);
  }
}

}  // namespace attnscope::sm90
