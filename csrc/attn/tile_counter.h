// Counters from which the blocks of a persistent kernel take their next tile.
#pragma once

#include <cuda_runtime.h>

namespace attnscope {

struct TileCounter {
  int taken;     // tiles handed out beyond the first of each block
  int finished;  // blocks that took their last
};

// The counter of a stream, at zero. Only launches on `stream` use it, one after the other. The
// kernel leaves it at zero, so that no launch needs a memset.
//
// Null under graph capture: the launch then takes its tiles in a fixed order. A graph may be
// instantiated twice, or cloned into another graph, and both may run at the same time with one set
// of launch parameters.
cudaError_t tile_counter(int device, cudaStream_t stream, TileCounter** counter);

}  // namespace attnscope
