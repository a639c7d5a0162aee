#pragma once
#include "emulator.h"

namespace attnscope::ptx {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - emulator::shared);
}
inline void store_shared(uint32_t shared, uint32_t value) {
  std::memcpy(emulator::shared_at(shared, 4), &value, 4);
}
inline void store_shared_v4(uint32_t shared, float x, float y, float z, float w) {
  const float values[4] = {x, y, z, w};
  std::memcpy(emulator::shared_at(shared, 16), values, 16);
}
inline uint4 load_shared_v4(uint32_t shared) {
  uint4 value;
  std::memcpy(&value, emulator::shared_at(shared, 16), 16);
  return value;
}

}  // namespace attnscope::ptx
