// attnscope::forward on the CPU.
#include <torch/csrc/stable/ops.h>

#include "binding/forward.h"
#include "cpu/forward.h"

namespace attnscope::binding {
namespace {

ForwardResult forward_cpu(const AttentionTensors& tensors, const ForwardOptions& options) {
  STD_TORCH_CHECK(options.variant == 0, "variant must be 0 on the CPU, got ", options.variant);
  ForwardCall call = prepare_forward(tensors, options);
  cpu::forward(call.params, [](int64_t count, const std::function<void(int64_t, int64_t)>& body) {
    torch::stable::parallel_for(0, count, 1, body);
  });
  return {std::move(call.out), std::move(call.lse)};
}

}  // namespace
}  // namespace attnscope::binding

STABLE_TORCH_LIBRARY_IMPL(attnscope, CPU, m) {
  m.impl("forward", TORCH_BOX(&attnscope::binding::forward_op<attnscope::binding::forward_cpu>));
}
