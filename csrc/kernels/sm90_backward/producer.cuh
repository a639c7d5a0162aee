// The producer: a thread that loads K and V of a tile, then Q, dO and their statistics block by
// block.
#pragma once

#include "kernels/sm90_backward/late_load.cuh"
#include "kernels/sm90_backward/marks.cuh"
#include "kernels/sm90_backward/shared.cuh"
#include "ptx/tma.cuh"

namespace attnscope::sm90 {

// [rows, kHeadDim], swizzled 128 bytes.
template <class Config>
__device__ __forceinline__ void load_rows(void* shared, const TensorMap& tensor, uint32_t barrier,
                                          ptx::CachePolicy policy, int rows, int row, int head,
                                          int batch) {
#pragma unroll
  for (int column = 0; column < Config::kHeadDim; column += 64) {
    ptx::tma_load_4d(ptx::shared_address(shared) + column / 64 * rows * Config::kRowBytes,
                     &tensor.map, barrier, policy, column, row, head * tensor.head_step,
                     batch * tensor.batch_step);
  }
}

#ifdef ATTNSCOPE_FAULTS
// The tile is still described: its consumers wait for this copy before they release it.
template <class Config>
__device__ __forceinline__ void issue_late_load(const BackwardArguments& a,
                                                BackwardShared<Config>& s, const LateLoad& copy) {
  const KeyTile& t = s.tile[copy.tile];
  const int stage = copy.stage;
  const auto load_keys = [&](auto& buffer, const TensorMap& tensor, uint64_t& full) {
    load_rows<Config>(buffer, tensor, ptx::shared_address(&full), ptx::CachePolicy::kEvictFirst,
                      Config::kBlockN, t.k_row, t.head_kv, t.batch);
  };
  const auto load_queries = [&](auto& buffer, auto& statistics, const TensorMap& tensor,
                                uint64_t& full, const float* source) {
    load_rows<Config>(buffer, tensor, ptx::shared_address(&full), ptx::CachePolicy::kEvictLast,
                      Config::kBlockM, t.q_row + copy.block * Config::kBlockM, copy.head, t.batch);
    ptx::bulk_load(ptx::shared_address(statistics), source, 4 * Config::kBlockM,
                   ptx::shared_address(&full));
  };
  const float* statistics =
      a.statistics +
      (int64_t{copy.head} * a.query_blocks + t.first_block + copy.block) * (2 * Config::kBlockM);
  if (copy.operand == Operand::kK) load_keys(s.k[stage], a.k, s.k_full[stage]);
  if (copy.operand == Operand::kV) load_keys(s.v[stage], a.v, s.v_full[stage]);
  if (copy.operand == Operand::kQ) {
    load_queries(s.q[stage], s.lse_log2[stage], a.q, s.q_full[stage], statistics);
  }
  if (copy.operand == Operand::kDout) {
    load_queries(s.dout[stage], s.delta[stage], a.dout, s.dout_full[stage],
                 statistics + Config::kBlockM);
  }
}
#endif

// What the loads of all tiles so far used.
struct LoadCounts {
  int blocks = 0;  // of queries
  int tiles = 0;   // that some query sees
};

// Loads a tile. One thread.
template <class Config>
__device__ __forceinline__ void load_tile(const BackwardArguments& a, BackwardShared<Config>& s,
                                          int tile, LoadCounts& counts, const Timeline& timeline) {
  using ptx::shared_address;
  constexpr int kBlockM = Config::kBlockM, kStatisticsBytes = 4 * kBlockM;
  const KeyTile& t = s.tile[tile];
  const auto load_keys = [&](auto& buffer, const TensorMap& tensor, uint64_t& full, int stage,
                             Operand operand) {
    inject(Fault::kCopy, 4 * counts.tiles + static_cast<int>(operand));
    ptx::mbarrier_arrive_expect_tx(shared_address(&full), Config::kKeyBytes);
    if (is_late(s, operand, counts.tiles, stage, 0, 0, tile)) return;
    load_rows<Config>(buffer, tensor, shared_address(&full), ptx::CachePolicy::kEvictFirst,
                      Config::kBlockN, t.k_row, t.head_kv, t.batch);
  };
  const auto load_queries = [&](auto& buffer, auto& statistics, const TensorMap& tensor,
                                uint64_t& full, int stage, int head, int block, const float* source,
                                Operand operand) {
    const uint32_t barrier = shared_address(&full);
    inject(Fault::kCopy, 4 * counts.blocks + static_cast<int>(operand));
    ptx::mbarrier_arrive_expect_tx(barrier, Config::kQueryBytes + kStatisticsBytes);
    if (is_late(s, operand, counts.blocks, stage, head, block, tile)) return;
    load_rows<Config>(buffer, tensor, barrier, ptx::CachePolicy::kEvictLast, kBlockM,
                      t.q_row + block * kBlockM, head, t.batch);
    ptx::bulk_load(shared_address(statistics), source, kStatisticsBytes, barrier);
  };

  const Slot<Config::kKeyStages> k_slot(counts.tiles);
  const Slot<Config::kValueStages> v_slot(counts.tiles++);
  const auto load_k = [&] {
    ptx::mbarrier_wait(shared_address(&s.k_empty[k_slot.stage]), k_slot.parity ^ 1);
    if constexpr (Config::kKeyStages > 1) {
      timeline.tile(counts.tiles - 1, BackwardProducerTile::kIssueK);
    } else {
      timeline.step(counts.blocks - 1, BackwardProducerStep::kIssueK);
    }
    load_keys(s.k[k_slot.stage], a.k, s.k_full[k_slot.stage], k_slot.stage, Operand::kK);
  };
  // A single buffer is free only after the last dQ of the tile before: the first Q and dO come
  // first.
  bool has_k = Config::kKeyStages > 1;
  if (has_k) {
    timeline.tile(counts.tiles - 1, BackwardProducerTile::kAwaitKSlot);
    load_k();
  }
  timeline.tile(counts.tiles - 1, BackwardProducerTile::kAwaitVSlot);
  ptx::mbarrier_wait(shared_address(&s.v_empty[v_slot.stage]), v_slot.parity ^ 1);
  timeline.tile(counts.tiles - 1, BackwardProducerTile::kIssueV);
  load_keys(s.v[v_slot.stage], a.v, s.v_full[v_slot.stage], v_slot.stage, Operand::kV);
  ptx::await_kernel_before();
#pragma unroll 1
  for (int head = first_head<Config>(a, t); head < end_head<Config>(a, t); ++head) {
    int place = t.start;
#pragma unroll 1
    for (int n = t.begin; n < t.end; ++n, place = t.place_after(place)) {
      const int block = t.block_at(place, head);
      const Slot<Config::kStages> slot(counts.blocks++);
      timeline.step(counts.blocks - 1, BackwardProducerStep::kAwaitSlot);
      ptx::mbarrier_wait(shared_address(&s.empty[slot.stage]), slot.parity ^ 1);
      timeline.step(counts.blocks - 1, BackwardProducerStep::kIssueQ);
      const float* statistics =
          a.statistics + (int64_t{head} * a.query_blocks + t.first_block + block) * (2 * kBlockM);
      load_queries(s.q[slot.stage], s.lse_log2[slot.stage], a.q, s.q_full[slot.stage], slot.stage,
                   head, block, statistics, Operand::kQ);
      timeline.step(counts.blocks - 1, BackwardProducerStep::kIssueDout);
      load_queries(s.dout[slot.stage], s.delta[slot.stage], a.dout, s.dout_full[slot.stage],
                   slot.stage, head, block, statistics + kBlockM, Operand::kDout);
      if (!has_k) {
        timeline.step(counts.blocks - 1, BackwardProducerStep::kAwaitKSlot);
        load_k();
      }
      has_k = true;
    }
  }
}

template <class Config>
__device__ __forceinline__ void produce(const BackwardArguments& a, BackwardShared<Config>& s) {
  LoadCounts counts;
  const Timeline timeline(BackwardLane::kProducer, true);
#pragma unroll 1
  for (int n = 0;; ++n) {
    const Slot<kTileBuffers> slot(n);
    timeline.tile(n, BackwardProducerTile::kAwaitTile);
    ptx::mbarrier_wait(ptx::shared_address(&s.tile_full[slot.stage]), slot.parity);
    if (s.tile[slot.stage].rows == 0) break;
    load_tile<Config>(a, s, slot.stage, counts, timeline);
    ptx::mbarrier_arrive(ptx::shared_address(&s.tile_wanted));
    ptx::mbarrier_arrive(ptx::shared_address(&s.tile_empty[slot.stage]));
  }
  timeline.finish(counts.tiles, counts.blocks);
  finish_late_loads(s);
}

}  // namespace attnscope::sm90
