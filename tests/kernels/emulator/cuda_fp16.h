#pragma once
#include "cuda_bf16.h"

struct __half {
  uint16_t bits;
};
struct __half2 {
  __half x, y;
};

template <>
inline float to_float<__half>(__half h) {
  const int exponent = h.bits >> 10 & 31, mantissa = h.bits & 1023;
  const float sign = h.bits >> 15 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
}
template <>
inline __half from_float<__half>(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  if (std::isnan(value)) return {0x7fff};
  if (size >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00)};
  int exponent = size > 0 ? std::ilogb(size) : -14;
  exponent = std::max(exponent, -14);
  // In units of the last place; 1024 or more is a normal number. A carry moves to the exponent.
  const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  return {static_cast<uint16_t>(sign | (units + (uint32_t(exponent + 14) << 10)))};
}
inline float2 __half22float2(__half2 h) { return {to_float(h.x), to_float(h.y)}; }
