// The warpgroups of the wide kernel that accumulate dV and dK of a thread block's 64 keys.
#pragma once

#include "attn/nonfinite.cuh"
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
  using Base::a, Base::s, Base::rank, Base::order, Base::steps, Base::first, Base::tiles;
  using Base::kBlockM;
  using typename Base::Element;
  using QuerySlot = Slot<Config::kStages>;

  __device__ __forceinline__ WideConsumer(const BackwardArguments& a, WideShared<Config>& s,
                                          int rank)
      : Base(a, s, rank) {}

  using Gradient = float[Config::kSlices][Config::kSliceColumns / 2];

  // The next part of dO, which this warp has read.
  __device__ __forceinline__ void release_dout() {
    Base::release_ranks(s.dout_empty[ring.stage]);
    ring.advance(1);
  }

  __device__ __forceinline__ static void clear(Gradient& d) {
#pragma unroll
    for (auto& slice : d) {
#pragma unroll
      for (float& x : slice) x = 0.0f;
    }
  }

  // A slice of d [64 keys, kHeadDim] += P^T or dS^T, from registers, times columns of dO or Q,
  // N-major.
  __device__ __forceinline__ static void issue_slice(float (&d)[Config::kSliceColumns / 2],
                                                     const uint32_t (&scores)[kBlockM / 4],
                                                     ptx::WgmmaDescriptor queries, int first) {
#pragma unroll
    for (int step = 0; step < kBlockM / 16; ++step) {
      ptx::WgmmaRegister<Element, Config::kSliceColumns>::mma(
          d, &scores[4 * step], queries.at(first + step * 16 * Config::kRowBytes));
    }
  }

  // After the last product.
  __device__ __forceinline__ static void await(Gradient& d) {
    ptx::wgmma_wait<0>();
#pragma unroll
    for (auto& slice : d) ptx::pin_registers(slice);
  }

  // Zeroes what a product must not read of the queries in `tile`.
  __device__ __forceinline__ void clear_queries(Element* tile, int blocks, int barrier) const {
    if (__builtin_expect(Base::is_ragged(), false)) {
      Base::clear_rows(tile, blocks, max(Base::tile().seqlen_q - order.block * kBlockM, 0),
                       barrier);
    }
  }

  DoutRing<Config> ring;  // the first part that was not released

  // Stores the accumulators, by way of 2 KB for each warp at `staging`.
  __device__ __forceinline__ void store(const Gradient& d, const KeyGradient& gradient,
                                        uint32_t staging) const {
    constexpr int kBlocks = Config::kColumnBlocks / Config::kSlices;
    const KeyTile& t = Base::tile();
    const int warp = threadIdx.x / 32 % 4, first = rank * 64 + warp * 16;
    if (Config::kParts && t.split >= 0) {
      float4* const piece = first_piece<Config>(a, t.split, t.part, gradient.number, first);
#pragma unroll
      for (int column = 0; column < Config::kColumnBlocks; ++column) {
        store_piece(piece + column * 256, d[column / kBlocks] + column % kBlocks * 32);
      }
      return;
    }
    Element* out = row_of<Element>(gradient, t, first);
#pragma unroll
    for (int column = 0; column < Config::kColumnBlocks; ++column) {
      store_rows<Element>(d[column / kBlocks] + column % kBlocks * 32, gradient.factor,
                          staging + warp * 2048, out + column * 64, gradient.stride.row,
                          t.rows - first, gradient.columns - column * 64);
    }
  }
};

// S^T = K Q^T, P^T, dV += P^T dO.
template <class Config>
class ValueConsumer : WideConsumer<Config> {
  using Base = WideConsumer<Config>;
  using Base::a, Base::s, Base::rank, Base::order, Base::steps, Base::first, Base::tiles;
  using Base::kBlockM;
  using Scores = float[kBlockM / 2];
  using Columns = ColumnPairs<kBlockM / 8>;
  using Packed = uint32_t[kBlockM / 4];
  static constexpr int kBarrier = 1;

 public:
  __device__ __forceinline__ ValueConsumer(const BackwardArguments& a, WideShared<Config>& s,
                                           int rank)
      : Base(a, s, rank) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    while (Base::take_tile()) run_tile();
  }

 private:
  // In flight at once: the slices of dV(i); then the last one and S(i + 1). Each part of dO is
  // released when its slice is complete, the first one before the wait for Q: its buffer is then
  // loaded for the next step while this one goes on. The KeyConsumer waits for P: so lse is loaded,
  // and barriers are read, beside S.
  __device__ __forceinline__ void run_tile() {
    typename Base::Gradient dv;
    Base::clear(dv);
    Scores p;
    wait(s.k_full, tiles & 1);
    const int last = first + steps - 1;
    Columns lse = issue_scores(p, first);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(p);
#pragma unroll 1
    for (int i = first;; ++i) {
      Packed packed;
      probabilities(p, packed, lse, i);
      inject(Fault::kRelease, i);
      issue_gradient(dv, packed);
      if constexpr (Config::kDoutParts > 1) {
        ptx::wgmma_wait<1>();
        Base::release_dout();
      }
      if (i == last) break;
      lse = issue_scores(p, i + 1);
      ptx::wgmma_wait<1>();
      Base::release_dout();
      order.advance();
      look_ahead(i + 1);
      ptx::wgmma_wait<0>();
      ptx::pin_registers(p);
    }
    ready = false;
    Base::await(dv);
    Base::release_dout();
    wait(s.weights_empty, last & 1);
    Base::store(dv, value_gradient(a), ptx::shared_address(s.weights));
    // Other warps write P where this one staged.
    ptx::named_barrier(kBarrier, 128);
    Base::release_tile();
  }

  // Whether the buffer of P and dO of a step are there: then its waits are left out.
  __device__ __forceinline__ void look_ahead(int i) {
    ready = has_completed(s.weights_empty, (i & 1) ^ 1);
#pragma unroll
    for (int part = 0; part < Config::kDoutParts; ++part) {
      const auto slot = Base::ring.after(part);
      ready &= has_completed(s.dout_full[slot.stage], slot.parity);
    }
  }

  // dV += P^T dO, a slice of columns for each part of dO.
  __device__ __forceinline__ void issue_gradient(typename Base::Gradient& dv,
                                                 const Packed& packed) const {
#pragma unroll
    for (int part = 0; part < Config::kDoutParts; ++part) {
      const auto slot = Base::ring.after(part);
      if (__builtin_expect(!ready, false)) wait(s.dout_full[slot.stage], slot.parity);
      Base::clear_queries(s.dout[slot.stage], Config::kDoutBlocks, kBarrier);
      ptx::wgmma_fence();
      Base::issue_slice(dv[part], packed, Base::dout(slot.stage), 0);
      ptx::wgmma_commit();
    }
  }

  // Returns the step's lse.
  __device__ __forceinline__ Columns issue_scores(Scores& p, int i) const {
    const typename Base::QuerySlot slot(i);
    wait(s.q_full[slot.stage], slot.parity);
    const Columns lse(s.statistics[slot.stage][0]);
    sm90::issue_scores<Config>(p, Base::descriptor(Base::keys()),
                               Base::descriptor(s.q[0], slot.stage));
    return lse;
  }

  __device__ __forceinline__ void probabilities(Scores& p, Packed& packed, Columns& lse,
                                                int i) const {
    const bool cap = a.scores.transform == kCap;
    if (__builtin_expect(a.scores.transform, false)) transform_scores<false>(p, a.scores);
    if (__builtin_expect(Base::is_boundary(), false)) {
      const KeyTile& t = Base::tile();
      const ForwardParams& f = a.params.forward;
      const int key = t.first_key + rank * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
      mask_keys<Config>(p, {t.seqlen_q - t.seqlen_k, f.window_right, f.window_left}, key,
                        order.block * kBlockM, t.seqlen_q, t.seqlen_k);
    }
    make_probabilities<WideWeights<Config>>(a, p, packed, lse);
    if (__builtin_expect(!ready, false)) wait(s.weights_empty, (i & 1) ^ 1);
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

  bool ready = false;
};

// dP^T = V dO^T, dS^T, dK += dS^T Q.
template <class Config>
class KeyConsumer : WideConsumer<Config> {
  using Base = WideConsumer<Config>;
  using Base::a, Base::s, Base::rank, Base::order, Base::steps, Base::first, Base::tiles;
  using Base::kBlockM;
  using Scores = float[kBlockM / 2];
  using Packed = uint32_t[kBlockM / 4];
  static constexpr int kBarrier = 2;

 public:
  __device__ __forceinline__ KeyConsumer(const BackwardArguments& a, WideShared<Config>& s,
                                         int rank)
      : Base(a, s, rank) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    while (Base::take_tile()) run_tile();
  }

 private:
  // In flight at once: dK(i) and the first part of dP(i + 1). Q(i) is released before the wait for
  // the second part: S(i + 2) needs its buffer.
  __device__ __forceinline__ void run_tile() {
    typename Base::Gradient dk;
    Base::clear(dk);
    Scores dp;
    wait(s.v_full, tiles & 1);
    const int last = first + steps - 1;
    issue_gradients<0>(dp);
    issue_rest(dp);
    ptx::pin_registers(dp);
#pragma unroll 1
    for (int i = first;; ++i) {
      const typename Base::QuerySlot slot(i);
      Packed ds;
      Base::release_dout();
      wait(s.q_full[slot.stage], slot.parity);
      score_gradients(dp, ds, i);
      Base::clear_queries(s.q[slot.stage], Config::kColumnBlocks, kBarrier);
      inject(Fault::kRelease, 2 * i);
      ptx::wgmma_fence();
      const ptx::WgmmaDescriptor queries = Base::descriptor(s.q[0], slot.stage);
#pragma unroll
      for (int j = 0; j < Config::kSlices; ++j) {
        Base::issue_slice(dk[j], ds, queries,
                          j * Config::kSliceColumns / 64 * Config::kColumnBytes);
      }
      ptx::wgmma_commit();
      if (i == last) break;
      issue_gradients<0>(dp);
      ptx::wgmma_wait<1>();
      // The other consumer has done with Q and its statistics: it has passed on P.
      Base::release_ranks(s.q_empty[slot.stage]);
      order.advance();
      issue_rest(dp);
      ptx::pin_registers(dp);
    }
    release(s.v_empty);  // the last dP is complete
    Base::await(dk);
    Base::release_ranks(s.q_empty[typename Base::QuerySlot(last).stage]);
    Base::store(dk, key_gradient(a), ptx::shared_address(s.dk));
    Base::release_tile();
  }

  // dP^T, of part `kPart` of dO.
  template <int kPart>
  __device__ __forceinline__ void issue_gradients(Scores& dp) const {
    const auto slot = Base::ring.after(kPart);
    wait(s.dout_full[slot.stage], slot.parity);
    issue_scores<Config, kPart * Config::kDoutBlocks, Config::kDoutBlocks>(
        dp, Base::descriptor(Base::values()), Base::dout(slot.stage));
  }

  // The other parts, until dP^T is complete.
  __device__ __forceinline__ void issue_rest(Scores& dp) {
    if constexpr (Config::kDoutParts > 1) {
      issue_gradients<1>(dp);
      ptx::wgmma_wait<1>();
      Base::release_dout();
    }
    ptx::wgmma_wait<0>();
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
      const uint32_t words[4] = {w.x, w.y, w.z, w.w};
      const auto weights = [&](int k) { return unpack<typename Config::Element>(words[k]); };
      float part[8];
      uint32_t packed[4];
#pragma unroll
      for (int k = 0; k < 8; ++k) part[k] = dp[8 * j + k];
      ColumnPairs<2> columns(delta + 16 * j);
      make_score_gradients<WideQuarter<Config>, kHidden>(weights, part, packed, columns);
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
