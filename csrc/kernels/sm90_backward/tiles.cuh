// Which tile of keys a thread block works on, and the queries that see it.
#pragma once

#include "kernels/sm90_backward/parts.cuh"
#include "kernels/sm90_backward/shared.cuh"

namespace attnscope::sm90 {

// Whether turns of head number `head` of the batch ascend.
__device__ __forceinline__ bool turns_ascend(const BackwardArguments& a, int head) {
  return a.alternates && head / a.order.section % 2 != 0;
}

// The tile that comes as number `index`, and its head. Tiles with the most queries come first; but
// last where turns descend, see Turns.
__device__ __forceinline__ Tile find_tile(const BackwardArguments& a, int index) {
  const Tile tile = tile_at(a.order, index);
  const bool descend = a.tickets != nullptr && !turns_ascend(a, tile.head);
  return {descend ? tile.m_block : a.order.m_blocks - 1 - tile.m_block, tile.head};
}

// The tile of an entry of tile_list. Bounds that descend leave gaps in it, which hold anything.
__device__ __forceinline__ Tile listed_tile(const BackwardArguments& a, const Tile& entry) {
  return {min(max(entry.m_block, ~entry.m_block), a.order.m_blocks - 1),
          min(max(entry.head, 0), a.order.heads - 1)};
}

// Describes tile number `block` of the key head `head` of the batch, but for its direction, which
// is there before: one lane for each consumer's blocks, one for the rest. Warp-converged.
template <class Config>
__device__ __forceinline__ void describe_tile(const BackwardArguments& a, int head, int block,
                                              KeyTile& t) {
  const ForwardParams& p = a.params.forward;
  const int lane = ptx::lane();
  int head_kv = head, sequence, key_block = block;
  if (a.packed) {
    sequence = find_sequence(p.cu_seqlens_k, p.total_k, p.batch, Config::kBlockN, block);
    key_block -= first_block(p.cu_seqlens_k, p.total_k, sequence, Config::kBlockN);
  } else {
    sequence = head / a.heads_kv;
    head_kv -= sequence * a.heads_kv.divisor;
  }
  const Segment seg_q = segment(p.cu_seqlens_q, p.total_q, p.seqlen_q, sequence);
  const Segment seg_k = segment(p.cu_seqlens_k, p.total_k, p.seqlen_k, sequence);
  const int first_key = key_block * Config::kBlockN;
  // The window of a key: query i sees key j if j - shift - right <= i <= j - shift + left.
  const Window queries{seg_q.length - seg_k.length, p.window_right,
                       Config::kSeenToEnd ? -1 : p.window_left};
  const bool is_consumer = lane < Config::kConsumers;
  const int begin_key = first_key + (is_consumer ? 64 * lane : 0);
  const int end_key = min(begin_key + (is_consumer ? 64 : Config::kBlockN), seg_k.length);
  if (lane > Config::kConsumers) return;
  BlockRange range = block_range(queries, begin_key, end_key, seg_q.length, Config::kBlockM);
  if (is_consumer) {
    if (end_key <= begin_key) range.end = range.begin;
    // Queries past the end of a dense call need no mask: their rows are 0, and so is their P.
    if (Config::kSeenToEnd) range.full_end = range.end;
    // Keys past the end need a mask in every block.
    if (end_key < begin_key + 64) range.full_begin = INT_MAX;
    t.consumer[lane] = range;
  } else {
    t.rows = key_block < 0 ? 0 : max(end_key - begin_key, 0);
    t.head_kv = head_kv;
    t.batch = seg_k.batch;
    t.q_row = static_cast<int>(seg_q.row);
    t.k_row = static_cast<int>(seg_k.row) + first_key;
    t.first_key = first_key;
    t.key_block = key_block;
    t.seqlen_q = seg_q.length;
    t.seqlen_k = seg_k.length;
    t.first_block = a.packed ? first_block(p.cu_seqlens_q, p.total_q, sequence, Config::kBlockM)
                             : sequence * a.dense_queries.divisor;
    t.begin = range.begin;
    t.end = range.end;
    t.start = range.begin;
    // Tiles that see the same blocks start at different ones: otherwise they wait for each other's
    // first part (claims.cuh), or add to the same addresses at once.
    if (p.window_right < 0 && !a.whole_heads && a.tickets == nullptr) {
      t.start += first_key / Config::kBlockM % max(range.end - range.begin, 1);
    }
  }
}

// The first query head whose blocks the tile goes through backwards, see Turns.
template <class Config>
__device__ __forceinline__ int end_forward(const BackwardArguments& a, const KeyTile& t) {
  const ForwardParams& p = a.params.forward;
  if (a.tickets == nullptr || p.window_left >= 0 || p.window_right < 0) return INT_MAX;
  return t.direction > 0 ? first_head<Config>(a, t) + 1 : end_head<Config>(a, t) - 1;
}

// Describes a tile or a part of one, see tile_of; of whole heads, the tile `key_block` of head
// `unit`. `unit` may be in shared memory: it is read again rather than kept in a register.
// Warp-converged.
template <class Config>
__device__ __forceinline__ void describe_unit(const BackwardArguments& a, const int& unit,
                                              int key_block, KeyTile& t) {
  constexpr bool kParts = Config::kParts;
  const bool is_last_lane = ptx::lane() == Config::kConsumers;
  Tile tile{key_block, unit};
  // The direction is stored early: it then takes no register.
  if (a.tile_list != nullptr) {
    tile = a.tile_list[unit];
    if (is_last_lane) t.direction = tile.m_block < 0 ? -1 : 1;
    tile = listed_tile(a, tile);
  } else {
    if (!a.whole_heads) tile = find_tile(a, kParts ? tile_of(a, unit) : unit);
    if (is_last_lane) t.direction = turns_ascend(a, tile.head) ? -1 : 1;
  }
  if (kParts && a.parts_have_heads) tile.head = take_heads(a, tile, is_last_lane, t);
  describe_tile<Config>(a, tile.head, tile.m_block, t);
  if (kParts && is_last_lane) take_part(a, unit, t);
  if (is_last_lane) t.end_forward = end_forward<Config>(a, t);
}

}  // namespace attnscope::sm90
