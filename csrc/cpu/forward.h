// Attention forward on the CPU: plain C++, blocked, linear memory.
#pragma once

#include <cstdint>
#include <functional>

#include "attn/params.h"

namespace attnscope::cpu {

// Runs body(begin, end) over [0, count) on the caller's thread pool.
using ParallelFor =
    std::function<void(int64_t count, const std::function<void(int64_t, int64_t)>& body)>;

void forward(const ForwardParams& params, const ParallelFor& parallel_for);

}  // namespace attnscope::cpu
