#include "binding/forward.h"

#include <cmath>

#include "attn/score_scales.h"

namespace attnscope::binding {
namespace {

// Kernels work with float32 in base 2: the factors they derive must be normal numbers too.
void check_scores(const ForwardOptions& o) {
  check_float32(o.scale, "scale");
  check_float32(o.scale * kLog2e, "scale * log2(e)");
  STD_TORCH_CHECK(o.softcap >= 0, "softcap must be >= 0 (0: none), got ", o.softcap);
  check_float32(o.softcap, "softcap");
  check_float32(2 * kLog2e * o.softcap, "2 * log2(e) * softcap");
  if (o.softcap > 0) {
    check_float32(2 * kLog2e * o.scale / o.softcap, "2 * log2(e) * scale / softcap");
  }
}

}  // namespace

void check_window(int64_t left, int64_t right) {
  STD_TORCH_CHECK(left >= -1, "window_left must be >= -1, got ", left);
  STD_TORCH_CHECK(right >= -1, "window_right must be >= -1, got ", right);
}

void set_window(ForwardParams& p, bool causal, int64_t left, int64_t right) {
  const int64_t unbounded = int64_t{p.seqlen_q} + p.seqlen_k;
  p.window_left = left >= unbounded ? -1 : static_cast<int>(left);
  p.window_right = right >= unbounded ? -1 : static_cast<int>(right);
  if (causal) p.window_right = 0;
}

AttentionSizes check_call(const AttentionTensors& t, const ForwardOptions& o) {
  const AttentionSizes s = check_attention(t, o.max_seqlen_q, o.max_seqlen_k);
  check_window(o.window_left, o.window_right);
  check_scores(o);
  to_dtype(t.q.scalar_type());
  return s;
}

ForwardCall describe_call(const AttentionTensors& t, const ForwardOptions& o,
                          const AttentionSizes& s) {
  ForwardCall call{{}, readable(t.q), readable(t.k), readable(t.v), t.q, t.q};
  ForwardParams& p = call.params;
  p.q = call.q.const_data_ptr();
  p.k = call.k.const_data_ptr();
  p.v = call.v.const_data_ptr();
  p.q_stride = strides_of(call.q);
  p.k_stride = strides_of(call.k);
  p.v_stride = strides_of(call.v);
  p.lse_batch_stride = s.packed ? 0 : s.heads_q * s.rows_q;
  p.lse_head_stride = s.rows_q;
  if (s.packed) {
    p.cu_seqlens_q = static_cast<const int32_t*>(t.cu_seqlens_q->const_data_ptr());
    p.cu_seqlens_k = static_cast<const int32_t*>(t.cu_seqlens_k->const_data_ptr());
  }
  p.total_q = s.packed ? s.rows_q : s.batch * s.rows_q;
  p.total_k = s.packed ? s.rows_k : s.batch * s.rows_k;
  p.batch = static_cast<int>(s.batch);
  p.seqlen_q = static_cast<int>(s.seqlen_q);
  p.seqlen_k = static_cast<int>(s.seqlen_k);
  p.heads_q = static_cast<int>(s.heads_q);
  p.heads_kv = static_cast<int>(s.heads_kv);
  p.head_dim = static_cast<int>(s.head_dim);
  p.head_dim_v = static_cast<int>(s.head_dim_v);
  p.dtype = to_dtype(t.q.scalar_type());
  p.scale = o.scale;
  p.softcap = o.softcap;
  set_window(p, o.causal, o.window_left, o.window_right);
  return call;
}

ForwardCall prepare_forward(const AttentionTensors& t, const ForwardOptions& o) {
  const AttentionSizes s = check_call(t, o);
  ForwardCall call = describe_call(t, o, s);
  const int32_t code = dtype_code(t.q), lse_code = float32_code();
  if (s.packed) {
    call.out = empty_like_device(t.q, {s.rows_q, s.heads_q, s.head_dim_v}, code);
    call.lse = empty_like_device(t.q, {s.heads_q, s.rows_q}, lse_code);
  } else {
    call.out = empty_like_device(t.q, {s.batch, s.rows_q, s.heads_q, s.head_dim_v}, code);
    call.lse = empty_like_device(t.q, {s.batch, s.heads_q, s.rows_q}, lse_code);
  }
  call.params.out = call.out.mutable_data_ptr();
  call.params.lse = static_cast<float*>(call.lse.mutable_data_ptr());
  call.params.out_stride = strides_of(call.out);
  return call;
}

}  // namespace attnscope::binding
