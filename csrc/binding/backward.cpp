#include "binding/backward.h"

#include <vector>

namespace attnscope::binding {
namespace {

void check_tensors(const BackwardTensors& t, const AttentionSizes& s) {
  const Tensor& q = t.inputs.q;
  std::vector<int64_t> out{s.rows_q, s.heads_q, s.head_dim_v}, lse{s.heads_q, s.rows_q};
  if (!s.packed) {
    out.insert(out.begin(), s.batch);
    lse.insert(lse.begin(), s.batch);
  }
  check_like(t.out, "out", out, q.scalar_type(), q);
  check_like(t.dout, "dout", out, q.scalar_type(), q);
  check_like(t.lse, "lse", lse, ScalarType::Float, q);
  if (t.dlse.has_value()) check_like(*t.dlse, "dlse", lse, ScalarType::Float, q);
}

// Contiguous and uninitialized, in the shape and dtype of `t`.
Tensor gradient_of(const Tensor& t) {
  const auto sizes = t.sizes();
  const int32_t dtype = dtype_code(t);
  return sizes.size() == 3 ? empty_like_device(t, {sizes[0], sizes[1], sizes[2]}, dtype)
                           : empty_like_device(t, {sizes[0], sizes[1], sizes[2], sizes[3]}, dtype);
}

}  // namespace

BackwardCall prepare_backward(const BackwardTensors& t, const BackwardOptions& o) {
  const AttentionSizes s = check_call(t.inputs, o.forward);
  check_tensors(t, s);

  const AttentionTensors& inputs = t.inputs;
  BackwardCall call{{},
                    describe_call(inputs, o.forward, s),
                    readable_apart(t.dout),
                    std::nullopt,
                    gradient_of(inputs.q),
                    gradient_of(inputs.k),
                    gradient_of(inputs.v)};
  call.forward.out = readable_apart(t.out);
  call.forward.lse = contiguous(t.lse);
  if (t.dlse.has_value()) call.dlse = contiguous(*t.dlse);

  BackwardParams& p = call.params;
  p.forward = call.forward.params;
  // Read, not written: the backward shares the description of the forward's outputs.
  p.forward.out = const_cast<void*>(call.forward.out.const_data_ptr());
  p.forward.lse = static_cast<float*>(const_cast<void*>(call.forward.lse.const_data_ptr()));
  p.forward.out_stride = strides_of(call.forward.out);
  p.dout = call.dout.const_data_ptr();
  if (call.dlse) p.dlse = static_cast<const float*>(call.dlse->const_data_ptr());
  p.dq = call.dq.mutable_data_ptr();
  p.dk = call.dk.mutable_data_ptr();
  p.dv = call.dv.mutable_data_ptr();
  p.dout_stride = strides_of(call.dout);
  p.dq_stride = strides_of(call.dq);
  p.dk_stride = strides_of(call.dk);
  p.dv_stride = strides_of(call.dv);
  p.deterministic = o.deterministic;
  return call;
}

}  // namespace attnscope::binding
