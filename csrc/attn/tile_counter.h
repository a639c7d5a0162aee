// Counters from which the blocks of a persistent kernel take their next tile.
#pragma once

#include <cuda_runtime.h>

namespace attnscope {

struct TileCounter {
  int taken;     // tiles handed out beyond the first of each block
  int finished;  // blocks that took their last
};

// A counter at zero that no kernel in flight but the caller's next launch on `stream` uses. The
// kernel leaves it at zero again, so no launch needs a memset: launches of one stream share a
// counter, and a launch under graph capture gets one of its own, for whichever stream replays it.
// Null on failure.
TileCounter* tile_counter(cudaStream_t stream);

}  // namespace attnscope
