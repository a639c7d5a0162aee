// Portable forward kernel (sm_80 and later): mma.sync, cp.async, ldmatrix.
#pragma once

#include "attn/params.h"

namespace attnscope::sm80 {

// Enqueues the kernel on `stream` (a cudaStream_t of the current device). Returns null, or
// CUDA's message if the launch failed. bf16 and fp16; head dims: multiples of 8 up to 256.
const char* launch_forward(const ForwardParams& params, void* stream);

}  // namespace attnscope::sm80
