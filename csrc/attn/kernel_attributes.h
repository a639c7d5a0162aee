// What CUDA must know of a kernel before its first launch on a device.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace attnscope {

// Allows `kernel` its dynamic shared memory, `bytes`, on the current device: once for each kernel
// and device.
template <auto kernel>
cudaError_t allow_shared_memory(int bytes) {
  static std::atomic<uint64_t> allowed{0};  // bit i: device i; devices from 64 on ask every time
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (allowed.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) allowed.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

}  // namespace attnscope
