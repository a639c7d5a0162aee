// What the instrumented library (-DATTNSCOPE_TIMELINE) offers to its caller, which is
// python/attnscope/timeline/library.py: plain C, dense contiguous tensors of one device.
#pragma once

#include <algorithm>
#include <iterator>

#include "attn/timeline.cuh"
#include "kernels/sm90_forward/launch.h"

#define ATTNSCOPE_EXPORT extern "C" __attribute__((visibility("default")))

// The tile that serves a call on a device of `sms` multiprocessors: head_dim, block_m, block_n,
// q_stages, stages, blocks_per_sm, consumers, scores_live, query heads side by side,
// heads_per_tile. False where none does.
ATTNSCOPE_EXPORT bool attnscope_timeline_tile(int head_dim, int seqlen_q, int batch, int heads_q,
                                              int heads_kv, bool causal, int sms, int* tile) {
  using namespace attnscope::sm90;
  const ForwardChoice choice =
      choose_forward(head_dim, seqlen_q, heads_q, heads_kv, batch, causal, false, sms);
  if (choice.row < 0) return false;
  const ForwardTile& t = kForwardTiles[choice.row];
  const int values[] = {
      t.head_dim,      t.block_m,     t.block_n,     t.q_stages,           t.stages,
      t.blocks_per_sm, t.consumers(), t.scores_live, 1 << choice.grouping, t.heads_per_tile};
  std::copy(std::begin(values), std::end(values), tile);
  return true;
}

// Where the launches that follow on the current device leave their marks; null, or CUDA's message.
ATTNSCOPE_EXPORT const char* attnscope_timeline_buffer(uint32_t* words, int lanes, int tile_rows,
                                                       int step_rows) {
  const attnscope::TimelineBuffer buffer{words, lanes, tile_rows, step_rows};
  const cudaError_t error = cudaMemcpyToSymbol(attnscope::g_timeline, &buffer, sizeof(buffer));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// q, out [batch, seqlen_q, heads_q, head_dim], k, v [batch, seqlen_k, heads_kv, head_dim] of bf16
// or fp16, lse [batch, heads_q, seqlen_q]. Null, or why it was not launched.
ATTNSCOPE_EXPORT const char* attnscope_timeline_forward(const void* q, const void* k, const void* v,
                                                        void* out, float* lse, int batch,
                                                        int seqlen_q, int seqlen_k, int heads_q,
                                                        int heads_kv, int head_dim, bool bfloat16,
                                                        bool causal, double scale, void* stream) {
  using attnscope::Strides;
  const auto strides = [head_dim](int64_t rows, int64_t heads) {
    return Strides{rows * heads * head_dim, heads * head_dim, head_dim};
  };
  attnscope::ForwardParams p{};
  p.q = q;
  p.k = k;
  p.v = v;
  p.out = out;
  p.lse = lse;
  p.q_stride = p.out_stride = strides(seqlen_q, heads_q);
  p.k_stride = p.v_stride = strides(seqlen_k, heads_kv);
  p.lse_batch_stride = int64_t{heads_q} * seqlen_q;
  p.lse_head_stride = seqlen_q;
  p.total_q = int64_t{batch} * seqlen_q;
  p.total_k = int64_t{batch} * seqlen_k;
  p.batch = batch;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  p.heads_q = heads_q;
  p.heads_kv = heads_kv;
  p.head_dim = p.head_dim_v = head_dim;
  p.dtype = bfloat16 ? attnscope::DType::kBFloat16 : attnscope::DType::kFloat16;
  p.scale = scale;
  p.window_left = -1;
  p.window_right = causal ? 0 : -1;
  const char* reason = attnscope::sm90::unsupported_forward(p);
  return reason != nullptr ? reason : attnscope::sm90::launch_forward(p, stream);
}
