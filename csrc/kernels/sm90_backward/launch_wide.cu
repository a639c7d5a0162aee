#include <cuda_runtime.h>

#include "kernels/sm90_backward/launch_row.cuh"
#include "kernels/sm90_backward/wide.cuh"
#include "kernels/sm90_backward/wide_postprocess.cuh"

namespace attnscope::sm90 {
namespace {

template <class Config_>
struct WideKernels {
  using Config = Config_;
  static constexpr auto kMain = wide_backward_kernel<Config>;
  static constexpr auto kMainOfParts = wide_backward_kernel<WithParts<Config>>;
  static constexpr auto kPost = wide_postprocess_kernel<Config>;
  static constexpr auto kPostOfParts = wide_postprocess_kernel<WithParts<Config>>;
  static constexpr int kBlocks = Config::kRanks;
  static constexpr int kSharedBytes = sizeof(WideShared<Config>);
  static constexpr int kPostThreads = kWidePostprocessThreads;
  static constexpr int kKeyRows = 64, kQueryRows = 64 / Config::kRanks, kStoredRows = 0;
};

template <class Element>
cudaError_t launch_row(const BackwardParams& p, const DeviceFacts& device, cudaStream_t stream) {
  static_assert(kBackwardTiles[4].wide() && kBackwardTileCount == 6, "the rows of wide.cuh");
  if (first_backward_tile(p.forward) == 4) {
    return launch<WideKernels<WideConfig<Element, 4>>>(p, device, stream);
  }
  return launch<WideKernels<WideConfig<Element, 5>>>(p, device, stream);
}

}  // namespace

cudaError_t launch_wide(const BackwardParams& params, const DeviceFacts& device,
                        cudaStream_t stream) {
  return params.forward.dtype == DType::kBFloat16
             ? launch_row<__nv_bfloat16>(params, device, stream)
             : launch_row<__half>(params, device, stream);
}

}  // namespace attnscope::sm90
