// The warpgroups of the wide kernel that accumulate dV and dK of a thread block's 64 keys.
#pragma once

#include "kernels/sm90_backward/epilogue.cuh"
#include "kernels/sm90_backward/products.cuh"
#include "kernels/sm90_backward/scores.cuh"
#include "kernels/sm90_backward/wide_shared.cuh"

namespace attnscope::sm90 {

// Both run through the same steps: a block of queries of one head each. A thread of one works on
// the same scores as the thread of that number of the other. Between two turns of their loops no
// product is in flight, see BackwardConsumer::run_steps.
template <class Config>
class WideConsumer : protected WideRole<Config> {
 protected:
  using Base = WideRole<Config>;
  using Base::a, Base::s, Base::rank, Base::block, Base::steps;
  using Base::kBlockM;
  using typename Base::Element;
  using QuerySlot = Slot<Config::kStages>;
  using DoutSlot = Slot<Config::kDoutStages>;

  __device__ __forceinline__ WideConsumer(const BackwardArguments& a, WideShared<Config>& s,
                                          int rank)
      : Base(a, s, rank) {}

  using Gradient = float[Config::kSlices][Config::kSliceColumns / 2];

  __device__ __forceinline__ static void clear(Gradient& d) {
#pragma unroll
    for (auto& slice : d) {
#pragma unroll
      for (float& x : slice) x = 0.0f;
    }
  }

  // d [64 keys, kHeadDim] += P^T or dS^T, from registers, times dO or Q, N-major.
  __device__ __forceinline__ static void issue_gradient(Gradient& d,
                                                        const uint32_t (&scores)[kBlockM / 4],
                                                        ptx::WgmmaDescriptor queries) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockM / 16; ++step) {
#pragma unroll
      for (int i = 0; i < Config::kSlices; ++i) {
        ptx::WgmmaRegister<Element, Config::kSliceColumns>::mma(
            d[i], &scores[4 * step],
            queries.at(step * 16 * Config::kRowBytes +
                       i * Config::kSliceColumns / 64 * Config::kColumnBytes));
      }
    }
    ptx::wgmma_commit();
  }

  // After the last product.
  __device__ __forceinline__ static void await(Gradient& d) {
    ptx::wgmma_wait<0>();
#pragma unroll
    for (auto& slice : d) ptx::pin_registers(slice);
  }

  // Zeroes what a product must not read of the queries in `tile`.
  __device__ __forceinline__ void clear_queries(Element* tile, int barrier) const {
    if (__builtin_expect(Base::is_ragged(), false)) {
      Base::clear_rows(tile, Config::kColumnBlocks, max(s.tile.seqlen_q - block * kBlockM, 0),
                       barrier);
    }
  }

  // Stores the accumulators, by way of 2 KB for each warp at `staging`.
  __device__ __forceinline__ void store(const Gradient& d, float factor, void* data,
                                        const Strides& stride, int dim, uint32_t staging) const {
    const KeyTile& t = s.tile;
    const int warp = threadIdx.x / 32 % 4, first = rank * 64 + warp * 16;
    Element* out = static_cast<Element*>(data) + t.batch * stride.batch +
                   int64_t{t.k_row + first} * stride.row + t.head_kv * stride.head;
#pragma unroll
    for (int column = 0; column < Config::kColumnBlocks; ++column) {
      constexpr int kBlocks = Config::kColumnBlocks / Config::kSlices;
      store_rows<Element>(d[column / kBlocks] + column % kBlocks * 32, factor,
                          staging + warp * 2048, out + column * 64, stride.row, t.rows - first,
                          dim - column * 64);
    }
  }
};

// S^T = K Q^T, P^T, dV += P^T dO.
template <class Config>
class ValueConsumer : WideConsumer<Config> {
  using Base = WideConsumer<Config>;
  using Base::a, Base::s, Base::rank, Base::block, Base::steps;
  using Base::kBlockM;
  using Scores = float[kBlockM / 2];
  using Packed = uint32_t[kBlockM / 4];
  static constexpr int kBarrier = 1;

 public:
  __device__ __forceinline__ ValueConsumer(const BackwardArguments& a, WideShared<Config>& s,
                                           int rank)
      : Base(a, s, rank) {}

  __device__ __forceinline__ void run() {
    typename Base::Gradient dv;
    Base::clear(dv);
    if (steps > 0) {
      Scores p;
      wait(s.k_full, 0);
      issue_scores(p, 0);
      ptx::wgmma_wait<0>();
      ptx::pin_registers(p);
#pragma unroll 1
      for (int i = 0;; ++i) {
        const typename Base::DoutSlot slot(i);
        Packed packed;
        probabilities(p, packed, i);
        wait(s.dout_full[slot.stage], slot.parity);
        Base::clear_queries(s.dout[slot.stage], kBarrier);
        inject(Fault::kRelease, i);
        Base::issue_gradient(dv, packed, Base::descriptor(s.dout[0], slot.stage));
        if (i + 1 == steps) break;
        issue_scores(p, i + 1);
        ptx::wgmma_wait<1>();
        Base::release_ranks(s.dout_empty[slot.stage]);
        Base::advance_block();
        ptx::wgmma_wait<0>();
        ptx::pin_registers(p);
      }
      Base::await(dv);
      wait(s.weights_empty, (steps - 1) & 1);
    }
    Base::store(dv, 1.0f, a.params.dv, a.params.dv_stride, a.params.forward.head_dim_v,
                ptx::shared_address(s.weights));
  }

 private:
  __device__ __forceinline__ void issue_scores(Scores& p, int i) const {
    const typename Base::QuerySlot slot(i);
    wait(s.q_full[slot.stage], slot.parity);
    sm90::issue_scores<Config>(p, Base::descriptor(s.k), Base::descriptor(s.q[0], slot.stage));
  }

  __device__ __forceinline__ void probabilities(Scores& p, Packed& packed, int i) const {
    const bool cap = a.scores.transform == kCap;
    if (__builtin_expect(a.scores.transform, false)) transform_scores<false>(p, a.scores);
    if (__builtin_expect(Base::is_boundary(), false)) {
      const KeyTile& t = s.tile;
      const ForwardParams& f = a.params.forward;
      const int key = t.first_key + rank * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
      mask_keys<Config>(p, {t.seqlen_q - t.seqlen_k, f.window_right, f.window_left}, key,
                        block * kBlockM, t.seqlen_q, t.seqlen_k);
    }
    ColumnPairs<kBlockM / 8> lse(s.statistics[typename Base::QuerySlot(i).stage][0]);
    make_probabilities<WideWeights<Config>>(a, p, packed, lse);
    wait(s.weights_empty, (i & 1) ^ 1);
    uint4* weights = &s.weights[0][threadIdx.x % 128];
    if (__builtin_expect(cap, false)) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t w[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          w[k] = ptx::pack<typename Config::Element>(p[8 * j + 2 * k], p[8 * j + 2 * k + 1]);
        }
        weights[j * 128] = {w[0], w[1], w[2], w[3]};
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        weights[j * 128] = {packed[4 * j], packed[4 * j + 1], packed[4 * j + 2], packed[4 * j + 3]};
      }
    }
    inject(Fault::kScores, i);
    release(s.weights_full);
  }
};

// dP^T = V dO^T, dS^T, dK += dS^T Q.
template <class Config>
class KeyConsumer : WideConsumer<Config> {
  using Base = WideConsumer<Config>;
  using Base::a, Base::s, Base::rank, Base::block, Base::steps;
  using Base::kBlockM;
  using Scores = float[kBlockM / 2];
  using Packed = uint32_t[kBlockM / 4];
  static constexpr int kBarrier = 2;

 public:
  __device__ __forceinline__ KeyConsumer(const BackwardArguments& a, WideShared<Config>& s,
                                         int rank)
      : Base(a, s, rank) {}

  __device__ __forceinline__ void run() {
    typename Base::Gradient dk;
    Base::clear(dk);
    if (steps > 0) {
      Scores dp;
      wait(s.v_full, 0);
      issue_gradients(dp, 0);
      ptx::wgmma_wait<0>();
      ptx::pin_registers(dp);
#pragma unroll 1
      for (int i = 0;; ++i) {
        const typename Base::QuerySlot slot(i);
        Packed ds;
        Base::release_ranks(s.dout_empty[typename Base::DoutSlot(i).stage]);
        wait(s.q_full[slot.stage], slot.parity);
        score_gradients(dp, ds, i);
        Base::clear_queries(s.q[slot.stage], kBarrier);
        inject(Fault::kRelease, 2 * i);
        Base::issue_gradient(dk, ds, Base::descriptor(s.q[0], slot.stage));
        if (i + 1 == steps) break;
        issue_gradients(dp, i + 1);
        ptx::wgmma_wait<1>();
        // The other consumer has done with Q and its statistics: it has passed on P.
        Base::release_ranks(s.q_empty[slot.stage]);
        Base::advance_block();
        ptx::wgmma_wait<0>();
        ptx::pin_registers(dp);
      }
      Base::await(dk);
    }
    ptx::named_barrier(kBarrier, 128);  // after the last product of each warp
    Base::store(dk, a.scale, a.params.dk, a.params.dk_stride, a.params.forward.head_dim,
                ptx::shared_address(s.v));
  }

 private:
  // dP^T.
  __device__ __forceinline__ void issue_gradients(Scores& dp, int i) const {
    const typename Base::DoutSlot slot(i);
    wait(s.dout_full[slot.stage], slot.parity);
    issue_scores<Config>(dp, Base::descriptor(s.v), Base::descriptor(s.dout[0], slot.stage));
  }

  __device__ __forceinline__ void score_gradients(const Scores& dp, Packed& ds, int i) const {
    wait(s.weights_full, i & 1);
    const float* delta = s.statistics[typename Base::QuerySlot(i).stage][1];
    if (__builtin_expect(Base::is_boundary(), false)) {
      score_gradients<true>(dp, ds, delta);
    } else {
      score_gradients<false>(dp, ds, delta);
    }
    inject(Fault::kRelease, 2 * i + 1);
    release(s.weights_empty);
    pass_on(ds, i);
  }

  // 16 queries at a time: there is no room for P of all.
  template <bool kHidden>
  __device__ __forceinline__ void score_gradients(const Scores& dp, Packed& ds,
                                                  const float* delta) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint4 w = s.weights[j][threadIdx.x % 128];
      const uint32_t weights[4] = {w.x, w.y, w.z, w.w};
      float part[8];
      uint32_t packed[4];
#pragma unroll
      for (int k = 0; k < 8; ++k) part[k] = dp[8 * j + k];
      ColumnPairs<2> columns(delta + 16 * j);
      make_score_gradients<WideQuarter<Config>, kHidden>(part, weights, part, packed, columns);
#pragma unroll
      for (int k = 0; k < 4; ++k) ds[4 * j + k] = packed[k];
    }
  }

  // dS to this rank's and the peer's QueryConsumer.
  __device__ __forceinline__ void pass_on(const Packed& ds, int i) const {
    const Slot<Config::kScoreStages> slot(i);
    wait(s.ds_empty[slot.stage], slot.parity ^ 1);
    const uint32_t shared =
        ptx::shared_address(s.ds) + (slot.stage * Config::kRanks + rank) * Config::kScoreBytes;
    store_scores<Config>(shared, ds);
    ptx::fence_proxy_async();
    inject(Fault::kScores, i);
    ptx::named_barrier(kBarrier, 128);
    if (threadIdx.x % 128 == 0) {
      const uint32_t full = ptx::shared_address(&s.ds_full[slot.stage]);
      ptx::mbarrier_arrive_expect_tx(full, Config::kScoreBytes);
      ptx::cluster_copy(ptx::cluster_address(shared, 1 - rank), shared, Config::kScoreBytes,
                        ptx::cluster_address(full, 1 - rank));
    }
    __syncwarp();
  }
};

}  // namespace attnscope::sm90
