// The scheduler of the wide kernel: a warp of each rank describes the tiles of the cluster.
#pragma once

#include "kernels/sm90_backward/scheduler.cuh"
#include "kernels/sm90_backward/tiles.cuh"
#include "kernels/sm90_backward/wide_shared.cuh"

namespace attnscope::sm90 {

// The index of the next tile: rank 0 takes it from the counter, and copies it to rank 1. One thread
// of each rank. `count`: of indices that were taken before.
template <class Config>
__device__ __forceinline__ int take_index(const BackwardArguments& a, WideShared<Config>& s,
                                          int rank, int count) {
  static_assert(Config::kRanks == 2, "rank 1 is the only other one");
  const uint32_t full = ptx::shared_address(&s.index_full);
  if (rank == 0) {
    ptx::mbarrier_wait(ptx::shared_address(&s.index_empty), count & 1 ^ 1);
    const int index = s.taken[0] = ptx::atomic_add(a.counter, 1);
    ptx::fence_proxy_async();
    ptx::cluster_copy(ptx::cluster_address(ptx::shared_address(s.index), 1),
                      ptx::shared_address(s.taken), sizeof(s.index), ptx::cluster_address(full, 1));
    return index;
  }
  ptx::mbarrier_arrive_expect_tx(full, sizeof(s.index));
  ptx::mbarrier_wait(full, count & 1);
  const int index = s.index[0];
  ptx::cluster_arrive_if(ptx::cluster_address(ptx::shared_address(&s.index_empty), 0), true);
  return index;
}

// As schedule() does. What lives across the loop is in shared memory. Warp-converged.
template <class Config>
__device__ __forceinline__ void schedule_wide(const BackwardArguments& a, WideShared<Config>& s,
                                              int rank) {
  using Element = typename Config::Element;
  // All tiles come from the counter.
  const bool ordered = a.tickets != nullptr || a.tile_list != nullptr;
  if (ptx::lane() == 0) s.number = 0;
  __syncwarp();
#pragma unroll 1
  for (int count = 0;; ++count) {
    const int number = s.number;
    KeyTile& t = s.tile[number & 1];
    ptx::mbarrier_wait(ptx::shared_address(&s.tile_empty[number & 1]), number >> 1 & 1 ^ 1);
    int index = 0;
    if (count == 0 && !ordered) {
      index = blockIdx.x / Config::kRanks;
    } else {
      // The kernel before zeroes the counter. No thread block ends before it.
      ptx::await_kernel_before();
      if (ptx::lane() == 0) index = take_index<Config>(a, s, rank, count - (ordered ? 0 : 1));
      index = ptx::uniform(index) + (ordered ? 0 : gridDim.x / Config::kRanks);
    }
    const bool last = index >= a.tiles;
    if (!last) {
      describe_unit<WideTileConfig<Config::kParts>>(a, index, 0, t);
    } else if (ptx::lane() == 0) {
      t.rows = 0;
    }
    __syncwarp();
    inject(Fault::kTile, number);
    if (last || (t.rows > 0 && t.begin < t.end)) {
      if (kEveryLaneArrives || ptx::lane() == 0) {
        ptx::mbarrier_arrive(ptx::shared_address(&s.tile_full[number & 1]));
      }
      if (last) return;
      ptx::mbarrier_wait(ptx::shared_address(&s.tile_wanted), number & 1);
      __syncwarp();
      if (ptx::lane() == 0) ++s.number;
    } else {
      // In a packed batch, some numbers have no tile. No query may see the keys of a tile.
      const int first = rank * 64, end = min(t.rows, first + 64);
      clear_keys<Element>(t, a.params.dk, a.params.dk_stride, a.params.forward.head_dim, first,
                          end);
      clear_keys<Element>(t, a.params.dv, a.params.dv_stride, a.params.forward.head_dim_v, first,
                          end);
    }
    __syncwarp();
  }
}

}  // namespace attnscope::sm90
