// Clocks and the number of the SM. PTX ISA 10 (special registers), sm_30.
#pragma once

#include <cstdint>

namespace attnscope::ptx {

// Cycles of this SM, the low 32 bits.
__device__ __forceinline__ uint32_t clock_low() {
  uint32_t cycles;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
  return cycles;
}

// Nanoseconds of the whole device; it moves on in steps of 32 or more.
__device__ __forceinline__ uint64_t global_timer() {
  uint64_t nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds)::"memory");
  return nanoseconds;
}

__device__ __forceinline__ uint32_t sm_id() {
  uint32_t id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

}  // namespace attnscope::ptx
