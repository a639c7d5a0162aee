// Attention forward with mma.sync (sm_80 and later).
//
// Problem   out = softmax(mask(cap(q k^T scale))) v and its log-sum-exp, see attn/params.h.
// Tile      block_m query rows per thread block; every warp owns block_m / warps of them, with O in
//           registers. K and V pass through shared memory, block_n keys at a time, last block first.
// Pipeline  cp.async fills the next K and V while the tensor cores work on the present ones; the
//           exponentials of 16 keys are issued between the P V products of the 16 keys before.
// Softmax   online, in base 2; O is rescaled only when a row's maximum grew by more than 2^8.
// Limits    bf16, fp16; head dims in multiples of 8 up to 256.
// Test      tests/test_forward_gpu.py; bench: attnscope bench --impl cuda-sm80.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>

#include "attn/block_range.cuh"
#include "attn/params.h"
#include "attn/score_scales.h"
#include "attn/seqlen.cuh"
#include "attn/tile_order.cuh"
#include "kernels/sm80_forward/config.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"

namespace attnscope::sm80 {

template <class Element_, int kHeadDim_>
struct ForwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr ForwardTile kTile = forward_tile(kHeadDim);
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kWarps = kTile.warps;
  static constexpr int kThreads = kTile.threads();
  static constexpr int kStages = kTile.stages;
  static constexpr int kRowTiles = kBlockM / kWarps / 16;  // m16 tiles of a warp
  static constexpr int kRows = 2 * kRowTiles;              // rows of a thread
  static constexpr bool kQInRegisters = kTile.q_in_registers;

  // Shared rows are cut into column blocks of 64 elements (32 where 64 does not divide): 128-byte
  // (64-byte) rows whose 16-byte chunks are permuted by the row, so ldmatrix meets no bank twice.
  static constexpr int kBlockCols = kHeadDim % 64 == 0 ? 64 : 32;
  static constexpr int kRowBytes = 2 * kBlockCols;

  static_assert(kTile.head_dim == kHeadDim, "the tile table has no row for this head dim");
  static_assert(kHeadDim % 32 == 0, "head dim tiles are multiples of 32");
  static_assert(kBlockM % (16 * kWarps) == 0, "each warp owns whole m16 tiles");
  static_assert(kBlockN % 16 == 0, "keys are consumed 16 at a time");
  static_assert(kStages == 1 || kStages == 2, "K and V are single or double buffered");
};

template <class Config>
struct ForwardShared {
  using Element = typename Config::Element;
  alignas(128) Element q[Config::kBlockM * Config::kHeadDim];  // O on its way out, too
  alignas(128) Element k[Config::kStages][Config::kBlockN * Config::kHeadDim];
  alignas(128) Element v[Config::kStages][Config::kBlockN * Config::kHeadDim];
};

// Byte offset of 16-byte chunk `chunk` of row `row` in a swizzled tile of `kTileRows` rows.
template <class Config, int kTileRows>
__device__ __forceinline__ uint32_t tile_offset(int row, int chunk) {
  constexpr int kChunks = Config::kBlockCols / 8;
  const int block = chunk / kChunks;
  const int key = kChunks == 8 ? row & 7 : (row >> 1) & 3;
  return (block * kTileRows + row) * Config::kRowBytes + ((chunk % kChunks) ^ key) * 16;
}

// The rows of one head in global memory, and the chunks of every tile that this thread copies: the
// threads of a 128-byte (64-byte) row segment are neighbours, and the rows of a thread keep one
// swizzle key, so all its shared addresses are one base and constants.
template <class Config>
struct TileSource {
  using Element = typename Config::Element;
  static constexpr int kChunks = Config::kBlockCols / 8;
  static constexpr int kRowStep = Config::kThreads / kChunks;

  const Element* lane_rows;  // this thread's chunk of its first row
  int64_t row_stride;
  int head_dim;

  __device__ __forceinline__ TileSource(const void* data, const Strides& strides, const Segment& segment,
                                        int head, int head_dim_)
      : row_stride(strides.row), head_dim(head_dim_) {
    lane_rows = static_cast<const Element*>(data) + int64_t{segment.batch} * strides.batch + head * strides.head +
                (segment.row + lane_row()) * row_stride + lane_chunk() * 8;
  }
  static __device__ __forceinline__ int lane_row() { return threadIdx.x / kChunks; }
  static __device__ __forceinline__ int lane_chunk() { return threadIdx.x % kChunks; }

  // Starts the copy of rows first_row + [0, kTileRows) into shared memory; rows past `valid_rows` and
  // columns past the true head dim become zero, so rubbish there (NaN too) cannot reach a product.
  template <int kTileRows>
  __device__ __forceinline__ void load(int first_row, int valid_rows, uint32_t shared) const {
    static_assert(kTileRows % kRowStep == 0, "every thread copies the same number of rows");
    shared += tile_offset<Config, kTileRows>(lane_row(), lane_chunk());
    const Element* from = lane_rows + first_row * row_stride;
    const bool whole = valid_rows >= kTileRows && head_dim == Config::kHeadDim;
#pragma unroll
    for (int i = 0; i < kTileRows / kRowStep; ++i) {
#pragma unroll
      for (int block = 0; block < Config::kHeadDim / Config::kBlockCols; ++block) {
        const uint32_t to = shared + (block * kTileRows + i * kRowStep) * Config::kRowBytes;
        if (whole) {
          ptx::cp_async_16(to, from + block * Config::kBlockCols);
        } else {
          const bool valid = lane_row() + i * kRowStep < valid_rows &&
                             block * Config::kBlockCols + lane_chunk() * 8 < head_dim;
          ptx::cp_async_16_zfill(to, valid ? from + block * Config::kBlockCols : lane_rows, valid);
        }
      }
      from += kRowStep * row_stride;
    }
  }
};

// A thread's share of its warp's rows: in every m16 tile rows g and g + 8, g = lane / 4.
template <class Config>
struct Accumulators {
  float o[Config::kRowTiles][Config::kHeadDim / 8][4];
  float s[Config::kRowTiles][Config::kBlockN / 8][4];
  // The maximum that P and row_sum refer to, times scale_log2. It starts at the lowest finite float:
  // then no difference below is ever inf - inf, and rows without keys need no care.
  float row_max[Config::kRows];
  float row_sum[Config::kRows];  // this thread's columns only
};

// Addresses of a lane for ldmatrix: A operands and V^T take rows by lane % 16 and a chunk by
// lane / 16; K takes rows by lane % 8 + 8 (lane / 16) and a chunk by lane / 8 % 2.
template <class Config, int kTileRows>
struct FragmentAddress {
  uint32_t base;
  __device__ __forceinline__ FragmentAddress(uint32_t tile, int row, int chunk)
      : base(tile + tile_offset<Config, kTileRows>(row, chunk)) {}
  // The address `row16` tiles of 16 rows down and `step` pairs of chunks to the right: both keep
  // the swizzle key, and the chunk index enters by exclusive or.
  __device__ __forceinline__ uint32_t at(int row16, int step) const {
    constexpr int kSteps = Config::kBlockCols / 16;
    return (base ^ (step % kSteps * 32)) + (step / kSteps * kTileRows + row16 * 16) * Config::kRowBytes;
  }
};

// A warp's Q as A operands: kept in registers where they are to spare, else read from shared memory
// for every block of keys.
template <class Config>
struct QueryFragments {
  static constexpr int kSteps = Config::kHeadDim / 16;
  FragmentAddress<Config, Config::kBlockM> address;
  uint32_t kept[Config::kQInRegisters ? kSteps : 1][Config::kRowTiles][4];

  __device__ __forceinline__ void keep() {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) read(kept[step], step);
  }
  __device__ __forceinline__ void read(uint32_t (&a)[Config::kRowTiles][4], int step) const {
#pragma unroll
    for (int m = 0; m < Config::kRowTiles; ++m) ptx::ldmatrix_x4(a[m], address.at(m, step));
  }
  __device__ __forceinline__ void get(uint32_t (&a)[Config::kRowTiles][4], int step) const {
    if constexpr (Config::kQInRegisters) {
#pragma unroll
      for (int m = 0; m < Config::kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = kept[step][m][i];
      }
    } else {
      read(a, step);
    }
  }
};

template <class Config>
__device__ __forceinline__ void compute_scores(Accumulators<Config>& acc, const QueryFragments<Config>& q,
                                               const FragmentAddress<Config, Config::kBlockN>& k) {
  constexpr int kSteps = Config::kHeadDim / 16;
  constexpr int kPairs = Config::kBlockN / 16;
#pragma unroll
  for (int m = 0; m < Config::kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc.s[m][n][i] = 0.0f;
    }
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
        ptx::mma_m16n8k16<typename Config::Element>(acc.s[m][2 * pair], a[m], b[0], b[1]);
        ptx::mma_m16n8k16<typename Config::Element>(acc.s[m][2 * pair + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Scores to final logits where the plain path (base-2 exponent of s * scale) does not serve: softcap,
// and scales that are not positive, whose maximum is not that of the raw scores.
template <class Config>
__device__ __forceinline__ void transform_scores(Accumulators<Config>& acc, float scale, float softcap) {
  constexpr float kLog2e = 1.4426950408889634f;
#pragma unroll
  for (int m = 0; m < Config::kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float s = acc.s[m][n][i] * scale;
        if (softcap > 0.0f) {
          // tanh(x) = 1 - 2 / (e^2x + 1); tanh.approx would cost 2^-11 of the cap.
          const float e = ptx::exp2_approx(s / softcap * (2.0f * kLog2e));
          s = softcap * (1.0f - __fdividef(2.0f, e + 1.0f));
        }
        acc.s[m][n][i] = s;
      }
    }
  }
}

template <class Config>
__device__ __forceinline__ void mask_scores(Accumulators<Config>& acc, const Window& window, int first_row,
                                            int first_key, int seqlen_k) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < Config::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + m * 16 + half * 8 + lane / 4;
      const int begin = window.first_key(row) - first_key - lane % 4 * 2;
      const int end = window.end_key(row, seqlen_k) - first_key - lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < Config::kBlockN / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = n * 8 + i;
          if (key < begin || key >= end) acc.s[m][n][half * 2 + i] = -INFINITY;
        }
      }
    }
  }
}

// Raises the reference maxima where a row's new maximum passed them by more than kHeadroom, and
// scales O and the sums to match. Below that P stays under 2^8, which costs no accuracy in fp32 sums
// and none in P, whose relative precision is the same at any scale.
template <class Config>
__device__ __forceinline__ void update_row_max(Accumulators<Config>& acc, float scale_log2) {
  constexpr float kHeadroom = 8.0f;
  float new_max[Config::kRows];
  bool grew = false;
#pragma unroll
  for (int m = 0; m < Config::kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = fmaxf(acc.s[m][0][half * 2], acc.s[m][0][half * 2 + 1]);
#pragma unroll
      for (int n = 1; n < Config::kBlockN / 8; ++n) {
        x = fmaxf(x, fmaxf(acc.s[m][n][half * 2], acc.s[m][n][half * 2 + 1]));
      }
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
      const int r = 2 * m + half;
      new_max[r] = x * scale_log2;
      grew |= new_max[r] - acc.row_max[r] > kHeadroom;
    }
  }
  if (!__any_sync(0xffffffffu, grew)) return;
#pragma unroll
  for (int r = 0; r < Config::kRows; ++r) {
    const float old_max = acc.row_max[r];
    acc.row_max[r] = fmaxf(old_max, new_max[r]);
    const float factor = ptx::exp2_approx(old_max - acc.row_max[r]);
    acc.row_sum[r] *= factor;
#pragma unroll
    for (int d = 0; d < Config::kHeadDim / 8; ++d) {
      acc.o[r / 2][d][r % 2 * 2] *= factor;
      acc.o[r / 2][d][r % 2 * 2 + 1] *= factor;
    }
  }
}

// Exponentials [kBegin, kEnd) of the 8 kRowTiles a thread owns among 16 keys; scores become
// probabilities in place.
template <class Config>
__device__ __forceinline__ void exponentiate(Accumulators<Config>& acc, float scale_log2, int keys16,
                                             int begin, int end) {
#pragma unroll
  for (int i = begin; i < end; ++i) {
    const int m = i / 8, n = 2 * keys16 + i / 4 % 2, e = i % 4;
    const int r = 2 * m + e / 2;
    const float p = ptx::exp2_approx(fmaf(acc.s[m][n][e], scale_log2, -acc.row_max[r]));
    acc.s[m][n][e] = p;
    acc.row_sum[r] += p;
  }
}

// O += P V. The probabilities of the next 16 keys are computed between the products of these.
template <class Config>
__device__ __forceinline__ void accumulate_output(Accumulators<Config>& acc, float scale_log2,
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
      const auto& s = acc.s[m];
      a[m][0] = ptx::pack<Element>(s[2 * step][0], s[2 * step][1]);
      a[m][1] = ptx::pack<Element>(s[2 * step][2], s[2 * step][3]);
      a[m][2] = ptx::pack<Element>(s[2 * step + 1][0], s[2 * step + 1][1]);
      a[m][3] = ptx::pack<Element>(s[2 * step + 1][2], s[2 * step + 1][3]);
    }
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, v.at(step, pair));
#pragma unroll
      for (int m = 0; m < Config::kRowTiles; ++m) {
        ptx::mma_m16n8k16<Element>(acc.o[m][2 * pair], a[m], b[0], b[1]);
        ptx::mma_m16n8k16<Element>(acc.o[m][2 * pair + 1], a[m], b[2], b[3]);
      }
      if (step + 1 < kSteps) {
        exponentiate(acc, scale_log2, step + 1, kExps * pair / kPairs,
                     kExps * (pair + 1) / kPairs);
      }
    }
  }
}

// O / sum through the warp's own rows of shared memory to global, 16 bytes a store, and the LSE. Where
// the tile lies is worked out again here rather than kept in registers through the main loop.
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
  float* lse = p.lse + int64_t{seg_q.batch} * p.lse_batch_stride + head * p.lse_head_stride + seg_q.row;
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * Config::kRowTiles * 16;
#pragma unroll
  for (int r = 0; r < Config::kRows; ++r) {
    float sum = acc.row_sum[r];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const int tile_row = warp_row + r / 2 * 16 + r % 2 * 8 + lane / 4;
    const int row = first_row + tile_row;
    const bool empty = sum == 0.0f;  // no key seen: the largest term of any other row is at least 1
    const float inverse = empty ? 0.0f : 1.0f / sum;
    if (lane % 4 == 0 && row < seqlen_q) {
      lse[row] = empty ? -INFINITY : fmaf(acc.row_max[r], 0.6931471805599453f, logf(sum));
    }
#pragma unroll
    for (int d = 0; d < Config::kHeadDim / 8; ++d) {
      const uint32_t packed = ptx::pack<Element>(acc.o[r / 2][d][r % 2 * 2] * inverse,
                                                 acc.o[r / 2][d][r % 2 * 2 + 1] * inverse);
      const uint32_t at = shared_q + tile_offset<Config, Config::kBlockM>(tile_row, d) + lane % 4 * 4;
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

// Rows of a packed batch that belong to no sequence are rows without keys.
template <class Config>
__device__ __forceinline__ void clear_tail(const ForwardParams& p, int head) {
  using Element = typename Config::Element;
  const int64_t begin = min(max(static_cast<int64_t>(p.cu_seqlens_q[p.batch]), int64_t{0}), p.total_q);
  for (int64_t row = begin; row < p.total_q; ++row) {
    Element* out = static_cast<Element*>(p.out) + row * p.out_stride.row + head * p.out_stride.head;
    for (int d = threadIdx.x; d < p.head_dim_v; d += blockDim.x) out[d] = Element(0.0f);
    if (threadIdx.x == 0) p.lse[head * p.lse_head_stride + row] = -INFINITY;
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
    clear_tail<Config>(p, blockIdx.x - order.m_blocks * order.heads);
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
  const BlockRange range = block_range(window, first_row, min(first_row + kBlockM, seg_q.length),
                                       seg_k.length, kBlockN);

  // Plain path: P = 2^(s * scale_log2 - max). Else the scores are final before the maximum.
  const float scale = static_cast<float>(p.scale), softcap = static_cast<float>(p.softcap);
  const bool transform = softcap > 0.0f || !(scale > 0.0f);

  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * Config::kRowTiles * 16;
  const uint32_t shared_q = ptx::shared_address(shared.q);
  const uint32_t shared_k = ptx::shared_address(shared.k);
  const uint32_t shared_v = ptx::shared_address(shared.v);
  constexpr uint32_t kStageBytes = sizeof(shared.k[0]);

  const auto load_k = [&](int block, int stage) {
    k.template load<kBlockN>(block * kBlockN, seg_k.length - block * kBlockN, shared_k + stage * kStageBytes);
    ptx::cp_async_commit();
  };
  const auto load_v = [&](int block, int stage) {
    v.template load<kBlockN>(block * kBlockN, seg_k.length - block * kBlockN, shared_v + stage * kStageBytes);
    ptx::cp_async_commit();
  };

  Accumulators<Config> acc;
#pragma unroll
  for (int r = 0; r < Config::kRows; ++r) {
    acc.row_max[r] = -FLT_MAX;
    acc.row_sum[r] = 0.0f;
#pragma unroll
    for (int d = 0; d < Config::kHeadDim / 8; ++d) acc.o[r / 2][d][r % 2 * 2] = acc.o[r / 2][d][r % 2 * 2 + 1] = 0.0f;
  }

  if (range.begin < range.end) {
    q.template load<kBlockM>(first_row, seg_q.length - first_row, shared_q);
    load_k(range.end - 1, 0);
    load_v(range.end - 1, 0);
  }
  QueryFragments<Config> q_fragments{{shared_q, warp_row + lane % 16, lane / 16}, {}};
  if constexpr (Config::kQInRegisters) {
    ptx::cp_async_wait<1>();
    __syncthreads();
    q_fragments.keep();
  }
  for (int block = range.end - 1, stage = 0; block >= range.begin; --block) {
    const bool last = block == range.begin;
    // K of this block (and, with one stage, V of the block before) has arrived everywhere, and
    // with two stages everyone is done with the other buffers.
    ptx::cp_async_wait<1>();
    __syncthreads();
    if (kStages == 2 && !last) load_k(block - 1, stage ^ 1);
    compute_scores<Config>(acc, q_fragments,
                           FragmentAddress<Config, kBlockN>(shared_k + stage * kStageBytes,
                                                            lane % 8 + lane / 16 * 8, lane / 8 % 2));
    if (transform) transform_scores<Config>(acc, scale, softcap);
    if (block < range.full_begin || block >= range.full_end) {
      mask_scores<Config>(acc, window, first_row + warp_row, block * kBlockN, seg_k.length);
    }
    update_row_max<Config>(acc, scores.scale_log2);
    if (kStages == 2 && !last) {
      ptx::cp_async_wait<1>();
    } else {
      ptx::cp_async_wait<0>();
    }
    __syncthreads();
    if (!last) {
      if (kStages == 1) {
        load_k(block - 1, 0);
      } else {
        load_v(block - 1, stage ^ 1);
      }
    }
    accumulate_output<Config>(acc, scores.scale_log2,
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
