// Who stores the first part of dQ of a block of queries in place of adding it: then nobody zeroes
// dQ before. A small dQ is zeroed instead, see launch.cu.
//
// The claim of (query head, block of queries) is 0, then counts the writers who might be first, and
// has kStored added once the part is in global memory. Who takes 0 from it stores, the others wait
// until it is stored, and add. In a call with turns the first in turn stores, and marks the
// claim for the postprocess alone: a block that nobody has claimed sees no key.
//
// Under a causal mask tiles start at different blocks of queries. Without a right bound of the
// window all tiles would start at the first one, and wait: so each starts where its keys are, and
// comes to the blocks before at the end.
//
// Progress: between taking 0 and adding kStored a writer waits for nothing but its own store. So
// the others wait for a thread that runs, in whatever order thread blocks come.
#pragma once

#include "kernels/sm90_backward/shared.cuh"
#include "ptx/reduce.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"

namespace attnscope::sm90 {

inline constexpr int kStored = 1 << 16;  // more than there are writers

// Whether the first part of block number `place` is stored: then the caller may add.
__device__ __forceinline__ bool is_stored(const BackwardArguments& a, int place) {
  if (ptx::load_acquire(a.claims + place) < kStored) return false;
  ptx::fence_proxy_async_global();
  return true;
}

// True for who is first. Otherwise waits until the first part is stored.
__device__ __forceinline__ bool claim(const BackwardArguments& a, int place) {
  inject(Fault::kAdd, 4 * place + 1);
  if (ptx::atomic_add(a.claims + place, 1) == 0) return true;
  while (!is_stored(a, place)) {
  }
  return false;
}

// After this thread's store of the first part.
__device__ __forceinline__ void publish_claim(const BackwardArguments& a, int place) {
  ptx::tma_store_wait<0>();
  ptx::fence_proxy_async_global();
  inject(Fault::kAdd, 4 * place + 2);
  ptx::release_add(a.claims + place, kStored);
}

}  // namespace attnscope::sm90
