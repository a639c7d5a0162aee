// Tensor copies by TMA. PTX ISA 9.7.9.27, sm_90.
#pragma once

#include <cstdint>

namespace attnscope::ptx {

// L2 eviction policies as TMA takes them: the encodings createpolicy gives for the
// whole access.
enum class CachePolicy : uint64_t {
  kEvictFirst = 0x12F0000000000000,
  kEvictLast = 0x14F0000000000000,
};

__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A box at coordinates (x, y, z, w), innermost first; its bytes are counted on `barrier`.
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

// A box of shared memory to the coordinates, clipped to the tensor. The thread that copies waits:
// for its groups, all but the last kPending, to have been read.
__device__ __forceinline__ void tma_store_5d(const void* map, uint32_t shared, int x, int y, int z,
                                             int w, int u) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::
          "l"(map),
      "r"(shared), "r"(x), "r"(y), "r"(z), "r"(w), "r"(u)
      : "memory");
}

__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// As tma_store_wait_read, until the copies are written.
template <int kPending>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace attnscope::ptx
