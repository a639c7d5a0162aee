// The main kernels of the rows of the tile table.
#pragma once

#include <utility>

#include "attn/device.h"
#include "kernels/sm80_backward/kernel.cuh"

namespace attnscope::sm80 {

using BackwardKernel = void (*)(BackwardParams, BackwardCall);

using RowKernels = KernelTable<BackwardKernel, kBackwardTileCount>;

template <class Element, bool kOfHopper, int kRow>
constexpr BackwardKernel kernel_of() {
  if constexpr (serves_hopper(kRow) != kOfHopper) {
    return nullptr;
  } else {
    constexpr const BackwardTile& kTile = kBackwardTiles[kRow];
    using Config = BackwardConfig<Element, kTile.head_dim, kTile.block_m, kTile.block_n>;
    static_assert(sizeof(BackwardShared<Config>) == kTile.shared_bytes(),
                  "the tile table and the struct disagree");
    return backward_kernel<Config>;
  }
}

template <class Element, bool kOfHopper, int... kRows>
RowKernels& row_kernels(std::integer_sequence<int, kRows...>) {
  static RowKernels kernels{{kernel_of<Element, kOfHopper, kRows>()...}, {}};
  return kernels;
}

// The kernels of rows that serve Hopper, or of the others.
template <class Element, bool kOfHopper>
RowKernels& row_kernels() {
  return row_kernels<Element, kOfHopper>(std::make_integer_sequence<int, kBackwardTileCount>());
}

// The kernels of rows that do not serve Hopper, see small.cu.
RowKernels& small_kernels(DType dtype);

}  // namespace attnscope::sm80
