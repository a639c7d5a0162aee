// What the roles share: the configuration, the arguments, shared memory and its barriers.
#pragma once

#include "attn/block_range.cuh"
#include "attn/divisor.h"
#include "attn/faults.cuh"
#include "attn/params.h"
#include "attn/ring.cuh"
#include "attn/score_scales.h"
#include "attn/seqlen.cuh"
#include "attn/tensor_map.h"
#include "attn/tile_order.cuh"
#include "kernels/sm90_backward/config.cuh"
#include "ptx/address.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/sync.cuh"

namespace attnscope::sm90 {

inline constexpr int kTileBuffers = 2;  // for descriptions of tiles

template <class Element_, int kRow>
struct BackwardConfig {
  using Element = Element_;
  static constexpr BackwardTile kTile = kBackwardTiles[kRow];
  static constexpr int kHeadDim = kTile.head_dim;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kStages = kTile.stages;
  static constexpr int kKeyStages = kTile.key_stages();
  static constexpr int kValueStages = kTile.value_stages();
  static constexpr int kConsumers = kTile.consumers();
  static constexpr int kThreads = kTile.threads();
  static constexpr int kAdders = 1;  // to a ticket, for each tile
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 240;
  static constexpr int kGradientStages = kTile.gradient_stages();
  static constexpr int kRowBytes = 128;  // one swizzled row of a 64-element column block
  static constexpr int kKeyBytes = 2 * kBlockN * kHeadDim;    // of K or V
  static constexpr int kQueryBytes = 2 * kBlockM * kHeadDim;  // of Q or dO
  static constexpr int kScoreBytes = 2 * kBlockM * 64;        // of a consumer's dS
  static constexpr int kColumnBlocks = kHeadDim / 64;
  static constexpr bool kSeenToEnd = kTile.long_queries > 0;  // calls without a left window alone
  // dV and dK leave by TMA, beside the next tile, dV by way of V. With one buffer the next V would
  // wait for dV, which is slower.
  static constexpr bool kStoresByTma = kValueStages > 1 && kColumnBlocks == 1;
  static constexpr bool kEarlyValues = kTile.early_values;
  static constexpr bool kTransposes = kTile.transposes();
  static constexpr bool kWholeHeads = kTile.takes_whole_heads();
  static constexpr bool kParts = false;                          // see WithParts
  static constexpr int kUnits = kTransposes ? 1 : kBlockM / 64;  // of rows of dQ
  static constexpr int kPartFloats = kBlockM / kUnits * 64;      // of a column block of a unit
  static constexpr int kGradientParts = kUnits * kColumnBlocks;
  static constexpr int kGradientFloats = kBlockM * kHeadDim;  // of dQ of a block

  static_assert(kHeadDim % 64 == 0, "column blocks have 64 elements");
  static_assert(!kTransposes || kColumnBlocks == 2, "dQ is computed in two column blocks");
  static_assert(kConsumers <= 3, "KeyTile has room for three");
};

// The configuration for calls whose last tiles have parts, see parts.cuh. Looking for parts costs
// short tiles 1 to 3 %.
template <class Config>
struct WithParts : Config {
  static constexpr bool kParts = true;
};

// One tile of keys, described once for all roles. Blocks are blocks of queries.
struct alignas(128) KeyTile {
  int rows;       // keys of the tile; 0: there is no tile
  int head_kv;    // its first query head is head_kv * group
  int batch;      // index into the tensors; 0 when packed
  int q_row;      // row of the tensors where the sequence's queries begin
  int k_row;      // row of the tensors where the tile begins
  int first_key;  // key of the sequence where the tile begins
  int key_block;  // number of the tile in its sequence
  int seqlen_q, seqlen_k;
  int first_block;  // number of the sequence's first block among those of a head
  int begin, end;   // the blocks that see a key of the tile
  int start;        // the first of them in turn; after the last one comes `begin`
  int direction;    // of turns: 1 where they descend, -1 where they ascend
  int end_forward;  // the blocks of query heads from here on come backwards, see Turns
  // The blocks that see one of a consumer's 64 keys; full_begin, full_end: all of them.
  BlockRange consumer[3];
  // With parts: the tile's number among those that have some, and the part; otherwise split is -1.
  int split, part;
  int first_head, end_head;  // with parts: its query heads

  // Goes from `start` through the places of the blocks in turn.
  __device__ __forceinline__ int place_after(int place) const {
    return place + 1 == end ? begin : place + 1;
  }
  __device__ __forceinline__ int block_at(int place, int head) const {
    return head < end_forward ? place : begin + end - 1 - place;
  }
};

// The same blocks, of one query head after the other. For roles that need no number of the head.
struct BlockOrder {
  int begin, end;
  int block;
  int direction;      // to the next block
  int forward_heads;  // that are left, with this one; then blocks come backwards

  __device__ __forceinline__ BlockOrder(int begin, int end, int start, int forward_heads)
      : begin(begin), end(end), forward_heads(forward_heads) {
    direction = forward_heads > 0 ? 1 : -1;
    block = forward_heads > 0 ? start : end - 1;
  }

  __device__ __forceinline__ void advance() {
    block += direction;
    if (__builtin_expect(block == end || block < begin, false)) turn_around();
  }
  // Blocks of this direction that are left, and what follows the last one.
  __device__ __forceinline__ int left() const {
    return direction > 0 ? end - block : block - begin + 1;
  }
  __device__ __forceinline__ void turn_around() {
    if (--forward_heads > 0) {
      block = begin;
    } else {
      direction = -1;
      block = end - 1;
    }
  }
};

// What a producer loads.
enum class Operand { kK, kV, kQ, kDout };

#ifdef ATTNSCOPE_FAULTS
// A delayed copy. The producer fills it in; a separate thread issues it.
struct LateLoad {
  int ready, done;
  Operand operand;
  int stage, head, block;
  int tile;  // the buffer of its description
  int part;  // of dO of the wide kernel
  uint32_t start, cycles;
};
#endif

// The tile that the scheduler takes next: its number in the call (whole heads: the head's number),
// and in the thread block.
struct NextTile {
  int index, number;
  int key_block;  // whole heads
};

// Barriers are named by the event that completes them.
template <class Config>
struct BackwardShared {
  using Element = typename Config::Element;
  static constexpr int kStages = Config::kStages;
  static constexpr int kTileElements = Config::kBlockN * Config::kHeadDim;
  static constexpr int kBlockElements = Config::kBlockM * Config::kHeadDim;
  alignas(1024) Element k[Config::kKeyStages][kTileElements];
  alignas(1024) Element v[Config::kValueStages][kTileElements];
  alignas(1024) Element q[kStages][kBlockElements];
  alignas(1024) Element dout[kStages][kBlockElements];
  // dS [kBlockM, 64 keys] of each consumer. At the end of a tile: dV, dK and dQ on the way out; by
  // TMA dV leaves by way of `v`.
  alignas(1024) Element ds[2][Config::kConsumers][Config::kBlockM * 64];
  alignas(128) float dq[Config::kGradientStages][Config::kGradientFloats];  // on its way out
  alignas(128) float lse_log2[kStages][Config::kBlockM];
  alignas(128) float delta[kStages][Config::kBlockM];
  KeyTile tile[kTileBuffers];
  NextTile next;
  uint64_t tile_full[kTileBuffers], tile_empty[kTileBuffers];
  uint64_t tile_wanted;  // all loads of a tile have been issued
  uint64_t k_full[Config::kKeyStages], k_empty[Config::kKeyStages];
  uint64_t v_full[Config::kValueStages], v_empty[Config::kValueStages];
  uint64_t q_full[kStages];     // Q and lse_log2
  uint64_t dout_full[kStages];  // dO and delta
  uint64_t empty[kStages];      // all four
  uint64_t ds_full[2], ds_empty[2];
  uint64_t dq_full[Config::kGradientStages], dq_empty[Config::kGradientStages];
  uint64_t dq_taken[2];  // the other writer has passed the ring of dQ on
  uint64_t dq_done;      // whole heads: all of a head's dQ is in global memory
#ifdef ATTNSCOPE_FAULTS
  LateLoad late_load;
#endif
};

struct BackwardArguments {
  TensorMap q, k, v, dout;
  TensorMap dk, dv;  // kStoresByTma: in boxes of a warp's rows
  BackwardParams params;
  TileOrder order;
  ScoreScales scores;
  float scale, inverse_cap;
  Divisor heads_kv;
  int group;              // query heads of a key head
  int query_blocks;       // of a head, in the whole batch
  Divisor all_queries;    // the same
  Divisor dense_queries;  // dense: blocks of queries in a sequence
  bool packed;
  bool whole_heads;  // see launch.cu
  int tiles;  // of keys or parts of them, in the whole call; whole heads: key heads of the batch
  int whole_tiles;  // the later ones are parts of tiles, see parts.cuh
  Divisor parts;
  bool parts_have_heads;  // and all blocks; otherwise blocks, and all heads
  float* statistics;
  float* gradient;
  int* tickets;     // null without turns
  bool alternates;  // dense: turns ascend in every other section of heads, see Turns
  Tile* tile_list;  // null unless packed, see lists_tiles
  int slots;        // SMs or clusters
  float* partial;   // dV and dK of parts
  int* claims;      // null if the preprocess zeroes dQ, or if heads are whole; see claims.cuh
  int* counter;
};

// The query heads of tile `t`, or of a part of it.
template <class Config>
__device__ __forceinline__ int first_head(const BackwardArguments& a, const KeyTile& t) {
  return Config::kParts ? t.first_head : t.head_kv * a.group;
}
template <class Config>
__device__ __forceinline__ int end_head(const BackwardArguments& a, const KeyTile& t) {
  return Config::kParts ? t.end_head : (t.head_kv + 1) * a.group;
}
template <class Config>
__device__ __forceinline__ int head_count(const BackwardArguments& a, const KeyTile& t) {
  return Config::kParts ? t.end_head - t.first_head : a.group;
}

// The same on the uniform datapath. Warp-converged.
template <class Config>
__device__ __forceinline__ int uniform_head_count(const BackwardArguments& a, const KeyTile& t) {
  const int heads = head_count<Config>(a, t);
  return Config::kParts ? ptx::uniform(heads) : heads;
}

// The blocks of tile `t`.
template <class Config>
__device__ __forceinline__ BlockOrder block_order(const BackwardArguments& a, const KeyTile& t) {
  return {t.begin, t.end, t.start, t.end_forward - first_head<Config>(a, t)};
}

// The same on the uniform datapath. Warp-converged.
template <class Config>
__device__ __forceinline__ BlockOrder uniform_block_order(const BackwardArguments& a,
                                                          const KeyTile& t) {
  return {ptx::uniform(t.begin), ptx::uniform(t.end), ptx::uniform(t.start),
          ptx::uniform(t.end_forward - first_head<Config>(a, t))};
}

// The place of the first block of queries of tile `t`'s sequence, in its first head.
template <class Config>
__device__ __forceinline__ int first_place(const BackwardArguments& a, const KeyTile& t) {
  return first_head<Config>(a, t) * a.query_blocks + t.first_block;
}

// The number of the first block of a sequence among those of a packed batch. Sequences that end and
// start within one block of `rows` rows must not share it: so each adds one. floor(a / n) + 1 +
// floor(b / n) >= floor((a + b) / n), so the blocks of a sequence end before the next one's begin.
__device__ __forceinline__ int first_block(const int32_t* cu_seqlens, int64_t total, int sequence,
                                           int rows) {
  const int begin =
      min(max(cu_seqlens[sequence], 0), static_cast<int>(min(total, int64_t{INT_MAX})));
  return begin / rows + sequence;
}

// The sequence of a packed batch that block number `block` belongs to, if any: the last one whose
// first block is not after it. Warp-converged.
__device__ __forceinline__ int find_sequence(const int32_t* cu_seqlens, int64_t total, int batch,
                                             int rows, int block) {
  int low = 0;
  for (int count = batch; count > 1;) {
    const int step = (count + 31) / 32;
    const int candidate = low + ptx::lane() * step;
    const bool before =
        candidate < low + count && first_block(cu_seqlens, total, candidate, rows) <= block;
    const int chosen = max(__popc(__ballot_sync(0xffffffffu, before)) - 1, 0) * step;
    count = min(step, count - chosen);
    low += chosen;
  }
  return low;
}

// A block of rows: the place of block number `index` of the whole batch.
struct RowBlock {
  Segment segment;
  int block;  // number in the sequence
  int first;  // row of the sequence where the block begins
  int rows;   // that the block has; 0 or less: none
};

// The queries of block number `index`. Warp-converged.
template <class Config>
__device__ __forceinline__ RowBlock query_block(const BackwardArguments& a, int index) {
  const ForwardParams& p = a.params.forward;
  RowBlock b;
  int sequence;
  if (a.packed) {
    sequence = find_sequence(p.cu_seqlens_q, p.total_q, p.batch, Config::kBlockM, index);
    b.block = index - first_block(p.cu_seqlens_q, p.total_q, sequence, Config::kBlockM);
  } else {
    sequence = index / a.dense_queries;
    b.block = index - sequence * a.dense_queries.divisor;
  }
  b.segment = segment(p.cu_seqlens_q, p.total_q, p.seqlen_q, sequence);
  b.first = b.block * Config::kBlockM;
  b.rows = b.block < 0 ? 0 : min(Config::kBlockM, b.segment.length - b.first);
  return b;
}

}  // namespace attnscope::sm90
