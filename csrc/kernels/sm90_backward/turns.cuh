// Turns: the order in which key blocks add to dQ in a deterministic call.
//
// Writers take turns: the ticket of (query head, two blocks of queries) counts the key blocks that
// have added. The last key block that a query sees adds first, the others in descending order:
// under a causal mask a tile then starts at the blocks of queries where its turn is the first. A
// turn for each block takes longer than a step at head dim 128: waits for additions, and for the
// ticket.
//
// Progress: tiles are taken from a counter, the last key blocks of a sequence first, and a thread
// block (wide: a cluster) works on its tiles in this order. A tile waits only for tiles of later
// key blocks, which were taken before. So of all tiles that have been taken and have not ended, the
// first one runs and waits for none.
#pragma once

#include "kernels/sm90_backward/shared.cuh"
#include "ptx/reduce.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"

namespace attnscope::sm90 {

// Bounds that descend (the contents of cu_seqlens are not trusted) may hide tiles: then nobody
// waits.
__device__ __forceinline__ void await_turn(const BackwardArguments& a, const int* ticket,
                                           int turn) {
  inject(Fault::kTurn, turn);
  while (kGuardedRing && ptx::load_acquire(ticket) < turn && a.counter[1] == 0) {
  }
}

// How many key blocks of kBlockN keys add to a block of kBlockM queries before tile `t` does.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ int turn_number(const BackwardArguments& a, const KeyTile& t,
                                           int block) {
  const ForwardParams& p = a.params.forward;
  const Window window{t.seqlen_k - t.seqlen_q, p.window_left, p.window_right};
  const int last_row = min((block + 1) * kBlockM, t.seqlen_q) - 1;
  return (window.end_key(last_row, t.seqlen_k) - 1) / kBlockN - t.key_block;
}

template <class Config>
struct Turns {
  __device__ __forceinline__ static int number(const BackwardArguments& a, const KeyTile& t,
                                               int block) {
    return turn_number<Config::kBlockM, Config::kBlockN>(a, t, block);
  }

  // Whether a turn of tile `t` begins at `block`.
  __device__ __forceinline__ static bool begins(const KeyTile& t, int block) {
    return block == t.begin || block % 2 == 0;
  }

  // Waits until all earlier key blocks have added to dQ of `block`, which is number `place` of all,
  // and of the other block with this turn. Returns the number of their ticket.
  __device__ __forceinline__ static int await(const BackwardArguments& a, const KeyTile& t,
                                              int place, int block) {
    const int ticket = place - block % 2;
    await_turn(a, a.tickets + ticket, number(a, t, block | 1));
    ptx::fence_proxy_async_global();
    return ticket;
  }

  // Waits for this thread's additions, and passes the turn on.
  __device__ __forceinline__ static void finish(const BackwardArguments& a, int ticket) {
    ptx::tma_store_wait<0>();
    ptx::fence_proxy_async_global();
    inject(Fault::kTurn, ticket);
    ptx::release_add(a.tickets + ticket);
  }
};

}  // namespace attnscope::sm90
