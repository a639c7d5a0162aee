// The C interface of the instrumented library (-DATTNSCOPE_TIMELINE=<element>) for dense contiguous
// tensors of one device. Caller: python/attnscope/timeline/library.py.
#pragma once

#include <type_traits>

#include "attn/device.h"
#include "attn/timeline.cuh"
#include "kernels/sm90_forward/config.cuh"
#include "kernels/sm90_forward/launch.h"

#define ATTNSCOPE_EXPORT extern "C" __attribute__((visibility("default")))

// What the caller's buffer and reader are made for.
struct TimelineTile {
  int block_m, block_n, blocks_per_sm, consumers, heads_per_tile, key_parts, heads_side_by_side;
};

// Sets the buffer for the marks of later launches on the current device; null, or CUDA's message.
ATTNSCOPE_EXPORT const char* attnscope_timeline_buffer(uint32_t* words, int lanes, int tile_rows,
                                                       int step_rows) {
  const attnscope::TimelineBuffer buffer{words, lanes, tile_rows, step_rows};
  const cudaError_t error = cudaMemcpyToSymbol(attnscope::g_timeline, &buffer, sizeof(buffer));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// q, out [batch, seqlen_q, heads_q, head_dim], k, v [batch, seqlen_k, heads_kv, head_dim] of type
// ATTNSCOPE_TIMELINE, lse [batch, heads_q, seqlen_q]. Null, or why it was not launched: a tile that
// differs from the caller's would write marks out of the buffer.
ATTNSCOPE_EXPORT const char* attnscope_timeline_forward(const void* q, const void* k, const void* v,
                                                        void* out, float* lse, int batch,
                                                        int seqlen_q, int seqlen_k, int heads_q,
                                                        int heads_kv, int head_dim, bool causal,
                                                        double scale, const TimelineTile* tile,
                                                        void* stream) {
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
  p.dtype = std::is_same_v<ATTNSCOPE_TIMELINE, __half> ? attnscope::DType::kFloat16
                                                       : attnscope::DType::kBFloat16;
  p.scale = scale;
  p.window_left = -1;
  p.window_right = causal ? 0 : -1;
  if (const char* reason = attnscope::sm90::unsupported_forward(p)) return reason;
  const auto choice = attnscope::sm90::choose_forward(attnscope::sm90::forward_call(p),
                                                      attnscope::current_device().sms);
  const auto& t = attnscope::sm90::kForwardTiles[choice.row];
  if (t.block_m != tile->block_m || t.block_n != tile->block_n ||
      t.blocks_per_sm != tile->blocks_per_sm || t.consumers() != tile->consumers ||
      t.heads_per_tile != tile->heads_per_tile || t.key_parts != tile->key_parts ||
      1 << choice.grouping != tile->heads_side_by_side)
    return "the sources choose another tile than the installed build; run `make build`";
  return attnscope::sm90::launch_forward(p, stream);
}
