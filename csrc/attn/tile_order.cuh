// The order in which thread blocks take tiles of query rows.
#pragma once

namespace attnscope {

struct TileOrder {
  int m_blocks;
  int heads;    // batch * heads_q, the query heads of a batch entry side by side
  int section;  // heads whose tiles are taken together
  int last;     // heads at the end that are a section of their own; 0 unless section is 1

  long long tiles() const { return static_cast<long long>(m_blocks) * heads; }
};

// Heads come one after the other, so that a head's K and V stay in L2. Under a causal mask the last
// tiles of a head cost the most. They come first, across as many heads as fit in L2 together: the
// short tiles then balance the end (longest processing time first).
inline TileOrder tile_order(int m_blocks, int batch, int heads_q, int heads_kv,
                            long long kv_bytes_per_head, bool longest_first) {
  constexpr long long kL2Share = 32 << 20;  // of 40 to 60 MB
  TileOrder order{m_blocks, batch * heads_q, 1, 0};
  if (longest_first) {
    const long long kv_heads = kL2Share / (kv_bytes_per_head > 0 ? kv_bytes_per_head : 1);
    const long long heads = (kv_heads > 1 ? kv_heads : 1) * (heads_q / heads_kv);
    order.section = static_cast<int>(heads < order.heads ? heads : order.heads);
  }
  return order;
}

struct Tile {
  int m_block;
  int head;  // in [0, batch * heads_q)
};

#ifdef __CUDACC__
// `section_tiles` and `section` are order.section * order.m_blocks and order.section: numbers, or
// divisors.
template <class Number>
__device__ __forceinline__ Tile tile_at(const TileOrder& order, int index, Number section_tiles,
                                        Number section) {
  const int before = order.heads - order.last;
  const bool at_end = index >= before * order.m_blocks;
  const int first = at_end ? before : index / section_tiles * order.section;
  const int width = at_end ? order.last : min(order.section, order.heads - first);
  const int rest = index - first * order.m_blocks;
  const int above = width == 1 ? rest : width == order.section ? rest / section : rest / width;
  return {order.m_blocks - 1 - above, first + rest - above * width};
}

// The first unit of rows of tile `m_block` of `m_blocks`, of up to `per_tile` units each. With room
// for more units than there are, the first tiles have one less: under a causal mask the last ones
// see the most keys, and those keep all consumers at work.
__device__ __forceinline__ int first_unit_of(int m_block, int m_blocks, int units, int per_tile) {
  const int missing = m_blocks * per_tile - units;
  return min(m_block * per_tile - min(m_block, missing), units);
}

__device__ __forceinline__ Tile tile_at(const TileOrder& order, int index) {
  return tile_at(order, index, order.section * order.m_blocks, order.section);
}
#endif

}  // namespace attnscope
