// attnscope::forward on CUDA: picks the kernel, launches it on torch's current stream.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/device.h>

#include "binding/device_cuda.h"
#include "binding/forward.h"
#include "kernels/sm80_forward/launch.h"
#include "kernels/sm90_forward/launch.h"

namespace attnscope::binding {
namespace {

const char* launch(const ForwardParams& params, int64_t variant, void* stream) {
  if (variant != kSm80 && takes_sm90(variant, sm90::unsupported_forward(params))) {
    return sm90::launch_forward(params, stream);
  }
  return sm80::launch_forward(params, stream);
}

ForwardResult forward_cuda(const AttentionTensors& tensors, const ForwardOptions& options) {
  check_cuda(tensors.q, options.variant);
  const int32_t device = tensors.q.get_device_index();
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
