// The epilogue of a consumer: stores O and the log-sum-exp of 64 rows.
#pragma once

#include "attn/nonfinite.cuh"
#include "kernels/sm90_forward/shared.cuh"
#include "kernels/sm90_forward/softmax.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"

namespace attnscope::sm90 {

// Two consumers have the same rows and half of the keys each: see exchange_output.
template <class Config>
__device__ __forceinline__ void give_output(const Fragments<Config>& f,
                                            PartialOutput<Config, true>& partial, int warp) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < Config::kValueDim / 8; ++i) {
    partial.o[warp][i][lane] =
        make_float4(f.o[4 * i], f.o[4 * i + 1], f.o[4 * i + 2], f.o[4 * i + 3]);
  }
  partial.rows[warp][lane] = make_float4(f.row_max[0], f.row_max[1], f.row_sum[0], f.row_sum[1]);
}

// O and the sums of both parts, by the larger maximum.
template <class Config>
__device__ __forceinline__ void add_output(Fragments<Config>& f,
                                           const PartialOutput<Config, true>& partial, int warp) {
  const int lane = threadIdx.x % 32;
  const float4 rows = partial.rows[warp][lane];
  const float other_max[2] = {rows.x, rows.y}, other_sum[2] = {rows.z, rows.w};
  float factor[2], other_factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float new_max = fmaxf(f.row_max[half], other_max[half]);
    factor[half] = ptx::exp2_approx(f.row_max[half] - new_max);
    other_factor[half] = ptx::exp2_approx(other_max[half] - new_max);
    f.row_max[half] = new_max;
    f.row_sum[half] = f.row_sum[half] * factor[half] + other_sum[half] * other_factor[half];
  }
#pragma unroll
  for (int i = 0; i < Config::kValueDim / 8; ++i) {
    const float4 o = partial.o[warp][i][lane];
    f.o[4 * i] = f.o[4 * i] * factor[0] + o.x * other_factor[0];
    f.o[4 * i + 1] = f.o[4 * i + 1] * factor[0] + o.y * other_factor[0];
    f.o[4 * i + 2] = f.o[4 * i + 2] * factor[1] + o.z * other_factor[1];
    f.o[4 * i + 3] = f.o[4 * i + 3] * factor[1] + o.w * other_factor[1];
  }
}

// A warp of one part gives O to the warp of the other that has the same elements, and goes on once
// that warp has added it. Both reach each barrier at one instruction, which synccheck asks for.
template <class Config>
__device__ __forceinline__ void exchange_output(Fragments<Config>& f,
                                                PartialOutput<Config, true>& partial, int warp,
                                                bool gives) {
  if (gives) give_output<Config>(f, partial, warp);
  ptx::named_barrier(1 + warp, 64);
  if (!gives) add_output<Config>(f, partial, warp);
  ptx::named_barrier(5 + warp, 64);
}

// Stores a warp's 16 rows through shared memory, in blocks of 64 columns. TMA clips them to the
// tensor. Where the rows end inside a packed batch, eight lanes write the 128 contiguous bytes of a
// row instead. The log-sum-exp comes last: a fence waits for all stores before it. False if an
// element of O in the warp is not finite.
template <class Config>
__device__ __forceinline__ bool store_output(
    const Fragments<Config>& f, const ForwardArguments& a, const Unit& unit, int batch,
    typename Config::Element (&staging)[Config::kOutStages][16 * 64]) {
  using Element = typename Config::Element;
  constexpr int kBlocks = (Config::kValueDim + 63) / 64;  // of columns
  constexpr int kStages = Config::kOutStages;
  constexpr int kAtOnce = kBlocks <= kStages ? kBlocks : 1;
  const ForwardParams& p = a.params;
  const int lane = threadIdx.x % 32;
  const int first_row = threadIdx.x % 128 / 32 * 16;
  const int rows = unit.rows - first_row;
  const int q_row = unit.q_row + grouping<Config>(a).query(first_row);
  const int head = unit.head;
  if (lane == 0) ptx::tma_store_wait_read<0>();

  float sum[2], inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] = f.row_sum[half] + __shfl_xor_sync(0xffffffffu, f.row_sum[half], 1);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
    // 0 where no key is seen; in any other row the largest term is at least 1.
    inverse[half] = sum[half] == 0.0f ? 0.0f : ptx::reciprocal_approx(sum[half]);
  }

  // Rows of 128 bytes, swizzled in chunks of 16 bytes. A lane writes row lane % 16 and chunk
  // lane / 16 of a pair; it reads row lane / 8 and chunk lane % 8.
  const uint32_t shared = ptx::shared_address(staging);
  const uint32_t write = shared + lane % 16 * 128 + ((lane / 16 ^ lane % 8) * 16);
  NonfiniteSearch<Element> nonfinite;
  const bool copied = rows >= 16 || (rows > 0 && !a.packed);
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const int stage = block % kStages * 2048;
    if (block >= kStages) {
      if (lane == 0) ptx::tma_store_wait_read<kStages - 1>();
      __syncwarp();
    }
#pragma unroll
    for (int chunk = 0; chunk < 8 && block * 64 + chunk * 8 < Config::kValueDim; chunk += 2) {
      const float* o = &f.o[block * 32 + 4 * chunk];
      const uint4 words{ptx::pack<Element>(o[0] * inverse[0], o[1] * inverse[0]),
                        ptx::pack<Element>(o[2] * inverse[1], o[3] * inverse[1]),
                        ptx::pack<Element>(o[4] * inverse[0], o[5] * inverse[0]),
                        ptx::pack<Element>(o[6] * inverse[1], o[7] * inverse[1])};
      nonfinite.add(words);
      ptx::stmatrix_x4((write ^ chunk * 16) + stage, {words.x, words.y, words.z, words.w});
    }
    if (block % kAtOnce != kAtOnce - 1) continue;
    ptx::fence_proxy_async();
    __syncwarp();
#pragma unroll
    for (int written = block - kAtOnce + 1; written <= block; ++written) {
      const int from = written % kStages * 2048;
      if (copied) {
        if (lane == 0) {
          ptx::tma_store_5d(&a.out.map, shared + from, written * 64, 0, q_row,
                            head >> grouping<Config>(a).log2, batch);
          ptx::tma_store_commit();
        }
      } else {
        const uint32_t read = shared + from + lane / 8 * 128 + ((lane % 8 ^ lane / 8) * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint4 value = ptx::load_shared_v4((read ^ i % 2 * 64) + i * 512);
          const int row = lane / 8 + i * 4;
          if (row < rows && written * 64 + lane % 8 * 8 < p.head_dim_v) {
            Element* out = static_cast<Element*>(p.out) +
                           (q_row + grouping<Config>(a).query(row)) * p.out_stride.row +
                           (head + grouping<Config>(a).head(row)) * p.out_stride.head;
            *reinterpret_cast<uint4*>(out + written * 64 + lane % 8 * 8) = value;
          }
        }
      }
    }
  }

  float* lse = p.lse + batch * p.lse_batch_stride + head * p.lse_head_stride + q_row;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + half * 8;
    if (lane % 4 == 0 && row < rows) {
      lse[grouping<Config>(a).head(row) * p.lse_head_stride + grouping<Config>(a).query(row)] =
          sum[half] == 0.0f ? -INFINITY
                            : fmaf(f.row_max[half] + ptx::log2_approx(sum[half]),
                                   0.6931471805599453f, a.scores.softcap);
    }
  }
  return !__any_sync(0xffffffffu, nonfinite.found());
}

}  // namespace attnscope::sm90
