// NVTX ranges of the ops, in the one domain `attnscope`, with registered strings so that nsys can
// gate on them. Without the NVTX headers the ranges compile to nothing.
#pragma once

#include <cstdint>

#if __has_include(<nvtx3/nvtx3.hpp>)
#include <nvtx3/nvtx3.hpp>
#define ATTNSCOPE_NVTX 1
#else
#define ATTNSCOPE_NVTX 0
#endif

namespace attnscope::binding {

// The Python side (attnscope.ranges) names the same strings; a test compares the two.
enum class Range : int { kForward, kBackward, kCopy };
constexpr const char* kRangeNames[] = {"attnscope::forward", "attnscope::backward",
                                       "attnscope::copy"};
inline constexpr const char* kNvtxDomain = "attnscope";

#if ATTNSCOPE_NVTX
struct NvtxDomain {
  static constexpr const char* name = kNvtxDomain;
};

// A push/pop range around an op call; the payload is a size, which distinguishes calls. It begins
// and ends on the thread of the call: for a backward, on autograd's.
class NvtxRange {
 public:
  explicit NvtxRange(Range range, int64_t payload = 0)
      : scoped_(nvtx3::event_attributes{registered(range), nvtx3::payload{payload}}) {}

 private:
  static const nvtx3::registered_string_in<NvtxDomain>& registered(Range range) {
    static const nvtx3::registered_string_in<NvtxDomain> strings[] = {
        nvtx3::registered_string_in<NvtxDomain>{kRangeNames[0]},
        nvtx3::registered_string_in<NvtxDomain>{kRangeNames[1]},
        nvtx3::registered_string_in<NvtxDomain>{kRangeNames[2]},
    };
    return strings[static_cast<int>(range)];
  }
  nvtx3::scoped_range_in<NvtxDomain> scoped_;
};
#else
class NvtxRange {
 public:
  explicit NvtxRange(Range, int64_t = 0) {}
};
#endif

}  // namespace attnscope::binding
