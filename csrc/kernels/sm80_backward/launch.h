// Portable backward kernels (sm_80 and later): mma.sync, cp.async, ldmatrix.
#pragma once

#include <cstdint>

#include "attn/params.h"

namespace attnscope::sm80 {

// Bytes of device memory that launch_backward needs as params.workspace.
int64_t backward_workspace(const BackwardParams& params);

// Enqueues the kernels on `stream` (a cudaStream_t of the current device). Every element of dq, dk
// and dv is written. Returns null, or CUDA's message when a launch was refused.
const char* launch_backward(const BackwardParams& params, void* stream);

}  // namespace attnscope::sm80
