// The producer: a thread that loads K and V of a tile, then Q, dO and their statistics block by
// block.
#pragma once

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

// What the loads of all tiles so far used.
struct LoadCounts {
  int blocks = 0;  // of queries
  int tiles = 0;   // that some query sees
};

// Loads a tile. One thread.
template <class Config>
__device__ __forceinline__ void load_tile(const BackwardArguments& a, BackwardShared<Config>& s,
                                          const KeyTile& t, LoadCounts& counts) {
  using ptx::shared_address;
  constexpr int kBlockM = Config::kBlockM, kStatisticsBytes = 4 * kBlockM;
  const auto load_keys = [&](auto& buffer, const TensorMap& tensor, uint64_t& full) {
    ptx::mbarrier_arrive_expect_tx(shared_address(&full), Config::kKeyBytes);
    load_rows<Config>(buffer, tensor, shared_address(&full), ptx::CachePolicy::kEvictFirst,
                      Config::kBlockN, t.k_row, t.head_kv, t.batch);
  };
  const auto load_queries = [&](auto& buffer, auto& statistics, const TensorMap& tensor,
                                uint64_t& full, int head, int block, const float* source) {
    const uint32_t barrier = shared_address(&full);
    ptx::mbarrier_arrive_expect_tx(barrier, Config::kQueryBytes + kStatisticsBytes);
    load_rows<Config>(buffer, tensor, barrier, ptx::CachePolicy::kEvictLast, kBlockM,
                      t.q_row + block * kBlockM, head, t.batch);
    ptx::bulk_load(shared_address(statistics), source, kStatisticsBytes, barrier);
  };

  const Slot<kKeyStages> k_slot(counts.tiles);
  const Slot<Config::kValueStages> v_slot(counts.tiles++);
  ptx::mbarrier_wait(shared_address(&s.k_empty[k_slot.stage]), k_slot.parity ^ 1);
  load_keys(s.k[k_slot.stage], a.k, s.k_full[k_slot.stage]);
  ptx::mbarrier_wait(shared_address(&s.v_empty[v_slot.stage]), v_slot.parity ^ 1);
  load_keys(s.v[v_slot.stage], a.v, s.v_full[v_slot.stage]);
  ptx::await_kernel_before();
#pragma unroll 1
  for (int head = t.head_kv * a.group; head < (t.head_kv + 1) * a.group; ++head) {
#pragma unroll 1
    for (int block = t.begin; block < t.end; ++block) {
      const Slot<Config::kStages> slot(counts.blocks++);
      ptx::mbarrier_wait(shared_address(&s.empty[slot.stage]), slot.parity ^ 1);
      const float* statistics =
          a.statistics + (int64_t{head} * a.query_blocks + t.first_block + block) * (2 * kBlockM);
      load_queries(s.q[slot.stage], s.lse_log2[slot.stage], a.q, s.q_full[slot.stage], head, block,
                   statistics);
      load_queries(s.dout[slot.stage], s.delta[slot.stage], a.dout, s.dout_full[slot.stage], head,
                   block, statistics + kBlockM);
    }
  }
}

template <class Config>
__device__ __forceinline__ void produce(const BackwardArguments& a, BackwardShared<Config>& s) {
  LoadCounts counts;
#pragma unroll 1
  for (int n = 0;; ++n) {
    const Slot<Config::kTileBuffers> slot(n);
    const KeyTile& t = s.tile[slot.stage];
    ptx::mbarrier_wait(ptx::shared_address(&s.tile_full[slot.stage]), slot.parity);
    if (t.rows == 0) return;
    load_tile<Config>(a, s, t, counts);
    ptx::mbarrier_arrive(ptx::shared_address(&s.tile_wanted));
    ptx::mbarrier_arrive(ptx::shared_address(&s.tile_empty[slot.stage]));
  }
}

}  // namespace attnscope::sm90
