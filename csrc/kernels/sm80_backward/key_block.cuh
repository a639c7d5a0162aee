// What a thread block computes: the keys of one block, and the query blocks that see them.
#pragma once

#include "attn/block_range.cuh"
#include "attn/params.h"
#include "attn/seqlen.cuh"
#include "attn/tiles.cuh"
#include "kernels/sm80_backward/workspace.cuh"

namespace attnscope::sm80 {

// In shared memory: the accumulators need the registers.
template <class Config>
struct KeyBlock {
  Segment seg_q, seg_k;
  Window window;
  int head_kv;
  int heads;               // query heads of the group
  int index;               // of the block in its sequence
  int row_begin, row_end;  // queries that see a key of the block
  int begin_block;         // their blocks [begin_block, end_block)
  int end_block;
  int first_block;   // where each query head starts
  int64_t work_row;  // the sequence's first row in the workspace, of the first query head

  __device__ __forceinline__ void set(const ForwardParams& p, const BackwardWorkspace& work,
                                      int batch, int head, int index_, bool rotate) {
    seg_q = segment(p.cu_seqlens_q, p.total_q, p.seqlen_q, batch);
    seg_k = segment(p.cu_seqlens_k, p.total_k, p.seqlen_k, batch);
    window = {seg_k.length - seg_q.length, p.window_left, p.window_right};
    head_kv = head;
    heads = p.heads_q / p.heads_kv;
    index = index_;
    row_begin = window.first_row(first_key());
    row_end = window.end_row(end_key() - 1, seg_q.length);
    begin_block = row_begin / Config::kBlockM;
    end_block =
        row_begin < row_end ? (row_end + Config::kBlockM - 1) / Config::kBlockM : begin_block;
    first_block = begin_block;
    if (rotate && begin_block < end_block) first_block += index % (end_block - begin_block);
    work_row = int64_t{head} * heads * work.rows + workspace_row(p, seg_q, batch);
  }

  __device__ __forceinline__ int first_key() const { return index * Config::kBlockN; }
  __device__ __forceinline__ int end_key() const {
    return min(first_key() + Config::kBlockN, seg_k.length);
  }
  // Whether some query of a block does not see some key of this one.
  __device__ __forceinline__ bool boundary(int query_block) const {
    const int first = query_block * Config::kBlockM, end = first + Config::kBlockM;
    return end > seg_q.length || window.first_key(end - 1) > first_key() ||
           window.end_key(first, seg_k.length) < first_key() + Config::kBlockN;
  }
};

// The pairs of a query head and a query block, head by head. The blocks of a head wrap round.
template <class Config>
struct Step {
  int head;    // in the group
  int block;   // query block
  int parity;  // of the step's number

  explicit __device__ __forceinline__ Step(const KeyBlock<Config>& at)
      : head(at.begin_block < at.end_block ? 0 : at.heads), block(at.first_block), parity(0) {}
  __device__ __forceinline__ bool done(const KeyBlock<Config>& at) const {
    return head == at.heads;
  }
  __device__ __forceinline__ Step next(const KeyBlock<Config>& at) const {
    Step step = *this;
    if (++step.block == at.end_block) step.block = at.begin_block;
    step.head += step.block == at.first_block;
    step.parity ^= 1;
    return step;
  }
  // The step's first row in the workspace.
  __device__ __forceinline__ int64_t work_row(const KeyBlock<Config>& at,
                                              const BackwardWorkspace& work) const {
    return at.work_row + head * work.rows + block * Config::kBlockM;
  }
};

// Starts the copy of the block's keys. Keys that no query sees become zeros: their weight is 0, and
// 0 * NaN is NaN.
template <class Config>
__device__ __forceinline__ void load_seen_keys(const TileSource<Config>& keys,
                                               const KeyBlock<Config>& at, uint32_t shared) {
  const int begin = at.window.first_key(0),
            end = at.window.end_key(at.seg_q.length - 1, at.seg_k.length);
  const int first = at.first_key();
  keys.template load<Config::kBlockN>(first, begin - first, end - first, shared);
}

// A thread's keys of an m16 tile are rows, its queries columns: those of pairs that the window
// hides get -inf. `key` is the thread's first key, `query` its first query.
template <int kCount, class Config>
__device__ __forceinline__ void mask_keys(float (&s)[2][kCount], const KeyBlock<Config>& at,
                                          int key, int query) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = key + m * 16 + half * 8;
      const int begin = at.window.first_row(row) - query;
      const int end = row < at.seg_k.length ? at.window.end_row(row, at.seg_q.length) - query : 0;
#pragma unroll
      for (int n = 0; n < kCount / 4; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = n * 8 + i;
          if (column < begin || column >= end) s[m][4 * n + 2 * half + i] = -INFINITY;
        }
      }
    }
  }
}

}  // namespace attnscope::sm80
