// Before the main kernel: delta and lse as it reads them, dQ's accumulator and counters at zero,
// and zeros for rows that no segment contains.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "attn/nonfinite.cuh"
#include "kernels/sm80_backward/workspace.cuh"

namespace attnscope::sm80 {

constexpr int kSideThreads = 256;  // of the kernels before and after the main one

// kWorkRows rows of one head.
struct RowBlock {
  Segment segment;
  int batch, head;
  int first;  // row in its sequence

  __device__ __forceinline__ RowBlock(const ForwardParams& p, int index) {
    const int blocks = (p.seqlen_q + kWorkRows - 1) / kWorkRows;
    const int sequence = index / blocks;
    first = (index - sequence * blocks) * kWorkRows;
    batch = sequence / p.heads_q;
    head = sequence - batch * p.heads_q;
    segment = attnscope::segment(p.cu_seqlens_q, p.total_q, p.seqlen_q, batch);
  }
};

// Zeros in rows of a packed tensor before the first segment, past the last, and past max_length of
// a longer one.
template <class Element>
__device__ __forceinline__ void clear_uncovered_rows(void* data, const Strides& strides,
                                                     const int32_t* cu_seqlens, int64_t total,
                                                     int batches, int max_length, int head,
                                                     int head_dim) {
  const auto bound = [&](int i) {
    return min(max(static_cast<int64_t>(cu_seqlens[i]), int64_t{0}), total);
  };
  const auto clear = [&](int64_t begin, int64_t end, int thread, int threads) {
    Element* rows = static_cast<Element*>(data) + head * strides.head;
    for (int64_t row = begin; row < end; ++row) {
      for (int d = 8 * thread; d < head_dim; d += 8 * threads) {
        *reinterpret_cast<uint4*>(rows + row * strides.row + d) = uint4{0, 0, 0, 0};
      }
    }
  };
  const int thread = threadIdx.x;
  clear(0, bound(0), thread, kSideThreads);
  clear(bound(batches), total, thread, kSideThreads);
  for (int batch = thread; batch < batches; batch += kSideThreads) {
    clear(bound(batch) + max_length, bound(batch + 1), 0, 1);
  }
}

template <class Element>
__global__ void __launch_bounds__(kSideThreads)
    preprocess_kernel(const __grid_constant__ BackwardParams p,
                      const __grid_constant__ BackwardWorkspace work, int row_blocks, int block_m) {
  const ForwardParams& f = p.forward;
  if (blockIdx.x == 0 && threadIdx.x == 0) *work.started = 0;
  int extra = static_cast<int>(blockIdx.x) - row_blocks;
  if (extra >= f.heads_q) {
    extra -= f.heads_q;
    clear_uncovered_rows<Element>(p.dk, p.dk_stride, f.cu_seqlens_k, f.total_k, f.batch, f.seqlen_k,
                                  extra, f.head_dim);
    clear_uncovered_rows<Element>(p.dv, p.dv_stride, f.cu_seqlens_k, f.total_k, f.batch, f.seqlen_k,
                                  extra, f.head_dim_v);
    return;
  }
  if (extra >= 0) {
    clear_uncovered_rows<Element>(p.dq, p.dq_stride, f.cu_seqlens_q, f.total_q, f.batch, f.seqlen_q,
                                  extra, f.head_dim);
    return;
  }
  const RowBlock at(f, blockIdx.x);
  if (at.first >= at.segment.length) return;
  const int64_t work_row = at.head * work.rows + workspace_row(f, at.segment, at.batch) + at.first;

  const int log2_lanes = work.head_dim <= 64 ? 3 : work.head_dim <= 128 ? 4 : 5;  // of a row
  const int lanes = 1 << log2_lanes, lane = threadIdx.x & (lanes - 1);
  const int64_t row0 = at.segment.row + at.first;
  const Element* out = static_cast<const Element*>(f.out) +
                       int64_t{at.segment.batch} * f.out_stride.batch + row0 * f.out_stride.row +
                       at.head * f.out_stride.head + lane * 8;
  const Element* dout = static_cast<const Element*>(p.dout) +
                        int64_t{at.segment.batch} * p.dout_stride.batch + row0 * p.dout_stride.row +
                        at.head * p.dout_stride.head + lane * 8;
  const int64_t lse_row =
      int64_t{at.segment.batch} * f.lse_batch_stride + at.head * f.lse_head_stride + row0;
#pragma unroll 4
  for (int row = threadIdx.x >> log2_lanes; row < kWorkRows; row += kSideThreads >> log2_lanes) {
    const bool valid = at.first + row < at.segment.length;
    uint4 a{0, 0, 0, 0}, b{0, 0, 0, 0};
    if (valid && lane * 8 < f.head_dim_v) {
      a = *reinterpret_cast<const uint4*>(out + row * f.out_stride.row);
      b = *reinterpret_cast<const uint4*>(dout + row * p.dout_stride.row);
    }
    const uint32_t words_a[4] = {a.x, a.y, a.z, a.w}, words_b[4] = {b.x, b.y, b.z, b.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = unpack<Element>(words_a[i]), y = unpack<Element>(words_b[i]);
      sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    if (lane == 0) {
      const float lse = valid ? f.lse[lse_row + row] : -INFINITY;
      work.lse[work_row + row] = lse == -INFINITY ? INFINITY : lse * 1.4426950408889634f;
      work.delta[work_row + row] = valid && p.dlse ? sum - p.dlse[lse_row + row] : sum;
    }
  }

  float4* const dq = reinterpret_cast<float4*>(work.dq + work_row * work.head_dim);
  for (int i = threadIdx.x; i < kWorkRows * work.head_dim / 4; i += kSideThreads) {
    dq[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
  }
  if (p.deterministic && threadIdx.x < kWorkRows / block_m) {
    work.turns[work_row / block_m + threadIdx.x] = 0;
  }
}

}  // namespace attnscope::sm80
