#include <cuda_runtime.h>

#include <algorithm>
#include <utility>

#include "attn/device.h"
#include "kernels/sm80_backward/kernel.cuh"
#include "kernels/sm80_backward/launch.h"
#include "kernels/sm80_backward/plan.h"
#include "kernels/sm80_backward/postprocess.cuh"
#include "kernels/sm80_backward/preprocess.cuh"

namespace attnscope::sm80 {
namespace {

// The table row that serves a call on the current device; -1 if there is none.
int device_row(const ForwardParams& p) {
  const int device = current_device().device;
  int shared_bytes = 0;
  if (device < 0 || cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                           device) != cudaSuccess) {
    return -1;
  }
  return backward_row(std::max(p.head_dim, p.head_dim_v), shared_bytes);
}

template <class Config>
cudaError_t launch(const BackwardParams& params, cudaStream_t stream) {
  using Element = typename Config::Element;
  const BackwardPlan plan = backward_plan(params, Config::kTile);
  if (!plan.fits()) return cudaErrorInvalidConfiguration;
  BackwardParams p = params;
  p.deterministic = plan.deterministic;
  const auto row_blocks = static_cast<unsigned>(plan.row_blocks);
  if (const auto blocks = static_cast<unsigned>(plan.row_blocks + plan.clear_blocks); blocks > 0) {
    preprocess_kernel<Element><<<blocks, kSideThreads, 0, stream>>>(
        p, plan.call.workspace, static_cast<int>(row_blocks), Config::kBlockM);
  }
  if (plan.key_blocks > 0) {
    constexpr int kSharedBytes = sizeof(BackwardShared<Config>);
    static_assert(kSharedBytes == Config::kTile.shared_bytes(),
                  "the tile table and the struct disagree");
    if (cudaError_t error =
            allow_shared_memory<backward_kernel<Config>>(current_device().device, kSharedBytes);
        error != cudaSuccess) {
      return error;
    }
    backward_kernel<Config><<<static_cast<unsigned>(plan.key_blocks),
                              dim3(Config::kGroupThreads, 2), kSharedBytes, stream>>>(p, plan.call);
  }
  if (row_blocks > 0) {
    postprocess_kernel<Element><<<row_blocks, kSideThreads, 0, stream>>>(p, plan.call.workspace);
  }
  return cudaGetLastError();
}

// One launch function for each row of the tile table.
template <class Element, int... kRows>
cudaError_t launch_row(const BackwardParams& p, int row, cudaStream_t stream,
                       std::integer_sequence<int, kRows...>) {
  constexpr cudaError_t (*kLaunches[])(const BackwardParams&, cudaStream_t) = {
      launch<BackwardConfig<Element, kBackwardTiles[kRows].head_dim, kBackwardTiles[kRows].block_m,
                            kBackwardTiles[kRows].block_n>>...};
  return kLaunches[row](p, stream);
}

}  // namespace

int64_t backward_workspace(const BackwardParams& params) {
  const int row = device_row(params.forward);
  if (row < 0) return 0;  // launch_backward reports it
  BackwardWorkspace work;
  return place_workspace(work, params, kBackwardTiles[row], nullptr);
}

const char* launch_backward(const BackwardParams& p, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  constexpr std::make_integer_sequence<int, kBackwardTileCount> kRows;
  const int row = device_row(p.forward);
  const cudaError_t error = row < 0 ? cudaErrorInvalidValue
                            : p.forward.dtype == DType::kBFloat16
                                ? launch_row<__nv_bfloat16>(p, row, cuda_stream, kRows)
                                : launch_row<__half>(p, row, cuda_stream, kRows);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace attnscope::sm80
