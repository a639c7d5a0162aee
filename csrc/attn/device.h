// Attributes of a device, queried once and cached. Host only.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace attnscope {

inline constexpr int kMaxDevices = 64;

struct DeviceFacts {
  int device;  // -1: unknown
  int major;   // compute capability
  int sms;
};

// The current device. Only the first call queries its attributes. Makes the device's context
// current in a thread that has not used CUDA yet, as autograd's may not: the encoder of tensor
// maps, a driver function, needs one.
inline DeviceFacts current_device() {
  static std::atomic<int> known[kMaxDevices];  // 0: not yet; otherwise major << 16 | sms
  int device = -1;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= kMaxDevices) {
    return {-1, 0, 0};
  }
  static thread_local int bound = -1;
  if (device != bound) {
    if (cudaSetDevice(device) != cudaSuccess) return {-1, 0, 0};
    bound = device;
  }
  int packed = known[device].load(std::memory_order_relaxed);
  if (packed == 0) {
    int major = 0, sms = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
      return {-1, 0, 0};
    }
    packed = major << 16 | sms;
    known[device].store(packed, std::memory_order_relaxed);
  }
  return {device, packed >> 16, packed & 0xffff};
}

// The devices that allow a kernel its dynamic shared memory: bit i is device i.
using AllowedDevices = std::atomic<uint64_t>;

// The kernels of the rows of a tile table.
template <class Kernel, int kRows>
struct KernelTable {
  Kernel kernel[kRows];
  AllowedDevices allowed[kRows];
};

// Allows `kernel` `bytes` of dynamic shared memory; calls CUDA once for each kernel and device.
template <class Kernel>
cudaError_t allow_shared_memory(Kernel* kernel, AllowedDevices& allowed, int device, int bytes) {
  if (device < 0) return cudaErrorInvalidDevice;
  const uint64_t bit = uint64_t{1} << device;
  if (allowed.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) allowed.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

}  // namespace attnscope
