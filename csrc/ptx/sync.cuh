// Barriers among some of a block's warps, fences between proxies, register reallocation.
#pragma once

#include <cstdint>

namespace attnscope::ptx {

// Named barriers. PTX ISA 9.7.13.1.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Orders this thread's ordinary writes to shared memory before later reads of them by the tensor
// cores and TMA. PTX ISA 9.7.13.4, sm_90.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for global memory, in both directions.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// The thread's number in its warp, read anew at each call: what is computed from it is not kept in
// registers from one use to the next.
__device__ __forceinline__ int lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// A value that all lanes of the warp hold alike, brought into a uniform register: what is computed
// from it (loop bounds, descriptors) stays on the uniform datapath. PTX ISA 9.7.13.9, sm_80.
__device__ __forceinline__ int uniform(int value) {
  int result;
  asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(value));
  return result;
}

// One thread's atomic addition; returns the value before. (The compiler's own atomicAdd gathers the
// additions of a warp first, at a cost in registers.) PTX ISA 9.7.13.5.
__device__ __forceinline__ int atomic_add(int* global, int value) {
  int before;
  asm volatile("atom.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(global), "r"(value)
               : "memory");
  return before;
}

// Moves registers between warpgroups; every warp of the warpgroup executes it. PTX ISA 9.7.19.5.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace attnscope::ptx
