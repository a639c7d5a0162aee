// The threads of a block that compute P and dV.
#pragma once

#include "attn/scores.cuh"
#include "kernels/sm80_backward/epilogue.cuh"
#include "kernels/sm80_backward/key_block.cuh"
#include "kernels/sm80_backward/products.cuh"
#include "kernels/sm80_backward/shared.cuh"
#include "ptx/address.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"

namespace attnscope::sm80 {

// Scores to P, in the order of A operands, and P times the derivative of softcap to `weights`.
// `lse` points to the thread's first query.
template <bool kCapped, class Config>
__device__ __forceinline__ void compute_probabilities(
    uint32_t (&p)[2][Config::kQueries / 16][4], const float (&s)[2][Config::kQueries / 2],
    const BackwardCall& call, const float* lse,
    const FragmentStore<typename Config::Scores, Config::kBlockN>& weights) {
  using Element = typename Config::Element;
#pragma unroll
  for (int n = 0; n < Config::kQueries / 16; ++n) {
    const float2 low = *reinterpret_cast<const float2*>(lse + 16 * n);
    const float2 high = *reinterpret_cast<const float2*>(lse + 16 * n + 8);
    const float of_query[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      uint32_t weight[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x[2], w[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float score = s[m][8 * n + 2 * i + j];
          x[j] = ptx::exp2_approx(fmaf(score, call.scores.scale_log2, -of_query[i / 2 * 2 + j]));
          // tanh^2 is 1 where a mask left -inf.
          const float tanh = fmaxf(score * call.inverse_softcap, -1.0f);
          w[j] = kCapped ? x[j] * fmaf(-tanh, tanh, 1.0f) : x[j];
        }
        p[m][n][i] = ptx::pack<Element>(x[0], x[1]);
        weight[i] = kCapped ? ptx::pack<Element>(w[0], w[1]) : p[m][n][i];
      }
      weights.store(weight, m, n);
    }
  }
}

// Starts the copies of a step's Q and lse.
template <class Config>
__device__ __forceinline__ void load_queries(const BackwardParams& p, const BackwardCall& call,
                                             const KeyBlock<Config>& at, const Step<Config>& step,
                                             uint32_t shared_q, uint32_t shared_lse) {
  constexpr int kBlockM = Config::kBlockM;
  const int first = step.block * kBlockM;
  const TileSource<Config> q(p.forward.q, p.forward.q_stride, at.seg_q,
                             at.head_kv * at.heads + step.head, p.forward.head_dim);
  q.template load<kBlockM>(first, at.row_begin - first, at.row_end - first, shared_q);
  if (const int thread = ptx::thread(); thread < kBlockM / 4) {
    const float* lse = call.workspace.lse + step.work_row(at, call.workspace);
    ptx::cp_async_16(shared_lse + 16 * thread, lse + 4 * thread);
  }
  ptx::cp_async_commit();
}

template <class Config>
__device__ __forceinline__ void value_group(const BackwardParams& p, const BackwardCall& call,
                                            BackwardShared<Config>& shared) {
  using Element = typename Config::Element;
  using Scores = typename Config::Scores;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kStages = Config::kStages;
  const uint32_t shared_k = ptx::shared_address(shared.k);
  const uint32_t shared_q = ptx::shared_address(shared.q);
  const uint32_t shared_dout = ptx::shared_address(shared.dout);
  const uint32_t shared_scores = ptx::shared_address(shared.scores);
  const uint32_t shared_lse = ptx::shared_address(shared.lse);
  constexpr uint32_t kTileBytes = sizeof(shared.q[0]), kScoreBytes = sizeof(shared.scores[0]);

  float dv[2][Config::kColumns / 2];
  clear(dv);
  const KeyBlock<Config>& at = shared.at;
  Step<Config> step(at);
  if (!step.done(at)) {
    const TileSource<Config> k(p.forward.k, p.forward.k_stride, at.seg_k, at.head_kv,
                               p.forward.head_dim);
    load_seen_keys(k, at, shared_k);
    load_queries(p, call, at, step, shared_q, shared_lse);
  }
  for (; !step.done(at); step = step.next(at)) {
    const int stage = kStages == 1 ? 0 : step.parity;
    ptx::cp_async_wait<0>();
    group_barrier<Config, 0>();

    float s[2][Config::kQueries / 2];
    multiply_rows<Config>(s, shared_k, shared_q + stage * kTileBytes);
    const WarpPlace<Config> place;
    const int lane = place.lane;
    if (call.scores.transform != kNoTransform) {
      transform_scores(s[0], call.scores);
      transform_scores(s[1], call.scores);
    }
    if (at.boundary(step.block)) {
      mask_keys(s, at, at.first_key() + place.key + lane / 4,
                step.block * kBlockM + place.query + lane % 4 * 2);
    }
    uint32_t probabilities[2][Config::kQueries / 16][4];
    const float* lse = shared.lse[stage] + place.query + lane % 4 * 2;
    const FragmentStore<Scores, kBlockN> weights(shared_scores + step.parity * kScoreBytes,
                                                 place.key, place.query / 8, lane);
    if (call.scores.transform >= kCap) {
      compute_probabilities<true, Config>(probabilities, s, call, lse, weights);
    } else {
      compute_probabilities<false, Config>(probabilities, s, call, lse, weights);
    }
    const uint32_t shared_p = shared_scores + 2 * kScoreBytes;
    if constexpr (Config::kColumnWarps > 1) {
      const FragmentStore<Scores, kBlockN> store(shared_p, place.key, place.query / 8, lane);
#pragma unroll
      for (int n = 0; n < Config::kQueries / 16; ++n) {
        store.store(probabilities[0][n], 0, n);
        store.store(probabilities[1][n], 1, n);
      }
    }
    // The weights are visible, and the key group has finished with the other stage.
    block_barrier<Config>();
    const auto load_next = [&] {
      const Step<Config> next_step = step.next(at);
      if (next_step.done(at)) return;
      const int next = kStages == 1 ? 0 : next_step.parity;
      load_queries(p, call, at, next_step, shared_q + next * kTileBytes,
                   shared_lse + next * static_cast<uint32_t>(sizeof(shared.lse[0])));
    };
    if (kStages == 2) load_next();

    const FragmentAddress<Config, kBlockM> dout(shared_dout + stage * kTileBytes, lane % 16,
                                                place.column * 2 + lane / 16);
    if constexpr (Config::kColumnWarps > 1) {
      const FragmentAddress<Scores, kBlockN> p_rows(shared_p, place.key + lane % 16, lane / 16);
      multiply_queries<Config>(
          dv,
          [&](uint32_t (&a)[2][4], int n) {
            ptx::ldmatrix_x4(a[0], p_rows.at(0, n));
            ptx::ldmatrix_x4(a[1], p_rows.at(1, n));
          },
          dout);
    } else {
      multiply_queries<Config>(
          dv,
          [&](uint32_t (&a)[2][4], int n) {
#pragma unroll
            for (int j = 0; j < 8; ++j) a[j / 4][j % 4] = probabilities[j / 4][n][j % 4];
          },
          dout);
    }
    if (kStages == 1) {
      block_barrier<Config>();  // both groups have finished with the stage
      load_next();
    }
  }
  store_gradient<Config, 0>(dv, 1.0f, p.dv, p.dv_stride, at, p.forward.head_dim_v, shared.v);
}

}  // namespace attnscope::sm80
