// After the main kernel: dq = scale times the accumulator, in the dtype of q.
#pragma once

#include "kernels/sm80_backward/preprocess.cuh"
#include "ptx/math.cuh"
#include "ptx/reduce.cuh"

namespace attnscope::sm80 {

// A thread takes 8 columns of rows g and g + 8 of an m16 tile: 64 bytes of four lanes.
template <class Element>
__global__ void __launch_bounds__(kSideThreads)
    postprocess_kernel(const __grid_constant__ BackwardParams p,
                       const __grid_constant__ BackwardWorkspace work) {
  const ForwardParams& f = p.forward;
  const RowBlock at(f, blockIdx.x);
  if (at.first >= at.segment.length) return;
  const int64_t work_row = at.head * work.rows + workspace_row(f, at.segment, at.batch) + at.first;
  const int log2_chunks = work.head_dim <= 64 ? 3 : work.head_dim <= 128 ? 4 : 5;  // of a row
  const int chunk = threadIdx.x & ((1 << log2_chunks) - 1);
  if (chunk * 8 >= f.head_dim) return;
  const float* from = work.dq + work_row * work.head_dim + chunk * 128;
  Element* to = static_cast<Element*>(p.dq) + int64_t{at.segment.batch} * p.dq_stride.batch +
                (at.segment.row + at.first) * p.dq_stride.row + at.head * p.dq_stride.head +
                chunk * 8;
  const float scale = static_cast<float>(f.scale);
#pragma unroll 4
  for (int i = threadIdx.x >> log2_chunks; i < kWorkRows / 2; i += kSideThreads >> log2_chunks) {
    const int row16 = i / 8 * 16, g = i % 8;
    const float* tile = from + row16 * work.head_dim;
    float4 x[4];
    float columns[2][8];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      x[t] = *reinterpret_cast<const float4*>(tile +
                                              (ptx::kVectorAdd ? 16 * g + 4 * t : 32 * t + 4 * g));
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float of[4] = {x[t].x, x[t].y, x[t].z, x[t].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // With vector adds x[lane][accumulator], without x[accumulator][lane].
        const int lane = ptx::kVectorAdd ? t : j, accumulator = ptx::kVectorAdd ? j : t;
        columns[accumulator / 2][2 * lane + accumulator % 2] = of[j] * scale;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row16 + half * 8 + g;
      if (at.first + row >= at.segment.length) continue;
      const float* c = columns[half];
      *reinterpret_cast<uint4*>(to + row * p.dq_stride.row) =
          uint4{ptx::pack<Element>(c[0], c[1]), ptx::pack<Element>(c[2], c[3]),
                ptx::pack<Element>(c[4], c[5]), ptx::pack<Element>(c[6], c[7])};
    }
  }
}

}  // namespace attnscope::sm80
