// Addresses in shared memory as PTX instructions take them. PTX ISA 9.7.9.21 (cvta).
#pragma once

#include <cstdint>

namespace attnscope::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace attnscope::ptx
