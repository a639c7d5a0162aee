// Warpgroup matrix products: ordering, and descriptors of tiles in shared memory. PTX ISA 9.7.15.
#pragma once

#include <cstdint>

#include "ptx/wgmma_shapes.cuh"

namespace attnscope::ptx {

// Required before a product that reads registers written since the last product.
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

// Descriptors of tiles in shared memory: column blocks of [rows][64] 16-bit elements under the
// 128-byte swizzle, 1024-byte aligned; a group of 8 rows is 1024 bytes. The low word encodes the
// address and `leading_bytes`, the distance between column blocks of an N-major operand (K-major
// operands ignore it). An offset is one addition, since shared addresses fit the field's 14 bits.
struct WgmmaDescriptor {
  uint32_t low;

  __device__ __forceinline__ WgmmaDescriptor(uint32_t shared, int leading_bytes)
      : low(shared >> 4 | static_cast<uint32_t>(leading_bytes >> 4) << 16) {}

  // The descriptor of the operand `bytes` later; a multiple of 16.
  __device__ __forceinline__ uint64_t at(int bytes) const {
    constexpr uint32_t kHigh = 1u << 30 | 1024 >> 4;  // 128-byte swizzle, group stride
    return static_cast<uint64_t>(kHigh) << 32 | (low + static_cast<uint32_t>(bytes >> 4));
  }
};

}  // namespace attnscope::ptx
