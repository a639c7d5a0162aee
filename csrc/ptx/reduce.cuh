// Additions to global memory that return nothing, and the flags that order them. PTX ISA 9.7.13.6.
#pragma once

#include <cstdint>

namespace attnscope::ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kVectorAdd = false;
#else
constexpr bool kVectorAdd = true;
#endif

// Adds a lane's 4 floats to its share of 128 floats in global memory, which a warp fills. Where the
// hardware adds vectors, lane i's share is elements 4 i .. 4 i + 3; elsewhere i, i + 32, i + 64,
// i + 96, so that each instruction covers 128 bytes. See `warp_quad`.
__device__ __forceinline__ void add_warp_quad(float* warp_floats, int lane, const float* x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(warp_floats + lane + 32 * i),
                 "f"(x[i])
                 : "memory");
  }
#else
  asm volatile(
      "red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(warp_floats + 4 * lane),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
      : "memory");
#endif
}

// Adds to a flag after all accesses to memory before it. sm_70.
__device__ __forceinline__ void release_add(int* global, int value = 1) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

// A load before all accesses to memory after it. sm_70.
__device__ __forceinline__ int load_acquire(const int* global) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(global) : "memory");
  return value;
}

}  // namespace attnscope::ptx
