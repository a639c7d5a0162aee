// Attention forward with mma.sync (sm_80 and later).
//
// Problem   out = softmax(mask(cap(q k^T scale))) v and the log-sum-exp, see attn/params.h.
// Tile      block_m query rows per thread block; each warp owns block_m / warps of them and keeps
//           O in registers. K and V pass through shared memory, block_n keys at a time, last
//           block first.
// Pipeline  cp.async loads the next K and V during the products of the current ones; the
//           exponentials of 16 keys are issued between the P V products of the previous 16.
// Softmax   online, in base 2; O is rescaled only when a row's maximum grew by more than 2^8.
// Limits    bf16, fp16; head dims in multiples of 8 up to 256.
// Test      tests/ops/test_forward_gpu.py; bench: attnscope bench --impl cuda-sm80.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>

#include "attn/block_range.cuh"
#include "attn/params.h"
#include "attn/score_scales.h"
#include "attn/scores.cuh"
#include "attn/seqlen.cuh"
#include "attn/tail.cuh"
#include "attn/tile_order.cuh"
#include "kernels/sm80_forward/nonfinite.cuh"
#include "kernels/sm80_forward/tiles.cuh"
#include "ptx/address.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"

namespace attnscope::sm80 {

// A thread's share of its warp's rows: rows g and g + 8 of each m16 tile, g = lane / 4.
template <class Config>
struct Accumulators {
  float o[Config::kRowTiles][Config::kHeadDim / 2];
  float s[Config::kRowTiles][Config::kBlockN / 2];
  // Reference row max of P and row_sum, times scale_log2. It starts at the lowest finite float, so
  // no difference below is inf - inf and rows without keys need no special case.
  float row_max[Config::kRows];
  float row_sum[Config::kRows];  // this thread's columns only
  bool giant;                    // warp-uniform: some row max is giant, see is_giant
};

template <class Config>
__device__ __forceinline__ void compute_scores(Accumulators<Config>& acc,
                                               const QueryFragments<Config>& q,
                                               const FragmentAddress<Config, Config::kBlockN>& k) {
  constexpr int kSteps = Config::kHeadDim / 16;
  constexpr int kPairs = Config::kBlockN / 16;
#pragma unroll
  for (int m = 0; m < Config::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < Config::kBlockN / 2; ++i) acc.s[m][i] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t a[Config::kRowTiles][4];
    q.get(a, step);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, k.at(pair, step));
#pragma unroll
      for (int m = 0; m < Config::kRowTiles; ++m) {
        ptx::mma_m16n8k16<typename Config::Element>(&acc.s[m][8 * pair], a[m], b[0], b[1]);
        ptx::mma_m16n8k16<typename Config::Element>(&acc.s[m][8 * pair + 4], a[m], b[2], b[3]);
      }
    }
  }
}

// Warp-converged. If any row max of the warp grew by more than kHeadroom, raises the reference
// maxima and rescales O and the sums.
template <class Config>
__device__ __forceinline__ void update_row_max(Accumulators<Config>& acc, float scale_log2) {
  float new_max[Config::kRows];
  bool grew = false;
#pragma unroll
  for (int m = 0; m < Config::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = 2 * m + half;
      new_max[r] = row_maximum(acc.s[m], half) * scale_log2;
      grew |= new_max[r] - acc.row_max[r] > kHeadroom;
    }
  }
  if (!__any_sync(0xffffffffu, grew)) return;
  bool giant = false;
#pragma unroll
  for (int r = 0; r < Config::kRows; ++r) {
    const float old_max = acc.row_max[r];
    acc.row_max[r] = fmaxf(old_max, new_max[r]);
    giant |= is_giant(acc.row_max[r]);
    const float factor = ptx::exp2_approx(old_max - acc.row_max[r]);
    acc.row_sum[r] *= factor;
#pragma unroll
    for (int d = 0; d < Config::kHeadDim / 8; ++d) {
      acc.o[r / 2][4 * d + r % 2 * 2] *= factor;
      acc.o[r / 2][4 * d + r % 2 * 2 + 1] *= factor;
    }
  }
  acc.giant = __any_sync(0xffffffffu, giant);
}

// Factor from scores to exponents: scale_log2, or 1 if a giant maximum requires scaling the scores
// first (done here).
template <class Config>
__device__ __forceinline__ float exponent_scale(Accumulators<Config>& acc, float scale_log2) {
  if (__builtin_expect(!acc.giant, true)) return scale_log2;
#pragma unroll
  for (int m = 0; m < Config::kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < Config::kBlockN / 2; ++i) acc.s[m][i] *= scale_log2;
  }
  return 1.0f;
}

// Computes exponentials [begin, end) of the 8 * kRowTiles that a thread owns among 16 keys. Scores
// become probabilities in place.
template <class Config>
__device__ __forceinline__ void exponentiate(Accumulators<Config>& acc, float scale_log2,
                                             int keys16, int begin, int end) {
#pragma unroll
  for (int i = begin; i < end; ++i) {
    const int m = i / 8, r = 2 * m + i % 4 / 2;
    float& s = acc.s[m][8 * keys16 + i % 8];
    s = ptx::exp2_approx(fmaf(s, scale_log2, -acc.row_max[r]));
    acc.row_sum[r] += s;
  }
}

// O += P V. The probabilities of the next 16 keys are computed between these products.
template <class Config>
__device__ __forceinline__ void accumulate_output(
    Accumulators<Config>& acc, float scale_log2,
    const FragmentAddress<Config, Config::kBlockN>& v) {
  using Element = typename Config::Element;
  constexpr int kSteps = Config::kBlockN / 16;
  constexpr int kPairs = Config::kHeadDim / 16;
  constexpr int kExps = 8 * Config::kRowTiles;
  exponentiate(acc, scale_log2, 0, 0, kExps);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t a[Config::kRowTiles][4];
#pragma unroll
    for (int m = 0; m < Config::kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* s = &acc.s[m][8 * step + 2 * i];
        a[m][i] = ptx::pack<Element>(s[0], s[1]);
      }
    }
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, v.at(step, pair));
#pragma unroll
      for (int m = 0; m < Config::kRowTiles; ++m) {
        ptx::mma_m16n8k16<Element>(&acc.o[m][8 * pair], a[m], b[0], b[1]);
        ptx::mma_m16n8k16<Element>(&acc.o[m][8 * pair + 4], a[m], b[2], b[3]);
      }
      if (step + 1 < kSteps) {
        exponentiate(acc, scale_log2, step + 1, kExps * pair / kPairs, kExps * (pair + 1) / kPairs);
      }
    }
  }
}

// Writes O / sum through the warp's rows of shared memory, 16 bytes per store, and the LSE. The
// tile's position is computed again here, which saves registers in the main loop.
template <class Config>
__device__ __forceinline__ void store_output(Accumulators<Config>& acc, const ForwardParams& p,
                                             const TileOrder& order, uint32_t shared_q,
                                             const void* shared_q_pointer) {
  using Element = typename Config::Element;
  const Tile tile = tile_at(order, blockIdx.x);
  const int batch = tile.head / p.heads_q, head = tile.head % p.heads_q;
  const Segment seg_q = segment(p.cu_seqlens_q, p.total_q, p.seqlen_q, batch);
  const int first_row = tile.m_block * Config::kBlockM, seqlen_q = seg_q.length;
  Element* out = static_cast<Element*>(p.out) + int64_t{seg_q.batch} * p.out_stride.batch +
                 seg_q.row * p.out_stride.row + head * p.out_stride.head;
  float* lse =
      p.lse + int64_t{seg_q.batch} * p.lse_batch_stride + head * p.lse_head_stride + seg_q.row;
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * Config::kRowTiles * 16;
  __syncwarp();  // all lanes have read Q; with no keys there was no barrier since
#pragma unroll
  for (int r = 0; r < Config::kRows; ++r) {
    float sum = acc.row_sum[r];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const int tile_row = warp_row + r / 2 * 16 + r % 2 * 8 + lane / 4;
    const int row = first_row + tile_row;
    const bool empty = sum == 0.0f;  // no key seen: any other row's largest term is >= 1
    const float inverse = empty ? 0.0f : 1.0f / sum;
    if (lane % 4 == 0 && row < seqlen_q) {
      lse[row] = empty ? -INFINITY : fmaf(acc.row_max[r], 0.6931471805599453f, logf(sum));
    }
#pragma unroll
    for (int d = 0; d < Config::kHeadDim / 8; ++d) {
      const uint32_t packed = ptx::pack<Element>(acc.o[r / 2][4 * d + r % 2 * 2] * inverse,
                                                 acc.o[r / 2][4 * d + r % 2 * 2 + 1] * inverse);
      const uint32_t at =
          shared_q + tile_offset<Config, Config::kBlockM>(tile_row, d) + lane % 4 * 4;
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(packed) : "memory");
    }
  }
  __syncwarp();
  constexpr int kChunks = Config::kHeadDim / 8;
  constexpr int kTotal = Config::kRowTiles * 16 * kChunks;
#pragma unroll
  for (int i = 0; i < kTotal / 32; ++i) {
    const int index = i * 32 + lane;
    const int tile_row = warp_row + index / kChunks, chunk = index % kChunks;
    const int row = first_row + tile_row;
    if (row < seqlen_q && chunk * 8 < p.head_dim_v) {
      const auto* from = static_cast<const char*>(shared_q_pointer) +
                         tile_offset<Config, Config::kBlockM>(tile_row, chunk);
      *reinterpret_cast<uint4*>(out + row * p.out_stride.row + chunk * 8) =
          *reinterpret_cast<const uint4*>(from);
    }
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kTile.blocks_per_sm)
    forward_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ TileOrder order,
                   const __grid_constant__ ScoreScales scores) {
  using Element = typename Config::Element;
  constexpr int kBlockM = Config::kBlockM;
  constexpr int kBlockN = Config::kBlockN;
  constexpr int kStages = Config::kStages;
  extern __shared__ __align__(128) char shared_memory[];
  auto& shared = *reinterpret_cast<ForwardShared<Config>*>(shared_memory);

  if (blockIdx.x >= order.m_blocks * order.heads) {
    clear_uncovered<Element>(p, blockIdx.x - order.m_blocks * order.heads, threadIdx.x,
                             Config::kThreads);
    return;
  }
  const Tile tile = tile_at(order, blockIdx.x);
  const int batch = tile.head / p.heads_q, head = tile.head % p.heads_q;
  const Segment seg_q = segment(p.cu_seqlens_q, p.total_q, p.seqlen_q, batch);
  const Segment seg_k = segment(p.cu_seqlens_k, p.total_k, p.seqlen_k, batch);
  const int first_row = tile.m_block * kBlockM;
  if (first_row >= seg_q.length) return;

  const int head_kv = head / (p.heads_q / p.heads_kv);
  const TileSource<Config> q(p.q, p.q_stride, seg_q, head, p.head_dim);
  const TileSource<Config> k(p.k, p.k_stride, seg_k, head_kv, p.head_dim);
  const TileSource<Config> v(p.v, p.v_stride, seg_k, head_kv, p.head_dim_v);

  const Window window{seg_k.length - seg_q.length, p.window_left, p.window_right};
  const int end_row = min(first_row + kBlockM, seg_q.length);
  const BlockRange range = block_range(window, first_row, end_row, seg_k.length, kBlockN);
  // Keys that no row of the tile sees are loaded as zeros: their weight is 0, and 0 * NaN is NaN.
  const int first_key = window.first_key(first_row),
            end_key = window.end_key(end_row - 1, seg_k.length);

  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * Config::kRowTiles * 16;
  const uint32_t shared_q = ptx::shared_address(shared.q);
  const uint32_t shared_k = ptx::shared_address(shared.k);
  const uint32_t shared_v = ptx::shared_address(shared.v);
  constexpr uint32_t kStageBytes = sizeof(shared.k[0]);

  const auto load_k = [&](int block, int stage) {
    k.template load<kBlockN>(block * kBlockN, first_key - block * kBlockN,
                             end_key - block * kBlockN, shared_k + stage * kStageBytes);
    ptx::cp_async_commit();
  };
  const auto load_v = [&](int block, int stage) {
    v.template load<kBlockN>(block * kBlockN, first_key - block * kBlockN,
                             end_key - block * kBlockN, shared_v + stage * kStageBytes);
    ptx::cp_async_commit();
  };

  Accumulators<Config> acc;
  acc.giant = false;
#pragma unroll
  for (int r = 0; r < Config::kRows; ++r) {
    acc.row_max[r] = -FLT_MAX;
    acc.row_sum[r] = 0.0f;
#pragma unroll
    for (int d = 0; d < Config::kHeadDim / 8; ++d) {
      acc.o[r / 2][4 * d + r % 2 * 2] = acc.o[r / 2][4 * d + r % 2 * 2 + 1] = 0.0f;
    }
  }

  if (range.begin < range.end) {
    q.template load<kBlockM>(first_row, 0, seg_q.length - first_row, shared_q);
    load_k(range.end - 1, 0);
    load_v(range.end - 1, 0);
  }
  QueryFragments<Config> q_fragments{{shared_q, warp_row + lane % 16, lane / 16}, {}};
  if constexpr (Config::kQInRegisters) {
    ptx::cp_async_wait<1>();
    __syncthreads();
    q_fragments.keep();
  }
  // Without a window, all rows see all loaded keys.
  const bool windowed = p.window_left >= 0 || p.window_right >= 0;
  for (int block = range.end - 1, stage = 0; block >= range.begin; --block) {
    char* const v_tile = reinterpret_cast<char*>(shared.v[stage]);
    const bool last = block == range.begin;
    const bool boundary = block < range.full_begin || block >= range.full_end;
    // After the barrier below, K of this block (and, with one stage, V of the previous block) is
    // visible to all threads. With two stages, all threads have finished with the other buffers.
    ptx::cp_async_wait<1>();
    __syncthreads();
    if (kStages == 2 && !last) load_k(block - 1, stage ^ 1);
    compute_scores<Config>(
        acc, q_fragments,
        FragmentAddress<Config, kBlockN>(shared_k + stage * kStageBytes, lane % 8 + lane / 16 * 8,
                                         lane / 8 % 2));
    if (scores.transform) {
#pragma unroll
      for (int m = 0; m < Config::kRowTiles; ++m) transform_scores(acc.s[m], scores);
    }
    if (boundary) {
#pragma unroll
      for (int m = 0; m < Config::kRowTiles; ++m) {
        mask_scores(acc.s[m], window, first_row + warp_row + m * 16 + lane / 4, block * kBlockN,
                    seg_k.length);
      }
    }
    update_row_max<Config>(acc, scores.scale_log2);
    const float scale = exponent_scale<Config>(acc, scores.scale_log2);
    if (kStages == 2 && !last) {
      ptx::cp_async_wait<1>();
    } else {
      ptx::cp_async_wait<0>();
    }
    bool nonfinite = false;
    if (boundary && windowed) {
      nonfinite = __syncthreads_or(own_chunks_nonfinite<Config>(v_tile));
    } else {
      __syncthreads();
    }
    if (!last) {
      if (kStages == 1) {
        load_k(block - 1, 0);
      } else {
        load_v(block - 1, stage ^ 1);
      }
    }
    if (__builtin_expect(nonfinite, false)) {
      add_nonfinite<Config>(acc.o, v_tile, window, first_row + warp_row + lane / 4, block * kBlockN,
                            seg_k.length);
      __syncthreads();
      clear_nonfinite<Config>(v_tile);
      __syncthreads();
    }
    accumulate_output<Config>(
        acc, scale,
        FragmentAddress<Config, kBlockN>(shared_v + stage * kStageBytes, lane % 16, lane / 16));
    if (kStages == 1) {
      __syncthreads();
      if (!last) load_v(block - 1, 0);
    } else {
      stage ^= 1;
    }
  }

  store_output<Config>(acc, p, order, shared_q, shared.q);
}

}  // namespace attnscope::sm80
