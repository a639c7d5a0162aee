// attnscope::backward on CUDA: picks the kernels, allocates their workspace, launches them on
// torch's current stream.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/device.h>

#include "binding/backward.h"
#include "binding/device_cuda.h"
#include "kernels/sm80_backward/launch.h"
#include "kernels/sm90_backward/launch.h"

namespace attnscope::binding {
namespace {

// The caching allocator orders the workspace's next use after this call on the current stream, so
// it may be freed when the kernels are enqueued.
const char* launch(BackwardParams& params, int64_t variant, const Tensor& q) {
  const bool sm90 = variant != kSm80 && takes_sm90(variant, sm90::unsupported_backward(params));
  const int64_t bytes = sm90 ? sm90::backward_workspace(params) : sm80::backward_workspace(params);
  const Tensor workspace = empty_like_device(q, {bytes}, byte_code());
  params.workspace = workspace.mutable_data_ptr();
  void* const stream = current_stream(q.get_device_index());
  return sm90 ? sm90::launch_backward(params, stream) : sm80::launch_backward(params, stream);
}

BackwardResult backward_cuda(const BackwardTensors& tensors, const BackwardOptions& options) {
  const Tensor& q = tensors.inputs.q;
  const int64_t variant = options.forward.variant;
  check_cuda(q, variant);
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  BackwardCall call = prepare_backward(tensors, options);
  const char* error = launch(call.params, variant, q);
  STD_TORCH_CHECK(error == nullptr, "attnscope::backward: kernel launch failed: ", error);
  return {std::move(call.dq), std::move(call.dk), std::move(call.dv)};
}

}  // namespace
}  // namespace attnscope::binding

STABLE_TORCH_LIBRARY_IMPL(attnscope, CUDA, m) {
  m.impl("backward",
         TORCH_BOX(&attnscope::binding::backward_op<attnscope::binding::backward_cuda>));
}
