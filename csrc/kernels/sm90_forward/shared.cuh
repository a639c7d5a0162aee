// What the roles share: the configuration, the arguments, shared memory and its barriers.
#pragma once

#include <type_traits>

#include "attn/block_range.cuh"
#include "attn/divisor.h"
#include "attn/faults.cuh"
#include "attn/grouping.h"
#include "attn/params.h"
#include "attn/ring.cuh"
#include "attn/score_scales.h"
#include "attn/seqlen.cuh"
#include "attn/tensor_map.h"
#include "attn/tile_counter.h"
#include "attn/tile_order.cuh"
#include "kernels/sm90_forward/config.cuh"
#include "kernels/sm90_forward/marks.cuh"
#include "ptx/address.cuh"
#include "ptx/mbarrier.cuh"

namespace attnscope::sm90 {

template <class Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kKeyParts_,
          bool kGroupedOnly>
struct AnyForwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr ForwardTile kTile =
      forward_tile(kHeadDim, kBlockM_, kBlockN_, kKeyParts_, kGroupedOnly);
  static constexpr int kValueDim = kTile.head_dim_v;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kQStages = kTile.q_stages;
  static constexpr int kStages = kTile.stages;
  static constexpr int kOutStages = kTile.out_stages();
  static constexpr int kBlocksPerSm = kTile.blocks_per_sm;
  static constexpr int kConsumers = kTile.consumers();
  static constexpr int kHeadsPerTile = kTile.heads_per_tile;
  static constexpr int kKeyParts = kTile.key_parts;
  static constexpr int kUnits = kConsumers / kKeyParts;
  static constexpr int kHeadUnits = kTile.head_units();
  static constexpr int kKeyBuffers = kHeadsPerTile * kKeyParts;  // of K in a stage, and of V
  static constexpr int kThreads = kTile.threads();
  static constexpr int kProducerRegisters = kTile.producer_registers();
  static constexpr int kConsumerRegisters = kTile.consumer_registers();
  static constexpr int kColumns = kTile.columns();             // of Q and K
  static constexpr int kValueColumns = kTile.value_columns();  // of V and O
  static constexpr int kQBytes = 2 * 64 * kColumns;            // per unit
  static constexpr int kKeyBytes = 2 * kBlockN * kColumns;     // of a block of K
  static constexpr int kValueBytes = 2 * kBlockN * kValueColumns;
  static constexpr int kRowBytes = 128;  // one swizzled row of a 64-element column block
  static constexpr bool kScoresLive = kTile.scores_live;
  static constexpr bool kTakesTurns = kTile.takes_turns();
  static constexpr bool kTakesGroups = kTile.takes_groups;
  // Whether the first tile of a packed batch is described at the kernel's entry, as in a dense
  // call. That code costs dense calls 1 to 3 %.
  static constexpr bool kPackedAtEntry = kGroupedOnly;

  // The consumer's rows, among the units of the tile, and its part of a step's keys.
  static __device__ __forceinline__ int unit_of(int consumer) { return consumer / kKeyParts; }
  static __device__ __forceinline__ int part_of(int consumer) { return consumer % kKeyParts; }
  // Which buffer of a stage a consumer reads: the heads of a tile and the parts of a step have keys
  // of their own.
  static __device__ __forceinline__ int key_buffer_of(int consumer) {
    return (kHeadsPerTile == 1 ? 0 : consumer / kHeadUnits) * kKeyParts + part_of(consumer);
  }

  static_assert(kHeadsPerTile == 1 || !kTakesGroups, "heads have rows of their own or share them");
  static_assert(kKeyParts == 1 || kKeyParts == 2, "two consumers exchange O");
  static_assert(kTile.head_dim == kHeadDim, "the tile table has no such row");
  static_assert(kHeadDim % 16 == 0, "a product is 16 deep");
  static_assert(kValueDim <= kHeadDim, "a row is found again by all of a head dim's elements");
  static_assert(kBlockN % 16 == 0, "keys are consumed 16 at a time");
  static_assert(kConsumers >= 1 && kConsumers <= kMaxConsumers, "TileWork has room for these");
};

// One consumer for each unit of a tile.
template <class Element, int kHeadDim, int kBlockM, int kBlockN>
struct ForwardConfig : AnyForwardConfig<Element, kHeadDim, kBlockM, kBlockN, 1, false> {};
template <class Element, int kHeadDim, int kBlockM, int kBlockN>
struct GroupedForwardConfig : AnyForwardConfig<Element, kHeadDim, kBlockM, kBlockN, 1, true> {};

// Two consumers share the rows of a unit and divide its keys.
template <class Element, int kHeadDim, int kBlockM, int kBlockN>
struct SplitForwardConfig : AnyForwardConfig<Element, kHeadDim, kBlockM, kBlockN, 2, false> {};
template <class Element, int kHeadDim, int kBlockM, int kBlockN>
struct GroupedSplitForwardConfig : AnyForwardConfig<Element, kHeadDim, kBlockM, kBlockN, 2, true> {
};

// The configuration of row `kRow` of the table.
template <class Element, int kRow, int kHeadDim = kForwardTiles[kRow].head_dim,
          int kBlockM = kForwardTiles[kRow].block_m, int kBlockN = kForwardTiles[kRow].block_n>
using RowConfig = std::conditional_t<
    kForwardTiles[kRow].grouped_only(),
    std::conditional_t<kForwardTiles[kRow].key_parts == 1,
                       GroupedForwardConfig<Element, kHeadDim, kBlockM, kBlockN>,
                       GroupedSplitForwardConfig<Element, kHeadDim, kBlockM, kBlockN>>,
    std::conditional_t<kForwardTiles[kRow].key_parts == 1,
                       ForwardConfig<Element, kHeadDim, kBlockM, kBlockN>,
                       SplitForwardConfig<Element, kHeadDim, kBlockM, kBlockN>>>;

// Up to 64 rows of one query head, and the keys of them that are a consumer's: its part of a tile.
struct Unit {
  BlockRange range;  // the blocks that its rows see
  int head;
  int q_row;      // row of the tensors where it begins
  int first_row;  // row of the sequence (see Grouping) where it begins
  int rows;       // 0: the tile has no rows for this consumer
};

// One tile of query rows, described once for all roles. Blocks are blocks of keys.
struct alignas(16) TileWork {
  bool stop;     // no tile is left
  bool loading;  // its Q and its first block of K are being loaded already
  int head;      // the first query head that the tile may have
  int head_kv;   // its key head
  int batch;     // index into the tensors; 0 when packed
  int k_row;     // row of the tensors where the keys begin
  int seqlen_k;
  int shift;         // seqlen_k - seqlen_q
  int first_unit;    // among the units of its heads in this sequence
  int end_unit;      // one past the last
  BlockRange range;  // the blocks that any row of the tile sees
  Unit unit[kMaxConsumers];
};

inline constexpr int kMostTiles = INT_MAX / 2;  // of a call, so that the sum of two fits an int

// The scheduler's place among the tiles. In shared memory, since the scheduler has few registers.
struct TileQueue {
  int tiles;        // handed out by this thread block
  int index;        // of the tile, in the order of the call
  int sequence;     // the tile's sequence
  int m_block;      // the tile's place in that sequence
  int m_blocks;     // the tiles of its heads there
  int batch;        // packed: the first of the 32 sequences whose tiles are counted
  int turn;         // packed: of the sequences whose tiles are counted, see turn_of
  int through[33];  // packed: tiles before each of them, and through the last
};

#ifdef ATTNSCOPE_FAULTS
// A delayed copy. The producer fills it in; a separate thread issues it.
struct LateCopy {
  int ready, done;
  int is_k, stage, row, head, head_kv, batch;
  uint32_t full, start, cycles;
};
#endif

// The Fragments of a consumer that has half of the keys, but for S, for the consumer that has the
// other half. By warp and lane.
template <class Config, bool kHasParts>
struct PartialOutput {
  float4 o[Config::kUnits * 4][Config::kValueDim / 8][32];
  float4 rows[Config::kUnits * 4][32];  // row_max, row_sum
};
template <class Config>
struct PartialOutput<Config, false> {};

// Barriers are named by the event that completes them.
template <class Config>
struct ForwardShared {
  using Element = typename Config::Element;
  static constexpr int kStages = Config::kStages;
  static constexpr int kTiles = 2;  // one in work, one being fetched
  alignas(1024) Element q[Config::kQStages][Config::kUnits][64 * Config::kColumns];
  alignas(1024) Element k[kStages][Config::kKeyBuffers][Config::kBlockN * Config::kColumns];
  alignas(1024) Element v[kStages][Config::kKeyBuffers][Config::kBlockN * Config::kValueColumns];
  // A warp's O on the way out.
  alignas(1024) Element o[Config::kUnits * 4][Config::kOutStages][16 * 64];
  PartialOutput<Config, (Config::kKeyParts > 1)> partial;
  uint64_t q_full[Config::kQStages][Config::kUnits], q_empty[Config::kQStages][Config::kUnits];
  uint64_t k_full[kStages], k_empty[kStages];
  uint64_t v_full[kStages], v_empty[kStages];
  uint64_t tile_full[kTiles], tile_empty[kTiles], tile_wanted;
  TileWork tile[kTiles];
  TileQueue queue;
#ifdef ATTNSCOPE_FAULTS
  LateCopy late_copy;
#endif
};

struct ForwardArguments {
  TensorMap q, k, v, out;
  ForwardParams params;
  TileOrder order;
  int last_m_blocks;  // tiles of each of the heads at its end
  ScoreScales scores;
  Grouping grouping;
  Divisor section_tiles, section;  // of `order`
  Divisor together;                // query heads of a tile, see heads_together
  Divisor heads;                   // sets of query heads that have tiles of their own
  Divisor heads_per_key;           // query heads of a key head
  int tiles;                       // dense: how many; packed: at most
  int turns;                       // packed: sequences come in turns, the longest first
  int long_units, long_tiles;      // packed: of a sequence whose last heads have more tiles
  bool prefetch_tiles;             // take a tile as soon as a slot is free
  bool packed;
  bool hides_keys;       // rows of a tile may see different keys
  TileCounter* counter;  // null if each block has one tile at most
};

template <class Config>
__device__ __forceinline__ Grouping grouping(const ForwardArguments& a) {
  return Config::kTakesGroups ? a.grouping : Grouping{0};
}

// The key head of head number `i` of a tile.
template <class Config>
__device__ __forceinline__ int key_head(const ForwardArguments& a, const TileWork& w, int i) {
  static_assert(Config::kHeadsPerTile <= 2,
                "the second head has the first one's key head, or next");
  if (Config::kHeadsPerTile == 1) return w.head_kv;
  return w.head_kv + (w.head + i >= (w.head_kv + 1) * a.heads_per_key.divisor);
}

}  // namespace attnscope::sm90
