// Compiles device code for the host: qualifiers, threadIdx, and warp intrinsics for a warp of one
// lane.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <set>
#include <utility>

#define __device__
#define __forceinline__ inline

using std::max;
using std::min;

struct float2 {
  float x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
inline struct {
  int x;
} threadIdx;

inline bool __any_sync(unsigned, bool value) { return value; }
inline bool __all_sync(unsigned, bool value) { return value; }
inline float __shfl_xor_sync(unsigned, float value, int) { return value; }
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
