// Thread block clusters: ranks, shared memory of other blocks, copies to it. PTX ISA 9.7.13, sm_90.
#pragma once

#include <cstdint>

#include "ptx/tma.cuh"

namespace attnscope::ptx {

// This block's number in its cluster.
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A barrier among all threads of the cluster; accesses before it are visible after it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address, in the cluster's window, of what lies at `shared` in block `rank`.
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared, int rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}

// Arrives at a barrier of any block of the cluster where `condition` is true.
__device__ __forceinline__ void cluster_arrive_if(uint32_t address, bool condition) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cluster.b64 _, [%0];\n"
      "}\n" ::"r"(address),
      "r"(static_cast<uint32_t>(condition))
      : "memory");
}

// Copies bytes of this block's shared memory to another block's; its `barrier` counts them. Both
// addresses in the cluster's window and `bytes` are multiples of 16.
__device__ __forceinline__ void cluster_copy(uint32_t to, uint32_t from, int bytes,
                                             uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// tma_load_4d into the same place of each block in `mask`; each block's `barrier` counts the bytes.
__device__ __forceinline__ void tma_multicast_4d(uint32_t shared, const void* map, uint32_t barrier,
                                                 CachePolicy policy, uint16_t mask, int x, int y,
                                                 int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::"r"(
          shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "h"(mask),
      "l"(static_cast<uint64_t>(policy))
      : "memory");
}

}  // namespace attnscope::ptx
