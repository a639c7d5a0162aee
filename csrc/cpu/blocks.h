// The blocks of a call and how threads share them, for the forward and the backward.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "cpu/block.h"
#include "cpu/forward.h"

namespace attnscope::cpu {

// The build for the widest instruction set of this machine. ATTNSCOPE_CPU=avx2 or baseline narrows
// the choice.
const BlockKernels& block_kernels();

// The blocks of one head. Each function has one vector per thread, which its next call reuses.
const std::vector<Block>& query_blocks(const ForwardParams& p);
const std::vector<Block>& key_blocks(const ForwardParams& p);

// Calls body(block, scratch) for each block of each head. Each thread has `scratch_bytes` of its
// own, aligned to 64 bytes.
void for_each_block(const std::vector<Block>& blocks, int64_t heads, size_t scratch_bytes,
                    const ParallelFor& parallel_for,
                    const std::function<void(const Block&, void*)>& body);

size_t element_size(DType dtype);
// Size of the type in which a dtype's sums are computed.
size_t compute_size(DType dtype);

}  // namespace attnscope::cpu
