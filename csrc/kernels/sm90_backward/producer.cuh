// The producer: a thread that loads K and V once, then Q, dO and their statistics block by block.
#pragma once

#include "kernels/sm90_backward/late_load.cuh"
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
template <class Config>
__device__ __forceinline__ void issue_late_load(const BackwardArguments& a,
                                                BackwardShared<Config>& s, const LateLoad& copy) {
  const KeyTile& t = s.tile;
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
  if (copy.operand == Operand::kK) load_keys(s.k, a.k, s.k_full);
  if (copy.operand == Operand::kV) load_keys(s.v, a.v, s.v_full);
  if (copy.operand == Operand::kQ) {
    load_queries(s.q[stage], s.lse_log2[stage], a.q, s.q_full[stage], statistics);
  }
  if (copy.operand == Operand::kDout) {
    load_queries(s.dout[stage], s.delta[stage], a.dout, s.dout_full[stage],
                 statistics + Config::kBlockM);
  }
}
#endif

template <class Config>
__device__ __forceinline__ void produce(const BackwardArguments& a, BackwardShared<Config>& s) {
  using ptx::shared_address;
  constexpr int kBlockM = Config::kBlockM, kStatisticsBytes = 4 * kBlockM;
  // Read again where they are needed: this thread has few registers.
  const KeyTile& t = s.tile;

  const auto load_keys = [&](auto& buffer, const TensorMap& tensor, uint64_t& full,
                             Operand operand) {
    inject(Fault::kCopy, static_cast<int>(operand));
    ptx::mbarrier_arrive_expect_tx(shared_address(&full), Config::kKeyBytes);
    if (is_late(s, operand, 0, 0, 0, 0)) return;
    load_rows<Config>(buffer, tensor, shared_address(&full), ptx::CachePolicy::kEvictFirst,
                      Config::kBlockN, t.k_row, t.head_kv, t.batch);
  };
  int count = 0;  // of blocks, with the one being loaded
  const auto load_queries = [&](auto& buffer, auto& statistics, const TensorMap& tensor,
                                uint64_t& full, int head, int block, const float* source,
                                Operand operand) {
    const uint32_t barrier = shared_address(&full);
    inject(Fault::kCopy, 4 * count + static_cast<int>(operand));
    ptx::mbarrier_arrive_expect_tx(barrier, Config::kQueryBytes + kStatisticsBytes);
    const int stage = (count - 1) % Config::kStages;
    if (is_late(s, operand, count, stage, head, block)) return;
    load_rows<Config>(buffer, tensor, barrier, ptx::CachePolicy::kEvictLast, kBlockM,
                      t.q_row + block * kBlockM, head, t.batch);
    ptx::bulk_load(shared_address(statistics), source, kStatisticsBytes, barrier);
  };

  load_keys(s.k, a.k, s.k_full, Operand::kK);
  load_keys(s.v, a.v, s.v_full, Operand::kV);
  ptx::await_kernel_before();
#pragma unroll 1
  for (int head = t.head_kv * a.group; head < (t.head_kv + 1) * a.group; ++head) {
#pragma unroll 1
    for (int block = t.begin; block < t.end; ++block) {
      const Slot<Config::kStages> slot(count++);
      ptx::mbarrier_wait(shared_address(&s.empty[slot.stage]), slot.parity ^ 1);
      const float* statistics =
          a.statistics + (int64_t{head} * a.query_blocks + t.first_block + block) * (2 * kBlockM);
      load_queries(s.q[slot.stage], s.lse_log2[slot.stage], a.q, s.q_full[slot.stage], head, block,
                   statistics, Operand::kQ);
      load_queries(s.dout[slot.stage], s.delta[slot.stage], a.dout, s.dout_full[slot.stage], head,
                   block, statistics + kBlockM, Operand::kDout);
    }
  }
  finish_late_loads(s);
}

}  // namespace attnscope::sm90
