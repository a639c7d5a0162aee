// Attention forward for Hopper (sm_90a).
//
// Problem   out = softmax(mask(cap(q k^T scale))) v and its log-sum-exp, see attn/params.h.
// Roles     warpgroup 0 feeds: one thread takes tiles from a global counter and works out what they
//           are, another keeps the copy engine (TMA) ahead with Q, K and V. Warpgroups 1.. consume:
//           each owns 64 query rows; S and O stay in its registers.
// Pipeline  a consumer issues S(j+1) = Q K(j+1)^T, then O += P(j) V(j), and while the tensor cores
//           work on O it does the softmax of S(j+1). Consumers take turns at issuing, so that one's
//           softmax runs under the other's products.
// Schedule  persistent: a block takes tile after tile; Q and K of the next are fetched while the
//           consumers finish this one. O leaves straight from registers.
// Limits    bf16, fp16; head dims in multiples of 8 up to 256.
// Test      tests/test_forward_gpu.py; bench: attnscope bench --impl cuda.
#pragma once

#include <cuda.h>

#include <cfloat>

#include "attn/block_range.cuh"
#include "attn/params.h"
#include "attn/score_scales.h"
#include "attn/seqlen.cuh"
#include "attn/tile_counter.h"
#include "attn/tile_order.cuh"
#include "kernels/sm90_forward/config.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace attnscope::sm90 {

template <class Element_, int kHeadDim_>
struct ForwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr ForwardTile kTile = forward_tile(kHeadDim);
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kStages = kTile.stages;
  static constexpr int kConsumers = kTile.consumers();
  static constexpr int kThreads = kTile.threads();
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
  static constexpr int kTileBytes = 2 * kBlockN * kHeadDim;  // of K or V
  static constexpr int kRowBytes = 128;  // one swizzled row of a 64-element column block
#ifndef TURNS
#define TURNS 128
#endif
  static constexpr bool kTakeTurns = kHeadDim <= TURNS;

  static_assert(kTile.head_dim == kHeadDim, "the tile table has no row for this head dim");
  static_assert(kHeadDim % 64 == 0, "tiles are column blocks of 64 elements");
  static_assert(kBlockN % 16 == 0, "keys are consumed 16 at a time");
  static_assert(kConsumers == 2 || kConsumers == 3, "register budgets are given for 2 and 3 consumers");
};

// One tile of query rows, worked out once for all roles.
struct Work {
  bool stop;       // no tile: the block is done
  int head;        // of q; 0 <= head < heads_q
  int head_kv;
  int batch;       // of the tensors; 0 when packed
  int q_row;       // of the tensors, where the tile begins
  int k_row;       // of the tensors, where the keys begin
  int first_row;   // of the sequence, where the tile begins
  int seqlen_q, seqlen_k;
  int shift;       // seqlen_k - seqlen_q
  BlockRange range;
};

// Barriers are named by the event that completes them.
template <class Config>
struct ForwardShared {
  using Element = typename Config::Element;
  static constexpr int kStages = Config::kStages;
  static constexpr int kTiles = 3;  // one in work, one being fetched, one being worked out
  alignas(1024) Element q[Config::kBlockM * Config::kHeadDim];
  alignas(1024) Element k[kStages][Config::kBlockN * Config::kHeadDim];
  alignas(1024) Element v[kStages][Config::kBlockN * Config::kHeadDim];
  uint64_t q_full, q_empty;
  uint64_t k_full[kStages], k_empty[kStages];
  uint64_t v_full[kStages], v_empty[kStages];
  uint64_t tile_full[kTiles], tile_empty[kTiles];
  Work tile[kTiles];
};

struct ForwardMaps {
  CUtensorMap q, k, v;  // [batch, head, row, dim], boxes of [rows, 64]
};

// What every kernel argument block holds.
struct ForwardArguments {
  ForwardMaps maps;
  ForwardParams params;
  TileOrder order;
  ScoreScales scores;
  int tiles;
  bool packed;
  TileCounter* counter;
};

// Use number `count` of a ring of buffers: which buffer, and the parity of its barriers' phase.
template <int kStages>
struct Slot {
  int stage;
  int parity;
  __device__ __forceinline__ explicit Slot(int count) : stage(count % kStages), parity(count / kStages & 1) {}
};

// Takes tiles and works out what they are, a tile or two ahead of everyone.
template <class Config>
__device__ __forceinline__ void schedule(const ForwardArguments& a, ForwardShared<Config>& s) {
  using ptx::shared_address;
  const ForwardParams& p = a.params;
  int index = blockIdx.x;
  int tiles = 0;
  while (true) {
    const Slot<ForwardShared<Config>::kTiles> slot(tiles);
    Work& w = s.tile[slot.stage];
    const bool stop = index >= a.tiles;
    if (!stop) {
      const Tile tile = tile_at(a.order, index);
      index = gridDim.x + ptx::atomic_add(&a.counter->taken, 1);
      const int batch = tile.head / p.heads_q, head = tile.head - batch * p.heads_q;
      const int first_row = tile.m_block * Config::kBlockM;
      const Segment seg_q = segment(p.cu_seqlens_q, p.total_q, p.seqlen_q, batch);
      if (first_row >= seg_q.length) continue;
      ptx::mbarrier_wait(shared_address(&s.tile_empty[slot.stage]), slot.parity ^ 1);
      w.head = head;
      w.head_kv = head / (p.heads_q / p.heads_kv);
      w.batch = seg_q.batch;
      w.q_row = static_cast<int>(seg_q.row) + first_row;
      w.first_row = first_row;
      w.seqlen_q = seg_q.length;
      const Segment seg_k = segment(p.cu_seqlens_k, p.total_k, p.seqlen_k, batch);
      w.k_row = static_cast<int>(seg_k.row);
      w.seqlen_k = seg_k.length;
      const Window window{seg_k.length - seg_q.length, p.window_left, p.window_right};
      w.shift = window.shift;
      w.range = block_range(window, first_row, min(first_row + Config::kBlockM, seg_q.length), seg_k.length,
                            Config::kBlockN);
    } else {
      ptx::mbarrier_wait(shared_address(&s.tile_empty[slot.stage]), slot.parity ^ 1);
    }
    w.stop = stop;
    ptx::mbarrier_arrive(shared_address(&s.tile_full[slot.stage]));
    ++tiles;
    if (stop) break;
  }
  // The last block to get here leaves the counter as it was found.
  if (ptx::atomic_add(&a.counter->finished, 1) == gridDim.x - 1) {
    a.counter->taken = 0;
    a.counter->finished = 0;
  }
}

template <class Config>
__device__ __forceinline__ void load_box(uint32_t shared, const CUtensorMap& map, uint32_t barrier,
                                         ptx::CachePolicy policy, int rows, int row, int head, int batch) {
#pragma unroll
  for (int column = 0; column < Config::kHeadDim; column += 64) {
    ptx::tma_load_4d(shared + column / 64 * rows * Config::kRowBytes, &map, barrier, policy, column, row, head,
                     batch);
  }
}

template <class Config>
__device__ __forceinline__ void produce(const ForwardArguments& a, ForwardShared<Config>& s) {
  using ptx::shared_address;
  constexpr int kBlockN = Config::kBlockN;
  constexpr int kStages = Config::kStages;
  int tiles = 0, queries = 0, blocks = 0;  // uses of the rings so far
  while (true) {
    const Slot<ForwardShared<Config>::kTiles> slot(tiles++);
    ptx::mbarrier_wait(shared_address(&s.tile_full[slot.stage]), slot.parity);
    const Work w = s.tile[slot.stage];
    ptx::mbarrier_arrive(shared_address(&s.tile_empty[slot.stage]));
    if (w.stop) break;
    if (w.range.begin >= w.range.end) continue;

    const auto load = [&](const CUtensorMap& map, auto& buffers, uint64_t* full, uint64_t* empty, int count,
                          int block) {
      const Slot<kStages> slot(count);
      ptx::mbarrier_wait(shared_address(&empty[slot.stage]), slot.parity ^ 1);
      const uint32_t barrier = shared_address(&full[slot.stage]);
      ptx::mbarrier_arrive_expect_tx(barrier, Config::kTileBytes);
      load_box<Config>(shared_address(buffers[slot.stage]), map, barrier, ptx::CachePolicy::kEvictLast, kBlockN,
                       w.k_row + block * kBlockN, w.head_kv, w.batch);
    };

    // K runs one block ahead of V, as the consumers do; Q comes with the first K.
#pragma unroll 1
    for (int block = w.range.end - 1; block >= w.range.begin - 1; --block) {
      if (block >= w.range.begin) load(a.maps.k, s.k, s.k_full, s.k_empty, blocks, block);
      if (block == w.range.end - 1) {
        ptx::mbarrier_wait(shared_address(&s.q_empty), queries++ & 1 ^ 1);
        const uint32_t q_full = shared_address(&s.q_full);
        ptx::mbarrier_arrive_expect_tx(q_full, sizeof(s.q));
        load_box<Config>(shared_address(s.q), a.maps.q, q_full, ptx::CachePolicy::kEvictFirst, Config::kBlockM,
                         w.q_row, w.head, w.batch);
      } else {
        load(a.maps.v, s.v, s.v_full, s.v_empty, blocks - 1, block + 1);
      }
      ++blocks;
    }
    --blocks;
  }
}

// A consumer thread's rows are g and g + 8 of its warp's 16, g = lane / 4; of every 8 columns it holds
// 2 (lane % 4) and the next: element 4 n + 2 half + i.
template <class Config>
struct Fragments {
  float o[Config::kHeadDim / 2];
  float s[Config::kBlockN / 2];
  uint32_t p[Config::kBlockN / 4];
  float row_max[2];  // what P and row_sum refer to, times scale_log2; from the lowest finite float
  float row_sum[2];  // this thread's columns only
};

template <class Config>
__device__ __forceinline__ void issue_scores(Fragments<Config>& f, ptx::WgmmaDescriptor q, ptx::WgmmaDescriptor k) {
  constexpr int kQBlock = Config::kBlockM * Config::kRowBytes, kKBlock = Config::kBlockN * Config::kRowBytes;
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < Config::kHeadDim / 16; ++step) {
    ptx::WgmmaShared<typename Config::Element, Config::kBlockN>::mma(
        f.s, q.at(step / 4 * kQBlock + step % 4 * 32), k.at(step / 4 * kKBlock + step % 4 * 32), step > 0);
  }
  ptx::wgmma_commit();
}

template <class Config>
__device__ __forceinline__ void issue_output(Fragments<Config>& f, ptx::WgmmaDescriptor v) {
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < Config::kBlockN / 16; ++step) {
    ptx::WgmmaRegister<typename Config::Element, Config::kHeadDim>::mma(f.o, &f.p[4 * step],
                                                                        v.at(step * 16 * Config::kRowBytes));
  }
  ptx::wgmma_commit();
}

template <class Config>
__device__ __forceinline__ void transform_scores(Fragments<Config>& f, float scale, float softcap) {
  if (softcap > 0.0f) {
    const float to_exponent = scale / softcap * (2.0f * 1.4426950408889634f);
#pragma unroll
    for (int i = 0; i < Config::kBlockN / 2; ++i) {
      // tanh(x) = 1 - 2 / (e^2x + 1); tanh.approx would cost 2^-11 of the cap.
      const float e = ptx::exp2_approx(f.s[i] * to_exponent);
      f.s[i] = softcap * (1.0f - __fdividef(2.0f, e + 1.0f));
    }
  } else {
#pragma unroll
    for (int i = 0; i < Config::kBlockN / 2; ++i) f.s[i] *= scale;
  }
}

template <class Config>
__device__ __forceinline__ void mask_scores(Fragments<Config>& f, const Window& window, int row0, int first_key,
                                            int seqlen_k) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row0 + half * 8;
    const int begin = window.first_key(row) - first_key - column;
    const int end = window.end_key(row, seqlen_k) - first_key - column;
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = n * 8 + i;
        if (key < begin || key >= end) f.s[4 * n + 2 * half + i] = -INFINITY;
      }
    }
  }
}

// Scores to probabilities and partial sums. Returns whether a maximum grew by more than kHeadroom in
// this warp; then `factor` is what O must be scaled by. Below that P stays under 2^8, which costs
// nothing: fp32 sums hold it, and the relative precision of P is the same at any scale.
template <class Config>
__device__ __forceinline__ bool softmax(Fragments<Config>& f, float scale_log2, float (&factor)[2]) {
  constexpr float kHeadroom = 8.0f;
  float new_max[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float x = fmaxf(f.s[2 * half], f.s[2 * half + 1]);
#pragma unroll
    for (int n = 1; n < Config::kBlockN / 8; ++n) {
      x = fmaxf(x, fmaxf(f.s[4 * n + 2 * half], f.s[4 * n + 2 * half + 1]));
    }
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
    new_max[half] = x * scale_log2;
  }
  const bool grew = __any_sync(0xffffffffu, new_max[0] - f.row_max[0] > kHeadroom ||
                                                new_max[1] - f.row_max[1] > kHeadroom);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float old_max = f.row_max[half];
    f.row_max[half] = grew ? fmaxf(old_max, new_max[half]) : old_max;
    factor[half] = ptx::exp2_approx(old_max - f.row_max[half]);
    float sum = f.row_sum[half] * factor[half];
#pragma unroll
    for (int n = 0; n < Config::kBlockN / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = f.s[4 * n + 2 * half + i];
        x = ptx::exp2_approx(fmaf(x, scale_log2, -f.row_max[half]));
        sum += x;
      }
    }
    f.row_sum[half] = sum;
  }
  return grew;
}

template <class Config>
__device__ __forceinline__ void pack_probabilities(Fragments<Config>& f) {
#pragma unroll
  for (int i = 0; i < Config::kBlockN / 4; ++i) {
    f.p[i] = ptx::pack<typename Config::Element>(f.s[2 * i], f.s[2 * i + 1]);
  }
}

template <class Config>
__device__ __forceinline__ void rescale_output(Fragments<Config>& f, const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < Config::kHeadDim / 2; ++i) f.o[i] *= factor[i / 2 % 2];
}

// Sets rows of a V tile past the end of its sequence to zero: in a packed batch they are another
// sequence's rows, and may hold anything. (Elsewhere the copy engine has filled them with zeros.)
template <class Config>
__device__ __forceinline__ void clear_rows(typename Config::Element* v, int valid_rows) {
  const int lane = threadIdx.x % 128;
  for (int i = valid_rows * 8 + lane; i < Config::kBlockN * 8; i += 128) {
#pragma unroll
    for (int block = 0; block < Config::kHeadDim / 64; ++block) {
      reinterpret_cast<uint4*>(v)[block * Config::kBlockN * 8 + i] = uint4{};
    }
  }
  ptx::fence_proxy_async();
}

// Registers to global memory: the four threads of a row trade 4-byte pieces until each holds 16
// contiguous bytes.
template <class Config>
__device__ __forceinline__ void store_output(const Fragments<Config>& f, const ForwardParams& p, const Work& w,
                                             int warp_row) {
  using Element = typename Config::Element;
  const int quad = threadIdx.x % 4;
  const int rows = w.seqlen_q - w.first_row;  // of the tile and below it
  Element* out = static_cast<Element*>(p.out) + int64_t{w.batch} * p.out_stride.batch +
                 int64_t{w.q_row} * p.out_stride.row + w.head * p.out_stride.head;
  float* lse = p.lse + int64_t{w.batch} * p.lse_batch_stride + w.head * p.lse_head_stride + w.q_row;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = f.row_sum[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const int row = warp_row + half * 8;
    const bool empty = sum == 0.0f;  // no key seen: the largest term of any other row is at least 2^-8
    const float inverse = empty ? 0.0f : 1.0f / sum;
    if (quad == 0 && row < rows) {
      lse[row] = empty ? -INFINITY : fmaf(f.row_max[half], 0.6931471805599453f, logf(sum));
    }
#pragma unroll
    for (int n = 0; n < Config::kHeadDim / 8; n += 4) {
      uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* o = &f.o[4 * (n + i) + 2 * half];
        r[i] = ptx::pack<Element>(o[0] * inverse, o[1] * inverse);
      }
      // Transpose 4 x 4 among the quad: by pairs at distance 1, then 2.
#pragma unroll
      for (int distance = 1; distance <= 2; distance *= 2) {
        const bool upper = quad & distance;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i & distance) continue;
          const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? r[i] : r[i + distance], distance);
          if (upper) {
            r[i] = got;
          } else {
            r[i + distance] = got;
          }
        }
      }
      const int column = (n + quad) * 8;
      if (row < rows && column < p.head_dim_v) {
        *reinterpret_cast<uint4*>(out + row * p.out_stride.row + column) = uint4{r[0], r[1], r[2], r[3]};
      }
    }
  }
}

// Rows of a packed batch that belong to no sequence are rows without keys.
template <class Config>
__device__ __forceinline__ void clear_tail(const ForwardParams& p) {
  using Element = typename Config::Element;
  const int64_t begin = min(max(static_cast<int64_t>(p.cu_seqlens_q[p.batch]), int64_t{0}), p.total_q);
  for (int head = blockIdx.x; head < p.heads_q; head += gridDim.x) {
    for (int64_t row = begin; row < p.total_q; ++row) {
      Element* out = static_cast<Element*>(p.out) + row * p.out_stride.row + head * p.out_stride.head;
      for (int d = threadIdx.x - 128; d < p.head_dim_v; d += Config::kConsumers * 128) out[d] = Element(0.0f);
      if (threadIdx.x == 128) p.lse[head * p.lse_head_stride + row] = -INFINITY;
    }
  }
}

template <class Config>
__device__ __forceinline__ void consume(const ForwardArguments& a, ForwardShared<Config>& s) {
  using ptx::shared_address;
  constexpr int kBlockN = Config::kBlockN;
  constexpr int kStages = Config::kStages;
  constexpr int kFirstTurn = 1;  // named barriers kFirstTurn + consumer; 0 is __syncthreads
  const int consumer = ptx::uniform(threadIdx.x / 128 - 1);
  const int warp_row = consumer * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const bool elected = threadIdx.x % 32 == 0;  // one arrival a warp
  const ptx::WgmmaDescriptor q(shared_address(s.q) + consumer * 64 * Config::kRowBytes, 16);
  const auto k = [&](const Slot<kStages>& slot) {
    return ptx::WgmmaDescriptor(ptx::uniform(shared_address(s.k) + slot.stage * Config::kTileBytes), 16);
  };
  const auto v = [&](const Slot<kStages>& slot) {
    return ptx::WgmmaDescriptor(ptx::uniform(shared_address(s.v) + slot.stage * Config::kTileBytes),
                                kBlockN * Config::kRowBytes);
  };
  const float scale_log2 = a.scores.scale_log2;

  const auto take_turn = [&] {
    if (Config::kTakeTurns) ptx::barrier_sync(kFirstTurn + consumer, 256);
  };
  const auto pass_turn = [&] {
    if (Config::kTakeTurns) {
      ptx::barrier_arrive(kFirstTurn + (consumer + 1 == Config::kConsumers ? 0 : consumer + 1), 256);
    }
  };
  const auto release = [&](uint64_t& barrier) {
    __syncwarp();
    if (elected) ptx::mbarrier_arrive(shared_address(&barrier));
  };
  if (Config::kTakeTurns && consumer == Config::kConsumers - 1) ptx::barrier_arrive(kFirstTurn, 256);

  Fragments<Config> f;
  int tiles = 0, queries = 0, blocks = 0;  // uses of the rings so far
  while (true) {
    const Slot<ForwardShared<Config>::kTiles> slot(tiles++);
    ptx::mbarrier_wait(shared_address(&s.tile_full[slot.stage]), slot.parity);
    const Work& w = s.tile[slot.stage];
    if (ptx::uniform(w.stop)) break;
    // Said to be uniform, so that ring stages and descriptors stay in uniform registers.
    const BlockRange range{ptx::uniform(w.range.begin), ptx::uniform(w.range.end), ptx::uniform(w.range.full_begin),
                           ptx::uniform(w.range.full_end)};
    const int row0 = w.first_row + warp_row;
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 2; ++i) f.o[i] = 0.0f;
    f.row_max[0] = f.row_max[1] = -FLT_MAX;
    f.row_sum[0] = f.row_sum[1] = 0.0f;

    if (range.begin < range.end) {
      float factor[2];
      const auto finish_scores = [&](int block) {
        if (__builtin_expect(a.scores.transform, false)) transform_scores<Config>(f, a.scores.scale, a.scores.softcap);
        if (__builtin_expect(block < range.full_begin || block >= range.full_end, false)) {
          mask_scores<Config>(f, {w.shift, a.params.window_left, a.params.window_right}, row0, block * kBlockN,
                              w.seqlen_k);
        }
        return softmax<Config>(f, scale_log2, factor);
      };

      int block = range.end - 1;
      Slot<kStages> k_slot(blocks), v_slot(blocks);
      ptx::mbarrier_wait(shared_address(&s.q_full), queries++ & 1);
      ptx::mbarrier_wait(shared_address(&s.k_full[k_slot.stage]), k_slot.parity);
      issue_scores<Config>(f, q, k(k_slot));
      ptx::wgmma_wait<0>();
      ptx::pin_registers(f.s);
      release(s.k_empty[k_slot.stage]);
      if (block == range.begin) release(s.q_empty);
      finish_scores(block);
      pack_probabilities<Config>(f);
      const int valid_rows = w.seqlen_k - block * kBlockN;
      if (a.packed && valid_rows < kBlockN) {
        ptx::mbarrier_wait(shared_address(&s.v_full[v_slot.stage]), v_slot.parity);
        clear_rows<Config>(s.v[v_slot.stage], valid_rows);
        ptx::barrier_sync(kFirstTurn + Config::kConsumers + consumer, 128);
      }

      const auto await_next_scores = [&](int block) {
        const Slot<kStages> slot(blocks + 1);
        if (block > range.begin) ptx::mbarrier_wait(shared_address(&s.k_full[slot.stage]), slot.parity);
      };
      await_next_scores(block);
      for (--block; block >= range.begin; --block) {
        v_slot = Slot<kStages>(blocks++);
        k_slot = Slot<kStages>(blocks);
        const ptx::WgmmaDescriptor k_tile = k(k_slot), v_tile = v(v_slot);
        take_turn();
        issue_scores<Config>(f, q, k_tile);
        ptx::mbarrier_wait(shared_address(&s.v_full[v_slot.stage]), v_slot.parity);
        issue_output<Config>(f, v_tile);
        pass_turn();
        ptx::wgmma_wait<1>();
        ptx::pin_registers(f.s);
        release(s.k_empty[k_slot.stage]);
        if (block == range.begin) release(s.q_empty);
        const bool grew = finish_scores(block);
        // The exponentials are to run under P V: the compiler may not move them past this wait, and
        // will not move the wait for P V before it.
        ptx::pin_registers(f.s);
        await_next_scores(block);
        ptx::wgmma_wait<0>();
        ptx::pin_registers(f.o);
        release(s.v_empty[v_slot.stage]);
        if (__builtin_expect(grew, false)) rescale_output<Config>(f, factor);
        pack_probabilities<Config>(f);
      }

      v_slot = Slot<kStages>(blocks++);
      ptx::mbarrier_wait(shared_address(&s.v_full[v_slot.stage]), v_slot.parity);
      issue_output<Config>(f, v(v_slot));
      ptx::wgmma_wait<0>();
      ptx::pin_registers(f.o);
      release(s.v_empty[v_slot.stage]);
    }
    store_output<Config>(f, a.params, w, warp_row);
    release(s.tile_empty[slot.stage]);
  }
  if (a.packed) clear_tail<Config>(a.params);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) forward_kernel(const __grid_constant__ ForwardArguments a) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& s = *reinterpret_cast<ForwardShared<Config>*>(shared_memory);
  using ptx::shared_address;

  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&a.maps.q);
    ptx::prefetch_tensor_map(&a.maps.k);
    ptx::prefetch_tensor_map(&a.maps.v);
    constexpr int kWarps = 4 * Config::kConsumers;
    ptx::mbarrier_init(shared_address(&s.q_full), 1);
    ptx::mbarrier_init(shared_address(&s.q_empty), kWarps);
    for (int i = 0; i < ForwardShared<Config>::kTiles; ++i) {
      ptx::mbarrier_init(shared_address(&s.tile_full[i]), 1);
      ptx::mbarrier_init(shared_address(&s.tile_empty[i]), kWarps + 1);
    }
    for (int i = 0; i < Config::kStages; ++i) {
      ptx::mbarrier_init(shared_address(&s.k_full[i]), 1);
      ptx::mbarrier_init(shared_address(&s.k_empty[i]), kWarps);
      ptx::mbarrier_init(shared_address(&s.v_full[i]), 1);
      ptx::mbarrier_init(shared_address(&s.v_empty[i]), kWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x == 0) produce<Config>(a, s);
    if (threadIdx.x == 32) schedule<Config>(a, s);
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    consume<Config>(a, s);
  }
}

}  // namespace attnscope::sm90
