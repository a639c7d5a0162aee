// Fences between proxies, warp-uniform values, register reallocation.
#pragma once

#include <cstdint>

namespace attnscope::ptx {

// Orders this thread's ordinary writes to shared memory before later reads of them by the tensor
// cores and TMA. PTX ISA 9.7.13.4, sm_90.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders accesses to global memory between ordinary instructions and TMA, in both directions.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// The lane id, read again at each call: the compiler then keeps no value derived from it in
// registers between uses.
__device__ __forceinline__ int lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// threadIdx.x, likewise.
__device__ __forceinline__ int thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// blockIdx.x, likewise.
__device__ __forceinline__ int block() {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

// Moves a warp-uniform value into a uniform register. Values computed from it (loop bounds,
// descriptors) stay on the uniform datapath. PTX ISA 9.7.13.9, sm_80.
__device__ __forceinline__ int uniform(int value) {
  int result;
  asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(value));
  return result;
}

// One thread's atomic addition; returns the value before. CUDA's atomicAdd aggregates over the warp
// first, which costs registers. PTX ISA 9.7.13.5.
__device__ __forceinline__ int atomic_add(int* global, int value) {
  int before;
  asm volatile("atom.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(global), "r"(value)
               : "memory");
  return before;
}

// Programmatic dependent launch. The next kernel of the stream may start, if it was launched so,
// once every thread block has called this or has ended. PTX ISA 9.7.13.13, sm_90.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the kernel before has ended, and its writes are visible. Returns at once in a kernel
// that was not launched so.
__device__ __forceinline__ void await_kernel_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
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
