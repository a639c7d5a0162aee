// How consumers wait on mbarriers, and arrive.
#pragma once

#include "attn/faults.cuh"
#include "ptx/address.cuh"
#include "ptx/mbarrier.cuh"

namespace attnscope::sm90 {

__device__ __forceinline__ void wait(uint64_t& barrier, int parity) {
  ptx::mbarrier_wait(ptx::shared_address(&barrier), parity);
}

// Does not wait. The phase before has been waited for, as wait() needs too.
__device__ __forceinline__ bool has_completed(uint64_t& barrier, int parity) {
  return ptx::mbarrier_test(ptx::shared_address(&barrier), parity);
}

// One arrival a warp, after all of its lanes have read or written. Predicated, as in the forward.
__device__ __forceinline__ void release(uint64_t& barrier) {
  __syncwarp();
  ptx::mbarrier_arrive_if(ptx::shared_address(&barrier),
                          kEveryLaneArrives || threadIdx.x % 32 == 0);
}

__device__ __forceinline__ void release_if(uint64_t& barrier, bool condition) {
  __syncwarp();
  ptx::mbarrier_arrive_if(ptx::shared_address(&barrier),
                          (kEveryLaneArrives || threadIdx.x % 32 == 0) && condition);
}

}  // namespace attnscope::sm90
