#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <utility>

#include "attn/device.h"
#include "kernels/sm80_forward/kernel.cuh"
#include "kernels/sm80_forward/launch.h"

namespace attnscope::sm80 {
namespace {

using ForwardKernel = void (*)(ForwardParams, TileOrder, ScoreScales);

template <class Config>
constexpr ForwardKernel kernel_of() {
  static_assert(sizeof(ForwardShared<Config>) == Config::kTile.shared_bytes(),
                "the tile table and the struct disagree");
  return forward_kernel<Config>;
}

using RowKernels = KernelTable<ForwardKernel, kForwardTileCount>;

template <class Element, int... kRows>
RowKernels& row_kernels(std::integer_sequence<int, kRows...>) {
  static RowKernels kernels{{kernel_of<ForwardConfig<Element, kForwardTiles[kRows].head_dim>>()...},
                            {}};
  return kernels;
}

cudaError_t launch(const ForwardParams& p, RowKernels& kernels, int row, cudaStream_t stream) {
  const ForwardTile& tile = kForwardTiles[row];
  const int64_t m_blocks = (int64_t{p.seqlen_q} + tile.block_m - 1) / tile.block_m;
  const int64_t heads = int64_t{p.batch} * p.heads_q;
  const int64_t clearing = p.packed() ? p.heads_q : 0;  // blocks for rows outside any segment
  // Divide: the product of three large sizes could overflow 64 bits.
  if (heads > 0 && m_blocks > (INT_MAX - clearing) / heads) return cudaErrorInvalidConfiguration;
  const int64_t blocks = m_blocks * heads + clearing;
  if (blocks == 0) return cudaSuccess;
  const int64_t kv_bytes = int64_t{p.seqlen_k} * (p.head_dim + p.head_dim_v) * 2;
  const bool longest_first = is_causal(p);
  const TileOrder order = tile_order(static_cast<int>(m_blocks), p.batch, p.heads_q, p.heads_kv,
                                     kv_bytes, longest_first);

  const ForwardKernel kernel = kernels.kernel[row];
  if (cudaError_t error = allow_shared_memory(kernel, kernels.allowed[row], current_device().device,
                                              tile.shared_bytes());
      error != cudaSuccess) {
    return error;
  }
  kernel<<<static_cast<unsigned>(blocks), tile.threads(), tile.shared_bytes(), stream>>>(
      p, order, score_scales(p));
  return cudaGetLastError();
}

}  // namespace

const char* launch_forward(const ForwardParams& p, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  constexpr std::make_integer_sequence<int, kForwardTileCount> kRows;
  RowKernels& kernels =
      p.dtype == DType::kBFloat16 ? row_kernels<__nv_bfloat16>(kRows) : row_kernels<__half>(kRows);
  const int row = forward_row(std::max(p.head_dim, p.head_dim_v));
  const cudaError_t error = row < 0 ? cudaErrorInvalidValue : launch(p, kernels, row, cuda_stream);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace attnscope::sm80
