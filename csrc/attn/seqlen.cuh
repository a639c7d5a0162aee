// Where one sequence of a batch begins and how long it is, dense or packed.
#pragma once

#include <climits>

#include "attn/params.h"

namespace attnscope {

struct Segment {
  int64_t row;  // first row of the sequence in the tensor, counted in rows
  int batch;    // index into the batch stride; 0 when packed
  int length;
};

// cu_seqlens may hold anything: the range is clamped to [0, total] and to `max_length`, so a bad
// one gives a wrong result but never an access out of bounds.
__device__ __forceinline__ Segment segment(const int32_t* cu_seqlens, int64_t total, int max_length,
                                           int batch) {
  if (cu_seqlens == nullptr) return {0, batch, max_length};
  const int last = static_cast<int>(min(total, int64_t{INT_MAX}));
  const int begin = min(max(cu_seqlens[batch], 0), last);
  const int end = min(max(cu_seqlens[batch + 1], begin), last);
  return {begin, 0, min(end - begin, max_length)};
}

}  // namespace attnscope
