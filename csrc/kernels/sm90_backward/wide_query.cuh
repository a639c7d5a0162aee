// The warpgroup of the wide kernel that computes dQ and adds it to global memory.
#pragma once

#include "kernels/sm90_backward/turns.cuh"
#include "kernels/sm90_backward/wide_shared.cuh"
#include "ptx/reduce.cuh"
#include "ptx/wgmma.cuh"

namespace attnscope::sm90 {

template <class Config>
class QueryConsumer : WideRole<Config> {
  using Base = WideRole<Config>;
  using Base::a, Base::s, Base::rank, Base::order;
  using Base::kBlockM;
  using Base::steps, Base::first, Base::tiles;
  static constexpr int kRanks = Config::kRanks, kColumnBlocks = Config::kColumnBlocks;
  static_assert(Config::kProductColumns == 64, "a product is a column block");
  static constexpr int kBarrier = 3;
  using Gradient = float[Config::kProductColumns / 2];

 public:
  __device__ __forceinline__ QueryConsumer(const BackwardArguments& a, WideShared<Config>& s,
                                           int rank)
      : Base(a, s, rank) {}

  __device__ __forceinline__ void run() {
    ptx::await_kernel_before();
#pragma unroll 1
    while (Base::take_tile()) run_tile();
    ptx::tma_store_wait_read<0>();
  }

 private:
  __device__ __forceinline__ void run_tile() {
    place = ptx::uniform(first_place<Config>(a, Base::tile())) + order.block;
    blocks_left = order.end - order.begin;
    prepare_keys();
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      const Slot<Config::kScoreStages> slot(first + i);
      const int products = product_count(i);
      wait(s.ds_full[slot.stage], slot.parity);
#pragma unroll 1
      for (int j = 0; j < products; ++j) {
        const int column = column_block(j);
        Gradient dq;
        if (!kGuardedRing && j + 1 == products) Base::release_ranks(s.ds_empty[slot.stage]);
        inject(Fault::kRelease, 2 * (first + i) + j);
        issue_query_gradient(dq, slot.stage, column);
        if (j == 0) finish_turn();
        ptx::wgmma_wait<0>();
        ptx::pin_registers(dq);
        if (kGuardedRing && j + 1 == products) Base::release_ranks(s.ds_empty[slot.stage]);
        if (j + 1 == products && i + 1 == steps) release(s.k_empty);
        if (j == 0 && a.tickets != nullptr) take_turn(first + i);
        add(dq, column);
      }
      if constexpr (!Config::kStagesGradient) finish_turn();
      const int before = order.block;
      order.advance();
      place += order.block - before;
      if (--blocks_left == 0) {  // the next head's
        blocks_left = order.end - order.begin;
        place += a.query_blocks;
      }
    }
    finish_turn();
    Base::release_tile();
  }

  // The products of step `i`, and the first of the column blocks of product `j`, see WideConfig.
  __device__ __forceinline__ int product_count(int i) const {
    if constexpr (kColumnBlocks == 4) return 2;
    return (i + rank) % 2 + 1;
  }
  __device__ __forceinline__ int column_block(int j) const {
    if constexpr (kColumnBlocks == 4) return 2 * rank + j;
    return j == 0 ? 2 * rank : 1;
  }

  __device__ __forceinline__ void prepare_keys() const {
    wait(s.k_full, tiles & 1);
    // K of the next tile completes k_full again: it must not come before this wait.
    release(s.v_empty);
    wait(s.peer_full, tiles & 1);
    if (!a.packed || Base::tile().rows == 64 * kRanks) return;
    Base::clear_rows(Base::keys(), kColumnBlocks, Base::rows(rank), kBarrier);
    Base::clear_rows(s.peer_k, Config::kPeerBlocks, Base::rows(1 - rank), kBarrier);
  }

  // Columns of dQ [64, .]: dS of each rank, K-major, times its K, N-major. In the order of the
  // ranks, so that both compute the same bits.
  __device__ __forceinline__ void issue_query_gradient(Gradient& dq, int stage, int column) const {
    const uint32_t own = ptx::shared_address(Base::keys()) + column * Config::kColumnBytes;
    const uint32_t peer = ptx::shared_address(s.peer_k) +
                          (column - rank * (kColumnBlocks - 2)) * Config::kColumnBytes;
    ptx::wgmma_fence();
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      const ptx::WgmmaDescriptor keys = Base::descriptor(rank == r ? own : peer);
      const ptx::WgmmaDescriptor ds =
          Base::descriptor(ptx::shared_address(s.ds) + (stage * kRanks + r) * Config::kScoreBytes);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        ptx::WgmmaSharedNMajor<typename Config::Element, Config::kProductColumns>::mma(
            dq, ds.at(step * 32), keys.at(step * 16 * Config::kRowBytes), r + step > 0);
      }
    }
    ptx::wgmma_commit();
  }

  // Adds a product, a column block. A warp's 16 rows of a column block are 4 KB, see wide.cuh.
  __device__ __forceinline__ void add(const Gradient& dq, int column) const {
    float* gradient = a.gradient + int64_t{place} * Config::kGradientFloats +
                      column * Config::kPartFloats + threadIdx.x / 32 % 4 * 1024;
    if constexpr (Config::kStagesGradient) {
      add_by_tma(dq, column, gradient);
    } else {
      inject(Fault::kAdd, place * kColumnBlocks + column);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        ptx::add_warp_quad(gradient + j * 128, threadIdx.x % 32, dq + 4 * j);
      }
    }
  }

  __device__ __forceinline__ void add_by_tma(const Gradient& dq, int column,
                                             float* gradient) const {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const uint32_t staging = ptx::shared_address(s.dq + (warp * Config::kGradientStages + i / 4) *
                                                              Config::kStagedFloats);
      ptx::tma_store_wait_read<Config::kGradientStages - 1>();
      __syncwarp();
#pragma unroll
      for (int j = i; j < i + 4; ++j) {
        ptx::store_shared_v4(staging + j % 4 * 512 + lane * 16, dq[4 * j], dq[4 * j + 1],
                             dq[4 * j + 2], dq[4 * j + 3]);
      }
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane == 0) {
        inject(Fault::kAdd, place * kColumnBlocks * 2 + column * 2 + i);
        ptx::bulk_add(gradient + i * 128, staging, 2048);
        ptx::tma_store_commit();
      }
      __syncwarp();
    }
  }

  // Calls with turns: a step is one, see turns.cuh.
  __device__ __forceinline__ void take_turn(int step) {
    wait(s.turn_full, step & 1);
    if constexpr (Config::kStagesGradient) ptx::fence_proxy_async_global();
    has_turn = true;
  }

  // This warp has added its part of dQ of a step. By TMA it says so beside the next product, when
  // the additions have long completed.
  __device__ __forceinline__ void finish_turn() {
    if (!has_turn) return;
    if constexpr (Config::kStagesGradient) {
      if (threadIdx.x % 32 == 0) {
        ptx::tma_store_wait<0>();
        ptx::fence_proxy_async_global();
      }
    }
    inject(Fault::kTurn, place);
    release(s.turn_added);
    has_turn = false;
  }

  int place;        // of dQ: its block among those of all heads
  int blocks_left;  // of the head
  bool has_turn = false;
};

// Waits for all turns of a thread block, one after the other, ahead of the QueryConsumer: a warp
// that waits for the ticket has little time left to add. One thread.
template <class Config>
__device__ __forceinline__ void await_turns(const BackwardArguments& a, WideShared<Config>& s) {
  int turns = 0;
  ptx::await_kernel_before();
  for_each_tile(s, [&](const KeyTile& t, uint64_t&) {
    // Read before the last turn of the tile has come: then the description may change.
    BlockOrder order = block_order<Config>(a, t);
    const int heads = head_count<Config>(a, t), blocks = t.end - t.begin;
    int place = first_place<Config>(a, t);
#pragma unroll 1
    for (int head = 0; head < heads; ++head, place += a.query_blocks) {
#pragma unroll 1
      for (int i = 0; i < blocks; ++i, ++turns, order.advance()) {
        Turns<WideTileConfig<Config::kParts>>::await(a, t, place + order.block, order.block);
        wait(s.turn_empty, turns & 1 ^ 1);
        ptx::mbarrier_arrive(ptx::shared_address(&s.turn_full));
      }
    }
  });
}

// Passes on the turns of a thread block, one after the other, when the QueryConsumer's warps have
// added. One thread.
template <class Config>
__device__ __forceinline__ void pass_turns(const BackwardArguments& a, WideShared<Config>& s) {
  int turns = 0;
  for_each_tile(s, [&](const KeyTile& t, uint64_t& empty) {
    BlockOrder order = block_order<Config>(a, t);
    int* ticket = a.tickets + first_place<Config>(a, t);
    const int heads = head_count<Config>(a, t), blocks = t.end - t.begin;
    ptx::mbarrier_arrive(ptx::shared_address(&empty));
#pragma unroll 1
    for (int head = 0; head < heads; ++head, ticket += a.query_blocks) {
#pragma unroll 1
      for (int i = 0; i < blocks; ++i, ++turns, order.advance()) {
        wait(s.turn_added, turns & 1);
        ptx::mbarrier_arrive(ptx::shared_address(&s.turn_empty));
        inject(Fault::kTurn, turns);
        ptx::release_add(ticket + order.block);
      }
    }
  });
}

}  // namespace attnscope::sm90
