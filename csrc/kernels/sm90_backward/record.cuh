// The C interface of the instrumented backward, see attn/timeline_record.cuh.
#pragma once

#include "attn/device.h"
#include "attn/timeline_record.cuh"
#include "kernels/sm90_backward/config.cuh"
#include "kernels/sm90_backward/launch.h"

// Tensors as dense_call says; dout and dq are like q, dk and dv like k. The tile is what the
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
  BackwardParams b{};
  ForwardParams& p = b.forward;
  p = dense_call(c.batch, c.seqlen_q, c.seqlen_k, c.heads_q, c.heads_kv, c.head_dim, c.causal != 0,
                 c.scale);
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
  b.dout_stride = b.dq_stride = p.q_stride;
  b.dk_stride = b.dv_stride = p.k_stride;
  return b;
}

}  // namespace attnscope::sm90

// Bytes of the workspace of a call.
ATTNSCOPE_EXPORT int64_t attnscope_timeline_workspace(const TimelineBackward* call) {
  return attnscope::sm90::backward_workspace(attnscope::sm90::timeline_params(*call));
}

// Null, or why it was not launched.
ATTNSCOPE_EXPORT const char* attnscope_timeline_backward(const TimelineBackward* call,
                                                         void* stream) {
  using namespace attnscope::sm90;
  const attnscope::BackwardParams params = timeline_params(*call);
  if (const char* reason = unsupported_backward(params)) return reason;
  const int sms = attnscope::current_device().sms;
  const BackwardTile& t =
      kBackwardTiles[choose_backward(params.forward, sms, params.deterministic).row];
  if (t.wide() || t.block_m != call->block_m || t.block_n != call->block_n) {
    return attnscope::kOtherTile;
  }
  return launch_backward(params, stream);
}
