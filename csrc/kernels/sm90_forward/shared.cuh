// What the roles share: the configuration, the arguments, shared memory and its barriers.
#pragma once

#include <cuda.h>

#include "attn/block_range.cuh"
#include "attn/divisor.h"
#include "attn/params.h"
#include "attn/score_scales.h"
#include "attn/seqlen.cuh"
#include "attn/tile_counter.h"
#include "attn/tile_order.cuh"
#include "kernels/sm90_forward/config.cuh"
#include "kernels/sm90_forward/marks.cuh"

namespace attnscope::sm90 {

template <class Element_, int kHeadDim_, int kBlockM_>
struct ForwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr ForwardTile kTile = forward_tile(kHeadDim, kBlockM_);
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kQStages = kTile.q_stages;
  static constexpr int kStages = kTile.stages;
  static constexpr int kOutStages = kTile.out_stages();
  static constexpr int kBlocksPerSm = kTile.blocks_per_sm;
  static constexpr int kConsumers = kTile.consumers();
  static constexpr int kOwnHeads = kTile.own_heads;
  static constexpr int kHeadConsumers = kConsumers / kOwnHeads;  // of one of them
  static constexpr int kThreads = kTile.threads();
  static constexpr int kProducerRegisters = kTile.producer_registers();
  static constexpr int kConsumerRegisters = kTile.consumer_registers();
  static constexpr int kColumns = kTile.columns();
  static constexpr int kQBytes = 2 * 64 * kColumns;          // of a consumer
  static constexpr int kTileBytes = 2 * kBlockN * kColumns;  // of K or V
  static constexpr int kRowBytes = 128;  // one swizzled row of a 64-element column block
  static constexpr bool kKeepScores = kTile.keep_scores;
  static constexpr bool kTakesGroups =
      kForwardTiles[grouped_tile(kHeadDim)].block_m == kTile.block_m;

  static_assert(kOwnHeads == 1 || !kTakesGroups, "heads have rows of their own or share them");
  static_assert(kTile.head_dim == kHeadDim, "the tile table has no such row");
  static_assert(kHeadDim % 16 == 0, "a product is 16 deep");
  static_assert(kBlockN % 16 == 0, "keys are consumed 16 at a time");
  static_assert(kConsumers >= 1 && kConsumers <= kMaxConsumers, "what Work has room for");
};

// One tile of query rows, worked out once for all roles.
struct alignas(128) Work {
  bool stop;      // no tile: the block is done
  bool clears;    // V holds rows that no query of the tile may see
  int head;       // of q, the first of those in the tile
  int head_kv;    // of that one
  int batch;      // of the tensors; 0 when packed
  int q_row;      // of the tensors, where the tile begins
  int k_row;      // of the tensors, where the keys begin
  int first_row;  // of the sequence, where the tile begins: Grouping
  int end_row;    // of the sequence, where it ends: Grouping
  int seqlen_k;
  int shift;                           // seqlen_k - seqlen_q
  int first_key;                       // before it no row of the tile sees any
  BlockRange range;                    // what the tile visits
  BlockRange consumer[kMaxConsumers];  // what each consumer's rows do: a part of it
};

inline constexpr int kMostTiles = INT_MAX / 2;  // of a call, so that sums of two fit

// The scheduler's place among the tiles: in shared memory, since its registers are few.
struct TileQueue {
  int tiles;        // taken before
  int index;        // of the tile
  int sequence;     // that it is of
  int m_block;      // and which of its tiles it is
  int batch;        // packed: of the first of the 32 sequences that are looked at
  int through[33];  // packed: tiles before each of them, and through the last
};

// Barriers are named by the event that completes them.
template <class Config>
struct ForwardShared {
  using Element = typename Config::Element;
  static constexpr int kStages = Config::kStages;
  static constexpr int kTiles = 2;  // one in work, one being fetched
  alignas(1024) Element q[Config::kQStages][Config::kConsumers][64 * Config::kColumns];
  alignas(1024) Element k[kStages][Config::kOwnHeads][Config::kBlockN * Config::kColumns];
  alignas(1024) Element v[kStages][Config::kOwnHeads][Config::kBlockN * Config::kColumns];
  alignas(1024)
      Element o[Config::kConsumers * 4][Config::kOutStages][16 * 64];  // of a warp, on the way out
  uint64_t q_full[Config::kQStages][Config::kConsumers],
      q_empty[Config::kQStages][Config::kConsumers];
  uint64_t k_full[kStages], k_empty[kStages];
  uint64_t v_full[kStages], v_empty[kStages];
  uint64_t tile_full[kTiles], tile_empty[kTiles], tile_wanted;
  Work tile[kTiles];
  TileQueue queue;
};

// Query heads that share a key head may lie side by side in a tile: then a row of the tile is a
// pair of a query and one of 1 << log2 heads, and a sequence has as many times its queries in rows.
struct Grouping {
  int log2;

  __host__ __device__ int rows(int queries) const { return queries << log2; }
  __host__ __device__ int query(int row) const { return row >> log2; }
  __host__ __device__ int head(int row) const { return row & ((1 << log2) - 1); }
};

// [batch, head, row, dim] in boxes of [rows, 64]. A dimension without a stride (an expanded tensor)
// has size 1 in the map and step 0: its coordinate is always 0. Q and O have [batch, group of
// heads, row, head of the group, dim] in boxes of [rows, heads, 64].
struct TensorMap {
  CUtensorMap map;
  int head_step;
  int batch_step;
};

// What every kernel argument block holds.
struct ForwardArguments {
  TensorMap q, k, v, out;
  ForwardParams params;
  TileOrder order;
  ScoreScales scores;
  Grouping grouping;
  Divisor heads;          // of q, groups of them counted once
  Divisor heads_per_key;  // of q for each of k and v
  int tiles;              // dense: how many; packed: at most so many
  bool eager;             // tiles are taken ahead
  bool packed;
  TileCounter* counter;
};

template <class Config>
__device__ __forceinline__ Grouping grouping(const ForwardArguments& a) {
  return Config::kTakesGroups ? a.grouping : Grouping{0};
}

// Use number `count` of a ring of buffers: which buffer, and the parity of its barriers' phase.
template <int kStages>
struct Slot {
  int stage;
  int parity;
  __device__ __forceinline__ explicit Slot(int count)
      : stage(count % kStages), parity(count / kStages & 1) {}
};

}  // namespace attnscope::sm90
