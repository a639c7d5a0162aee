// attnscope::kernels: the tile tables compiled into this build, as JSON.
#include <torch/csrc/stable/library.h>

#include <sstream>
#include <string>

#include "kernels/sm80_forward/config.cuh"

namespace attnscope::binding {
namespace {

std::string kernels() {
  std::ostringstream json;
  json << "[";
  const char* separator = "";
  for (const auto& t : sm80::kForwardTiles) {
    json << separator << "{\"kernel\": \"sm80_forward\", \"head_dim\": " << t.head_dim
         << ", \"block_m\": " << t.block_m << ", \"block_n\": " << t.block_n
         << ", \"threads\": " << t.threads() << ", \"stages\": " << t.stages
         << ", \"shared_bytes\": " << t.shared_bytes() << ", \"blocks_per_sm\": " << t.blocks_per_sm
         << ", \"reason\": \"" << t.reason << "\"}";
    separator = ", ";
  }
  json << "]";
  return json.str();
}

}  // namespace
}  // namespace attnscope::binding

STABLE_TORCH_LIBRARY_IMPL(attnscope, CompositeExplicitAutograd, m) {
  m.impl("kernels", TORCH_BOX(&attnscope::binding::kernels));
}
