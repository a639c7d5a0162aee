// The threads of a block that compute dS, dK and dQ.
#pragma once

#include "attn/faults.cuh"
#include "attn/nonfinite.cuh"
#include "kernels/sm80_backward/epilogue.cuh"
#include "kernels/sm80_backward/key_block.cuh"
#include "kernels/sm80_backward/products.cuh"
#include "kernels/sm80_backward/shared.cuh"
#include "ptx/address.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/reduce.cuh"
#include "ptx/sync.cuh"

namespace attnscope::sm80 {

// dS = weight (dP - delta), in the order of A operands. It replaces the weights in shared memory,
// which this warp alone reads. kSelect: a weight of 0 gives 0 whatever dP is.
template <bool kSelect, class Config>
__device__ __forceinline__ void compute_ds(
    uint32_t (&ds)[2][Config::kQueries / 16][4], const float (&dp)[2][Config::kQueries / 2],
    const float* delta, const FragmentAddress<typename Config::Scores, Config::kBlockN>& weights,
    const FragmentStore<typename Config::Scores, Config::kBlockN>& store) {
  using Element = typename Config::Element;
  constexpr int kCount = Config::kQueries / 16;
  uint32_t w[2][2][4];  // read 16 queries ahead
  ptx::ldmatrix_x4(w[0][0], weights.at(0, 0));
  ptx::ldmatrix_x4(w[0][1], weights.at(1, 0));
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    if (n + 1 < kCount) {
      ptx::ldmatrix_x4(w[(n + 1) % 2][0], weights.at(0, n + 1));
      ptx::ldmatrix_x4(w[(n + 1) % 2][1], weights.at(1, n + 1));
    }
    const float2 low = *reinterpret_cast<const float2*>(delta + 16 * n);
    const float2 high = *reinterpret_cast<const float2*>(delta + 16 * n + 8);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 weight = unpack<Element>(w[n % 2][m][i]);
        const float2 row = i < 2 ? low : high;
        const float* x = &dp[m][8 * n + 2 * i];
        float a = weight.x * (x[0] - row.x), b = weight.y * (x[1] - row.y);
        if (kSelect) {
          a = weight.x == 0.0f ? 0.0f : a;
          b = weight.y == 0.0f ? 0.0f : b;
        }
        ds[m][n][i] = ptx::pack<Element>(a, b);
      }
    }
    __syncwarp();  // all lanes have read the weights of these queries
    store.store(ds[0][n], 0, n);
    store.store(ds[1][n], 1, n);
  }
}

// Starts the copies of a step's dO and delta.
template <class Config>
__device__ __forceinline__ void load_gradients(const BackwardParams& p, const BackwardCall& call,
                                               const KeyBlock<Config>& at, const Step<Config>& step,
                                               uint32_t shared_dout, uint32_t shared_delta) {
  constexpr int kBlockM = Config::kBlockM;
  const int first = step.block * kBlockM;
  const TileSource<Config> dout(p.dout, p.dout_stride, at.seg_q, at.head_kv * at.heads + step.head,
                                p.forward.head_dim_v);
  dout.template load<kBlockM>(first, at.row_begin - first, at.row_end - first, shared_dout);
  if (const int thread = ptx::thread(); thread < kBlockM / 4) {
    const float* delta = call.workspace.delta + step.work_row(at, call.workspace);
    ptx::cp_async_16(shared_delta + 16 * thread, delta + 4 * thread);
  }
  ptx::cp_async_commit();
}

// Key blocks add to a query block in the order of the grid. `turn` counts the blocks that have
// added.
struct Turn {
  int* turn;
  int before;  // key blocks that add before this one

  template <class Config>
  __device__ __forceinline__ Turn(const BackwardCall& call, const KeyBlock<Config>& at,
                                  const Step<Config>& step) {
    const int first = step.block * Config::kBlockM;
    turn = call.workspace.turns + step.work_row(at, call.workspace) / Config::kBlockM;
    const int end = min(first + Config::kBlockM, at.seg_q.length);
    const BlockRange range = block_range(at.window, first, end, at.seg_k.length, Config::kBlockN);
    before = call.last_first ? range.end - 1 - at.index : at.index - range.begin;
  }
  __device__ __forceinline__ void wait() const {
    inject(Fault::kTurn, before);
    while (kGuardedRing && ptx::load_acquire(turn) < before) __nanosleep(20);
  }
};

// Adds a step's dQ / scale to the workspace: dS K.
template <class Config>
__device__ __forceinline__ void add_dq(const BackwardParams& p, const BackwardCall& call,
                                       const KeyBlock<Config>& at, const Step<Config>& step,
                                       uint32_t shared_ds, uint32_t shared_k) {
  constexpr int kBlockN = Config::kBlockN, kColumnTiles = Config::kHeadDim / 8;
  const int thread = ptx::thread(), lane = thread % 32, warp = thread / 32;
  const int row_warp = warp / Config::kRowColumnWarps, column = warp % Config::kRowColumnWarps;
  const FragmentAddress<typename Config::Scores, kBlockN> ds(shared_ds, lane % 8 + lane / 16 * 8,
                                                             row_warp * 4 + lane / 8 % 2);
  FragmentAddress<Config, kBlockN> k(shared_k, lane % 16, column * 2 + lane / 16);
  const int64_t row = step.work_row(at, call.workspace) + row_warp * 32;
  float* out = call.workspace.dq + (row / 16 * kColumnTiles + column * 2) * 128;
  constexpr int kPassTiles = Config::kHeadDim / Config::kPasses / 8;
#pragma unroll 1
  for (int pass = 0; pass < Config::kPasses; ++pass) {
    float dq[2][Config::kPassColumns / 2];
    multiply_keys<Config>(dq, ds, k);
    if (pass == 0 && p.deterministic) {
      if (ptx::thread() == 0) Turn(call, at, step).wait();
      group_barrier<Config, 1>();
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int j = 0; j < Config::kPassColumns / 8; ++j) {
        const int tile = j / 2 * Config::kRowColumnWarps * 2 + j % 2;
        ptx::add_warp_quad(out + (m * kColumnTiles + tile) * 128, lane, &dq[m][4 * j]);
      }
    }
    out += kPassTiles * 128;
    k.base += kPassTiles * 8 / Config::kBlockCols * kBlockN * Config::kRowBytes;
  }
  if (p.deterministic) {
    group_barrier<Config, 1>();
    inject(Fault::kTurn, step.block);
    if (ptx::thread() == 0) ptx::release_add(Turn(call, at, step).turn);
  }
}

template <class Config>
__device__ __forceinline__ void key_group(const BackwardParams& p, const BackwardCall& call,
                                          BackwardShared<Config>& shared) {
  using Scores = typename Config::Scores;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  constexpr int kStages = Config::kStages;
  const uint32_t shared_k = ptx::shared_address(shared.k);
  const uint32_t shared_v = ptx::shared_address(shared.v);
  const uint32_t shared_q = ptx::shared_address(shared.q);
  const uint32_t shared_dout = ptx::shared_address(shared.dout);
  const uint32_t shared_scores = ptx::shared_address(shared.scores);
  const uint32_t shared_delta = ptx::shared_address(shared.delta);
  constexpr uint32_t kTileBytes = sizeof(shared.q[0]), kScoreBytes = sizeof(shared.scores[0]);

  float dk[2][Config::kColumns / 2];
  clear(dk);
  const KeyBlock<Config>& at = shared.at;
  Step<Config> step(at);
  if (!step.done(at)) {
    const TileSource<Config> v(p.forward.v, p.forward.v_stride, at.seg_k, at.head_kv,
                               p.forward.head_dim_v);
    load_seen_keys(v, at, shared_v);
    load_gradients(p, call, at, step, shared_dout, shared_delta);
    ptx::cp_async_wait<0>();
    group_barrier<Config, 1>();
  }
  for (; !step.done(at); step = step.next(at)) {
    const int stage = kStages == 1 ? 0 : step.parity;
    float dp[2][Config::kQueries / 2];
    multiply_rows<Config>(dp, shared_v, shared_dout + stage * kTileBytes);
    // The weights are visible, and the value group has finished with the other stage.
    block_barrier<Config>();
    const auto load_next = [&] {
      const Step<Config> next_step = step.next(at);
      if (next_step.done(at)) return;
      const int next = kStages == 1 ? 0 : next_step.parity;
      load_gradients(p, call, at, next_step, shared_dout + next * kTileBytes,
                     shared_delta + next * static_cast<uint32_t>(sizeof(shared.delta[0])));
    };
    if (kStages == 2) load_next();

    const WarpPlace<Config> place;
    const int lane = place.lane;
    const uint32_t shared_ds = shared_scores + step.parity * kScoreBytes;
    const float* delta = shared.delta[stage] + place.query + lane % 4 * 2;
    const FragmentAddress<Scores, kBlockN> weights(shared_ds, place.key + lane % 16,
                                                   place.query / 8 + lane / 16);
    const FragmentStore<Scores, kBlockN> store(shared_ds, place.key, place.query / 8, lane);
    uint32_t ds[2][Config::kQueries / 16][4];
    if (at.boundary(step.block)) {
      compute_ds<true, Config>(ds, dp, delta, weights, store);
    } else {
      compute_ds<false, Config>(ds, dp, delta, weights, store);
    }

    const FragmentAddress<Config, kBlockM> q(shared_q + stage * kTileBytes, lane % 16,
                                             place.column * 2 + lane / 16);
    if constexpr (Config::kColumnWarps > 1) {
      group_barrier<Config, 1>();
      const FragmentAddress<Scores, kBlockN> ds_rows(shared_ds, place.key + lane % 16, lane / 16);
      multiply_queries<Config>(
          dk,
          [&](uint32_t (&a)[2][4], int n) {
            ptx::ldmatrix_x4(a[0], ds_rows.at(0, n));
            ptx::ldmatrix_x4(a[1], ds_rows.at(1, n));
          },
          q);
    } else {
      multiply_queries<Config>(
          dk,
          [&](uint32_t (&a)[2][4], int n) {
#pragma unroll
            for (int j = 0; j < 8; ++j) a[j / 4][j % 4] = ds[j / 4][n][j % 4];
          },
          q);
    }
    // dS, and with two stages the next dO, are visible to the group.
    ptx::cp_async_wait<0>();
    group_barrier<Config, 1>();
    add_dq<Config>(p, call, at, step, shared_ds, shared_k);
    if (kStages == 1) {
      block_barrier<Config>();  // both groups have finished with the stage
      load_next();
      ptx::cp_async_wait<0>();
      group_barrier<Config, 1>();
    }
  }
  group_barrier<Config, 1>();  // no warp reads K any more
  store_gradient<Config, 1>(dk, static_cast<float>(p.forward.scale), p.dk, p.dk_stride, at,
                            p.forward.head_dim, shared.k);
}

}  // namespace attnscope::sm80
