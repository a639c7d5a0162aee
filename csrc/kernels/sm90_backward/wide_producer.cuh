// The producer of the wide kernel: a thread that loads K and V once, then Q and dO block by block.
#pragma once

#include "kernels/sm90_backward/late_load.cuh"
#include "kernels/sm90_backward/wide_shared.cuh"

namespace attnscope::sm90 {

// Rows `row` to row + 64 of `blocks` column blocks of K or V, from `first` on.
template <class Config>
__device__ __forceinline__ void load_keys(const KeyTile& t, void* buffer, const TensorMap& tensor,
                                          uint64_t& full, int row, int first, int blocks) {
#pragma unroll
  for (int i = 0; i < blocks; ++i) {
    ptx::tma_load_4d(ptx::shared_address(buffer) + i * Config::kColumnBytes, &tensor.map,
                     ptx::shared_address(&full), ptx::CachePolicy::kEvictFirst, (first + i) * 64,
                     t.k_row + row, t.head_kv * tensor.head_step, t.batch * tensor.batch_step);
  }
}

// This rank's share of 64 rows of Q or dO, into the shared memory of all ranks.
template <class Config>
__device__ __forceinline__ void load_queries(const KeyTile& t, int rank, void* buffer,
                                             const TensorMap& tensor, uint64_t& full, int row,
                                             int head) {
  constexpr int kRanks = Config::kRanks, kShare = 64 / kRanks;
#pragma unroll
  for (int i = 0; i < Config::kColumnBlocks; ++i) {
    const uint32_t to =
        ptx::shared_address(buffer) + i * Config::kColumnBytes + rank * kShare * Config::kRowBytes;
    const int head_at = head * tensor.head_step, batch_at = t.batch * tensor.batch_step;
    ptx::tma_multicast_4d(to, &tensor.map, ptx::shared_address(&full), ptx::CachePolicy::kEvictLast,
                          (1 << kRanks) - 1, i * 64, row + rank * kShare, head_at, batch_at);
  }
}

#ifdef ATTNSCOPE_FAULTS
template <class Config>
__device__ __forceinline__ void issue_late_load(const BackwardArguments& a, WideShared<Config>& s,
                                                int rank, const LateLoad& copy) {
  const KeyTile& t = s.tile;
  const int stage = copy.stage, row = t.q_row + copy.block * Config::kBlockM;
  if (copy.operand == Operand::kK) {
    load_keys<Config>(t, s.k, a.k, s.k_full, rank * 64, 0, Config::kColumnBlocks);
  } else if (copy.operand == Operand::kV) {
    load_keys<Config>(t, s.v, a.v, s.v_full, rank * 64, 0, Config::kColumnBlocks);
  } else if (copy.operand == Operand::kQ) {
    load_queries<Config>(t, rank, s.q[stage], a.q, s.q_full[stage], row, copy.head);
  } else {
    load_queries<Config>(t, rank, s.dout[stage], a.dout, s.dout_full[stage], row, copy.head);
  }
}
#endif

template <class Config>
__device__ __forceinline__ void produce_wide(const BackwardArguments& a, WideShared<Config>& s,
                                             int rank) {
  using ptx::shared_address;
  const KeyTile& t = s.tile;

  inject(Fault::kCopy, 0);
  ptx::mbarrier_arrive_expect_tx(shared_address(&s.k_full),
                                 Config::kTileBytes + Config::kPeerBlocks * Config::kColumnBytes);
  if (!is_late(s, Operand::kK, 0, 0, 0, 0)) {
    load_keys<Config>(t, s.k, a.k, s.k_full, rank * 64, 0, Config::kColumnBlocks);
  }
  load_keys<Config>(t, s.peer_k, a.k, s.k_full, (1 - rank) * 64, rank * (Config::kColumnBlocks - 2),
                    Config::kPeerBlocks);
  int count = 0;
#pragma unroll 1
  for (int head = t.head_kv * a.group; head < (t.head_kv + 1) * a.group; ++head) {
    int block = t.start;
#pragma unroll 1
    for (int n = t.begin; n < t.end; ++n, block = t.block_after(block)) {
      const Slot<Config::kStages> q_slot(count);
      const Slot<Config::kDoutStages> dout_slot(count);
      const int row = t.q_row + block * Config::kBlockM;

      uint64_t& q_full = s.q_full[q_slot.stage];
      ptx::mbarrier_wait(shared_address(&s.q_empty[q_slot.stage]), q_slot.parity ^ 1);
      inject(Fault::kCopy, 3 * count + 1);
      ptx::mbarrier_arrive_expect_tx(shared_address(&q_full),
                                     Config::kTileBytes + Config::kStatisticsBytes);
      if (!is_late(s, Operand::kQ, count, q_slot.stage, head, block)) {
        load_queries<Config>(t, rank, s.q[q_slot.stage], a.q, q_full, row, head);
      }
      ptx::bulk_load(shared_address(s.statistics[q_slot.stage]),
                     a.statistics + (int64_t{head} * a.query_blocks + t.first_block + block) *
                                        (2 * Config::kBlockM),
                     Config::kStatisticsBytes, shared_address(&q_full));
      if (count == 0) {
        ptx::mbarrier_arrive_expect_tx(shared_address(&s.v_full), Config::kTileBytes);
        if (!is_late(s, Operand::kV, 0, 0, 0, 0)) {
          load_keys<Config>(t, s.v, a.v, s.v_full, rank * 64, 0, Config::kColumnBlocks);
        }
      }
      uint64_t& dout_full = s.dout_full[dout_slot.stage];
      ptx::mbarrier_wait(shared_address(&s.dout_empty[dout_slot.stage]), dout_slot.parity ^ 1);
      inject(Fault::kCopy, 3 * count + 2);
      ptx::mbarrier_arrive_expect_tx(shared_address(&dout_full), Config::kTileBytes);
      if (!is_late(s, Operand::kDout, count, dout_slot.stage, head, block)) {
        load_queries<Config>(t, rank, s.dout[dout_slot.stage], a.dout, dout_full, row, head);
      }
      ++count;
    }
  }
  finish_late_loads(s);
}

}  // namespace attnscope::sm90
