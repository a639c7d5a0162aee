// From tensors to ForwardParams: what the CPU and the CUDA implementation of attnscope::forward
// share. Friendly errors for users come from Python; the checks here hold for any caller.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <string>
#include <tuple>

#include "attn/params.h"

namespace attnscope::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct ForwardOptions {
  double scale;
  int64_t max_seqlen_q;
  int64_t max_seqlen_k;
  bool causal;
  int64_t window_left;
  int64_t window_right;
  double softcap;
};

struct ForwardCall {
  ForwardParams params;
  Tensor q, k, v;   // as read by the kernel: the caller's, or a copy with usable strides
  Tensor out, lse;  // freshly allocated
};

ForwardCall prepare_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                            const std::optional<Tensor>& cu_seqlens_q,
                            const std::optional<Tensor>& cu_seqlens_k,
                            const ForwardOptions& options);

}  // namespace attnscope::binding
