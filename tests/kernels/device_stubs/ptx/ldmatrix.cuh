#pragma once
#include <cstdint>

namespace attnscope::ptx {

inline void ldmatrix_x4(uint32_t (&)[4], uint32_t) {}
inline void stmatrix_x4(uint32_t, const uint32_t (&)[4]) {}

}  // namespace attnscope::ptx
