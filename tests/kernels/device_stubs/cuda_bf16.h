#pragma once
#include "host_device.h"

struct __nv_bfloat16 {
  uint16_t bits;
};

template <class Element>
Element from_float(float value);

template <>
inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {  // for values that need no rounding
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return {static_cast<uint16_t>(bits >> 16)};
}
