// The C interface of the instrumented library (-DATTNSCOPE_TIMELINE=<element>) for dense contiguous
// tensors of one device. Caller: python/attnscope/timeline/library.py.
#pragma once

#include <type_traits>

#include "attn/device.h"
#include "attn/timeline.cuh"
#include "kernels/sm90_backward/config.cuh"
#include "kernels/sm90_backward/launch.h"

#define ATTNSCOPE_EXPORT extern "C" __attribute__((visibility("default")))

// q, out, dout, dq [batch, seqlen_q, heads_q, head_dim], k, v, dk, dv [batch, seqlen_k, heads_kv,
// head_dim] of type ATTNSCOPE_TIMELINE, lse [batch, heads_q, seqlen_q]. The tile is what the
// caller's buffer and reader are made for.
struct TimelineBackward {
  const void *dout, *q, *k, *v, *out;
  float* lse;
  void *dq, *dk, *dv, *workspace;
  double scale;
  int batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, causal, block_m, block_n;
};

namespace attnscope::sm90 {

inline BackwardParams timeline_params(const TimelineBackward& c) {
  const auto strides = [&c](int64_t rows, int64_t heads) {
    return Strides{rows * heads * c.head_dim, heads * c.head_dim, c.head_dim};
  };
  BackwardParams b{};
  ForwardParams& p = b.forward;
  p.q = c.q;
  p.k = c.k;
  p.v = c.v;
  p.out = const_cast<void*>(c.out);
  p.lse = c.lse;
  b.dout = c.dout;
  b.dq = c.dq;
  b.dk = c.dk;
  b.dv = c.dv;
  b.workspace = c.workspace;
  p.q_stride = p.out_stride = b.dout_stride = b.dq_stride = strides(c.seqlen_q, c.heads_q);
  p.k_stride = p.v_stride = b.dk_stride = b.dv_stride = strides(c.seqlen_k, c.heads_kv);
  p.lse_batch_stride = int64_t{c.heads_q} * c.seqlen_q;
  p.lse_head_stride = c.seqlen_q;
  p.total_q = int64_t{c.batch} * c.seqlen_q;
  p.total_k = int64_t{c.batch} * c.seqlen_k;
  p.batch = c.batch;
  p.seqlen_q = c.seqlen_q;
  p.seqlen_k = c.seqlen_k;
  p.heads_q = c.heads_q;
  p.heads_kv = c.heads_kv;
  p.head_dim = p.head_dim_v = c.head_dim;
  p.dtype = std::is_same_v<ATTNSCOPE_TIMELINE, __half> ? DType::kFloat16 : DType::kBFloat16;
  p.scale = c.scale;
  p.window_left = -1;
  p.window_right = c.causal != 0 ? 0 : -1;
  return b;
}

}  // namespace attnscope::sm90

// Sets the buffer for the marks of later launches on the current device; null, or CUDA's message.
ATTNSCOPE_EXPORT const char* attnscope_timeline_buffer(uint32_t* words, int lanes, int tile_rows,
                                                       int step_rows) {
  const attnscope::TimelineBuffer buffer{words, lanes, tile_rows, step_rows};
  const cudaError_t error = cudaMemcpyToSymbol(attnscope::g_timeline, &buffer, sizeof(buffer));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Bytes of the workspace of a call.
ATTNSCOPE_EXPORT int64_t attnscope_timeline_workspace(const TimelineBackward* call) {
  return attnscope::sm90::backward_workspace(attnscope::sm90::timeline_params(*call));
}

// Null, or why it was not launched: a tile that differs from the caller's would write marks out of
// the buffer.
ATTNSCOPE_EXPORT const char* attnscope_timeline_backward(const TimelineBackward* call,
                                                         void* stream) {
  using namespace attnscope::sm90;
  const attnscope::BackwardParams params = timeline_params(*call);
  if (const char* reason = unsupported_backward(params)) return reason;
  const int row = choose_backward(params.forward, attnscope::current_device().sms);
  const BackwardTile& t = kBackwardTiles[row];
  if (t.wide() || t.block_m != call->block_m || t.block_n != call->block_n) {
    return "the sources choose another tile than the installed build; run `make build`";
  }
  return launch_backward(params, stream);
}
