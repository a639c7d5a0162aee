#pragma once
#include "host_device.h"

namespace attnscope::ptx {

inline std::set<uint32_t> copied;  // destination addresses of the copies

inline void cp_async_16(uint32_t to, const void*) { copied.insert(to); }
inline void cp_async_16_zfill(uint32_t to, const void*, bool) { copied.insert(to); }

}  // namespace attnscope::ptx
