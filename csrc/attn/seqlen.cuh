// Where one sequence of a batch begins and how long it is, dense or packed.
#pragma once

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
  const int64_t begin = min(max(static_cast<int64_t>(cu_seqlens[batch]), int64_t{0}), total);
  const int64_t end = min(max(static_cast<int64_t>(cu_seqlens[batch + 1]), begin), total);
  return {begin, 0, static_cast<int>(min(end - begin, static_cast<int64_t>(max_length)))};
}

}  // namespace attnscope
