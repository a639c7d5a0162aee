// What the C interfaces of the instrumented libraries share (-DATTNSCOPE_TIMELINE=<element>).
// Caller: python/attnscope/timeline/library.py.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "attn/params.h"
#include "attn/timeline.cuh"

#define ATTNSCOPE_EXPORT extern "C" __attribute__((visibility("default")))

// Sets the buffer for the marks of later launches on the current device; null, or CUDA's message.
ATTNSCOPE_EXPORT const char* attnscope_timeline_buffer(uint32_t* words, int lanes, int tile_rows,
                                                       int step_rows) {
  const attnscope::TimelineBuffer buffer{words, lanes, tile_rows, step_rows};
  const cudaError_t error = cudaMemcpyToSymbol(attnscope::g_timeline, &buffer, sizeof(buffer));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

namespace attnscope {

// A tile that differs from the caller's would write marks out of the buffer.
constexpr char kOtherTile[] =
    "the sources choose another tile than the installed build; run `make build`";

// A call without its pointers: q, out [batch, seqlen_q, heads_q, head_dim], k, v [batch, seqlen_k,
// heads_kv, head_dim] of type ATTNSCOPE_TIMELINE, contiguous, lse [batch, heads_q, seqlen_q].
inline ForwardParams dense_call(int batch, int seqlen_q, int seqlen_k, int heads_q, int heads_kv,
                                int head_dim, bool causal, double scale) {
  const auto strides = [head_dim](int64_t rows, int64_t heads) {
    return Strides{rows * heads * head_dim, heads * head_dim, head_dim};
  };
  ForwardParams p{};
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
  p.dtype = std::is_same_v<ATTNSCOPE_TIMELINE, __half> ? DType::kFloat16 : DType::kBFloat16;
  p.scale = scale;
  p.window_left = -1;
  p.window_right = causal ? 0 : -1;
  return p;
}

}  // namespace attnscope
