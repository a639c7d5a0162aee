// A consumer: 64 keys of a tile. It accumulates their dK and dV, and computes dQ when it is its
// turn.
#pragma once

#include "kernels/sm90_backward/barriers.cuh"
#include "kernels/sm90_backward/epilogue.cuh"
#include "kernels/sm90_backward/marks.cuh"
#include "kernels/sm90_backward/products.cuh"
#include "kernels/sm90_backward/scores.cuh"
#include "kernels/sm90_backward/shared.cuh"
#include "ptx/tma.cuh"

namespace attnscope::sm90 {

// One warpgroup. Step number i works on one block of queries of one head; it uses buffer i of the
// ring, and buffer i modulo 2 for dS.
//
// The consumers take turns at dQ: one computes it from dS of all. Only this one waits for the
// others, so they drift apart: one uses the tensor cores while another computes exponentials.
template <class Config>
class BackwardConsumer {
 public:
  __device__ __forceinline__ BackwardConsumer(const BackwardArguments& a, BackwardShared<Config>& s)
      : a(a),
        s(s),
        consumer(ptx::uniform(threadIdx.x / 128 - 1)),
        timeline(BackwardLane::kConsumer + consumer, threadIdx.x % 128 == 0),
        turn(consumer) {}

  __device__ __forceinline__ void run() {
    for (; take_tile(); ++tiles) {
      prepare_keys();
      clear_gradients();
      run_steps();
      finish_tile();
    }
    await_stores();
    timeline.finish(tiles, step);
  }

 private:
  using AtTile = BackwardConsumerTile;
  using AtStep = BackwardConsumerStep;
  using Ring = Slot<Config::kStages>;
  using KeyRing = Slot<Config::kKeyStages>;
  using ValueRing = Slot<Config::kValueStages>;
  using GradientRing = Slot<Config::kGradientStages>;
  static constexpr int kBlockM = Config::kBlockM;
  using Scores = float[kBlockM / 2];
  using Packed = uint32_t[kBlockM / 4];

  __device__ __forceinline__ void clear_gradients() {
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 2; ++i) dk[i] = dv[i] = 0.0f;
  }

  __device__ __forceinline__ void run_steps() {
#pragma unroll 1
    while (step < last) {
      // In a loop of their own the blocks of one direction need not look for its end.
      const int end = min(step + order.left(), last);
#pragma unroll 1
      for (; step < end; ++step) {
        if (order.block >= first_seen && order.block < end_seen) {
          accumulate();
        } else {
          pass_over();
        }
        if (turn == 0) add_query_gradient();
        turn = turn == 0 ? Config::kConsumers - 1 : turn - 1;
        order.block += order.direction;
      }
      order.turn_around();
    }
    ptx::pin_registers(dk);
    ptx::pin_registers(dv);
    release(s.k_empty[KeyRing(tiles).stage]);
  }

  // A step in which some query sees a key of this consumer. In flight at once: S(i), dP(i); then
  // dV(i), dK(i). P(i) is computed beside dP(i), and with early values dS(i) beside dV(i).
  //
  // Products keep shared memory busy, and what comes after them waits: so lse is loaded before S. A
  // fence waits for this thread's writes to shared memory, so it comes after products that do not
  // need it. Reading a barrier takes as long as two products of 64 x 64 x 16: what the next step
  // needs is read beside dK, and the barrier of dS' buffer beside dP.
  __device__ __forceinline__ void accumulate() {
    const Ring slot(step);
    Scores p, dp;
    Packed packed_p, packed_ds;
    mark(AtStep::kAwaitOperands);
    await_operands(slot);
    mark(AtStep::kIssueScores);
    ColumnPairs<kBlockM / 8> lse(s.lse_log2[slot.stage]);
    issue_scores<Config>(p, key_rows(), queries(s.q, slot));
    issue_scores<Config>(dp, value_rows(), queries(s.dout, slot));
    pass_on_query_gradient(step - 1);
    mark(AtStep::kAwaitScores);
    ptx::wgmma_wait<1>();
    ptx::pin_registers(p);
    mark(AtStep::kProbabilities);
    probabilities(p, packed_p, lse);
    ColumnPairs<kBlockM / 8> delta(s.delta[slot.stage]);
    const bool is_free = has_completed(s.ds_empty[step & 1], step >> 1 & 1 ^ 1);
    if constexpr (Config::kEarlyValues) {
      mark(AtStep::kIssueValues);
      issue_key_gradient<Config>(dv, packed_p, queries(s.dout, slot));
    }
    mark(AtStep::kAwaitDp);
    ptx::wgmma_wait<Config::kEarlyValues ? 1 : 0>();
    ptx::pin_registers(dp);
    mark(AtStep::kScoreGradients);
    if constexpr (!Config::kStoresByTma) {
      release_if(s.v_empty[ValueRing(tiles).stage], step + 1 == last);
    }
    score_gradients(p, dp, packed_ds, delta);
    if (__builtin_expect(!is_free, false)) await_score_buffer();
    store_scores<Config>(ptx::shared_address(s.ds[buffer()][consumer]), packed_ds);
    mark(AtStep::kIssueKeys);
    if constexpr (!Config::kEarlyValues) {
      pack_probabilities<Config>(p, packed_p);
      issue_key_gradient<Config>(dv, packed_p, queries(s.dout, slot));
    }
    issue_key_gradient<Config>(dk, packed_ds, queries(s.q, slot));
    ptx::fence_proxy_async();
    inject(Fault::kScores, 2 * step);
    release(s.ds_full[step & 1]);
    const Ring next(step + 1);
    loaded = has_completed(s.q_full[next.stage], next.parity) &
             has_completed(s.dout_full[next.stage], next.parity);
    mark(AtStep::kAwaitProducts);
    ptx::wgmma_wait<0>();
    inject(Fault::kRelease, step);
    release(s.empty[slot.stage]);
  }

  // A step in which no query sees a key of this consumer: its dS is 0.
  __device__ __forceinline__ void pass_over() {
    const Ring slot(step);
    const ValueRing v_slot(tiles);
    mark(AtStep::kPassOver);
    pass_on_query_gradient(step - 1);
    await_score_buffer();
    store_scores<Config>(ptx::shared_address(s.ds[buffer()][consumer]), Packed{});
    ptx::fence_proxy_async();
    inject(Fault::kScores, 2 * step);
    release(s.ds_full[step & 1]);
    wait(s.v_full[v_slot.stage], v_slot.parity);
    if constexpr (!Config::kStoresByTma) release_if(s.v_empty[v_slot.stage], step + 1 == last);
    wait(s.q_full[slot.stage], slot.parity);
    wait(s.dout_full[slot.stage], slot.parity);
    loaded = false;
    inject(Fault::kRelease, step);
    release(s.empty[slot.stage]);
  }

  // dQ of the step's block, from dS of all consumers, into shared memory. It is passed on beside
  // the products of the next step, since the fence waits for the stores: but at once where other
  // thread blocks wait for a turn.
  __device__ __forceinline__ void add_query_gradient() {
    const GradientRing out(step);
    mark(AtStep::kAwaitOthers);
    wait(s.ds_full[step & 1], step >> 1 & 1);
    mark(AtStep::kIssueGradient);
    if constexpr (Config::kTransposes) {
      // The first column block is staged beside the product of the second.
      Scores left, right;
      issue_transposed_query_gradient<Config>(left, keys(), 0, scores());
      issue_transposed_query_gradient<Config>(right, keys(), 1, scores());
      await_gradient_slot(out);
      ptx::wgmma_wait<1>();
      ptx::pin_registers(left);
      mark(AtStep::kStageGradient);
      stage_query_part<Config>(ptx::shared_address(s.dq[out.stage]), 0, left);
      ptx::wgmma_wait<0>();
      ptx::pin_registers(right);
      release(s.ds_empty[step & 1]);
      stage_query_part<Config>(ptx::shared_address(s.dq[out.stage]), 1, right);
    } else {
      constexpr int kUnits = Config::kUnits, kColumnBlocks = Config::kColumnBlocks;
      float dq[kUnits][Config::kHeadDim / 2];
#pragma unroll
      for (int i = 0; i < kUnits; ++i) issue_query_gradient<Config>(dq[i], scores(64 * i), keys());
      await_gradient_slot(out);
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        i + 1 < kUnits ? ptx::wgmma_wait<1>() : ptx::wgmma_wait<0>();
        ptx::pin_registers(dq[i]);
        if (i == 0) mark(AtStep::kStageGradient);
        if (i + 1 == kUnits) release(s.ds_empty[step & 1]);
#pragma unroll
        for (int column = 0; column < kColumnBlocks; ++column) {
          stage_query_part<Config>(ptx::shared_address(s.dq[out.stage]), i * kColumnBlocks + column,
                                   dq[i] + 32 * column);
        }
      }
    }
    staged = true;
  }

  // dQ of a step, to the writer, unless that was done.
  __device__ __forceinline__ void pass_on_query_gradient(int of_step) {
    if (!staged) return;
    staged = false;
    ptx::fence_proxy_async();
    inject(Fault::kScores, 2 * of_step + 1);
    release(s.dq_full[GradientRing(of_step).stage]);
  }

  // Until the writer's buffer of dQ is free.
  __device__ __forceinline__ void await_gradient_slot(const GradientRing& out) const {
    mark(AtStep::kAwaitGradientSlot);
    wait(s.dq_empty[out.stage], out.parity ^ 1);
    mark(AtStep::kAwaitGradient);
  }

  // Until the step's buffer of dS is read for the last time.
  __device__ __forceinline__ void await_score_buffer() const {
    wait(s.ds_empty[step & 1], step >> 1 & 1 ^ 1);
  }

  // Stores what a tile accumulated.
  __device__ __forceinline__ void finish_tile() {
    loaded = false;
    mark(Config::kStoresByTma ? AtTile::kStore : AtTile::kAwaitScoreSlot);
    pass_on_query_gradient(step - 1);
    if constexpr (Config::kStoresByTma) {
      store_by_tma();
    } else {
      await_score_buffer();  // see staging
      mark(AtTile::kStore);
      store_key_gradients<Config>(a, *tile, consumer, staging(), dk, dv);
    }
    if constexpr (Config::kWholeHeads) {
      if (a.whole_heads && ptx::uniform(tile->key_block) == 0) {
        await_stores();  // see staging
        store_query_gradients();
        // No access needs this barrier, see prepare_keys. But without it ptxas takes the loop
        // control of row 0 as not uniform.
        if constexpr (Config::kStoresByTma) meet_warps();
      }
    }
    if constexpr (!Config::kStoresByTma) {
      mark(AtTile::kSync);
      meet_warps();
    }
    inject(Fault::kReleaseTile, tiles);
    release(s.tile_empty[Slot<kTileBuffers>(tiles).stage]);
  }

  // dV and dK, beside the next tile. dV leaves by way of this warp's rows of V, which no product
  // reads any more. V is released when TMA has read dV; for dK see prepare_keys.
  __device__ __forceinline__ void store_by_tma() {
    const uint32_t v = ptx::shared_address(s.v) + ValueRing(tiles).stage * Config::kKeyBytes;
    store_key_gradient_by_tma<Config>(a, *tile, first_row(), value_gradient(a), dv,
                                      v + first_row() * Config::kRowBytes);
    await_score_buffer();  // see staging
    store_key_gradient_by_tma<Config>(a, *tile, first_row(), key_gradient(a), dk, staging());
    if (ptx::lane() == 0) ptx::tma_store_wait_read<1>();
    release(s.v_empty[ValueRing(tiles).stage]);
  }

  // This warp's number in the consumer. In rows that store by TMA it takes no register of the loop.
  __device__ __forceinline__ int warp() const {
    return (Config::kStoresByTma ? ptx::thread() : threadIdx.x) / 32 % 4;
  }
  // The first of this warp's 16 rows of the tile.
  __device__ __forceinline__ int first_row() const { return consumer * 64 + warp() * 16; }

  // Until TMA has read what this warp stores.
  __device__ __forceinline__ void await_stores() const {
    if constexpr (Config::kStoresByTma) {
      if (ptx::lane() == 0) ptx::tma_store_wait_read<0>();
      __syncwarp();
    }
  }

  // The consumer's warps meet: other warps write dS where this one staged rows.
  __device__ __forceinline__ void meet_warps() const { ptx::named_barrier(1 + consumer, 128); }

  // Reads tile number `tiles`. False if there is none.
  __device__ __forceinline__ bool take_tile() {
    const Slot<kTileBuffers> slot(tiles);
    mark(AtTile::kAwaitTile);
    wait(s.tile_full[slot.stage], slot.parity);
    tile = &s.tile[slot.stage];
    first_seen = ptx::uniform(tile->consumer[consumer].begin);
    end_seen = ptx::uniform(tile->consumer[consumer].end);
    full_begin = ptx::uniform(tile->consumer[consumer].full_begin);
    full_end = ptx::uniform(tile->consumer[consumer].full_end);
    order = uniform_block_order<Config>(a, *tile);
    const int seqlen_q = ptx::uniform(tile->seqlen_q);
    ragged_block = a.packed && seqlen_q % kBlockM != 0 ? seqlen_q / kBlockM : -1;
    last += (order.end - order.begin) * uniform_head_count<Config>(a, *tile);
    return ptx::uniform(tile->rows) != 0;
  }

  // K, and V before its first use. Rows past the end of a packed sequence are the next one's: they
  // meet a dS of 0, but may hold NaN. TMA fills rows past the end of a tensor with zeros.
  __device__ __forceinline__ void prepare_keys() {
    const KeyRing k_slot(tiles);
    const ValueRing v_slot(tiles);
    mark(AtTile::kAwaitK);
    wait(s.k_full[k_slot.stage], k_slot.parity);
    if constexpr (Config::kStoresByTma) {
      await_stores();  // dK of the tile before, see staging
      meet_warps();
    }
    if (a.packed && tile->rows < Config::kBlockN) {
      wait(s.v_full[v_slot.stage], v_slot.parity);
      clear_rows<Config, Config::kBlockN>(s.k[k_slot.stage], tile->rows, 1 + consumer);
      clear_rows<Config, Config::kBlockN>(s.v[v_slot.stage], tile->rows, 1 + consumer);
    }
  }

  // Q, V and dO of a step, unless they were there beside the step before.
  __device__ __forceinline__ void await_operands(const Ring& slot) {
    if (__builtin_expect(!loaded, false)) {
      const ValueRing v_slot(tiles);
      wait(s.q_full[slot.stage], slot.parity);
      wait(s.v_full[v_slot.stage], v_slot.parity);
      wait(s.dout_full[slot.stage], slot.parity);
    }
    if (__builtin_expect(order.block == ragged_block, false)) {
      clear_rows<Config, kBlockM>(s.q[slot.stage], ragged_rows(), 1 + consumer);
      clear_rows<Config, kBlockM>(s.dout[slot.stage], ragged_rows(), 1 + consumer);
    }
  }

  __device__ __forceinline__ void probabilities(Scores& p, Packed& packed,
                                                ColumnPairs<kBlockM / 8>& lse) {
    if (__builtin_expect(a.scores.transform, false)) transform_scores<false>(p, a.scores);
    if (__builtin_expect(is_boundary(), false)) {
      const KeyTile& t = *tile;
      const ForwardParams& f = a.params.forward;
      const int key =
          t.first_key + threadIdx.x / 32 % 4 * 16 + consumer * 64 + threadIdx.x % 32 / 4;
      mask_keys<Config>(p, {t.seqlen_q - t.seqlen_k, f.window_right, f.window_left}, key,
                        order.block * kBlockM, t.seqlen_q, t.seqlen_k);
    }
    make_probabilities<Config>(a, p, packed, lse);
  }

  __device__ __forceinline__ void score_gradients(const Scores& p, const Scores& dp, Packed& packed,
                                                  ColumnPairs<kBlockM / 8>& delta) {
    const auto weights = [&](int i) { return float2{p[2 * i], p[2 * i + 1]}; };
    if (__builtin_expect(is_boundary(), false)) {
      make_score_gradients<Config, true>(weights, dp, packed, delta);
    } else {
      make_score_gradients<Config, false>(weights, dp, packed, delta);
    }
  }

  // Whole heads: stores this consumer's share of the head's dQ. The next head's stores to the same
  // place follow this warp's next arrival at ds_full.
  __device__ __forceinline__ void store_query_gradients() {
    const int blocks = a.dense_queries.divisor, all = a.group * blocks;
    const int batch = ptx::uniform(tile->batch), length = ptx::uniform(tile->seqlen_q);
    const int first_head = ptx::uniform(tile->head_kv) * a.group;
    const float* const place = a.gradient + int64_t{ptx::block()} * all * Config::kGradientFloats;
    wait(s.dq_done, heads++ & 1);
#pragma unroll 1
    for (int i = consumer; i < all * Config::kGradientParts; i += Config::kConsumers) {
      float x[32];
      const int number = i / Config::kGradientParts, part = i % Config::kGradientParts;
      load_query_part(x,
                      query_part<Config>(place + int64_t{number} * Config::kGradientFloats, part));
      const int head = number / a.dense_queries, first = (number - head * blocks) * kBlockM;
      const RowBlock b{{0, batch, length}, 0, first, min(kBlockM, length - first)};
      store_query_part<Config>(a, x, b, first_head + head, part, staging());
    }
    ptx::fence_proxy_async_global();  // before TMA writes to the place again
  }

  // 2 KB for each warp, on the way out, where dS of the next step comes.
  __device__ __forceinline__ uint32_t staging() const {
    return ptx::shared_address(s.ds[buffer()][consumer]) + warp() * 2048;
  }

  __device__ __forceinline__ bool is_boundary() const {
    return order.block < full_begin || order.block >= full_end;
  }
  __device__ __forceinline__ int ragged_rows() const { return tile->seqlen_q % kBlockM; }

  // This consumer's 64 rows of K and of V.
  __device__ __forceinline__ ptx::WgmmaDescriptor key_rows() const {
    return {ptx::shared_address(s.k) + KeyRing(tiles).stage * Config::kKeyBytes +
                consumer * 64 * Config::kRowBytes,
            16};
  }
  __device__ __forceinline__ ptx::WgmmaDescriptor value_rows() const {
    return {ptx::shared_address(s.v) + ValueRing(tiles).stage * Config::kKeyBytes +
                consumer * 64 * Config::kRowBytes,
            16};
  }
  // All of K, N-major.
  __device__ __forceinline__ ptx::WgmmaDescriptor keys() const {
    return {ptx::shared_address(s.k) + KeyRing(tiles).stage * Config::kKeyBytes,
            Config::kBlockN * Config::kRowBytes};
  }
  template <class Buffers>
  __device__ __forceinline__ ptx::WgmmaDescriptor queries(const Buffers& ring,
                                                          const Ring& slot) const {
    return {ptx::shared_address(ring) + slot.stage * Config::kQueryBytes,
            kBlockM * Config::kRowBytes};
  }
  // dS of the step, of all consumers, from row `row` of the block on.
  __device__ __forceinline__ ptx::WgmmaDescriptor scores(int row = 0) const {
    return {ptx::shared_address(s.ds) + buffer() * Config::kConsumers * Config::kScoreBytes +
                row * Config::kRowBytes,
            16};
  }
  // The buffer of dS of the step.
  __device__ __forceinline__ int buffer() const { return kGuardedRing ? step & 1 : 0; }

  __device__ __forceinline__ void mark(BackwardConsumerTile::Mark state) const {
    timeline.tile(tiles, state);
  }
  __device__ __forceinline__ void mark(BackwardConsumerStep::Mark state) const {
    timeline.step(step, state);
  }

  const BackwardArguments& a;
  BackwardShared<Config>& s;
  const int consumer;  // of the thread block
  const Timeline timeline;
  const KeyTile* tile;
  int tiles = 0;  // the number of `tile`
  int heads = 0;  // whole heads: that were stored
  int step = 0;   // of all tiles
  int last = 0;   // the step after the last one of `tile`
  float dk[Config::kHeadDim / 2], dv[Config::kHeadDim / 2];
  int turn;  // until this consumer computes dQ
  BlockOrder order{0, 0, 0, 1};
  int first_seen, end_seen, full_begin, full_end;  // blocks of queries, see KeyTile
  int ragged_block;     // packed: the block with rows past the end of the sequence; -1: none
  bool loaded = false;  // Q, V and dO of the step
  bool staged = false;  // dQ of the step before, which has not been passed on
};

}  // namespace attnscope::sm90
