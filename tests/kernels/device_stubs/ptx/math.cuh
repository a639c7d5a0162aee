#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace attnscope::ptx {

inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal_approx(float x) { return std::fabs(x) > 0x1p126f ? 0.0f : 1.0f / x; }

// For b = 0 only: returns c, with NaN where the element of `a` is not finite.
template <class Element>
uint32_t fma_x2(uint32_t a, uint32_t, uint32_t c) {
  constexpr uint32_t kExponent = std::is_same<Element, __half>::value ? 0x7c00 : 0x7f80;
  return c | ((a & kExponent) == kExponent ? 0x7fffu : 0u) |
         ((a >> 16 & kExponent) == kExponent ? 0x7fff0000u : 0u);
}

}  // namespace attnscope::ptx
