// The consuming role: products, softmax and output of 64 query rows.
#pragma once

#include <cfloat>

#include "attn/scores.cuh"
#include "attn/tail.cuh"
#include "kernels/sm90_forward/shared.cuh"
#include "kernels/sm90_forward/softmax.cuh"
#include "ptx/address.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace attnscope::sm90 {

template <class Config>
__device__ __forceinline__ void issue_scores(Fragments<Config>& f, ptx::WgmmaDescriptor q,
                                             ptx::WgmmaDescriptor k) {
  constexpr int kQBlock = 64 * Config::kRowBytes, kKBlock = Config::kBlockN * Config::kRowBytes;
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < Config::kHeadDim / 16; ++step) {
    ptx::WgmmaShared<typename Config::Element, Config::kBlockN>::mma(
        f.s, q.at(step / 4 * kQBlock + step % 4 * 32), k.at(step / 4 * kKBlock + step % 4 * 32),
        step > 0);
  }
  ptx::wgmma_commit();
}

// The address of a lane's 16 bytes for ldmatrix in a swizzled tile of `tile_rows` rows.
template <class Config>
__device__ __forceinline__ uint32_t lane_address(uint32_t tile, int tile_rows, int row, int chunk) {
  return tile + (chunk / 8 * tile_rows + row) * Config::kRowBytes + ((chunk ^ row) & 7) * 16;
}

// The scores of this warp's 16 rows once more, warp by warp: only some warps of a warpgroup may
// need them, and wgmma takes all four.
template <class Config>
__device__ __forceinline__ void recompute_scores(Fragments<Config>& f, uint32_t q, uint32_t k) {
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int n = 0; n < Config::kBlockN / 16; ++n) {
    float* s = &f.s[8 * n];
#pragma unroll
    for (int i = 0; i < 8; ++i) s[i] = 0.0f;
#pragma unroll 1
    for (int step = 0; step < Config::kHeadDim / 16; ++step) {
      uint32_t a[4], b[4];
      ptx::ldmatrix_x4(a, lane_address<Config>(q, 64, row, 2 * step + lane / 16));
      ptx::ldmatrix_x4(b,
                       lane_address<Config>(k, Config::kBlockN, n * 16 + lane % 8 + lane / 16 * 8,
                                            2 * step + lane / 8 % 2));
      ptx::mma_m16n8k16<typename Config::Element>(s, a, b[0], b[1]);
      ptx::mma_m16n8k16<typename Config::Element>(s + 4, a, b[2], b[3]);
    }
  }
}

template <class Config>
__device__ __forceinline__ void issue_output(Fragments<Config>& f, const Probabilities<Config>& p,
                                             ptx::WgmmaDescriptor v) {
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < Config::kBlockN / 16; ++step) {
    ptx::WgmmaRegister<typename Config::Element, Config::kHeadDim>::mma(
        f.o, &p[4 * step], v.at(step * 16 * Config::kRowBytes));
  }
  ptx::wgmma_commit();
}

// Sets to zero the rows of a V tile that no query of the tile may see: past the end of the sequence
// (in a packed batch another sequence's rows; elsewhere the copy engine has filled in zeros), or
// before a sliding window. They may hold anything, and 0 times NaN would be NaN.
template <class Config>
__device__ __forceinline__ void clear_rows(typename Config::Element* v, int valid_begin,
                                           int valid_end) {
  for (int i = threadIdx.x % 128; i < Config::kBlockN * 8; i += 128) {
    if (i / 8 >= valid_begin && i / 8 < valid_end) continue;
#pragma unroll
    for (int block = 0; block < Config::kColumns / 64; ++block) {
      reinterpret_cast<uint4*>(v)[block * Config::kBlockN * 8 + i] = uint4{};
    }
  }
  ptx::fence_proxy_async();
}

// A warp's 16 rows to global memory through shared memory, in blocks of 64 columns: by the copy
// engine, which clips them to the tensor; or, where the rows end amid a packed batch, so that eight
// lanes write the 128 contiguous bytes of a row. The log-sum-exp comes last: a fence waits for all
// stores before it.
template <class Config>
__device__ __forceinline__ void store_output(
    const Fragments<Config>& f, const ForwardArguments& a, const Work& w, int consumer,
    typename Config::Element (&staging)[Config::kOutStages][16 * 64]) {
  using Element = typename Config::Element;
  constexpr int kBlocks = (Config::kHeadDim + 63) / 64;  // of columns
  constexpr int kStages = Config::kOutStages;
  constexpr int kAtOnce = kBlocks <= kStages ? kBlocks : 1;
  const ForwardParams& p = a.params;
  const int lane = threadIdx.x % 32;
  const int first_row =  // of the head's in the tile
      consumer % Config::kHeadConsumers * 64 + threadIdx.x % 128 / 32 * 16;
  const int rows = w.end_row - w.first_row - first_row;
  const int q_row = w.q_row + grouping<Config>(a).query(first_row);
  const int head = w.head + consumer / Config::kHeadConsumers, batch = w.batch;
  if (Config::kOwnHeads > 1 && head >= p.heads_q) return;
  if (lane == 0) ptx::tma_store_wait_read<0>();

  float sum[2], inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] = f.row_sum[half] + __shfl_xor_sync(0xffffffffu, f.row_sum[half], 1);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
    // 0 where no key is seen: the largest term of any other row is at least 1.
    inverse[half] = sum[half] == 0.0f ? 0.0f : ptx::reciprocal_approx(sum[half]);
  }

  // In rows of 128 bytes, swizzled. Writing, a lane's address is of row lane % 16 and the chunk of
  // 16 bytes lane / 16 of a pair; reading, of row lane / 8 and chunk lane % 8.
  const uint32_t shared = ptx::shared_address(staging);
  const uint32_t write = shared + lane % 16 * 128 + ((lane / 16 ^ lane % 8) * 16);
  const bool copied = rows >= 16 || (rows > 0 && !a.packed);
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const int stage = block % kStages * 2048;
    if (block >= kStages) {
      if (lane == 0) ptx::tma_store_wait_read<kStages - 1>();
      __syncwarp();
    }
#pragma unroll
    for (int chunk = 0; chunk < 8 && block * 64 + chunk * 8 < Config::kHeadDim; chunk += 2) {
      const float* o = &f.o[block * 32 + 4 * chunk];
      ptx::stmatrix_x4((write ^ chunk * 16) + stage,
                       {ptx::pack<Element>(o[0] * inverse[0], o[1] * inverse[0]),
                        ptx::pack<Element>(o[2] * inverse[1], o[3] * inverse[1]),
                        ptx::pack<Element>(o[4] * inverse[0], o[5] * inverse[0]),
                        ptx::pack<Element>(o[6] * inverse[1], o[7] * inverse[1])});
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
                            : (f.row_max[half] + ptx::log2_approx(sum[half])) * 0.6931471805599453f;
    }
  }
}

template <class Config>
__device__ __forceinline__ void consume(const ForwardArguments& a, ForwardShared<Config>& s) {
  using ptx::shared_address;
  constexpr int kBlockN = Config::kBlockN;
  constexpr int kStages = Config::kStages;
  constexpr int kRowsCleared = 1;  // a named barrier; 0 is __syncthreads
  const int consumer = ptx::uniform(threadIdx.x / 128 - 1);
  const int own_head = consumer / Config::kHeadConsumers;
  const bool elected = threadIdx.x % 32 == 0;  // one arrival a warp
  const auto k = [&](const Slot<kStages>& slot) {
    return ptx::WgmmaDescriptor(
        shared_address(s.k) + (slot.stage * Config::kOwnHeads + own_head) * Config::kTileBytes, 16);
  };
  const auto v = [&](const Slot<kStages>& slot) {
    return ptx::WgmmaDescriptor(
        shared_address(s.v) + (slot.stage * Config::kOwnHeads + own_head) * Config::kTileBytes,
        kBlockN * Config::kRowBytes);
  };
  const float scale_log2 = a.scores.scale_log2;

  const auto release = [&](uint64_t& barrier) {
    __syncwarp();
    if (elected) ptx::mbarrier_arrive(shared_address(&barrier));
  };

  Fragments<Config> f;
  int tiles = 0, blocks = 0;  // uses of the rings so far
  const Timeline timeline(Lane::kConsumer + consumer, threadIdx.x % 128 == 0);
  while (true) {
    timeline.tile(tiles, ConsumerTile::kAwaitTile);
    const Slot<Config::kQStages> q_slot(tiles);
    const Slot<ForwardShared<Config>::kTiles> slot(tiles++);
    ptx::mbarrier_wait(shared_address(&s.tile_full[slot.stage]), slot.parity);
    const Work& w = s.tile[slot.stage];
    if (ptx::uniform(w.stop)) break;
    timeline.tile(tiles - 1, ConsumerTile::kPrepare);
    const BlockRange& range = w.consumer[consumer];
    const int begin = ptx::uniform(range.begin), end = ptx::uniform(range.end);
    const int full_begin = ptx::uniform(range.full_begin);
    const int full_end = ptx::uniform(range.full_end);
    const int tile_end = ptx::uniform(w.range.end);
    const auto clear = [&] {
#pragma unroll
      for (int i = 0; i < Config::kHeadDim / 2; ++i) f.o[i] = 0.0f;
      f.row_max[0] = f.row_max[1] = -FLT_MAX;
      f.row_sum[0] = f.row_sum[1] = 0.0f;
    };

    const auto needs_clearing = [&](int block) {
      return w.first_key > block * kBlockN || (a.packed && w.seqlen_k < (block + 1) * kBlockN);
    };
    // Every consumer comes here for the blocks that need clearing, once; one of a head clears.
    const auto clear_v = [&](const Slot<kStages>& slot, int block) {
      if (__builtin_expect(w.clears && needs_clearing(block), false)) {
        ptx::mbarrier_wait(shared_address(&s.v_full[slot.stage]), slot.parity);
        if (consumer % Config::kHeadConsumers == 0) {
          clear_rows<Config>(s.v[slot.stage][own_head], w.first_key - block * kBlockN,
                             w.seqlen_k - block * kBlockN);
        }
        ptx::barrier_sync(kRowsCleared, 128 * Config::kConsumers);
      }
    };
    // Blocks of the tile that other consumers' rows see and this one's do not: released unread, and
    // so perhaps before they are full, but not before all have released what was there before.
    const auto skip = [&](int block, int last) {
      for (; block >= last; --block) {
        const Slot<kStages> slot(blocks++);
        ptx::mbarrier_wait(shared_address(&s.k_empty[slot.stage]), slot.parity ^ 1);
        release(s.k_empty[slot.stage]);
        clear_v(slot, block);
        ptx::mbarrier_wait(shared_address(&s.v_empty[slot.stage]), slot.parity ^ 1);
        release(s.v_empty[slot.stage]);
      }
    };
    timeline.tile(tiles - 1, ConsumerTile::kAwaitQ);
    ptx::mbarrier_wait(shared_address(&s.q_full[q_slot.stage][consumer]), q_slot.parity);
    timeline.tile(tiles - 1, ConsumerTile::kSkipFirst);
    skip(tile_end - 1, end);
    if (begin < end) {
      float factor[2];
      Probabilities<Config> p[2];  // of this block, and of the last, which P V still reads
      // What only boundary blocks need is read from shared memory when they need it.
      const auto finish_scores = [&](int block, bool boundary) {
        if (__builtin_expect(a.scores.transform, false)) {
          transform_scores(f.s, a.scores);
        }
        if (__builtin_expect(boundary, false)) {
          const int row = w.first_row + consumer % Config::kHeadConsumers * 64 +
                          threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
          mask_scores_by_bits(f.s, {w.shift, a.params.window_left, a.params.window_right},
                              grouping<Config>(a), row, block * kBlockN, w.seqlen_k);
        }
      };
      const auto is_boundary = [&](int block) { return block < full_begin || block >= full_end; };
      const auto await_next_scores = [&](int block) {
        const Slot<kStages> slot(blocks + 1);
        if (block > begin) ptx::mbarrier_wait(shared_address(&s.k_full[slot.stage]), slot.parity);
      };

      // The first block: nothing to overlap with yet.
      int block = end - 1;
      const Slot<kStages> first(blocks);
      const ptx::WgmmaDescriptor q(
          ptx::uniform(shared_address(s.q) +
                       (q_slot.stage * Config::kConsumers + consumer) * Config::kQBytes),
          16);
      timeline.tile(tiles - 1, ConsumerTile::kAwaitK);
      ptx::mbarrier_wait(shared_address(&s.k_full[first.stage]), first.parity);
      timeline.tile(tiles - 1, ConsumerTile::kIssueScores);
      issue_scores<Config>(f, q, k(first));
      clear();
      timeline.tile(tiles - 1, ConsumerTile::kAwaitScores);
      ptx::wgmma_wait<0>();
      ptx::pin_registers(f.s);
      timeline.tile(tiles - 1, ConsumerTile::kSoftmax);
      release(s.k_empty[first.stage]);
      if (block == begin) release(s.q_empty[q_slot.stage][consumer]);
      finish_scores(block, is_boundary(block));
      raise_maximum<Config>(f, p[0], scale_log2, factor);
      if constexpr (!Config::kKeepScores) pack_probabilities<Config>(f, p[0]);
      timeline.tile(tiles - 1, ConsumerTile::kAwaitV);
      if (block > begin) clear_v(first, block);
      timeline.tile(tiles - 1, ConsumerTile::kAwaitNextK);
      await_next_scores(block);

      // S of this block, then P V of the block before; the softmax of this block runs under both.
      const auto step = [&](Probabilities<Config>& p_before, Probabilities<Config>& p_here) {
        const Slot<kStages> v_slot(blocks++), k_slot(blocks);
        const ptx::WgmmaDescriptor k_tile = k(k_slot), v_tile = v(v_slot);
        const bool boundary = is_boundary(block);
        timeline.step(blocks, ConsumerStep::kIssueScores);
        issue_scores<Config>(f, q, k_tile);
        timeline.step(blocks, ConsumerStep::kAwaitV);
        ptx::mbarrier_wait(shared_address(&s.v_full[v_slot.stage]), v_slot.parity);
        timeline.step(blocks, ConsumerStep::kIssueOutput);
        issue_output<Config>(f, p_before, v_tile);
        timeline.step(blocks, ConsumerStep::kAwaitScores);
        ptx::wgmma_wait<1>();
        ptx::pin_registers(f.s);
        timeline.step(blocks, ConsumerStep::kSoftmax);
        const auto release_scores = [&] {
          release(s.k_empty[k_slot.stage]);
          if (block == begin) release(s.q_empty[q_slot.stage][consumer]);
        };
        if constexpr (Config::kKeepScores) release_scores();
        finish_scores(block, boundary);
        // Boundary blocks may be the first that some rows see: there the maximum surely rises.
        bool rescale = boundary;
        if (__builtin_expect(!boundary, true)) {
          rescale = !softmax<Config>(f, p_here, scale_log2);
          if (__builtin_expect(rescale && !Config::kKeepScores, false)) {
            ptx::wgmma_wait<0>();  // sooner than needed, but it frees the registers of P
            ptx::pin_registers(f.o);
            recompute_scores<Config>(f, shared_address(s.q[q_slot.stage][consumer]),
                                     shared_address(s.k[k_slot.stage][own_head]));
            finish_scores(block, false);
          }
        }
        if (__builtin_expect(rescale, false)) {
          timeline.step(blocks, ConsumerStep::kRaiseMaximum);
          raise_maximum<Config>(f, p_here, scale_log2, factor);
        }
        if constexpr (!Config::kKeepScores) {
          release_scores();
          ptx::pin_registers(f.s);
        }
        timeline.step(blocks, ConsumerStep::kAwaitK);
        // A loop, so a boundary for the scheduler: it would else move the wait for P V up, before
        // the exponentials that are to run under it.
        await_next_scores(block);
        timeline.step(blocks, ConsumerStep::kAwaitOutput);
        ptx::wgmma_wait<0>();
        ptx::pin_registers(f.o);
        timeline.step(blocks, ConsumerStep::kRescale);
        release(s.v_empty[v_slot.stage]);
        if (__builtin_expect(rescale, false)) rescale_output<Config>(f, factor);
        if constexpr (!Config::kKeepScores) pack_probabilities<Config>(f, p_here);
      };
      const auto last = [&](Probabilities<Config>& p_before) {
        const Slot<kStages> v_slot(blocks++);
        timeline.tile(tiles - 1, ConsumerTile::kAwaitLastV);
        clear_v(v_slot, begin);
        ptx::mbarrier_wait(shared_address(&s.v_full[v_slot.stage]), v_slot.parity);
        timeline.tile(tiles - 1, ConsumerTile::kIssueOutput);
        issue_output<Config>(f, p_before, v(v_slot));
        timeline.tile(tiles - 1, ConsumerTile::kAwaitOutput);
        ptx::wgmma_wait<0>();
        ptx::pin_registers(f.o);
        release(s.v_empty[v_slot.stage]);
      };
      constexpr int kOther = Config::kKeepScores;  // else one set of probabilities serves
      while (true) {
        if (--block < begin) {
          last(p[0]);
          break;
        }
        step(p[0], p[kOther]);
        if (!Config::kKeepScores) continue;
        if (--block < begin) {
          last(p[kOther]);
          break;
        }
        step(p[kOther], p[0]);
      }
    } else {
      clear();
      release(s.q_empty[q_slot.stage][consumer]);
    }
    timeline.tile(tiles - 1, ConsumerTile::kSkipLast);
    skip(begin - 1, ptx::uniform(w.range.begin));
    timeline.tile(tiles - 1, ConsumerTile::kEpilogue);
    store_output<Config>(f, a, w, consumer, s.o[threadIdx.x / 32 - 4]);
    release(s.tile_empty[slot.stage]);
  }
  timeline.finish(tiles - 1, blocks);
  if (elected) ptx::tma_store_wait_read<0>();
  if (a.packed) {
    for (int head = blockIdx.x; head < a.params.heads_q; head += gridDim.x) {
      clear_uncovered<typename Config::Element>(a.params, head, threadIdx.x - 128,
                                                Config::kConsumers * 128);
    }
  }
}

}  // namespace attnscope::sm90
