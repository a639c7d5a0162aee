// Barriers in shared memory that count arrivals and bytes. PTX ISA 9.7.13.15, sm_90.
#pragma once

#include <cstdint>

namespace attnscope::ptx {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to TMA.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives where `condition` is true, by a predicate rather than a branch.
__device__ __forceinline__ void mbarrier_arrive_if(uint32_t barrier, bool condition) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n"
      "}\n" ::"r"(barrier),
      "r"(static_cast<uint32_t>(condition))
      : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits for the phase of the given parity to complete. The time hint lets the hardware park the
// warp: without it a waiting warp polls, and takes issue slots from working warps.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1, %2;\n"
      "@p bra done;\n"
      "bra again;\n"
      "done:\n"
      "}\n" ::"r"(barrier),
      "r"(parity), "r"(10'000'000)
      : "memory");
}

// Whether the phase of this parity has completed. Does not wait. PTX ISA 9.7.13.15.16, sm_80.
__device__ __forceinline__ bool mbarrier_test(uint32_t barrier, int parity) {
  int completed;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.s32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(completed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return completed != 0;
}

}  // namespace attnscope::ptx
