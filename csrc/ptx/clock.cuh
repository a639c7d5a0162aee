// Clocks and the SM's id. PTX ISA 10 (special registers), sm_30.
#pragma once

#include <cstdint>

namespace attnscope::ptx {

// The low 32 bits of this SM's cycle counter.
__device__ __forceinline__ uint32_t clock_low() {
  uint32_t cycles;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
  return cycles;
}

// Nanoseconds, one clock for the whole device. It advances in steps of 32 ns or more.
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
