#include <cuda_runtime.h>

#include "kernels/sm90_backward/row_kernels.cuh"
#include "kernels/sm90_backward/wide.cuh"
#include "kernels/sm90_backward/wide_postprocess.cuh"

namespace attnscope::sm90 {
namespace {

template <class Config>
RowKernels& row_kernels() {
  static RowKernels kernels{checked_tile<Config, WideShared<Config>>(),
                            backward_preprocess_kernel<Config>,
                            wide_backward_kernel<Config>,
                            wide_postprocess_kernel<Config>,
                            wide_backward_kernel<WithParts<Config>>,
                            wide_postprocess_kernel<WithParts<Config>>,
                            /*blocks=*/Config::kRanks,
                            kWidePostprocessThreads,
                            kSumBlocks<Config, kWidePostprocessThreads / 32>,
                            /*key_rows=*/64,
                            /*query_rows=*/64 / Config::kRanks,
                            /*stored_rows=*/0};
  return kernels;
}

template <class Element>
RowKernels& kernels_of(const ForwardParams& p) {
  static_assert(kBackwardTiles[5].wide() && kBackwardTileCount == 7, "the rows of wide.cuh");
  return first_backward_tile(p) == 5 ? row_kernels<WideConfig<Element, 5>>()
                                     : row_kernels<WideConfig<Element, 6>>();
}

}  // namespace

RowKernels& wide_kernels(const ForwardParams& p) {
  return p.dtype == DType::kBFloat16 ? kernels_of<__nv_bfloat16>(p) : kernels_of<__half>(p);
}

}  // namespace attnscope::sm90
