// attnscope::forward on CUDA: picks the kernel, launches it on torch's current stream.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/device.h>

#include "binding/forward.h"
#include "binding/nvtx.h"
#include "kernels/sm80_forward/launch.h"
#include "kernels/sm90_forward/launch.h"

namespace attnscope::binding {
namespace {

void* current_stream(int32_t device_index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return stream;
}

std::tuple<Tensor, Tensor> forward_cuda(const Tensor& q, const Tensor& k, const Tensor& v,
                                        const std::optional<Tensor>& cu_seqlens_q,
                                        const std::optional<Tensor>& cu_seqlens_k, double scale,
                                        int64_t max_seqlen_q, int64_t max_seqlen_k, bool causal,
                                        int64_t window_left, int64_t window_right, double softcap,
                                        std::string kernel) {
  NvtxRange range(Range::kForward, q.numel());
  STD_TORCH_CHECK(kernel == "auto" || kernel == "sm80" || kernel == "sm90", "kernel_name is '",
                  kernel, "'; allowed on CUDA: auto, sm80, sm90");
  STD_TORCH_CHECK(q.scalar_type() == ScalarType::Half || q.scalar_type() == ScalarType::BFloat16,
                  "q: dtype not supported on CUDA; allowed: float16, bfloat16");
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  const ForwardCall call = prepare_forward(
      q, k, v, cu_seqlens_q, cu_seqlens_k,
      {scale, max_seqlen_q, max_seqlen_k, causal, window_left, window_right, softcap});
  const char* reason = kernel == "sm80" ? "not asked for" : sm90::unsupported_forward(call.params);
  STD_TORCH_CHECK(kernel != "sm90" || reason == nullptr, "kernel_name is 'sm90': ", reason);
  void* stream = current_stream(q.get_device_index());
  const char* error = reason == nullptr ? sm90::launch_forward(call.params, stream)
                                        : sm80::launch_forward(call.params, stream);
  STD_TORCH_CHECK(error == nullptr, "attnscope::forward: kernel launch failed: ", error);
  return {call.out, call.lse};
}

}  // namespace
}  // namespace attnscope::binding

STABLE_TORCH_LIBRARY_IMPL(attnscope, CUDA, m) {
  m.impl("forward", TORCH_BOX(&attnscope::binding::forward_cuda));
}
