// The start of a thread block: its barriers, and its first tile, before the roles begin.
//
// In a short call most of the time passes before the first product. The first tile is the block's
// own number, so nothing is taken from a counter: a warp describes it while another initialises the
// barriers, then loads Q and the first block of K. All this code is at the kernel's entry: the code
// of a role is far away, and the first fetch of code from there takes as long as one from memory.
#pragma once

#include "kernels/sm90_forward/producer.cuh"
#include "kernels/sm90_forward/scheduler.cuh"

namespace attnscope::sm90 {

// By one thread.
template <class Config>
__device__ __forceinline__ void init_barriers(ForwardShared<Config>& s) {
  using ptx::shared_address;
  constexpr int kWarps = 4 * Config::kConsumers;
  for (int i = 0; i < Config::kQStages * Config::kUnits; ++i) {
    ptx::mbarrier_init(shared_address(&s.q_full[0][0] + i), 1);
    ptx::mbarrier_init(shared_address(&s.q_empty[0][0] + i), 4 * Config::kKeyParts);
  }
  ptx::mbarrier_init(shared_address(&s.tile_wanted), 1);
  for (int i = 0; i < ForwardShared<Config>::kTiles; ++i) {
    ptx::mbarrier_init(shared_address(&s.tile_full[i]), kEveryLaneArrives ? 32 : 1);
    ptx::mbarrier_init(shared_address(&s.tile_empty[i]), (kEveryLaneArrives ? 32 : 1) * kWarps + 2);
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

// By the scheduler's warp. Without kPackedAtEntry a packed batch has its first tile described by
// `schedule`.
template <class Config>
__device__ __forceinline__ void describe_first_tile(const ForwardArguments& a,
                                                    ForwardShared<Config>& s) {
  const bool elected = ptx::lane() == 0;
  if (elected) {
    s.queue.tiles = 0;
    s.queue.index = blockIdx.x;
    s.queue.batch = 0;
    s.queue.turn = 0;
  }
  __syncwarp();
  if (!Config::kPackedAtEntry && a.packed) return;
  if (Config::kPackedAtEntry && a.packed) count_tiles<Config>(a, s.queue, 0);
  const bool stop = !fill_in<Config, Config::kPackedAtEntry>(a, s.queue, s.tile[0]);
  if (elected) {
    s.tile[0].stop = stop;
    s.tile[0].loading = !stop && s.tile[0].range.begin < s.tile[0].range.end;
  }
}

// By the scheduler's warp, after the barriers are ready: hands out the first tile and loads its Q
// and its first block of K. `schedule` does so where `loading` is false.
template <class Config>
__device__ __forceinline__ void hand_first_tile(const ForwardArguments& a,
                                                ForwardShared<Config>& s) {
  const TileWork& w = s.tile[0];
  if ((!Config::kPackedAtEntry && a.packed) || !w.loading) return;
  const bool elected = threadIdx.x % 32 == 0;
  inject(Fault::kTile, 0);
  if (kEveryLaneArrives || elected) ptx::mbarrier_arrive(ptx::shared_address(&s.tile_full[0]));
  if (!elected) return;
#pragma unroll
  for (int i = 0; i < Config::kUnits; ++i) load_queries<Config>(a, s, w, 0, i);
  const uint32_t full = ptx::shared_address(&s.k_full[0]);
  ptx::mbarrier_arrive_expect_tx(full, sizeof(s.k[0]));
  load_keys<Config>(a, a.k, s.k[0], full, w, w.range.end - 1);
}

}  // namespace attnscope::sm90
