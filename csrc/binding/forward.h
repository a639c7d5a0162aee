// From the arguments of attnscope::forward to ForwardParams, for the CPU and the CUDA
// implementation.
#pragma once

#include <tuple>

#include "binding/nvtx.h"
#include "binding/tensors.h"

namespace attnscope::binding {

// The schema's arguments after the tensors, in its order.
struct ForwardOptions {
  double scale;
  int64_t max_seqlen_q;
  int64_t max_seqlen_k;
  bool causal;
  int64_t window_left;
  int64_t window_right;
  double softcap;
  int64_t variant;  // 0: the best kernel; 80, 90: the kernel of that architecture
};

struct ForwardCall {
  ForwardParams params;
  Tensor q, k, v;   // as read by the kernel: the caller's, or a copy with usable strides
  Tensor out, lse;  // freshly allocated
};

// Throws unless the arguments are a call that some device can run. Allocates nothing.
AttentionSizes check_call(const AttentionTensors& tensors, const ForwardOptions& options);

// Describes a checked call, without `out` and `lse` and their pointers. Copies q, k and v where
// kernels could not read them.
ForwardCall describe_call(const AttentionTensors& tensors, const ForwardOptions& options,
                          const AttentionSizes& sizes);

// Checks everything that does not depend on the device, then allocates the outputs.
ForwardCall prepare_forward(const AttentionTensors& tensors, const ForwardOptions& options);

// Throws unless both bounds are -1 or more.
void check_window(int64_t left, int64_t right);

// Sets the window of `p`, whose lengths are set. A causal mask bounds it at 0 on the right; a bound
// that reaches past every key is dropped.
void set_window(ForwardParams& p, bool causal, int64_t left, int64_t right);

using ForwardResult = std::tuple<Tensor, Tensor>;

// The op in the form that TORCH_BOX takes, around one device's implementation.
template <ForwardResult (*kImplementation)(const AttentionTensors&, const ForwardOptions&)>
ForwardResult forward_op(const Tensor& q, const Tensor& k, const Tensor& v,
                         const std::optional<Tensor>& cu_seqlens_q,
                         const std::optional<Tensor>& cu_seqlens_k, double scale,
                         int64_t max_seqlen_q, int64_t max_seqlen_k, bool causal,
                         int64_t window_left, int64_t window_right, double softcap,
                         int64_t variant) {
  NvtxRange range(Range::kForward, q.numel());
  return kImplementation(
      {q, k, v, cu_seqlens_q, cu_seqlens_k},
      {scale, max_seqlen_q, max_seqlen_k, causal, window_left, window_right, softcap, variant});
}

}  // namespace attnscope::binding
