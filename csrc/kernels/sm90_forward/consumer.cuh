// A consumer: products, softmax and output of 64 query rows of each tile.
#pragma once

#include "attn/tail.cuh"
#include "kernels/sm90_forward/epilogue.cuh"
#include "kernels/sm90_forward/products.cuh"
#include "kernels/sm90_forward/recompute.cuh"
#include "kernels/sm90_forward/shared.cuh"
#include "kernels/sm90_forward/softmax.cuh"
#include "ptx/named_barrier.cuh"

namespace attnscope::sm90 {

// One warpgroup. `blocks` counts the uses of the K and V rings, `tiles` those of Q and of the
// tiles' descriptions. Each method marks its states on the timeline; the marks compile to nothing
// in a normal build.
template <class Config>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const ForwardArguments& a, ForwardShared<Config>& s)
      : a(a),
        s(s),
        consumer(ptx::uniform(threadIdx.x / 128 - 1)),
        timeline(Lane::kConsumer + consumer, threadIdx.x % 128 == 0) {}

  __device__ __forceinline__ void run() {
    if (consumer == 1) give_turn();
    // Outside the loop over tiles, so that its code lies outside of theirs.
    while (run_tiles()) {
      recompute_rows<Config>(a, work(), static_cast<int>(threadIdx.x / 128) - 1);
      release_tile();
    }
    if (consumer == 0) take_turn();  // the last one that consumer 1 gave
    finish();
  }

 private:
  using Ring = Slot<Config::kStages>;
  using TileSlot = Slot<ForwardShared<Config>::kTiles>;
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr int kTurnBarrier = 1;  // and the next: one for each consumer
  // Where registers allow: the sums of a block are looked at after the wait for the next K, and so
  // complete under it. Above head dim 128 that is slower.
  static constexpr bool kSettlesLate = Config::kScoresLive && Config::kHeadDim <= 128;

  // Tile after tile, until none is left (false) or the warp's O is in doubt (true).
  //
  // The schedule: S(j+1) and O(j) are in flight together, and the softmax of S(j+1) runs while O(j)
  // does. O(j) reads one of two sets of probabilities while the softmax writes the other.
  __device__ __forceinline__ bool run_tiles() {
    constexpr int kOther = Config::kScoresLive;  // otherwise one set serves
    Probabilities<Config> p[2];
    while (await_tile()) {
      TileBlocks t = read_blocks();
      await_queries();
      skip(ptx::uniform(work().range.end), t.end, ConsumerTile::kSkipFirst);
      if (t.begin < t.end) {
        ptx::WgmmaDescriptor q = queries();
        int block = t.end - 1;
        first_block(t, q, block, p[0]);
        while (true) {
          if (--block < t.begin) {
            last_output(p[0]);
            break;
          }
          step(t, q, block, p[0], p[kOther]);
          if (!Config::kScoresLive) continue;
          if (--block < t.begin) {
            last_output(p[kOther]);
            break;
          }
          step(t, q, block, p[kOther], p[0]);
        }
      } else {
        clear();
        release(s.q_empty[q_stage()][unit_number()]);
      }
      skip(t.begin, ptx::uniform(work().range.begin), ConsumerTile::kSkipLast);
      if (__builtin_expect(!store_tile(), false)) return true;
      release_tile();
    }
    return false;
  }

  // The blocks of keys of a tile, in uniform registers: [begin, end) are this consumer's, and
  // [full_begin, full_end) need no mask.
  struct TileBlocks {
    int begin, end, full_begin, full_end;

    __device__ __forceinline__ bool is_boundary(int block) const {
      return block < full_begin || block >= full_end;
    }
    // From now on every block, if so.
    __device__ __forceinline__ void treat_as_boundary(bool all) {
      full_begin = max(full_begin, ptx::uniform(all) * INT_MAX);
    }
  };

  // False if there is no tile.
  __device__ __forceinline__ bool await_tile() {
    mark(ConsumerTile::kAwaitTile);
    wait(s.tile_full[TileSlot(tiles).stage], TileSlot(tiles).parity);
    return !ptx::uniform(work().stop);
  }

  __device__ __forceinline__ TileBlocks read_blocks() {
    mark(ConsumerTile::kPrepare);
    const BlockRange& range = unit().range;
    return {ptx::uniform(range.begin), ptx::uniform(range.end), ptx::uniform(range.full_begin),
            ptx::uniform(range.full_end)};
  }

  __device__ __forceinline__ void await_queries() {
    mark(ConsumerTile::kAwaitQ);
    wait(s.q_full[q_stage()][unit_number()], Slot<Config::kQStages>(tiles).parity);
  }

  // Releases blocks `block` - 1 down to `last` unread: only other consumers' rows see them.
  __device__ __forceinline__ void skip(int block, int last, ConsumerTile::Mark state) {
    mark(state);
#pragma unroll 1
    for (; block > last; --block) {
      take_turn();
      give_turn();
      const Ring slot(blocks++);
      pass(s.k_full[slot.stage], s.k_empty[slot.stage], slot.parity);
      pass(s.v_full[slot.stage], s.v_empty[slot.stage], slot.parity);
    }
  }

  __device__ __forceinline__ void pass(uint64_t& full, uint64_t& empty, int parity) {
    if constexpr (kGuardedRing) {
      wait(full, parity);
    } else {  // the planted fault: waits only until its last release has counted
      wait(empty, parity ^ 1);
    }
    release(empty);
  }

  // S and P of the first block: there is no O to overlap with yet.
  __device__ __forceinline__ void first_block(TileBlocks& t, ptx::WgmmaDescriptor q, int block,
                                              Probabilities<Config>& p) {
    const Ring slot(blocks);
    mark(ConsumerTile::kAwaitK);
    wait(s.k_full[slot.stage], slot.parity);
    mark(ConsumerTile::kIssueScores);
    take_turn();
    issue_scores<Config>(f, q, k(slot));
    give_turn();
    clear();
    mark(ConsumerTile::kAwaitScores);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(f.s);
    mark(ConsumerTile::kSoftmax);
    release_scores(slot, block == t.begin);
    finish_scores(block, t.is_boundary(block));
    t.treat_as_boundary(raise_maximum<Config>(f, p, scale_log2(), factor));
    if constexpr (!Config::kScoresLive) pack_probabilities<Config>(f, p);
    mark(ConsumerTile::kAwaitNextK);
    await_next_k(block > t.begin);
  }

  // S of this block, then O += P V of the block before; the softmax of S runs under both.
  __device__ __forceinline__ void step(TileBlocks& t, ptx::WgmmaDescriptor& q, int block,
                                       Probabilities<Config>& p_before,
                                       Probabilities<Config>& p_here) {
    const Ring v_slot(blocks++), k_slot(blocks);
    mark(ConsumerStep::kIssueScores);
    take_turn();
    issue_scores<Config>(f, q, k(k_slot));
    // Decided while S is computed. Where registers are short it would be spilled.
    int is_boundary = t.is_boundary(block);
    if constexpr (Config::kScoresLive && Config::kHeadDim < 256)
      asm volatile("" : "+r"(is_boundary));
    const bool boundary = is_boundary != 0;
    mark(ConsumerStep::kAwaitV);
    wait(s.v_full[v_slot.stage], v_slot.parity);
    mark(ConsumerStep::kIssueOutput);
    issue_output<Config>(f, p_before, v(v_slot));
    give_turn();
    mark(ConsumerStep::kAwaitScores);
    ptx::wgmma_wait<1>();
    ptx::pin_registers(f.s);
    mark(ConsumerStep::kSoftmax);
    if constexpr (Config::kScoresLive) release_scores(k_slot, block == t.begin);
    finish_scores(block, boundary);
    float sum[2];
    if (__builtin_expect(!boundary, true)) softmax<Config>(f, p_here, scale_log2(), sum);
    bool rescale;
    if constexpr (!kSettlesLate) {
      rescale = settle_maximum(t, p_here, sum, block, boundary, k_slot);
    }
    if constexpr (!Config::kScoresLive) {
      release_scores(k_slot, block == t.begin);
      ptx::pin_registers(f.s);
    }
    // The compiler would keep the descriptors of all its columns, in more than uniform registers.
    if constexpr (Config::kHeadDim > 128) q = queries();
    mark(ConsumerStep::kAwaitK);
    // The wait is a loop, and so a boundary for the compiler's scheduler. Without it the compiler
    // moves the wait for O up, before the exponentials that are to run during O.
    await_next_k(block > t.begin);
    if constexpr (kSettlesLate) {
      rescale = settle_maximum(t, p_here, sum, block, boundary, k_slot);
    }
    mark(ConsumerStep::kAwaitOutput);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(f.o);
    mark(ConsumerStep::kRescale);
    release(s.v_empty[v_slot.stage]);
    if (__builtin_expect(rescale, false)) rescale_output<Config>(f, factor);
    if constexpr (!Config::kScoresLive) pack_probabilities<Config>(f, p_here);
  }

  // O += P V of the last block: there is no next S to overlap with.
  __device__ __forceinline__ void last_output(Probabilities<Config>& p_before) {
    const Ring v_slot(blocks++);
    mark(ConsumerTile::kAwaitLastV);
    wait(s.v_full[v_slot.stage], v_slot.parity);
    mark(ConsumerTile::kIssueOutput);
    issue_output<Config>(f, p_before, v(v_slot));
    mark(ConsumerTile::kAwaitOutput);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(f.o);
    release(s.v_empty[v_slot.stage]);
  }

  // False if the warp stored NaN or infinity that may come from keys which its row does not see.
  __device__ __forceinline__ bool store_tile() {
    mark(ConsumerTile::kEpilogue);
    if constexpr (Config::kKeyParts > 1) {
      inject(Fault::kRelease, blocks);
      const bool gives = Config::part_of(consumer) > 0;
      exchange_output<Config>(f, s.partial, unit_warp(), gives);
      if (gives) return true;
    }
    const bool finite = store_output<Config>(f, a, unit(), work().batch, s.o[unit_warp()]);
    return finite || !a.hides_keys;
  }

  __device__ __forceinline__ void release_tile() {
    inject(Fault::kReleaseTile, tiles);
    uint64_t& empty = s.tile_empty[TileSlot(tiles).stage];
    if constexpr (kEveryLaneArrives) {
      ptx::mbarrier_arrive(ptx::shared_address(&empty));
    } else {
      release(empty);
    }
    ++tiles;
  }

  __device__ __forceinline__ void finish() {
    timeline.finish(tiles, blocks);
    if (threadIdx.x % 32 == 0) ptx::tma_store_wait_read<0>();
    if (a.packed) {
      for (int head = blockIdx.x; head < a.params.heads_q; head += gridDim.x) {
        clear_uncovered<typename Config::Element>(a.params, head, threadIdx.x - 128,
                                                  Config::kConsumers * 128);
      }
    }
  }

  // Adds the sums of a block's probabilities by the maximum in use; where that must rise, makes the
  // probabilities by the true one. True if it rose.
  __device__ __forceinline__ bool settle_maximum(TileBlocks& t, Probabilities<Config>& p,
                                                 const float (&sum)[2], int block, bool boundary,
                                                 const Ring& k_slot) {
    // A boundary block may be the first that some rows see: there the maximum surely rises. In a
    // giant warp every block counts as one.
    bool rises = boundary;
    if (__builtin_expect(!boundary, true)) {
      rises = !add_sums<Config>(f, sum);
      if (__builtin_expect(rises && !Config::kScoresLive, false)) {
        // No wgmma and no wait for one here: all warps of a warpgroup must execute these together.
        recompute_scores<Config>(f, ptx::shared_address(s.q[q_stage()][unit_number()]),
                                 ptx::shared_address(s.k[k_slot.stage][key_buffer()]));
        finish_scores(block, false);
      }
    }
    if (__builtin_expect(rises, false)) {
      mark(ConsumerStep::kRaiseMaximum);
      t.treat_as_boundary(raise_maximum<Config>(f, p, scale_log2(), factor));
    }
    return rises;
  }

  // Raw scores to masked logits. Only boundary blocks read the tile's bounds from shared memory.
  __device__ __forceinline__ void finish_scores(int block, bool boundary) {
    if (__builtin_expect(a.scores.transform, false)) cap_to_reciprocals(f.s, a.scores);
    if (__builtin_expect(boundary, false)) {
      const TileWork& w = work();
      const int row = unit().first_row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
      mask_scores_by_bits(
          f.s, {w.shift, a.params.window_left, a.params.window_right}, grouping<Config>(a), row,
          (block * Config::kKeyParts + Config::part_of(consumer)) * kBlockN, w.seqlen_k);
    }
  }

  // The consumers have a turn for each block that their tile visits: consumer 0, consumer 1, and so
  // on. Whoever takes a turn needs only blocks that the other one, a turn ahead, has already had.
  __device__ __forceinline__ void take_turn() const {
    if constexpr (Config::kTakesTurns) ptx::named_barrier(kTurnBarrier + consumer, 256);
  }
  __device__ __forceinline__ void give_turn() const {
    if constexpr (Config::kTakesTurns) ptx::named_barrier_arrive(kTurnBarrier + 1 - consumer, 256);
  }

  // After the last read of K, and of Q with the last block.
  __device__ __forceinline__ void release_scores(const Ring& slot, bool last) {
    release(s.k_empty[slot.stage]);
    if (last) release(s.q_empty[q_stage()][unit_number()]);
  }

  __device__ __forceinline__ void await_next_k(bool has_next) {
    const Ring slot(blocks + 1);
    if (has_next) wait(s.k_full[slot.stage], slot.parity);
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < Config::kValueDim / 2; ++i) f.o[i] = 0.0f;
    f.row_max[0] = f.row_max[1] = -FLT_MAX;
    f.row_sum[0] = f.row_sum[1] = 0.0f;
  }

  __device__ __forceinline__ static void wait(uint64_t& barrier, int parity) {
    ptx::mbarrier_wait(ptx::shared_address(&barrier), parity);
  }

  // One arrival a warp, after all of its lanes have read. Predicated: with a branch, the compiler
  // keeps ring positions and descriptors in vector registers, and moves them for every product.
  __device__ __forceinline__ void release(uint64_t& barrier) const {
    __syncwarp();
    inject(Fault::kRelease, blocks);
    ptx::mbarrier_arrive_if(ptx::shared_address(&barrier), threadIdx.x % 32 == 0);
  }

  __device__ __forceinline__ void mark(ConsumerTile::Mark state) const {
    timeline.tile(tiles, state);
  }
  __device__ __forceinline__ void mark(ConsumerStep::Mark state) const {
    timeline.step(blocks, state);
  }

  __device__ __forceinline__ const TileWork& work() const { return s.tile[TileSlot(tiles).stage]; }
  __device__ __forceinline__ const Unit& unit() const { return work().unit[consumer]; }
  __device__ __forceinline__ int q_stage() const { return Slot<Config::kQStages>(tiles).stage; }
  __device__ __forceinline__ int unit_number() const { return Config::unit_of(consumer); }
  // Among the warps that have the rows of the tile.
  __device__ __forceinline__ int unit_warp() const {
    return Config::kKeyParts == 1 ? threadIdx.x / 32 - 4 : unit_number() * 4 + threadIdx.x / 32 % 4;
  }
  __device__ __forceinline__ int key_buffer() const { return Config::key_buffer_of(consumer); }
  __device__ __forceinline__ float scale_log2() const { return a.scores.scale_log2; }

  __device__ __forceinline__ ptx::WgmmaDescriptor queries() const {
    const int offset = (q_stage() * Config::kUnits + unit_number()) * Config::kQBytes;
    return ptx::WgmmaDescriptor(ptx::uniform(ptx::shared_address(s.q) + offset), 16);
  }
  __device__ __forceinline__ ptx::WgmmaDescriptor k(const Ring& slot) const {
    return {ptx::shared_address(s.k) +
                (slot.stage * Config::kKeyBuffers + key_buffer()) * Config::kKeyBytes,
            16};
  }
  __device__ __forceinline__ ptx::WgmmaDescriptor v(const Ring& slot) const {
    return {ptx::shared_address(s.v) +
                (slot.stage * Config::kKeyBuffers + key_buffer()) * Config::kValueBytes,
            kBlockN * Config::kRowBytes};
  }

  const ForwardArguments& a;
  ForwardShared<Config>& s;
  const int consumer;  // of the thread block
  const Timeline timeline;
  Fragments<Config> f;
  float factor[2];            // what O is scaled by when the maximum rises
  int tiles = 0, blocks = 0;  // uses of the rings so far
};

}  // namespace attnscope::sm90
