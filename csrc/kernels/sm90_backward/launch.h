// Hopper backward kernels (sm_90a): wgmma, TMA, warp specialisation.
#pragma once

#include <cstdint>

#include "attn/params.h"

namespace attnscope::sm90 {

// Null if these kernels can run `params`; otherwise the reason why not.
const char* unsupported_backward(const BackwardParams& params);

// Bytes of device memory that launch_backward needs as params.workspace.
int64_t backward_workspace(const BackwardParams& params);

// Enqueues the kernels on `stream` (a cudaStream_t of the current device). Every element of dq, dk
// and dv is written. Returns null, or CUDA's message when a launch was refused.
const char* launch_backward(const BackwardParams& params, void* stream);

}  // namespace attnscope::sm90
