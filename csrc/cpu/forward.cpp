#include "cpu/forward.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/blocks.h"

namespace attnscope::cpu {

void forward(const ForwardParams& params, const ParallelFor& parallel_for) {
  const int64_t rows = params.total_q * params.heads_q;
  if (params.packed() && rows > 0) {  // rows that belong to no segment
    std::memset(params.out, 0, rows * params.head_dim_v * element_size(params.dtype));
    std::fill_n(params.lse, rows, -std::numeric_limits<float>::infinity());
  }
  const ForwardBlock kernel = block_kernels().forward;
  for_each_block(query_blocks(params), params.heads_q,
                 compute_size(params.dtype) * scratch_elements(params.head_dim, params.head_dim_v),
                 parallel_for,
                 [&](const Block& block, void* scratch) { kernel(params, block, scratch); });
}

}  // namespace attnscope::cpu
