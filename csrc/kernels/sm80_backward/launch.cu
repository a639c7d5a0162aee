#include <cuda_runtime.h>

#include <algorithm>

#include "attn/device.h"
#include "kernels/sm80_backward/launch.h"
#include "kernels/sm80_backward/plan.h"
#include "kernels/sm80_backward/postprocess.cuh"
#include "kernels/sm80_backward/preprocess.cuh"
#include "kernels/sm80_backward/row_kernels.cuh"

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

template <class Element>
cudaError_t launch(const BackwardParams& params, int row, cudaStream_t stream) {
  const BackwardTile& tile = kBackwardTiles[row];
  const BackwardPlan plan = backward_plan(params, tile);
  if (!plan.fits()) return cudaErrorInvalidConfiguration;
  BackwardParams p = params;
  p.deterministic = plan.deterministic;
  const auto row_blocks = static_cast<unsigned>(plan.row_blocks);
  if (const auto blocks = static_cast<unsigned>(plan.row_blocks + plan.clear_blocks); blocks > 0) {
    preprocess_kernel<Element><<<blocks, kSideThreads, 0, stream>>>(
        p, plan.call.workspace, static_cast<int>(row_blocks), tile.block_m);
  }
  if (plan.key_blocks > 0) {
    RowKernels& kernels =
        serves_hopper(row) ? row_kernels<Element, true>() : small_kernels(p.forward.dtype);
    const BackwardKernel kernel = kernels.kernel[row];
    if (cudaError_t error = allow_shared_memory(kernel, kernels.allowed[row],
                                                current_device().device, tile.shared_bytes());
        error != cudaSuccess) {
      return error;
    }
    kernel<<<static_cast<unsigned>(plan.key_blocks), dim3(tile.threads() / 2, 2),
             tile.shared_bytes(), stream>>>(p, plan.call);
  }
  if (row_blocks > 0) {
    postprocess_kernel<Element><<<row_blocks, kSideThreads, 0, stream>>>(p, plan.call.workspace);
  }
  return cudaGetLastError();
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
  const int row = device_row(p.forward);
  const cudaError_t error = row < 0 ? cudaErrorInvalidValue
                            : p.forward.dtype == DType::kBFloat16
                                ? launch<__nv_bfloat16>(p, row, cuda_stream)
                                : launch<__half>(p, row, cuda_stream);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace attnscope::sm80
