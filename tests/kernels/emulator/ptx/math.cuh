#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace attnscope::ptx {

inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }

template <class Element>
uint32_t pack(float low, float high) {
  return from_float<Element>(low).bits | uint32_t{from_float<Element>(high).bits} << 16;
}
template <class Element>
uint32_t fma_x2(uint32_t, uint32_t, uint32_t) {
  emulator::fail("fma_x2 is not emulated");
}

}  // namespace attnscope::ptx
