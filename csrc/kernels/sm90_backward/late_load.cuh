// Copies that arrive after later copies, see attn/faults.cuh: a producer leaves one in shared
// memory and goes on; another thread issues it. Empty unless -DATTNSCOPE_FAULTS.
#pragma once

#include "kernels/sm90_backward/shared.cuh"

namespace attnscope::sm90 {

#ifdef ATTNSCOPE_FAULTS
__device__ __forceinline__ int volatile_load(const int& shared) {
  return *static_cast<const volatile int*>(&shared);
}

__device__ __forceinline__ void volatile_store(int& shared, int value) {
  *static_cast<volatile int*>(&shared) = value;
}

// True if the copy waits in shared memory, which has room for one. `count`: of the operand's
// copies.
template <class Shared>
__device__ __forceinline__ bool is_late(Shared& s, Operand operand, int count, int stage, int head,
                                        int block, int tile, int part = 0) {
  const uint32_t cycles = fault_cycles(Fault::kLateCopy, 4 * count + static_cast<int>(operand));
  if (cycles == 0 || volatile_load(s.late_load.ready)) return false;
  s.late_load = {0, 0, operand, stage, head, block, tile, part, ptx::clock_low(), cycles};
  __threadfence_block();
  volatile_store(s.late_load.ready, 1);
  return true;
}

template <class Shared>
__device__ __forceinline__ void init_late_loads(Shared& s) {
  s.late_load.ready = s.late_load.done = 0;
}

// The producer has no more copies.
template <class Shared>
__device__ __forceinline__ void finish_late_loads(Shared& s) {
  while (volatile_load(s.late_load.ready)) {
  }
  volatile_store(s.late_load.done, 1);
}

// Issues each copy once its delay is over.
template <class Shared, class Issue>
__device__ __forceinline__ void issue_late_loads(Shared& s, const Issue& issue) {
  while (!volatile_load(s.late_load.done)) {
    if (!volatile_load(s.late_load.ready)) continue;
    __threadfence_block();
    const LateLoad copy = s.late_load;
    while (ptx::clock_low() - copy.start < copy.cycles) {
    }
    issue(copy);
    volatile_store(s.late_load.ready, 0);
  }
}

#else

template <class Shared>
__device__ __forceinline__ bool is_late(Shared&, Operand, int, int, int, int, int, int = 0) {
  return false;
}

template <class Shared>
__device__ __forceinline__ void init_late_loads(Shared&) {}

template <class Shared>
__device__ __forceinline__ void finish_late_loads(Shared&) {}

#endif

}  // namespace attnscope::sm90
