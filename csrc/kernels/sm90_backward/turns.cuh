// Turns: the order in which key blocks add to dQ, in a deterministic call and where it is faster.
//
// A ticket counts the key blocks that have added to a block of queries of a head. Turns descend:
// the last key block that a query sees adds first. Under a causal mask a tile then starts at the
// blocks of queries where its turn is the first. A part of a tile takes part in the turns of its
// query heads alone.
//
// But with descending turns the longest tiles of a causal call come last, and its end is badly
// balanced. So in every other section of heads (`alternates`) turns ascend: tiles of key block 0,
// the longest, come and add first, and begin with the last block of queries where they have one
// query head. Who had a short tile takes a long one. It starts earlier than the next key block of
// its head, and stays ahead of it.
//
// A tile works on its query heads one after the other, and tiles of a head drift apart: under a
// causal mask the next key block has 2 blocks of 64 queries less to do in each head. L2 has to hold
// what lies between the two. In blocks, of four query heads:
//
//   turns     all forwards   all backwards   as they are
//   descend   2 4 6 8        0 2 4 6         2 2 4 6: the first head forwards
//   ascend    6 4 2 0        8 6 4 2         6 4 2 2: the last head backwards
//
// With 0 between them the second one waits for each addition of the first one.
//
// In a packed batch the sequences come one after the other, the longest first (tile_list.cuh). If
// the tiles of a sequence fill the SMs five thirds times or more, its heads come in sections of
// both directions. A shorter one has turns of one direction:
// - They descend, and its heads come one after the other. Long tiles of a sequence run beside the
//   next ones, and all that run share L2: the fewer heads the better.
// - In the last wave they ascend, so that the call ends with short tiles. All heads come together:
//   the next tile of a head starts later then, and waits less. Tiles that start at once would wait
//   for each other, and short ones would lose more than they gain: so turns of a sequence in the
//   first wave descend, and those of one whose tiles fill less than a third of the SMs.
//
// Progress: tiles are taken from a counter, those of a head in the order of its turns, and a thread
// block (wide: a cluster) works on its tiles in this order. A tile waits only for tiles that were
// taken before. So of all tiles that have been taken and have not ended, the first one runs and
// waits for none.
#pragma once

#include "kernels/sm90_backward/barriers.cuh"
#include "kernels/sm90_backward/marks.cuh"
#include "kernels/sm90_backward/shared.cuh"
#include "ptx/reduce.cuh"
#include "ptx/sync.cuh"

namespace attnscope::sm90 {

// Calls `body` with each tile of the thread block, one after the other, and with the barrier that
// releases its description. Returns how many there were. One thread.
template <class Shared, class Body>
__device__ __forceinline__ int for_each_tile(Shared& s, const Body& body,
                                             const Timeline* timeline = nullptr) {
#pragma unroll 1
  for (int n = 0;; ++n) {
    const Slot<kTileBuffers> slot(n);
    if (timeline != nullptr) timeline->tile(n, BackwardWriterTile::kAwaitTile);
    wait(s.tile_full[slot.stage], slot.parity);
    const KeyTile& t = s.tile[slot.stage];
    if (t.rows == 0) return n;
    body(t, s.tile_empty[slot.stage]);
  }
}

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

  // Waits until all earlier key blocks have added to block number `block`, and `place` of all
  // heads. Bounds that descend (the contents of cu_seqlens are not trusted) may hide tiles: then
  // nobody waits.
  __device__ __forceinline__ static void await(const BackwardArguments& a, const KeyTile& t,
                                               int place, int block) {
    const int* const counter = a.tickets + place;
    const int adders = number(a, t, block) * Config::kAdders;
    inject(Fault::kTurn, place);
    while (kGuardedRing && ptx::load_acquire(counter) < adders && a.counter[1] == 0) {
    }
  }
};

}  // namespace attnscope::sm90
