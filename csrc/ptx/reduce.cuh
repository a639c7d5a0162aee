// Additions in global memory, and the flags that order them. PTX ISA 9.7.13.
#pragma once

#include <cstdint>

namespace attnscope::ptx {

// Adds four floats at a 16-byte aligned address; each addition is atomic. sm_90.
__device__ __forceinline__ void red_add_v4(float* global, float x, float y, float z, float w) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(x), "f"(y),
               "f"(z), "f"(w)
               : "memory");
}

// Later accesses of this thread see what was written before the matching release.
__device__ __forceinline__ int load_acquire(const int* global) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(global) : "memory");
  return value;
}

__device__ __forceinline__ void red_release_add(int* global, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

}  // namespace attnscope::ptx
