// The 16-bit formats as bits: to and from float, rounding to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

namespace attnscope::cpu {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float to_compute(float x) { return x; }
inline double to_compute(double x) { return x; }

inline float to_compute(BFloat16 x) { return float_of_bits(static_cast<uint32_t>(x.bits) << 16); }

inline float to_compute(Float16 x) {
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  // The exponent's bias goes from 15 to 127 by a multiplication, which normalises subnormals too.
  const uint32_t finite = bits_of_float(float_of_bits(magnitude) * 0x1p112f);
  const uint32_t special = magnitude | 0x7f800000u;
  return float_of_bits(sign | (magnitude >= 0x0f800000u ? special : finite));
}

inline void from_compute(float x, float* to) { *to = x; }
inline void from_compute(double x, double* to) { *to = x; }

inline void from_compute(float x, BFloat16* to) {
  const uint32_t bits = bits_of_float(x);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  to->bits = static_cast<uint16_t>((x != x ? 0x7fc00000u : rounded) >> 16);
}

inline void from_compute(float x, Float16* to) {
  const uint32_t bits = bits_of_float(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // 65520 and more round to infinity
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // subnormal: the addition rounds at 2^-24, ulp of 0.5f
    half = bits_of_float(float_of_bits(magnitude) + 0.5f) - bits_of_float(0.5f);
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  to->bits = static_cast<uint16_t>(sign | half);
}

}  // namespace
}  // namespace attnscope::cpu
