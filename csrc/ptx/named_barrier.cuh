// Barriers among some warps of a thread block. PTX ISA 9.7.13.1.
#pragma once

namespace attnscope::ptx {

// Barrier `id` of 16 (0 is __syncthreads) for `threads` threads, whole warps. Warps may reach it at
// different places of the program.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at the barrier and does not wait. PTX ISA 9.7.13.1.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace attnscope::ptx
