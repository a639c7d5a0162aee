// NaN and infinity in 16-bit elements, two in a 32-bit word.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx/math.cuh"

namespace attnscope {

// Searches words for elements that are not finite, by one multiplication a word: x * 0 is 0 or NaN.
template <class Element>
class NonfiniteSearch {
 public:
  __device__ __forceinline__ void add(uint32_t word) {
    zeros_ = ptx::fma_x2<Element>(word, 0u, zeros_);
  }
  __device__ __forceinline__ void add(const uint4& words) {
    add(words.x);
    add(words.y);
    add(words.z);
    add(words.w);
  }
  __device__ __forceinline__ bool found() const { return (zeros_ & 0x7fff7fffu) != 0; }

 private:
  uint32_t zeros_ = 0;
};

template <class Element>
__device__ __forceinline__ float2 unpack(uint32_t word);

template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t word) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}

template <>
__device__ __forceinline__ float2 unpack<__half>(uint32_t word) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}

// The NaN and infinities of a word; 0 in place of finite elements.
template <class Element>
__device__ __forceinline__ float2 nonfinite_part(uint32_t word) {
  const float2 x = unpack<Element>(word);
  return {fabsf(x.x) < INFINITY ? 0.0f : x.x, fabsf(x.y) < INFINITY ? 0.0f : x.y};
}

// The finite elements of a word; 0 in place of NaN and infinities.
template <class Element>
__device__ __forceinline__ uint32_t finite_part(uint32_t word) {
  const float2 x = unpack<Element>(word);
  return (fabsf(x.x) < INFINITY ? word & 0xffffu : 0u) |
         (fabsf(x.y) < INFINITY ? word & 0xffff0000u : 0u);
}

}  // namespace attnscope
