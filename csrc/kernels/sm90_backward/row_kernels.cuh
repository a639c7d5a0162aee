// The kernels of a row of the tile table, and what their launch depends on.
#pragma once

#include "attn/device.h"
#include "kernels/sm90_backward/preprocess.cuh"
#include "kernels/sm90_backward/shared.cuh"
#include "kernels/sm90_backward/sum_parts.cuh"

namespace attnscope::sm90 {

using BackwardKernel = void (*)(BackwardArguments);

struct RowKernels {
  const BackwardTile* tile;
  BackwardKernel pre, main, post;
  BackwardKernel main_of_parts, post_of_parts;  // if tiles have parts
  int blocks;                                   // of the main kernel for each SM, or cluster
  int post_threads;                             // for each block of queries
  int sum_blocks;                               // of post_of_parts, for each tile with parts
  int key_rows, query_rows, stored_rows;        // of tensor maps, see encode_tensor_maps
  AllowedDevices allowed[2] = {};               // main, main_of_parts
};

// The row's tile, whose kernels have `Shared` in shared memory.
template <class Config, class Shared>
constexpr const BackwardTile* checked_tile() {
  static_assert(sizeof(Shared) == Config::kTile.shared_bytes(),
                "the tile table and the struct disagree");
  static_assert(sizeof(Shared) <= 232448, "shared memory of a thread block");
  return &Config::kTile;
}

// Head dims above 128, see launch_wide.cu.
RowKernels& wide_kernels(const ForwardParams& p);

}  // namespace attnscope::sm90
