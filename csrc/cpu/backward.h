// Attention backward on the CPU: plain C++, blocked, linear memory.
#pragma once

#include "attn/params.h"
#include "cpu/forward.h"

namespace attnscope::cpu {

// Every element of dq, dk and dv is written. `params.workspace` is not used; the result does not
// depend on the number of threads.
void backward(const BackwardParams& params, const ParallelFor& parallel_for);

}  // namespace attnscope::cpu
