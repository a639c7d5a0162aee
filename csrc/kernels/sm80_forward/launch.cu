#include <cuda_runtime.h>

#include <climits>

#include "kernels/sm80_forward/kernel.cuh"
#include "kernels/sm80_forward/launch.h"

namespace attnscope::sm80 {
namespace {

template <class Config>
cudaError_t launch(const ForwardParams& p, cudaStream_t stream) {
  const int m_blocks = (p.seqlen_q + Config::kBlockM - 1) / Config::kBlockM;
  const int64_t kv_bytes =
      int64_t{p.seqlen_k} * (p.head_dim + p.head_dim_v) * sizeof(typename Config::Element);
  const bool longest_first = p.window_right >= 0 && p.window_left < 0;
  const TileOrder order =
      tile_order(m_blocks, p.batch, p.heads_q, p.heads_kv, kv_bytes, longest_first);
  const int64_t blocks = order.tiles() + (p.packed() ? p.heads_q : 0);
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;

  constexpr int kSharedBytes = sizeof(ForwardShared<Config>);
  static_assert(kSharedBytes == Config::kTile.shared_bytes(),
                "the tile table and the struct disagree");
  const auto kernel = forward_kernel<Config>;
  if (cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
      error != cudaSuccess) {
    return error;
  }
  kernel<<<static_cast<unsigned>(blocks), Config::kThreads, kSharedBytes, stream>>>(
      p, order, score_scales(p));
  return cudaGetLastError();
}

template <class Element>
cudaError_t launch_head_dim(const ForwardParams& p, cudaStream_t stream) {
  const int head_dim = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
  switch (forward_tile(head_dim).head_dim) {
    case 64:
      return launch<ForwardConfig<Element, 64>>(p, stream);
    case 96:
      return launch<ForwardConfig<Element, 96>>(p, stream);
    case 128:
      return launch<ForwardConfig<Element, 128>>(p, stream);
    case 192:
      return launch<ForwardConfig<Element, 192>>(p, stream);
    case 256:
      return launch<ForwardConfig<Element, 256>>(p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

const char* launch_forward(const ForwardParams& p, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = p.dtype == DType::kBFloat16
                                ? launch_head_dim<__nv_bfloat16>(p, cuda_stream)
                                : launch_head_dim<__half>(p, cuda_stream);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace attnscope::sm80
