// What the CUDA implementations of all ops share: the variants, and checks and facts of the device.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "binding/tensors.h"

namespace attnscope::binding {

enum Variant : int64_t { kAuto = 0, kSm80 = 80, kSm90 = 90 };

// Throws unless CUDA kernels can take a call with this q and `variant`.
inline void check_cuda(const Tensor& q, int64_t variant) {
  STD_TORCH_CHECK(variant == kAuto || variant == kSm80 || variant == kSm90,
                  "variant must be 0, 80 or 90 on CUDA, got ", variant);
  STD_TORCH_CHECK(q.is_cuda(), "q must be on CUDA, as one of the other tensors is");
  STD_TORCH_CHECK(q.scalar_type() == ScalarType::Half || q.scalar_type() == ScalarType::BFloat16,
                  "q must have dtype float16 or bfloat16 on CUDA");
}

// Whether the Hopper kernel runs a call, which it cannot for `reason` (null: it can). Throws where
// `variant` forces it.
inline bool takes_sm90(int64_t variant, const char* reason) {
  STD_TORCH_CHECK(variant != kSm90 || reason == nullptr,
                  "variant must be 0 or 80 for this call, got 90: ", reason);
  return reason == nullptr;
}

inline void* current_stream(int32_t device_index) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return stream;
}

}  // namespace attnscope::binding
