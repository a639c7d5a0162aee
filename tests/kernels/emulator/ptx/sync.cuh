#pragma once
#include "emulator.h"

namespace attnscope::ptx {

inline int lane() { return threadIdx.x % 32; }
inline int thread() { return threadIdx.x; }
inline int uniform(int value) { return value; }
inline void fence_proxy_async() {}
inline void fence_proxy_async_global() {}
inline void await_kernel_before() {}
inline int atomic_add(int* global, int value) {
  const int before = *global;
  *global += value;
  return before;
}

}  // namespace attnscope::ptx
