// attnscope::forward on the CPU.
#include "binding/forward.h"
#include "binding/nvtx.h"
#include "cpu/forward.h"

namespace attnscope::binding {
namespace {

std::tuple<Tensor, Tensor> forward_cpu(const Tensor& q, const Tensor& k, const Tensor& v,
                                       const std::optional<Tensor>& cu_seqlens_q,
                                       const std::optional<Tensor>& cu_seqlens_k, double scale,
                                       int64_t max_seqlen_q, int64_t max_seqlen_k, bool causal,
                                       int64_t window_left, int64_t window_right, double softcap,
                                       std::string kernel) {
  NvtxRange range(Range::kForward, q.numel());
  STD_TORCH_CHECK(kernel == "auto", "kernel_name is '", kernel, "'; allowed on the CPU: auto");
  const ForwardCall call = prepare_forward(
      q, k, v, cu_seqlens_q, cu_seqlens_k,
      {scale, max_seqlen_q, max_seqlen_k, causal, window_left, window_right, softcap});
  cpu::forward(call.params, [](int64_t count, const std::function<void(int64_t, int64_t)>& body) {
    torch::stable::parallel_for(0, count, 1, body);
  });
  return {call.out, call.lse};
}

}  // namespace
}  // namespace attnscope::binding

STABLE_TORCH_LIBRARY_IMPL(attnscope, CPU, m) {
  m.impl("forward", TORCH_BOX(&attnscope::binding::forward_cpu));
}
