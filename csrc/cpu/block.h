// One query block of the CPU forward: the kernel's parameters and its builds, one per instruction
// set. forward.cpp picks a build at run time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attn/params.h"

namespace attnscope::cpu {

inline constexpr int kBlockQ = 64;  // query rows per block
inline constexpr int kBlockK = 64;  // keys per step

// Rows [row, row + rows) of one segment and one head. A dense batch entry is a segment.
struct QueryBlock {
  int64_t batch;  // multiplies the batch strides; 0 when packed
  int64_t head;
  int64_t q_begin;  // the segment's first row in q and out
  int64_t k_begin;  // the segment's first row in k and v
  int64_t seqlen_q;
  int64_t seqlen_k;
  int64_t row;
  int rows;
};

// Scratch elements (of the compute type) that one call needs: queries, scores, accumulator,
// converted K and V tiles, and four numbers per row.
constexpr int64_t scratch_elements(int64_t head_dim, int64_t head_dim_v) {
  return kBlockQ * (head_dim + kBlockK + head_dim_v + 4) + kBlockK * (head_dim + head_dim_v);
}

// `scratch` must be aligned to 64 bytes.
using BlockKernel = void (*)(const ForwardParams& params, const QueryBlock& block, void* scratch);

namespace baseline {
void forward_block(const ForwardParams& params, const QueryBlock& block, void* scratch);
}
namespace avx2 {
void forward_block(const ForwardParams& params, const QueryBlock& block, void* scratch);
}
namespace avx512 {
void forward_block(const ForwardParams& params, const QueryBlock& block, void* scratch);
}

}  // namespace attnscope::cpu
