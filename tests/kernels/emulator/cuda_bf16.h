#pragma once
#include "emulator.h"

struct __nv_bfloat16 {
  uint16_t bits;
};

// Rounds to nearest even.
template <class Element>
Element from_float(float value);
template <class Element>
float to_float(Element element);

template <>
inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) return {0x7fff};
  bits += 0x7fff + (bits >> 16 & 1);
  return {static_cast<uint16_t>(bits >> 16)};
}
template <>
inline float to_float<__nv_bfloat16>(__nv_bfloat16 element) {
  return __uint_as_float(uint32_t{element.bits} << 16);
}
