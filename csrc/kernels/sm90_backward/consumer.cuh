// A consumer: 64 keys of a tile. It accumulates their dK and dV, and adds its part of dQ.
#pragma once

#include "kernels/sm90_backward/epilogue.cuh"
#include "kernels/sm90_backward/products.cuh"
#include "kernels/sm90_backward/scores.cuh"
#include "kernels/sm90_backward/shared.cuh"
#include "ptx/tma.cuh"

namespace attnscope::sm90 {

// One warpgroup. Step number i works on one block of queries of one head; it uses buffer i of the
// ring, and buffer i modulo 2 for dS.
//
// dS needs no `empty` barrier: who writes dS(i + 2) has waited for dS(i + 1) of both consumers, and
// each consumer completes its dQ(i), which reads dS(i), before it arrives with dS(i + 1).
template <class Config>
class BackwardConsumer {
 public:
  __device__ __forceinline__ BackwardConsumer(const BackwardArguments& a, BackwardShared<Config>& s)
      : a(a), s(s), consumer(ptx::uniform(threadIdx.x / 128 - 1)) {}

  __device__ __forceinline__ void run() {
    const KeyTile& t = s.tile;
    begin = ptx::uniform(t.begin);
    end = ptx::uniform(t.end);
    full_begin = ptx::uniform(t.consumer[consumer].full_begin);
    full_end = ptx::uniform(t.consumer[consumer].full_end);
    block = begin;
    const int seqlen_q = ptx::uniform(t.seqlen_q);
    ragged_block = a.packed && seqlen_q % kBlockM != 0 ? seqlen_q / kBlockM : -1;
    const int steps = max(end - begin, 0) * a.group;
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 2; ++i) dk[i] = dv[i] = 0.0f;
    if (steps > 0) {
      prepare_keys();
      run_steps(steps);
      ptx::wgmma_wait<0>();
      ptx::pin_registers(dk);
      ptx::pin_registers(dv);
    }
    store_key_gradients<Config>(a, s, consumer, dk, dv);
  }

 private:
  using Ring = Slot<Config::kStages>;
  static constexpr int kBlockM = Config::kBlockM;
  using Scores = float[kBlockM / 2];
  using Packed = uint32_t[kBlockM / 4];

  // dQ(i) runs beside the exponentials of step i + 1, dV(i) beside dS(i). In flight, in the order
  // of issue: dP(i), dV(i), dK(i), S(i + 1), dQ(i). Each turn of the loop begins with only dQ in
  // flight: the compiler serialises products whose A operand in registers lives across turns.
  __device__ __forceinline__ void run_steps(int steps) {
    Scores p;
    float dq[32];
    await_queries(Ring(0));
    issue_scores<Config>(p, keys(s.k), queries(s.q, Ring(0)));
    ptx::wgmma_wait<0>();
    ptx::pin_registers(p);
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      const Ring slot(i), next(i + 1);
      Scores dp;
      Packed packed_p, packed_ds;
      probabilities(slot, p, packed_p);
      await_dout(slot, i == 0);
      ptx::wgmma_wait<0>();
      ptx::pin_registers(dq);
      if (i > 0) stage_query_gradient(dq, i - 1);
      issue_scores<Config>(dp, keys(s.v), queries(s.dout, slot));
      issue_key_gradient<Config>(dv, packed_p, queries(s.dout, slot));
      ptx::wgmma_wait<1>();
      ptx::pin_registers(dp);
      score_gradients(slot, i, p, packed_p, dp, packed_ds);
      inject(Fault::kRelease, 2 * i);
      issue_key_gradient<Config>(dk, packed_ds, queries(s.q, slot));
      advance_block();
      ptx::wgmma_wait<1>();  // for dV: frees the registers of P
      // After the last step there is no S: the product then reads whatever is in the buffer, and
      // its result is not used. A branch around the product would serialise the others.
      if (i + 1 < steps) await_queries(next);
      issue_scores<Config>(p, keys(s.k), queries(s.q, next));
      ptx::wgmma_wait<1>();  // for dK: frees the registers of dS
      release(s.empty[slot.stage]);
      await_scores(i);
      inject(Fault::kRelease, 2 * i + 1);
      issue_query_gradient<Config>(dq, scores(i), key_columns());
      ptx::wgmma_wait<1>();
      ptx::pin_registers(p);
    }
    ptx::wgmma_wait<0>();
    ptx::pin_registers(dq);
    stage_query_gradient(dq, steps - 1);
    ptx::fence_proxy_async();
    pass_query_gradient(steps - 1);
  }

  // K, and V before its first use. Rows past the end of a packed sequence are the next one's: they
  // meet a dS of 0, but may hold NaN. TMA fills rows past the end of a tensor with zeros.
  __device__ __forceinline__ void prepare_keys() {
    wait(s.k_full, 0);
    if (a.packed && s.tile.rows < Config::kBlockN) {
      wait(s.v_full, 0);
      clear_rows<Config::kBlockN>(s.k, s.tile.rows);
      clear_rows<Config::kBlockN>(s.v, s.tile.rows);
    }
  }

  __device__ __forceinline__ void await_queries(const Ring& slot) {
    wait(s.q_full[slot.stage], slot.parity);
    if (block == ragged_block) clear_rows<kBlockM>(s.q[slot.stage], ragged_rows());
  }

  __device__ __forceinline__ void await_dout(const Ring& slot, bool first) {
    if (first) wait(s.v_full, 0);
    wait(s.dout_full[slot.stage], slot.parity);
    if (block == ragged_block) clear_rows<kBlockM>(s.dout[slot.stage], ragged_rows());
  }

  // Zeroes the rows of a tile from `first` on, before this consumer's products read them. Both
  // consumers do so: neither has to wait for the other.
  template <int kRows>
  __device__ __forceinline__ void clear_rows(typename Config::Element* tile, int first) const {
    constexpr int kChunks = Config::kRowBytes / 16;
#pragma unroll 1
    for (int i = first * kChunks + threadIdx.x % 128; i < kRows * kChunks; i += 128) {
#pragma unroll
      for (int columns = 0; columns < Config::kHeadDim / 64; ++columns) {
        reinterpret_cast<uint4*>(tile)[columns * kRows * kChunks + i] = uint4{};
      }
    }
    ptx::fence_proxy_async();
    ptx::barrier_sync(1 + consumer, 128);
  }

  __device__ __forceinline__ void probabilities(const Ring& slot, Scores& p, Packed& packed) {
    if (__builtin_expect(a.scores.transform, false)) transform_scores<false>(p, a.scores);
    if (__builtin_expect(is_boundary(), false)) {
      const KeyTile& t = s.tile;
      const ForwardParams& f = a.params.forward;
      const int key =
          t.first_key + threadIdx.x / 32 % 4 * 16 + consumer * 64 + threadIdx.x % 32 / 4;
      mask_keys<Config>(p, {t.seqlen_q - t.seqlen_k, f.window_right, f.window_left}, key,
                        block * kBlockM, t.seqlen_q, t.seqlen_k);
    }
    make_probabilities<Config>(a, p, packed, s.lse_log2[slot.stage]);
  }

  // dS in registers for dK, in shared memory for dQ.
  __device__ __forceinline__ void score_gradients(const Ring& slot, int i, const Scores& p,
                                                  const Packed& packed_p, const Scores& dp,
                                                  Packed& packed) {
    if (__builtin_expect(is_boundary(), false)) {
      make_score_gradients<Config, true>(p, packed_p, dp, packed, s.delta[slot.stage]);
    } else {
      make_score_gradients<Config, false>(p, packed_p, dp, packed, s.delta[slot.stage]);
    }
    store_scores<Config>(ptx::shared_address(s.ds[buffer(i)][consumer]), packed);
    ptx::fence_proxy_async();
    inject(Fault::kScores, i);
    release(s.ds_full[i & 1]);
    pass_query_gradient(i - 1);
  }

  __device__ __forceinline__ void await_scores(int i) const { wait(s.ds_full[i & 1], i >> 1 & 1); }

  // Puts this consumer's part of dQ(i) into shared memory: 4 KB a warp, see kernel.cuh.
  __device__ __forceinline__ void stage_query_gradient(const float (&dq)[32], int i) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    wait(s.dq_empty[consumer], i & 1 ^ 1);
    const uint32_t address = ptx::shared_address(s.dq[consumer]) + warp * 4096 + lane * 16;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      ptx::store_shared_v4(address + j * 512, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2],
                           dq[4 * j + 3]);
    }
  }

  // Passes dQ(i), if there is one, to the writer. After a proxy fence.
  __device__ __forceinline__ void pass_query_gradient(int i) {
    __syncwarp();
    ptx::mbarrier_arrive_if(ptx::shared_address(&s.dq_full[consumer]),
                            threadIdx.x % 32 == 0 && i >= 0);
  }

  __device__ __forceinline__ bool is_boundary() const {
    return block < full_begin || block >= full_end;
  }
  __device__ __forceinline__ void advance_block() {
    ++block;
    if (block == end) block = begin;
  }
  __device__ __forceinline__ int ragged_rows() const { return s.tile.seqlen_q % kBlockM; }

  __device__ __forceinline__ static void wait(uint64_t& barrier, int parity) {
    ptx::mbarrier_wait(ptx::shared_address(&barrier), parity);
  }

  // One arrival a warp, after all of its lanes have read or written. Predicated, as in the forward.
  __device__ __forceinline__ static void release(uint64_t& barrier) {
    __syncwarp();
    ptx::mbarrier_arrive_if(ptx::shared_address(&barrier),
                            kEveryLaneArrives || threadIdx.x % 32 == 0);
  }

  // This consumer's 64 rows of K or V.
  __device__ __forceinline__ ptx::WgmmaDescriptor keys(const typename Config::Element* tile) const {
    return {ptx::shared_address(tile) + consumer * 64 * Config::kRowBytes, 16};
  }
  // The columns of K for this consumer's part of dQ.
  __device__ __forceinline__ ptx::WgmmaDescriptor key_columns() const {
    constexpr int kColumns = Config::kBlockN * Config::kRowBytes;
    const int first = Config::kSplitRows ? 0 : consumer * kColumns;
    return {ptx::shared_address(s.k) + first, kColumns};
  }
  template <class Buffers>
  __device__ __forceinline__ ptx::WgmmaDescriptor queries(const Buffers& ring,
                                                          const Ring& slot) const {
    return {ptx::shared_address(ring) + slot.stage * Config::kQueryBytes,
            kBlockM * Config::kRowBytes};
  }
  // The buffer of dS of a step.
  __device__ __forceinline__ static int buffer(int i) { return kGuardedRing ? i & 1 : 0; }
  // The rows of dS for this consumer's part of dQ.
  __device__ __forceinline__ ptx::WgmmaDescriptor scores(int i) const {
    const int first = Config::kSplitRows ? consumer * 64 * Config::kRowBytes : 0;
    return {
        ptx::shared_address(s.ds) + buffer(i) * Config::kConsumers * Config::kScoreBytes + first,
        16};
  }

  const BackwardArguments& a;
  BackwardShared<Config>& s;
  const int consumer;  // of the thread block
  float dk[Config::kHeadDim / 2], dv[Config::kHeadDim / 2];
  int begin, end, full_begin, full_end;  // blocks of queries, see KeyTile
  int block;                             // of the step
  int ragged_block;  // packed: the block with rows past the end of the sequence; -1: none
};

}  // namespace attnscope::sm90
