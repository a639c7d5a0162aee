// Shared-memory addresses for PTX instructions, and accesses through them. PTX ISA 9.7.9.
#pragma once

#include <cstdint>

namespace attnscope::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint4 load_shared_v4(uint32_t shared) {
  uint4 r;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(shared)
               : "memory");
  return r;
}

__device__ __forceinline__ void store_shared_v4(uint32_t shared, float x, float y, float z,
                                                float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "f"(x), "f"(y), "f"(z),
               "f"(w)
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t shared, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(value) : "memory");
}

}  // namespace attnscope::ptx
