#pragma once
#include "emulator.h"

namespace attnscope::ptx {

// Copies are done when they are waited for.
inline void cp_async_16(uint32_t shared, const void* global) {
  if (reinterpret_cast<uintptr_t>(global) % 16) emulator::fail("misaligned copy");
  emulator::self().copies.push_back({emulator::shared_at(shared, 16), global});
}
inline void cp_async_16_zfill(uint32_t shared, const void* global, bool valid) {
  cp_async_16(shared, valid ? global : nullptr);
}
inline void cp_async_commit() {
  emulator::self().groups.push_back(std::move(emulator::self().copies));
  emulator::self().copies.clear();
}
template <int kPending>
void cp_async_wait() {
  auto& groups = emulator::self().groups;
  while (groups.size() > kPending) {
    for (const emulator::Copy& copy : groups.front()) {
      if (copy.from) {
        std::memcpy(copy.to, copy.from, 16);
      } else {
        std::memset(copy.to, 0, 16);
      }
    }
    groups.erase(groups.begin());
  }
}

}  // namespace attnscope::ptx
