// The order of the tiles of a packed call whose sequences come one after the other, the longest
// first: so the call ends with short tiles. The preprocess lists them: a scheduler that finds them
// itself has 400 instructions more, and slows down all calls with turns by 1 %.
#pragma once

#include "kernels/sm90_backward/order.h"
#include "kernels/sm90_backward/shared.cuh"

namespace attnscope::sm90 {

// Lists the tiles of `block_n` keys: a thread block those of a sequence.
__device__ __forceinline__ void list_tiles(const BackwardArguments& a, int block_n) {
  const ForwardParams& p = a.params.forward;
  const int heads = a.order.heads;
  const bool has_turns = a.tickets != nullptr;
  const auto first_of = [&](int sequence) {
    return sequence < p.batch ? first_block(p.cu_seqlens_k, p.total_k, sequence, block_n)
                              : a.order.m_blocks;
  };
#pragma unroll 1
  for (int sequence = blockIdx.x; sequence < p.batch; sequence += gridDim.x) {
    const int first = first_of(sequence), blocks = first_of(sequence + 1) - first;
    int blocks_before = 0;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < p.batch; i += 32) {
      const int others = first_of(i + 1) - first_of(i);
      const bool comes_before = others > blocks || (others == blocks && i < sequence);
      if (comes_before) blocks_before = min(blocks_before + others, a.order.m_blocks + 1);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      blocks_before += __shfl_xor_sync(0xffffffffu, blocks_before, distance);
    }
    if (blocks_before + blocks > a.order.m_blocks) continue;  // bounds that descend
    const int before_it = blocks_before * heads, tiles = blocks * heads;
    const int from_middle = a.order.m_blocks * heads - before_it - tiles / 2;
    int together = a.order.section;
    bool has_sections = false, ascends = false;
    if (has_turns) {  // see Turns
      const int section = section_of_sequence(blocks, heads, a.slots);
      has_sections = section < heads;
      const bool is_last = 3 * tiles >= a.slots && before_it >= a.slots && from_middle <= a.slots;
      together = has_sections || is_last ? section : 1;
      ascends = is_last && !has_sections;
    }
#pragma unroll 1
    for (int before = 0; before < heads; before += together) {
      const int width = min(together, heads - before);
      Tile* const list = a.tile_list + (before_it + before * blocks);
#pragma unroll 1
      for (int i = threadIdx.x; i < blocks * width; i += blockDim.x) {
        const int row = i / width;
        const int block = first + (ascends || !has_turns ? row : blocks - 1 - row);
        list[i] = {ascends ? ~block : block, before + i - row * width};
      }
      if (has_sections) ascends = !ascends;
    }
  }
}

}  // namespace attnscope::sm90
