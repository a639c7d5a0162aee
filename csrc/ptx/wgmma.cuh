// Warpgroup matrix products: ordering, and descriptors of tiles in shared memory. PTX ISA 9.7.15.
#pragma once

#include <cstdint>

#include "ptx/wgmma_shapes.cuh"

namespace attnscope::ptx {

// Before the first product that reads registers written since the last one.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses to accumulators across this point.
template <int kCount>
__device__ __forceinline__ void pin_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Tiles are column blocks of [rows][64] 16-bit elements under the 128-byte swizzle, 1024-byte aligned;
// one 8-row group is 1024 bytes. `leading_bytes` is the distance of column blocks where the operand is
// N-major; K-major operands ignore it.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t shared, int leading_bytes) {
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  constexpr uint64_t kGroupBytes = 1024;
  return kSwizzle128 | (kGroupBytes >> 4) << 32 | static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         (shared >> 4 & 0x3FFF);
}

}  // namespace attnscope::ptx
