// Copies by TMA: of tensors, and of contiguous bytes. PTX ISA 9.7.9.27 and 9.7.9.25, sm_90.
#pragma once

#include <cstdint>

namespace attnscope::ptx {

// L2 eviction policies: the encodings that createpolicy returns for a whole access.
enum class CachePolicy : uint64_t {
  kEvictFirst = 0x12F0000000000000,
  kEvictLast = 0x14F0000000000000,
};

__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads the box at coordinates (x, y, z, w), innermost first; `barrier` counts its bytes.
__device__ __forceinline__ void tma_load_4d(uint32_t shared, const void* map, uint32_t barrier,
                                            CachePolicy policy, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "l"(static_cast<uint64_t>(policy))
      : "memory");
}

__device__ __forceinline__ void tma_load_5d(uint32_t shared, const void* map, uint32_t barrier,
                                            CachePolicy policy, int x, int y, int z, int w, int u) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(u),
      "l"(static_cast<uint64_t>(policy))
      : "memory");
}

// Loads contiguous bytes; addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, int bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// Stores a box of shared memory at the coordinates, innermost first, clipped to the tensor.
__device__ __forceinline__ void tma_store_4d(const void* map, uint32_t shared, int x, int y, int z,
                                             int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(shared), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

__device__ __forceinline__ void tma_store_5d(const void* map, uint32_t shared, int x, int y, int z,
                                             int w, int u) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::
          "l"(map),
      "r"(shared), "r"(x), "r"(y), "r"(z), "r"(w), "r"(u)
      : "memory");
}

// Stores contiguous floats of shared memory; addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void bulk_store(float* global, uint32_t shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared), "r"(bytes)
               : "memory");
}

// Adds contiguous floats of shared memory to global memory; addresses and `bytes` are multiples of
// 16. Each addition is atomic.
__device__ __forceinline__ void bulk_add(float* global, uint32_t shared, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
      "r"(shared), "r"(bytes)
      : "memory");
}

__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but this thread's last kPending groups of stores are read from shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until all but this thread's last kPending groups of stores are written.
template <int kPending>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace attnscope::ptx
