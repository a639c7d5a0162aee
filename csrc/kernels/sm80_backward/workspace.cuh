// The workspace of a backward call: what its three kernels pass to each other.
#pragma once

#include "attn/params.h"
#include "attn/score_scales.h"
#include "attn/seqlen.cuh"
#include "attn/tile_order.cuh"

namespace attnscope::sm80 {

// Rows of a sequence in the workspace are rounded up to this, so that kernels need no bounds.
constexpr int kWorkRows = 128;

struct BackwardWorkspace {
  int64_t rows;  // of all sequences
  int head_dim;  // of the tile
  float* lse;    // [Hq, rows]: lse log2(e); +inf where P must be 0
  float* delta;  // [Hq, rows]: rowsum(out dout) - dlse
  float* dq;     // [Hq, rows / 16, head_dim / 8, 128]: dQ / scale, m16n8 tiles as accumulators
  int* turns;    // [Hq, rows / block_m]: key blocks that have added their part, if deterministic
  int* started;  // thread blocks that have started, if deterministic
};

// What the kernels are passed besides BackwardParams.
struct BackwardCall {
  TileOrder order;  // of key blocks, over the batch and the key heads
  bool last_first;  // the last key block of a sequence comes first
  ScoreScales scores;
  float inverse_softcap;
  BackwardWorkspace workspace;
};

// The first row of a sequence. Packed sequences keep their order and start at multiples.
__device__ __forceinline__ int64_t workspace_row(const ForwardParams& p, const Segment& segment,
                                                 int batch) {
  if (p.cu_seqlens_q == nullptr) {
    return int64_t{batch} * ((p.seqlen_q + kWorkRows - 1) / kWorkRows * kWorkRows);
  }
  return (segment.row + int64_t{batch} * kWorkRows) / kWorkRows * kWorkRows;
}

}  // namespace attnscope::sm80
