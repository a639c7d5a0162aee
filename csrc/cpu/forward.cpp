#include "cpu/forward.h"

namespace attnscope::cpu {

void forward(const ForwardParams&, const ParallelFor&) {}

}  // namespace attnscope::cpu
