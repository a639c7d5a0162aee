#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <utility>

#include "attn/device.h"
#include "kernels/sm80_forward/kernel.cuh"
#include "kernels/sm80_forward/launch.h"

namespace attnscope::sm80 {
namespace {

template <class Config>
cudaError_t launch(const ForwardParams& p, cudaStream_t stream) {
  const int64_t m_blocks = (int64_t{p.seqlen_q} + Config::kBlockM - 1) / Config::kBlockM;
  const int64_t heads = int64_t{p.batch} * p.heads_q;
  const int64_t clearing = p.packed() ? p.heads_q : 0;  // blocks for rows outside any segment
  // Divide: the product of three large sizes could overflow 64 bits.
  if (heads > 0 && m_blocks > (INT_MAX - clearing) / heads) return cudaErrorInvalidConfiguration;
  const int64_t blocks = m_blocks * heads + clearing;
  if (blocks == 0) return cudaSuccess;
  const int64_t kv_bytes =
      int64_t{p.seqlen_k} * (p.head_dim + p.head_dim_v) * sizeof(typename Config::Element);
  const bool longest_first = p.window_right >= 0 && p.window_left < 0;
  const TileOrder order = tile_order(static_cast<int>(m_blocks), p.batch, p.heads_q, p.heads_kv,
                                     kv_bytes, longest_first);

  constexpr int kSharedBytes = sizeof(ForwardShared<Config>);
  static_assert(kSharedBytes == Config::kTile.shared_bytes(),
                "the tile table and the struct disagree");
  if (cudaError_t error =
          allow_shared_memory<forward_kernel<Config>>(current_device().device, kSharedBytes);
      error != cudaSuccess) {
    return error;
  }
  forward_kernel<Config><<<static_cast<unsigned>(blocks), Config::kThreads, kSharedBytes, stream>>>(
      p, order, score_scales(p));
  return cudaGetLastError();
}

// One launch function for each row of the tile table.
template <class Element, int... kRows>
cudaError_t launch_row(const ForwardParams& p, cudaStream_t stream,
                       std::integer_sequence<int, kRows...>) {
  constexpr cudaError_t (*kLaunches[])(const ForwardParams&, cudaStream_t) = {
      launch<ForwardConfig<Element, kForwardTiles[kRows].head_dim>>...};
  const int row = forward_row(std::max(p.head_dim, p.head_dim_v));
  return row < 0 ? cudaErrorInvalidValue : kLaunches[row](p, stream);
}

}  // namespace

const char* launch_forward(const ForwardParams& p, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  constexpr std::make_integer_sequence<int, kForwardTileCount> kRows;
  const cudaError_t error = p.dtype == DType::kBFloat16
                                ? launch_row<__nv_bfloat16>(p, cuda_stream, kRows)
                                : launch_row<__half>(p, cuda_stream, kRows);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace attnscope::sm80
