// Counters from which the blocks of a persistent kernel take their next tile.
#pragma once

#include <cuda_runtime.h>

namespace attnscope {

struct TileCounter {
  int taken;     // tiles handed out beyond the first of each block
  int finished;  // blocks that took their last
};

// A counter at zero that no kernel in flight uses but the next launch on `stream`. The kernel
// leaves it at zero, so that no launch needs a memset: launches on one stream share a counter. A
// launch under graph capture gets one of its own, for whichever stream replays it.
//
// Limit: one captured launch must not run twice at the same time, as by two executable graphs of
// one graph. Both would take their tiles from one counter.
cudaError_t tile_counter(int device, cudaStream_t stream, TileCounter** counter);

}  // namespace attnscope
