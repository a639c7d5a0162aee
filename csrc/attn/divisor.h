// Division by a number that is constant for a launch.
#pragma once

#include <cstdint>

namespace attnscope {

// n / divisor for 0 <= n < 2^31, divisor > 0, by a multiplication: a division is about thirty
// dependent instructions on the device. Granlund and Montgomery 1994, section 4
// (doi:10.1145/178243.178249).
struct Divisor {
  int divisor;
  uint32_t multiplier;
  int shift;

  static Divisor of(int divisor) {
    int shift = 0;
    while ((int64_t{1} << shift) < divisor) ++shift;
    const uint64_t excess = (uint64_t{1} << shift) - static_cast<uint64_t>(divisor);
    const uint64_t multiplier = (excess << 32) / static_cast<uint64_t>(divisor) + 1;
    return {divisor, static_cast<uint32_t>(multiplier), shift};
  }
};

#ifdef __CUDACC__
__device__ __forceinline__ int operator/(int n, const Divisor& d) {
  return static_cast<int>((__umulhi(n, d.multiplier) + n) >> d.shift);
}
#endif

}  // namespace attnscope
