// Hopper forward kernel (sm_90a): wgmma, TMA, warp specialisation.
#pragma once

#include "attn/params.h"

namespace attnscope::sm90 {

// Null if this kernel can run `params`; otherwise the reason why not.
const char* unsupported_forward(const ForwardParams& params);

// Enqueues the kernel on `stream` (a cudaStream_t of the current device). Returns null, or CUDA's
// message when the launch was refused.
const char* launch_forward(const ForwardParams& params, void* stream);

}  // namespace attnscope::sm90
