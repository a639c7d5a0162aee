#include "cpu/forward.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "cpu/block.h"

namespace attnscope::cpu {
namespace {

// The widest kernel that this machine supports. ATTNSCOPE_CPU=avx2 or baseline narrows the choice.
BlockKernel pick_kernel() {
#if defined(__x86_64__)
  const char* asked = std::getenv("ATTNSCOPE_CPU");
  const bool baseline_only = asked && std::strcmp(asked, "baseline") == 0;
  const bool avx2_at_most = baseline_only || (asked && std::strcmp(asked, "avx2") == 0);
  __builtin_cpu_init();
  if (!avx2_at_most && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return avx512::forward_block;
  }
  if (!baseline_only && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return avx2::forward_block;
  }
#endif
  return baseline::forward_block;
}

int64_t clamp(int64_t x, int64_t low, int64_t high) { return std::max(low, std::min(x, high)); }

// Rows of one segment. The contents of cu_seqlens are not trusted.
struct Rows {
  int64_t begin;
  int64_t count;
};

Rows segment(const int32_t* cu_seqlens, int64_t b, int64_t total, int64_t max_seqlen) {
  const int64_t begin = clamp(cu_seqlens[b], 0, total);
  const int64_t end = clamp(cu_seqlens[b + 1], begin, total);
  return {begin, std::min(end - begin, max_seqlen)};
}

// The query blocks of one head, longest first within a segment: under a causal mask the last rows
// see the most keys, and a long block at the end would leave threads idle. The vector is
// thread-local and is reused by the thread's next call.
const std::vector<QueryBlock>& query_blocks(const ForwardParams& p) {
  static thread_local std::vector<QueryBlock> blocks;
  blocks.clear();
  for (int64_t b = 0; b < p.batch; ++b) {
    Rows q{0, p.seqlen_q}, k{0, p.seqlen_k};
    if (p.packed()) {
      q = segment(p.cu_seqlens_q, b, p.total_q, p.seqlen_q);
      k = segment(p.cu_seqlens_k, b, p.total_k, p.seqlen_k);
    }
    const int64_t count = (q.count + kBlockQ - 1) / kBlockQ;
    for (int64_t i = count - 1; i >= 0; --i) {
      const int64_t row = i * kBlockQ;
      const int rows = static_cast<int>(std::min<int64_t>(kBlockQ, q.count - row));
      blocks.push_back({p.packed() ? 0 : b, 0, q.begin, k.begin, q.count, k.count, row, rows});
    }
  }
  return blocks;
}

size_t element_size(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 8;
    case DType::kFloat32:
      return 4;
    default:
      return 2;
  }
}

// A thread's scratch for one block, at most 560 KiB. It is kept until the thread ends: allocating
// and freeing this size at every call fragments the heap.
void* scratch(size_t bytes) {
  struct Free {
    void operator()(void* data) const { ::operator delete(data, std::align_val_t{64}); }
  };
  static thread_local std::unique_ptr<void, Free> memory;
  static thread_local size_t size = 0;
  if (size < bytes) {
    memory.reset();
    size = 0;
    memory.reset(::operator new(bytes, std::align_val_t{64}));
    size = bytes;
  }
  return memory.get();
}

}  // namespace

void forward(const ForwardParams& params, const ParallelFor& parallel_for) {
  static const BlockKernel kernel = pick_kernel();
  const int64_t rows = params.total_q * params.heads_q;
  if (params.packed() && rows > 0) {  // rows that belong to no segment
    std::memset(params.out, 0, rows * params.head_dim_v * element_size(params.dtype));
    std::fill_n(params.lse, rows, -std::numeric_limits<float>::infinity());
  }
  const std::vector<QueryBlock>& blocks = query_blocks(params);
  const int64_t count = static_cast<int64_t>(blocks.size());
  const size_t compute_size = params.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
  const size_t scratch_bytes = compute_size * scratch_elements(params.head_dim, params.head_dim_v);

  // Blocks differ in cost, so each thread takes the next block when it is free.
  std::atomic<int64_t> next{0};
  const int64_t items = count * params.heads_q;
  parallel_for(items, [&](int64_t, int64_t) {
    void* const memory = scratch(scratch_bytes);
    for (int64_t item = next++; item < items; item = next++) {
      QueryBlock block = blocks[item % count];
      block.head = item / count;
      kernel(params, block, memory);
    }
  });
}

}  // namespace attnscope::cpu
