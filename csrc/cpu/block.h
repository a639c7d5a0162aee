// One block of queries or keys on the CPU: the kernels' parameters and their builds, one per
// instruction set. blocks.cpp picks a build at run time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attn/params.h"

namespace attnscope::cpu {

inline constexpr int kBlockQ = 64;  // query rows per block
inline constexpr int kBlockK = 64;  // keys per step
static_assert(kBlockQ == kBlockK, "the backward's key blocks have the size of its query blocks");

// Rows [row, row + rows) of one segment and one head: of its queries, or of its keys in a key block
// of the backward. A dense batch entry is a segment.
struct Block {
  int64_t batch;    // multiplies the batch strides; 0 when packed
  int64_t head;     // of the queries, or of the keys
  int64_t q_begin;  // the segment's first row in q and out
  int64_t k_begin;  // the segment's first row in k and v
  int64_t seqlen_q;
  int64_t seqlen_k;
  int64_t row;
  int rows;
};

// Scratch elements (of the compute type) that one forward block needs: queries, scores,
// accumulator, converted K and V tiles, and four numbers per row.
constexpr int64_t scratch_elements(int64_t head_dim, int64_t head_dim_v) {
  return kBlockQ * (head_dim + kBlockK + head_dim_v + 4) + kBlockK * (head_dim + head_dim_v);
}

// The same for a backward block: two transposed operands, two accumulators, two converted tiles,
// probabilities and score gradients, and four numbers per row.
constexpr int64_t backward_scratch_elements(int64_t head_dim, int64_t head_dim_v) {
  return kBlockQ * (3 * (head_dim + head_dim_v) + 2 * kBlockK + 4);
}

// Numbers of the compute type per query row, in the layout of lse, that the query blocks of a
// backward write and its key blocks read: row max, weight and delta, one plane after the other.
inline constexpr int kRowStatistics = 3;

// `scratch` must be aligned to 64 bytes.
using ForwardBlock = void (*)(const ForwardParams& params, const Block& block, void* scratch);
using BackwardBlock = void (*)(const BackwardParams& params, const Block& block, void* scratch,
                               void* statistics);

struct BlockKernels {
  ForwardBlock forward;
  BackwardBlock backward_queries;  // dq and the row statistics
  BackwardBlock backward_keys;     // dk and dv
};

namespace baseline {
extern const BlockKernels kBlockKernels;
}
namespace avx2 {
extern const BlockKernels kBlockKernels;
}
namespace avx512 {
extern const BlockKernels kBlockKernels;
}

}  // namespace attnscope::cpu
