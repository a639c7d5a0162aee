// attnscope::backward on the CPU.
#include <torch/csrc/stable/ops.h>

#include "binding/backward.h"
#include "cpu/backward.h"

namespace attnscope::binding {
namespace {

BackwardResult backward_cpu(const BackwardTensors& tensors, const BackwardOptions& options) {
  STD_TORCH_CHECK(options.forward.variant == 0, "variant must be 0 on the CPU, got ",
                  options.forward.variant);
  BackwardCall call = prepare_backward(tensors, options);
  cpu::backward(call.params, [](int64_t count, const std::function<void(int64_t, int64_t)>& body) {
    torch::stable::parallel_for(0, count, 1, body);
  });
  return {std::move(call.dq), std::move(call.dk), std::move(call.dv)};
}

}  // namespace
}  // namespace attnscope::binding

STABLE_TORCH_LIBRARY_IMPL(attnscope, CPU, m) {
  m.impl("backward", TORCH_BOX(&attnscope::binding::backward_op<attnscope::binding::backward_cpu>));
}
