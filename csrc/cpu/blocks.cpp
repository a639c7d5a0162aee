#include "cpu/blocks.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace attnscope::cpu {
namespace {

const BlockKernels& pick_kernels() {
#if defined(__x86_64__)
  const char* asked = std::getenv("ATTNSCOPE_CPU");
  const bool baseline_only = asked && std::strcmp(asked, "baseline") == 0;
  const bool avx2_at_most = baseline_only || (asked && std::strcmp(asked, "avx2") == 0);
  __builtin_cpu_init();
  if (!avx2_at_most && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return avx512::kBlockKernels;
  }
  if (!baseline_only && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return avx2::kBlockKernels;
  }
#endif
  return baseline::kBlockKernels;
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

// Longest first within a segment, because a long block at the end would leave threads idle: under a
// causal mask the last queries see the most keys, and the first keys are seen most.
void fill_blocks(const ForwardParams& p, bool of_keys, std::vector<Block>* blocks) {
  blocks->clear();
  for (int64_t b = 0; b < p.batch; ++b) {
    Rows q{0, p.seqlen_q}, k{0, p.seqlen_k};
    if (p.packed()) {
      q = segment(p.cu_seqlens_q, b, p.total_q, p.seqlen_q);
      k = segment(p.cu_seqlens_k, b, p.total_k, p.seqlen_k);
    }
    const int64_t rows = of_keys ? k.count : q.count;
    const int64_t count = (rows + kBlockQ - 1) / kBlockQ;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = (of_keys ? i : count - 1 - i) * kBlockQ;
      const int taken = static_cast<int>(std::min<int64_t>(kBlockQ, rows - row));
      blocks->push_back({p.packed() ? 0 : b, 0, q.begin, k.begin, q.count, k.count, row, taken});
    }
  }
}

// A thread's scratch for one block, at most 855 KiB. It is kept until the thread ends: allocating
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

const BlockKernels& block_kernels() {
  static const BlockKernels& kernels = pick_kernels();
  return kernels;
}

const std::vector<Block>& query_blocks(const ForwardParams& p) {
  static thread_local std::vector<Block> blocks;
  fill_blocks(p, false, &blocks);
  return blocks;
}

const std::vector<Block>& key_blocks(const ForwardParams& p) {
  static thread_local std::vector<Block> blocks;
  fill_blocks(p, true, &blocks);
  return blocks;
}

void for_each_block(const std::vector<Block>& blocks, int64_t heads, size_t scratch_bytes,
                    const ParallelFor& parallel_for,
                    const std::function<void(const Block&, void*)>& body) {
  // Blocks differ in cost, so each thread takes the next block when it is free.
  const int64_t count = static_cast<int64_t>(blocks.size());
  std::atomic<int64_t> next{0};
  const int64_t items = count * heads;
  parallel_for(items, [&](int64_t, int64_t) {
    void* const memory = scratch(scratch_bytes);
    for (int64_t item = next++; item < items; item = next++) {
      Block block = blocks[item % count];
      block.head = item / count;
      body(block, memory);
    }
  });
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

size_t compute_size(DType dtype) {
  return dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
}

}  // namespace attnscope::cpu
