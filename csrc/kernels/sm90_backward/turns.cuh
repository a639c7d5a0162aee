// Turns: the order in which key blocks add to dQ in a deterministic call.
//
// A warp adds the same elements of a block of dQ in every thread block. So warps take turns: the
// ticket of (query head, block of queries, consumer warp) counts the key blocks that have added.
// The last key block that a query sees adds first, the others in descending order: under a causal
// mask a tile then starts at the block of queries where its turn is the first.
//
// Progress: tiles are taken from a counter, the last key blocks of a sequence first. A tile waits
// only for tiles of later key blocks. Those were taken before, so they run or have ended, and
// the one taken first waits for none.
#pragma once

#include "kernels/sm90_backward/shared.cuh"
#include "ptx/reduce.cuh"

namespace attnscope::sm90 {

template <class Config>
class Turn {
 public:
  __device__ __forceinline__ Turn(const BackwardArguments& a, const KeyTile& t, int place,
                                  int block, int consumer)
      : a(a), t(t), place(place), block(block), consumer(consumer) {}

  // Warp-converged, like finish.
  __device__ __forceinline__ void await() const {
    if (a.tickets == nullptr) return;
    const ForwardParams& p = a.params.forward;
    const Window window{t.seqlen_k - t.seqlen_q, p.window_left, p.window_right};
    const int last_row = min((block + 1) * Config::kBlockM, t.seqlen_q) - 1;
    const int last_block = (window.end_key(last_row, t.seqlen_k) - 1) / Config::kBlockN;
    if (threadIdx.x % 32 == 0) {
      while (ptx::load_acquire(ticket()) != last_block - t.key_block) {
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void finish() const {
    if (a.tickets == nullptr) return;
    __threadfence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::red_release_add(ticket(), 1);
  }

 private:
  __device__ __forceinline__ int* ticket() const {
    return a.tickets + (int64_t{place} * Config::kConsumers + consumer) * 4 + threadIdx.x / 32 % 4;
  }

  const BackwardArguments& a;
  const KeyTile& t;
  const int place, block, consumer;
};

}  // namespace attnscope::sm90
