// The producer of the wide kernel: a thread that loads K and V of a tile, then Q and dO block by
// block.
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

// This rank's share of 64 rows of `blocks` column blocks of Q or dO, from `first` on, into the
// shared memory of all ranks.
template <class Config>
__device__ __forceinline__ void load_queries(const KeyTile& t, int rank, void* buffer,
                                             const TensorMap& tensor, uint64_t& full, int row,
                                             int head, int first, int blocks) {
  constexpr int kRanks = Config::kRanks, kShare = 64 / kRanks;
#pragma unroll
  for (int i = 0; i < blocks; ++i) {
    const uint32_t to =
        ptx::shared_address(buffer) + i * Config::kColumnBytes + rank * kShare * Config::kRowBytes;
    const int head_at = head * tensor.head_step, batch_at = t.batch * tensor.batch_step;
    ptx::tma_multicast_4d(to, &tensor.map, ptx::shared_address(&full), ptx::CachePolicy::kEvictLast,
                          (1 << kRanks) - 1, (first + i) * 64, row + rank * kShare, head_at,
                          batch_at);
  }
}

#ifdef ATTNSCOPE_FAULTS
template <class Config>
__device__ __forceinline__ void issue_late_load(const BackwardArguments& a, WideShared<Config>& s,
                                                int rank, const LateLoad& copy) {
  const KeyTile& t = s.tile[copy.tile];
  const int stage = copy.stage, row = t.q_row + copy.block * Config::kBlockM;
  if (copy.operand == Operand::kK) {
    load_keys<Config>(t, s.keys[stage], a.k, s.k_full, rank * 64, 0, Config::kColumnBlocks);
  } else if (copy.operand == Operand::kV) {
    load_keys<Config>(t, s.keys[stage], a.v, s.v_full, rank * 64, 0, Config::kColumnBlocks);
  } else if (copy.operand == Operand::kQ) {
    load_queries<Config>(t, rank, s.q[stage], a.q, s.q_full[stage], row, copy.head, 0,
                         Config::kColumnBlocks);
  } else {
    load_queries<Config>(t, rank, s.dout[stage], a.dout, s.dout_full[stage], row, copy.head,
                         copy.part * Config::kDoutBlocks, Config::kDoutBlocks);
  }
}
#endif

// Loads tile number `number`. `count`: the steps of the tiles before.
template <class Config>
__device__ __forceinline__ void load_wide_tile(const BackwardArguments& a, WideShared<Config>& s,
                                               int rank, int number, int& count,
                                               DoutRing<Config>& ring) {
  using ptx::shared_address;
  const int buffer = number & 1;
  const KeyTile& t = s.tile[buffer];

  // K takes the place of V of the tile before.
  ptx::mbarrier_wait(shared_address(&s.v_empty), number & 1 ^ 1);
  inject(Fault::kCopy, 4 * number);
  ptx::mbarrier_arrive_expect_tx(shared_address(&s.k_full), Config::kTileBytes);
  if (!is_late(s, Operand::kK, number, buffer, 0, 0, buffer)) {
    load_keys<Config>(t, s.keys[buffer], a.k, s.k_full, rank * 64, 0, Config::kColumnBlocks);
  }
  ptx::await_kernel_before();
#pragma unroll 1
  for (int head = first_head<Config>(a, t); head < end_head<Config>(a, t); ++head) {
    int place = t.start;
#pragma unroll 1
    for (int n = t.begin; n < t.end; ++n, place = t.place_after(place)) {
      const int block = t.block_at(place, head);
      const Slot<Config::kStages> q_slot(count);
      const int row = t.q_row + block * Config::kBlockM;

      uint64_t& q_full = s.q_full[q_slot.stage];
      ptx::mbarrier_wait(shared_address(&s.q_empty[q_slot.stage]), q_slot.parity ^ 1);
      inject(Fault::kCopy, 4 * count + 1);
      ptx::mbarrier_arrive_expect_tx(shared_address(&q_full),
                                     Config::kTileBytes + Config::kStatisticsBytes);
      if (!is_late(s, Operand::kQ, count, q_slot.stage, head, block, buffer)) {
        load_queries<Config>(t, rank, s.q[q_slot.stage], a.q, q_full, row, head, 0,
                             Config::kColumnBlocks);
      }
      ptx::bulk_load(shared_address(s.statistics[q_slot.stage]),
                     a.statistics + (int64_t{head} * a.query_blocks + t.first_block + block) *
                                        (2 * Config::kBlockM),
                     Config::kStatisticsBytes, shared_address(&q_full));
#pragma unroll 1
      for (int part = 0; part < Config::kDoutParts; ++part) {
        const int copy = count * Config::kDoutParts + part, stage = ring.stage;
        uint64_t& full = s.dout_full[stage];
        ptx::mbarrier_wait(shared_address(&s.dout_empty[stage]), ring.parity ^ 1);
        ring.advance(1);
        inject(Fault::kCopy, 4 * copy + 2);
        ptx::mbarrier_arrive_expect_tx(shared_address(&full),
                                       Config::kDoutBlocks * Config::kColumnBytes);
        if (!is_late(s, Operand::kDout, copy, stage, head, block, buffer, part)) {
          load_queries<Config>(t, rank, s.dout[stage], a.dout, full, row, head,
                               part * Config::kDoutBlocks, Config::kDoutBlocks);
        }
      }
      if (n == t.begin && head == first_head<Config>(a, t)) {
        // V takes the place of K of the tile before.
        ptx::mbarrier_wait(shared_address(&s.k_empty), number & 1 ^ 1);
        inject(Fault::kCopy, 4 * number + 3);
        ptx::mbarrier_arrive_expect_tx(shared_address(&s.v_full), Config::kTileBytes);
        if (!is_late(s, Operand::kV, number, buffer ^ 1, 0, 0, buffer)) {
          load_keys<Config>(t, s.keys[buffer ^ 1], a.v, s.v_full, rank * 64, 0,
                            Config::kColumnBlocks);
        }
        ptx::mbarrier_arrive_expect_tx(shared_address(&s.peer_full),
                                       Config::kPeerBlocks * Config::kColumnBytes);
        load_keys<Config>(t, s.peer_k, a.k, s.peer_full, (1 - rank) * 64,
                          rank * (Config::kColumnBlocks - 2), Config::kPeerBlocks);
      }
      ++count;
    }
  }
}

template <class Config>
__device__ __forceinline__ void produce_wide(const BackwardArguments& a, WideShared<Config>& s,
                                             int rank) {
  int count = 0;
  DoutRing<Config> ring;
#pragma unroll 1
  for (int number = 0;; ++number) {
    ptx::mbarrier_wait(ptx::shared_address(&s.tile_full[number & 1]), number >> 1 & 1);
    if (s.tile[number & 1].rows == 0) break;
    load_wide_tile<Config>(a, s, rank, number, count, ring);
    ptx::mbarrier_arrive(ptx::shared_address(&s.tile_wanted));
    ptx::mbarrier_arrive(ptx::shared_address(&s.tile_empty[number & 1]));
  }
  finish_late_loads(s);
}

}  // namespace attnscope::sm90
