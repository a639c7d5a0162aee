// The first tile of a thread block: taken by its own number, and loaded before the roles begin.
#pragma once

#include "kernels/sm90_forward/producer.cuh"
#include "kernels/sm90_forward/scheduler.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/sync.cuh"

namespace attnscope::sm90 {

inline constexpr int kBarriersReady = 1, kLoadsMayStart = 2;  // named barriers

// Initialises the barriers. By a whole warp.
template <class Config>
__device__ __forceinline__ void init_barriers(ForwardShared<Config>& s) {
  using ptx::shared_address;
  if (ptx::lane() == 0) {
    constexpr int kWarps = 4 * Config::kConsumers;
    for (int i = 0; i < Config::kQStages * Config::kConsumers; ++i) {
      ptx::mbarrier_init(shared_address(&s.q_full[0][0] + i), 1);
      ptx::mbarrier_init(shared_address(&s.q_empty[0][0] + i), 4);
    }
    ptx::mbarrier_init(shared_address(&s.tile_wanted), 1);
    for (int i = 0; i < ForwardShared<Config>::kTiles; ++i) {
      ptx::mbarrier_init(shared_address(&s.tile_full[i]), kEveryLaneArrives ? 32 : 1);
      ptx::mbarrier_init(shared_address(&s.tile_empty[i]),
                         (kEveryLaneArrives ? 32 : 1) * kWarps + 2);
    }
    for (int i = 0; i < Config::kStages; ++i) {
      ptx::mbarrier_init(shared_address(&s.k_full[i]), 1);
      ptx::mbarrier_init(shared_address(&s.k_empty[i]), kWarps);
      ptx::mbarrier_init(shared_address(&s.v_full[i]), 1);
      ptx::mbarrier_init(shared_address(&s.v_empty[i]), kWarps);
    }
    ptx::fence_mbarrier_init();
#ifdef ATTNSCOPE_FAULTS
    s.late_copy.ready = s.late_copy.done = 0;
#endif
  }
  __syncwarp();
}

// The scheduler's warp, of a dense call: describes the tile of the block's number, while another
// warp initialises the barriers, and starts the loads of its Q and of its first block of K. In a
// short call most of the time passes before the first product; nothing else is on this path.
template <class Config>
__device__ __forceinline__ void start_first_tile(const ForwardArguments& a,
                                                 ForwardShared<Config>& s) {
  const bool elected = ptx::lane() == 0;
  if (elected) {
    s.queue.tiles = 0;
    s.queue.index = blockIdx.x;
    s.queue.batch = 0;
  }
  __syncwarp();
  TileWork& w = s.tile[0];
  const bool dense = !a.packed;
  bool stop = true;
  if (dense) stop = !fill_in<Config, false>(a, s.queue, w);
  ptx::named_barrier(kLoadsMayStart, 64);
  if (dense && elected) {
    w.stop = stop;
    if (!stop && w.range.begin < w.range.end) {
#pragma unroll
      for (int i = 0; i < Config::kConsumers; ++i) load_queries<Config>(a, s, w, 0, i);
      const uint32_t full = ptx::shared_address(&s.k_full[0]);
      ptx::mbarrier_arrive_expect_tx(full, Config::kHeadsPerTile * Config::kTileBytes);
      load_keys<Config>(a, a.k, s.k[0], full, w, w.range.end - 1);
      w.loading = true;
    }
  }
  __syncwarp();
}

}  // namespace attnscope::sm90
