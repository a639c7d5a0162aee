// attnscope::kernels: the tile tables compiled into this build, as JSON.
#include <torch/csrc/stable/library.h>

#include <sstream>
#include <string>

#include "kernels/sm80_forward/config.cuh"
#include "kernels/sm90_forward/config.cuh"

namespace attnscope::binding {
namespace {

template <class Tile>
void append(std::ostringstream& json, const char* kernel, const Tile& t) {
  json << (json.tellp() > 1 ? ", " : "") << "{\"kernel\": \"" << kernel
       << "\", \"head_dim\": " << t.head_dim << ", \"block_m\": " << t.block_m
       << ", \"block_n\": " << t.block_n << ", \"threads\": " << t.threads()
       << ", \"stages\": " << t.stages << ", \"shared_bytes\": " << t.shared_bytes()
       << ", \"blocks_per_sm\": " << t.blocks_per_sm << ", \"reason\": \"" << t.reason << "\"}";
}

std::string kernels() {
  std::ostringstream json;
  json << "[";
  for (const auto& t : sm80::kForwardTiles) append(json, "sm80_forward", t);
  for (const auto& t : sm90::kForwardTiles) append(json, "sm90_forward", t);
  json << "]";
  return json.str();
}

}  // namespace
}  // namespace attnscope::binding

STABLE_TORCH_LIBRARY_IMPL(attnscope, CompositeExplicitAutograd, m) {
  m.impl("kernels", TORCH_BOX(&attnscope::binding::kernels));
}
