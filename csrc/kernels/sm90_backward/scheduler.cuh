// The scheduler: a warp that takes tiles and describes them for the other roles.
#pragma once

#include "kernels/sm90_backward/marks.cuh"
#include "kernels/sm90_backward/shared.cuh"
#include "kernels/sm90_backward/tiles.cuh"
#include "ptx/sync.cuh"

namespace attnscope::sm90 {

// Zeroes rows `first` to `end` of a tile of a gradient.
template <class Element>
__device__ __forceinline__ void clear_keys(const KeyTile& t, void* data, const Strides& stride,
                                           int dim, int first, int end) {
  auto* row = static_cast<Element*>(data) + t.batch * stride.batch +
              int64_t{t.k_row + first + ptx::lane()} * stride.row + t.head_kv * stride.head;
#pragma unroll 1
  for (int i = first + ptx::lane(); i < end; i += 32, row += 32 * stride.row) {
#pragma unroll 1
    for (int column = 0; column < dim; column += 8) {
      *reinterpret_cast<uint4*>(row + column) = uint4{};
    }
  }
}

template <class Config>
__device__ __forceinline__ void note_tile(const BackwardArguments& a, const Timeline& timeline,
                                          int number, const KeyTile& t) {
  timeline.note(number, BackwardSchedulerTile::kFirstHead, first_head<Config>(a, t));
  timeline.note(number, BackwardSchedulerTile::kEndHead, end_head<Config>(a, t));
  timeline.note(number, BackwardSchedulerTile::kBatch, t.batch);
  timeline.note(number, BackwardSchedulerTile::kFirstKey, t.first_key);
  timeline.note(number, BackwardSchedulerTile::kBegin, t.begin);
  timeline.note(number, BackwardSchedulerTile::kEnd, t.end);
  timeline.note(number, BackwardSchedulerTile::kStart, t.start);
  timeline.note(number, BackwardSchedulerTile::kRows, t.rows);
}

// Takes a tile only when the last one's loads have been issued: tiles taken early balance badly.
// What lives across the loop is in shared memory: the warp has few registers. Warp-converged.
template <class Config>
__device__ __forceinline__ void schedule(const BackwardArguments& a, BackwardShared<Config>& s) {
  // All tiles come from the counter.
  const bool ordered = a.tickets != nullptr || a.tile_list != nullptr;
  NextTile& next = s.next;
  const Timeline timeline(BackwardLane::kScheduler, ptx::lane() == 0);
  if (ordered) ptx::await_kernel_before();
  if (ptx::lane() == 0) {
    next.index = ordered ? ptx::atomic_add(a.counter, 1) : static_cast<int>(blockIdx.x);
    next.number = 0;
    next.key_block = a.order.m_blocks - 1;
  }
  __syncwarp();
#pragma unroll 1
  for (;;) {
    const Slot<kTileBuffers> slot(next.number);
    KeyTile& t = s.tile[slot.stage];
    timeline.tile(next.number, BackwardSchedulerTile::kAwaitSlot);
    ptx::mbarrier_wait(ptx::shared_address(&s.tile_empty[slot.stage]), slot.parity ^ 1);
    timeline.tile(next.number, BackwardSchedulerTile::kHand);
    const bool last = next.index >= a.tiles;
    if (!last) {
      describe_unit<Config>(a, next.index, next.key_block, t);
    } else if (ptx::lane() == 0) {
      t.rows = 0;
    }
    __syncwarp();
    inject(Fault::kTile, next.number);
    if (last || (t.rows > 0 && t.begin < t.end)) {
      if (kEveryLaneArrives || ptx::lane() == 0) {
        ptx::mbarrier_arrive(ptx::shared_address(&s.tile_full[slot.stage]));
      }
      if (!last) note_tile<Config>(a, timeline, next.number, t);
      timeline.tile(next.number, BackwardSchedulerTile::kAwaitRequest);
      // The kernel before zeroes the counter. No thread block ends before it.
      ptx::await_kernel_before();
      if (last) {
        timeline.finish(next.number, 0);
        return;
      }
      ptx::mbarrier_wait(ptx::shared_address(&s.tile_wanted), next.number & 1);
      __syncwarp();
      timeline.tile(next.number, BackwardSchedulerTile::kTake);
      if (ptx::lane() == 0) ++next.number;
    } else {
      // In a packed batch, some numbers have no tile. No query may see the keys of a tile.
      clear_keys<typename Config::Element>(t, a.params.dk, a.params.dk_stride,
                                           a.params.forward.head_dim, 0, t.rows);
      clear_keys<typename Config::Element>(t, a.params.dv, a.params.dv_stride,
                                           a.params.forward.head_dim_v, 0, t.rows);
      ptx::await_kernel_before();
    }
    if (ptx::lane() == 0 && (!a.whole_heads || --next.key_block < 0)) {
      next.index = ptx::atomic_add(a.counter, 1) + (ordered ? 0 : static_cast<int>(gridDim.x));
      next.key_block = a.order.m_blocks - 1;
    }
    __syncwarp();
  }
}

}  // namespace attnscope::sm90
