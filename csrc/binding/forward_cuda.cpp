// attnscope::forward on CUDA: picks the kernel, launches it on torch's current stream.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/device.h>

#include "binding/forward.h"
#include "kernels/sm80_forward/launch.h"
#include "kernels/sm90_forward/launch.h"

namespace attnscope::binding {
namespace {

enum Variant : int64_t { kAuto = 0, kSm80 = 80, kSm90 = 90 };

void* current_stream(int32_t device_index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return stream;
}

const char* launch(const ForwardParams& params, int64_t variant, void* stream) {
  if (variant == kSm80) return sm80::launch_forward(params, stream);
  const char* reason = sm90::unsupported_forward(params);
  STD_TORCH_CHECK(variant == kAuto || reason == nullptr,
                  "variant must be 0 or 80 for this call, got 90: ", reason);
  return reason == nullptr ? sm90::launch_forward(params, stream)
                           : sm80::launch_forward(params, stream);
}

ForwardResult forward_cuda(const AttentionTensors& tensors, const ForwardOptions& options) {
  const Tensor& q = tensors.q;
  STD_TORCH_CHECK(options.variant == kAuto || options.variant == kSm80 || options.variant == kSm90,
                  "variant must be 0, 80 or 90 on CUDA, got ", options.variant);
  STD_TORCH_CHECK(q.is_cuda(), "q must be on CUDA, as one of the other tensors is");
  STD_TORCH_CHECK(q.scalar_type() == ScalarType::Half || q.scalar_type() == ScalarType::BFloat16,
                  "q must have dtype float16 or bfloat16 on CUDA");
  const int32_t device = q.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  ForwardCall call = prepare_forward(tensors, options);
  const char* error = launch(call.params, options.variant, current_stream(device));
  STD_TORCH_CHECK(error == nullptr, "attnscope::forward: kernel launch failed: ", error);
  return {std::move(call.out), std::move(call.lse)};
}

}  // namespace
}  // namespace attnscope::binding

STABLE_TORCH_LIBRARY_IMPL(attnscope, CUDA, m) {
  m.impl("forward", TORCH_BOX(&attnscope::binding::forward_op<attnscope::binding::forward_cuda>));
}
