#include <cuda_runtime.h>

#include <climits>

#include "attn/device.h"
#include "kernels/sm90_backward/kernel.cuh"
#include "kernels/sm90_backward/launch.h"
#include "kernels/sm90_backward/launch_row.cuh"
#include "kernels/sm90_backward/postprocess.cuh"

namespace attnscope::sm90 {
namespace {

template <class Config_>
struct NarrowKernels {
  using Config = Config_;
  static constexpr auto kMain = backward_kernel<Config>;
  static constexpr auto kMainOfParts = backward_kernel<WithParts<Config>>;
  static constexpr auto kPost = backward_postprocess_kernel<Config>;
  static constexpr auto kPostOfParts = backward_postprocess_kernel<WithParts<Config>>;
  static constexpr int kBlocks = 1;
  static constexpr int kSharedBytes = sizeof(BackwardShared<Config>);
  static constexpr int kPostThreads = 128 * Config::kColumnBlocks;
  static constexpr int kKeyRows = Config::kBlockN, kQueryRows = Config::kBlockM;
  static constexpr int kStoredRows = Config::kStoresByTma ? 16 : 0;
};

template <class Element>
cudaError_t launch_row(const BackwardParams& p, const DeviceFacts& device, cudaStream_t stream) {
  switch (choose_backward(p.forward, device.sms)) {
    case 0:
      return launch<NarrowKernels<BackwardConfig<Element, 0>>>(p, device, stream);
    case 1:
      return launch<NarrowKernels<BackwardConfig<Element, 1>>>(p, device, stream);
    case 2:
      return launch<NarrowKernels<BackwardConfig<Element, 2>>>(p, device, stream);
    default:
      return launch<NarrowKernels<BackwardConfig<Element, 3>>>(p, device, stream);
  }
}

}  // namespace

const char* unsupported_backward(const BackwardParams& params) {
  const ForwardParams& p = params.forward;
  const DeviceFacts device = current_device();
  if (device.major != 9) return "the device is not of compute capability 9.0";
  if (p.softcap >= kWideCap) return "softcap is 256 or more";
  if (tensor_map_encoder() == nullptr) return "the driver has no cuTensorMapEncodeTiled";
  const int row = choose_backward(p, device.sms);
  if (row < 0) return "the head dim is above 256";
  const int64_t rows_q = p.packed() ? p.total_q : p.seqlen_q,
                rows_k = p.packed() ? p.total_k : p.seqlen_k;
  if ((rows_q > 1 && (p.q_stride.row == 0 || params.dout_stride.row == 0)) ||
      (rows_k > 1 && (p.k_stride.row == 0 || p.v_stride.row == 0))) {
    return "rows have a stride of zero";
  }
  const BackwardTile& t = kBackwardTiles[row];
  if (query_places(p, t) > INT_MAX || key_tiles(p, t) > INT_MAX / kWideRanks)
    return "too many blocks of rows";
  return nullptr;
}

int64_t backward_workspace(const BackwardParams& params) {
  return backward_layout(params, current_device().sms).bytes;
}

const char* launch_backward(const BackwardParams& params, void* stream) {
  const ForwardParams& p = params.forward;
  const DeviceFacts device = current_device();
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  static_assert(kBackwardTileCount == 6, "a row of the table has no launch");
#ifdef ATTNSCOPE_TIMELINE  // the one element type that is compiled, and no wide kernel
  const cudaError_t error = launch_row<ATTNSCOPE_TIMELINE>(params, device, cuda_stream);
#else
  const cudaError_t error =
      kBackwardTiles[first_backward_tile(p)].wide() ? launch_wide(params, device, cuda_stream)
      : p.dtype == DType::kBFloat16 ? launch_row<__nv_bfloat16>(params, device, cuda_stream)
                                    : launch_row<__half>(params, device, cuda_stream);
#endif
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace attnscope::sm90

#ifdef ATTNSCOPE_TIMELINE
#include "kernels/sm90_backward/record.cuh"
#endif
