#pragma once
#include "emulator.h"

namespace attnscope::ptx {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - emulator::shared);
}
inline void store_shared(uint32_t shared, uint32_t value) {
  std::memcpy(emulator::shared_at(shared, 4), &value, 4);
}

}  // namespace attnscope::ptx
