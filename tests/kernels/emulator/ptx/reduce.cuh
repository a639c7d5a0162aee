#pragma once
#include "emulator.h"

namespace attnscope::ptx {

constexpr bool kVectorAdd = VECTOR_ADD;

inline void add_warp_quad(float* warp_floats, int lane, const float* x) {
  for (int i = 0; i < 4; ++i) warp_floats[kVectorAdd ? 4 * lane + i : lane + 32 * i] += x[i];
}
inline void release_add(int* global) { ++*global; }
inline std::function<int(const int*)> on_load_acquire;
inline int load_acquire(const int* global) {
  return on_load_acquire ? on_load_acquire(global) : *global;
}

}  // namespace attnscope::ptx
