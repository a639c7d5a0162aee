#include "cpu/backward.h"

#include <cstring>
#include <memory>

#include "cpu/blocks.h"

namespace attnscope::cpu {

// Two passes, so that each gradient is summed by one thread in one order: over query blocks for dq,
// then over key blocks for dk and dv. Both compute the scores.
void backward(const BackwardParams& params, const ParallelFor& parallel_for) {
  const ForwardParams& p = params.forward;
  const size_t element = element_size(p.dtype), compute = compute_size(p.dtype);
  if (p.packed()) {  // rows that belong to no segment
    const auto clear = [&](void* grad, int64_t rows, int64_t heads, int64_t dim) {
      if (rows > 0) std::memset(grad, 0, rows * heads * dim * element);
    };
    clear(params.dq, p.total_q, p.heads_q, p.head_dim);
    clear(params.dk, p.total_k, p.heads_kv, p.head_dim);
    clear(params.dv, p.total_k, p.heads_kv, p.head_dim_v);
  }
  const BlockKernels& kernels = block_kernels();
  const size_t scratch_bytes = compute * backward_scratch_elements(p.head_dim, p.head_dim_v);
  const std::unique_ptr<char[]> statistics(
      new char[kRowStatistics * p.total_q * p.heads_q * compute]);
  const auto run = [&](const std::vector<Block>& blocks, int64_t heads, BackwardBlock kernel) {
    for_each_block(blocks, heads, scratch_bytes, parallel_for,
                   [&](const Block& block, void* scratch) {
                     kernel(params, block, scratch, statistics.get());
                   });
  };
  run(query_blocks(p), p.heads_q, kernels.backward_queries);
  run(key_blocks(p), p.heads_kv, kernels.backward_keys);
}

}  // namespace attnscope::cpu
