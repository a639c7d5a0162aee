// How many heads' tiles come together. Plain C++.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attn/grouping.h"
#include "attn/params.h"
#include "attn/tile_order.cuh"

namespace attnscope::sm90 {

// Waves of tiles up to which those that come last must not be long.
inline constexpr int kFewWaves = 8;

// Whether the heads of a sequence with turns come in sections of both directions: where its tiles
// fill the slots five thirds times.
ATTNSCOPE_HOST_DEVICE constexpr bool has_turns_both_ways(int64_t tiles, int64_t slots) {
  return 3 * tiles >= 5 * slots;
}

// The heads whose tiles come together, with `slots` SMs or clusters, where first tiles are longest.
// Who had a long tile gets a short one of the next section: so the call has an even number of equal
// sections. Each has the heads whose tiles fill the slots once, to nine tenths, if their number
// divides: L2 holds less than with more heads. Otherwise as many as fit in L2 (`section` of the
// order), or fill the slots.
//
// An odd number of heads has no equal sections. In a call of few tiles slots would be idle at the
// end of unequal ones, so all heads come together; with turns in two sections, since these ascend
// in the second one, see Turns.
constexpr int choose_section(const TileOrder& order, int slots, bool has_turns) {
  const int blocks = std::max(order.m_blocks, 1), heads = std::max(order.heads, 1);
  for (int section = slots / blocks; section * blocks * 10 >= slots * 9; --section) {
    if (heads % (2 * section) == 0) return section;
  }
  const auto waves = static_cast<int>(int64_t{heads} * blocks / slots);
  int sections = ceil_div(ceil_div(heads, order.section), 2) * 2;
  if (heads % 2 == 0) {
    sections = std::clamp(waves / 2 * 2, 2, sections);
    while (heads % sections != 0) sections -= 2;
  } else if (waves < kFewWaves) {
    sections = has_turns ? 2 : 1;
  }
  return ceil_div(heads, sections);
}

// The same for calls with turns whose tiles are all alike. Tiles that take turns one after the
// other start one after the other: so the slots are filled once. But with fewer than four heads a
// late tile holds up more others.
constexpr int choose_section_of_turns(const TileOrder& order, int slots, bool wide) {
  const int heads = std::max(order.heads, 1), least = std::min(wide ? 1 : 4, heads);
  return std::clamp(slots / std::max(order.m_blocks, 1), least, heads);
}

// The same for a packed batch of `order.m_blocks` tiles a head, which come longest first within a
// sequence alone. Few tiles come with those of all heads: a long one that comes late ends late.
// Otherwise, if the first ones are the longest, as many heads come together as fill the slots with
// their tiles of the longest sequence. With turns each sequence has sections of its own, see
// section_of_sequence; if tiles are alike, they come with those of all heads.
constexpr int choose_section_of_packed(const TileOrder& order, const ForwardParams& p, int block_n,
                                       int slots, bool has_turns) {
  const int heads = std::max(order.heads, 1), longest = ceil_div(p.seqlen_k, block_n);
  if (has_turns || int64_t{heads} * order.m_blocks < int64_t{kFewWaves} * slots) return heads;
  return is_causal(p) ? std::clamp(slots / std::max(longest, 1), 1, heads) : 1;
}

// The same for a sequence of `blocks` tiles a head, where sequences with turns come one after the
// other. From five thirds of a wave on, heads come in an even number of sections, which fill the
// slots about once each. With fewer tiles it is all heads, which list_tiles may take one by one.
ATTNSCOPE_HOST_DEVICE constexpr int section_of_sequence(int blocks, int heads, int slots) {
  const int64_t tiles = int64_t{blocks} * heads;
  if (!has_turns_both_ways(tiles, slots)) return heads;
  int sections = 2 * static_cast<int>((tiles + slots) / (2 * int64_t{slots}));
  if (sections >= heads) return 1;
  while (heads % 2 == 0 && heads % sections != 0) sections -= 2;
  return (heads + sections - 1) / sections;
}

}  // namespace attnscope::sm90
