// The tiles for cards with less shared memory than Hopper's. They are not compiled for sm_90.
#include "kernels/sm80_backward/row_kernels.cuh"

namespace attnscope::sm80 {

RowKernels& small_kernels(DType dtype) {
  return dtype == DType::kBFloat16 ? row_kernels<__nv_bfloat16, false>()
                                   : row_kernels<__half, false>();
}

}  // namespace attnscope::sm80
