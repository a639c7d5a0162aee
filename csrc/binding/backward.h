// From the arguments of attnscope::backward to BackwardParams, for the CPU and the CUDA
// implementation.
#pragma once

#include <optional>
#include <tuple>

#include "binding/forward.h"

namespace attnscope::binding {

// The tensors of a call, in the schema's order.
struct BackwardTensors {
  const Tensor& dout;  // like out
  AttentionTensors inputs;
  const Tensor& out;                  // [B, Sq, Hq, Dv] or [Tq, Hq, Dv], q's dtype
  const Tensor& lse;                  // float32 [B, Hq, Sq] or [Hq, Tq]
  const std::optional<Tensor>& dlse;  // like lse; none: zero
};

struct BackwardOptions {
  ForwardOptions forward;
  bool deterministic;
};

struct BackwardCall {
  BackwardParams params;  // without the workspace
  ForwardCall forward;    // its out and lse are the caller's, or copies
  Tensor dout;
  std::optional<Tensor> dlse;
  Tensor dq, dk, dv;  // freshly allocated
};

// Checks everything that does not depend on the device, then allocates the gradients.
BackwardCall prepare_backward(const BackwardTensors& tensors, const BackwardOptions& options);

using BackwardResult = std::tuple<Tensor, Tensor, Tensor>;

// The op in the form that TORCH_BOX takes, around one device's implementation.
template <BackwardResult (*kImplementation)(const BackwardTensors&, const BackwardOptions&)>
BackwardResult backward_op(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                           const Tensor& out, const Tensor& lse, const std::optional<Tensor>& dlse,
                           const std::optional<Tensor>& cu_seqlens_q,
                           const std::optional<Tensor>& cu_seqlens_k, double scale,
                           int64_t max_seqlen_q, int64_t max_seqlen_k, bool causal,
                           int64_t window_left, int64_t window_right, double softcap,
                           int64_t variant, bool deterministic) {
  NvtxRange range(Range::kBackward, q.numel());
  return kImplementation(
      {dout, {q, k, v, cu_seqlens_q, cu_seqlens_k}, out, lse, dlse},
      {{scale, max_seqlen_q, max_seqlen_k, causal, window_left, window_right, softcap, variant},
       deterministic});
}

}  // namespace attnscope::binding
