// Turns: the order in which key blocks add to dQ in a deterministic call.
//
// A ticket counts the key blocks that have added to a block of queries of a head, or to two, see
// `turn_mask`. Turns descend: the last key block that a query sees adds first. Under a causal mask
// a tile then starts at the blocks of queries where its turn is the first. A part of a tile takes
// part in the turns of its query heads alone.
//
// But with descending turns the longest tiles of a causal call come last, and its end is badly
// balanced. So in every other section of heads (`alternates`) turns ascend: tiles of key block 0,
// the longest, come and add first, and go through the queries from the last block to the first.
// Who had a short tile takes a long one. It starts earlier than the next key block of its head, and
// stays ahead of it.
//
// In a packed batch the sequences come one after the other. If the tiles of a sequence fill the SMs
// one and a half times, its heads come in sections of both directions. If they fill three quarters
// of the SMs, the sequence is a section itself, and ascends if the tiles before it fill the SMs an
// odd number of times. Tiles of a shorter one descend: those of the next fill the gaps at its end.
//
// One thread waits for the turns, ahead of who adds dQ. Who waits for the ticket, and then for its
// own additions, has little time left for dQ.
//
// Progress: tiles are taken from a counter, those of a head in the order of its turns, and a thread
// block (wide: a cluster) works on its tiles in this order. A tile waits only for tiles that were
// taken before. So of all tiles that have been taken and have not ended, the first one runs and
// waits for none.
#pragma once

#include "kernels/sm90_backward/barriers.cuh"
#include "kernels/sm90_backward/shared.cuh"
#include "ptx/reduce.cuh"
#include "ptx/sync.cuh"

namespace attnscope::sm90 {

template <class Config>
struct Turns {
  // How many key blocks add to a block of queries before tile `t` does.
  __device__ __forceinline__ static int number(const BackwardArguments& a, const KeyTile& t,
                                               int block) {
    const ForwardParams& p = a.params.forward;
    const Window window{t.seqlen_k - t.seqlen_q, p.window_left, p.window_right};
    const int last_row = min((block + 1) * Config::kBlockM, t.seqlen_q) - 1;
    const int after = (window.end_key(last_row, t.seqlen_k) - 1) / Config::kBlockN - t.key_block;
    return t.direction < 0 ? t.key_block : after;  // where turns ascend, no key is hidden before
  }

  // Whether a turn of tile `t` begins at `block`.
  __device__ __forceinline__ static bool begins(const BackwardArguments& a, const KeyTile& t,
                                                int block) {
    return block == t.start || (block & a.turn_mask) == (t.direction < 0 ? a.turn_mask : 0);
  }

  // The number of the ticket of a block of queries, which is number `place` of all.
  __device__ __forceinline__ static int ticket(const BackwardArguments& a, int place, int block) {
    return place - (block & a.turn_mask);
  }

  // Waits until all earlier key blocks have added to all blocks of the turn that begins at `block`.
  // Bounds that descend (the contents of cu_seqlens are not trusted) may hide tiles: then nobody
  // waits.
  __device__ __forceinline__ static void await(const BackwardArguments& a, const KeyTile& t,
                                               int place, int block) {
    const int* const counter = a.tickets + ticket(a, place, block);
    const int adders = number(a, t, block | a.turn_mask) * Config::kAdders;
    inject(Fault::kTurn, place);
    while (kGuardedRing && ptx::load_acquire(counter) < adders && a.counter[1] == 0) {
    }
  }
};

// Waits for all turns of a thread block, one after the other. One thread.
template <class Config, class Shared>
__device__ __forceinline__ void await_turns(const BackwardArguments& a, Shared& s) {
  using Turns = sm90::Turns<Config>;
  int turns = 0;
  ptx::await_kernel_before();
#pragma unroll 1
  for (int n = 0;; ++n) {
    const Slot<kTileBuffers> slot(n);
    wait(s.tile_full[slot.stage], slot.parity);
    const KeyTile& t = s.tile[slot.stage];
    if (t.rows == 0) return;
    // Read before the last turn of the tile has come: then the description may change.
    const int start = t.start, begin = t.begin, end = t.end, direction = t.direction;
    const int heads = head_count<Config>(a, t);
    int place = first_place<Config>(a, t);
#pragma unroll 1
    for (int head = 0; head < heads; ++head, place += a.query_blocks) {
#pragma unroll 1
      for (int block = start; block >= begin && block < end;
           block = direction < 0 ? (block & ~a.turn_mask) - 1 : (block | a.turn_mask) + 1) {
        Turns::await(a, t, place + block, block);
        wait(s.turn_empty, turns & 1 ^ 1);
        ptx::mbarrier_arrive(ptx::shared_address(&s.turn_full));
        ++turns;
      }
    }
  }
}

}  // namespace attnscope::sm90
