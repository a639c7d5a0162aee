// The checker: a warp that makes V of boundary blocks safe to multiply by P = 0.
//
// In a block that only some rows of a tile see, the product computes 0 times V for the other rows,
// and 0 times NaN or infinity is NaN. TMA completes v_landed for such a block, and only this warp
// waits for that barrier. The warp sets to zero the keys that no row of the tile sees (other
// sequences, keys before a window) and elements that are not finite; then it completes v_full. At
// the end of the tile the consumers add the elements that are not finite, from global memory, to
// the rows that see them: a rare path.
#pragma once

#include "kernels/sm90_forward/producer.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"

namespace attnscope::sm90 {

// Waits for a phase of a barrier. In a build with injected faults the warp issues late copies while
// it waits. Warp-converged.
template <class Config>
__device__ __forceinline__ void wait_and_serve(const ForwardArguments& a, ForwardShared<Config>& s,
                                               uint64_t& barrier, int parity) {
#ifdef ATTNSCOPE_FAULTS
  const uint32_t address = ptx::shared_address(&barrier);
  while (!__all_sync(0xffffffffu, ptx::mbarrier_test(address, parity))) {
    issue_late_copy<Config>(a, s);
  }
#else
  ptx::mbarrier_wait(ptx::shared_address(&barrier), parity);
#endif
}

// Two elements in a word, each set to zero if it is NaN or infinite.
template <class Element>
__device__ __forceinline__ uint32_t finite_or_zero(uint32_t pair) {
  constexpr uint32_t kExponent = ptx::kExponentBits<Element>;
  uint32_t result = pair;
  if ((pair & kExponent) == kExponent) result &= 0xffff0000u;
  if ((pair >> 16 & kExponent) == kExponent) result &= 0x0000ffffu;
  return result;
}

// One V tile: [kBlockN, kColumns], swizzled 128 bytes. Rows outside [valid_begin, valid_end) become
// zero, as do elements that are not finite. True if there were any. Warp-converged.
template <class Config>
__device__ __forceinline__ bool make_finite(uint32_t v, int valid_begin, int valid_end) {
  using Element = typename Config::Element;
  const int lane = threadIdx.x % 32;
  // A lane's 16 bytes of row lane / 8; the tile is cut into steps of four rows.
  constexpr int kSteps = Config::kColumns / 64 * Config::kBlockN / 4;
  if (valid_begin > 0 || valid_end < Config::kBlockN) {
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      const int row = step % (Config::kBlockN / 4) * 4 + lane / 8;
      if (row < valid_begin || row >= valid_end) {
        ptx::store_shared_v4(v + (step * 32 + lane) * 16, uint4{});
      }
    }
    ptx::fence_proxy_async();
  }
  uint32_t x = 0, y = 0, z = 0, w = 0;  // 0 times an element, summed: NaN if one is not finite
#pragma unroll 2
  for (int step = 0; step < kSteps; ++step) {
    const uint4 values = ptx::load_shared_v4(v + (step * 32 + lane) * 16);
    x = ptx::fma_zero<Element>(values.x, x);
    y = ptx::fma_zero<Element>(values.y, y);
    z = ptx::fma_zero<Element>(values.z, z);
    w = ptx::fma_zero<Element>(values.w, w);
  }
  const bool finite = ((x | y | z | w) & 0x7fff7fffu) == 0;
  if (__all_sync(0xffffffffu, finite)) return false;
#pragma unroll 1
  for (int step = 0; step < kSteps; ++step) {
    uint4 values = ptx::load_shared_v4(v + (step * 32 + lane) * 16);
    values.x = finite_or_zero<Element>(values.x);
    values.y = finite_or_zero<Element>(values.y);
    values.z = finite_or_zero<Element>(values.z);
    values.w = finite_or_zero<Element>(values.w);
    ptx::store_shared_v4(v + (step * 32 + lane) * 16, values);
  }
  ptx::fence_proxy_async();
  return true;
}

template <class Config>
__device__ __forceinline__ void check_values(const ForwardArguments& a, ForwardShared<Config>& s) {
  using ptx::shared_address;
  using Ring = Slot<Config::kStages>;
  const bool elected = threadIdx.x % 32 == 0;
  int tiles = 0, blocks = 0;  // uses of the rings so far
  uint32_t parities = 0;      // bit i: the parity of v_landed[i]; it counts only checked uses
  while (true) {
    const Slot<ForwardShared<Config>::kTiles> slot(tiles++);
    wait_and_serve<Config>(a, s, s.tile_full[slot.stage], slot.parity);
    const TileWork& w = s.tile[slot.stage];
    if (w.stop) break;
#pragma unroll 1
    for (int block = w.range.end - 1; block >= w.range.begin; --block, ++blocks) {
      if (!is_checked(a, w, block)) continue;
      const int stage = Ring(blocks).stage;
      wait_and_serve<Config>(a, s, s.v_landed[stage], parities >> stage & 1);
      parities ^= 1u << stage;
      inject(Fault::kCheck, blocks);
      bool not_finite = false;
#pragma unroll 1
      for (int i = 0; i < Config::kHeadsPerTile; ++i) {
        not_finite |= make_finite<Config>(shared_address(s.v[stage][i]),
                                          w.first_key - block * Config::kBlockN,
                                          w.seqlen_k - block * Config::kBlockN);
      }
      if (elected && not_finite) s.v_not_finite[slot.stage] = 1;
      __syncwarp();
      if (elected) ptx::mbarrier_arrive(shared_address(&s.v_full[stage]));
    }
    inject(Fault::kReleaseTile, tiles);
    ptx::mbarrier_arrive(shared_address(&s.tile_empty[slot.stage]));
  }
#ifdef ATTNSCOPE_FAULTS
  while (volatile_load(s.late_copy.ready)) issue_late_copy<Config>(a, s);
#endif
}

// Adds the elements that make_finite removed to the rows that see them. P > 0 there, so each counts
// as itself. Called after the warp has stored its 16 rows; changes them in global memory.
// Warp-converged.
template <class Config>
__device__ __forceinline__ void add_not_finite(const ForwardArguments& a, const TileWork& w,
                                               int consumer) {
  using Element = typename Config::Element;
  const ForwardParams& p = a.params;
  const Window window{w.shift, p.window_left, p.window_right};
  const int lane = ptx::lane();
  const int tile_head = Config::head_of(consumer);
  const Element* v = static_cast<const Element*>(p.v) + w.batch * p.v_stride.batch +
                     key_head<Config>(a, w, tile_head) * p.v_stride.head;
  if (lane == 0) ptx::tma_store_wait<0>();
  ptx::fence_proxy_async_global();
  __syncwarp();
  const int first_row = Config::unit_of(consumer) * 64 + threadIdx.x % 128 / 32 * 16;
#pragma unroll 1
  for (int row = first_row; row < min(first_row + 16, w.end_row - w.first_row); ++row) {
    const int query = grouping<Config>(a).query(w.first_row + row);
    const int begin = window.first_key(query), end = window.end_key(query, w.seqlen_k);
    Element* out = static_cast<Element*>(p.out) + w.batch * p.out_stride.batch +
                   (w.q_row + grouping<Config>(a).query(row)) * p.out_stride.row +
                   (w.head + tile_head + grouping<Config>(a).head(row)) * p.out_stride.head;
#pragma unroll 1
    for (int column = lane; column < p.head_dim_v; column += 32) {
      float sum = 0.0f;
#pragma unroll 1
      for (int key = begin; key < end; ++key) {
        if (!is_checked(a, w, key / Config::kBlockN)) continue;
        const float value = static_cast<float>(v[int64_t{w.k_row + key} * p.v_stride.row + column]);
        if (!(fabsf(value) <= FLT_MAX)) sum += value;
      }
      if (sum != 0.0f) out[column] = Element(static_cast<float>(out[column]) + sum);
    }
  }
}

}  // namespace attnscope::sm90
