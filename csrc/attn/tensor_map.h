// Tensor maps: TMA's descriptors of tensors in global memory. PTX ISA 5.5.2.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "attn/grouping.h"
#include "attn/params.h"

namespace attnscope {

// K and V: [batch, head, row, dim] in boxes of [rows, 64]. Q and O: [batch, group of heads, row,
// head of the group, dim] in boxes of [rows, heads, 64]. Broadcast dimensions (stride 0) are
// encoded with size 1; their coordinate is multiplied by step = 0.
struct TensorMap {
  CUtensorMap map;
  int head_step;
  int batch_step;
};

// The driver's encoder, without linking libcuda; null where the driver has none.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &result);
    const bool usable = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return usable ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function) : nullptr;
  }();
  return encoder;
}

// How much the L2 reads at a time for boxes whose rows are 128 bytes, unless measured otherwise.
inline constexpr CUtensorMapL2promotion kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;

// Boxes of `box` elements, the first 64 of them one row of 128 bytes under the 128-byte swizzle.
// `strides` are in elements and start with the second dimension.
template <int kRank>
bool encode_tensor_map(TensorMap* tensor, DType dtype, const void* data,
                       const int64_t (&sizes)[kRank], const int64_t (&strides)[kRank - 1],
                       const int (&box)[kRank], CUtensorMapL2promotion promotion) {
  cuuint64_t map_sizes[kRank], map_strides[kRank - 1];
  cuuint32_t map_box[kRank], steps[kRank];
  for (int i = 0; i < kRank; ++i) {
    const bool broadcast = i > 0 && strides[i - 1] == 0;
    map_sizes[i] = broadcast ? 1 : static_cast<cuuint64_t>(sizes[i]);
    map_box[i] = static_cast<cuuint32_t>(box[i]);
    steps[i] = 1;
    // The stride of a dimension of size 1 is never used, but must be a multiple of 16 bytes.
    if (i > 0)
      map_strides[i - 1] = map_sizes[i] > 1 ? static_cast<cuuint64_t>(2 * strides[i - 1]) : 16;
  }
  const CUtensorMapDataType type = dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                             : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return tensor_map_encoder()(&tensor->map, type, kRank, const_cast<void*>(data), map_sizes,
                              map_strides, map_box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                              CU_TENSOR_MAP_SWIZZLE_128B, promotion,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// K or V, in boxes of `box_rows` rows.
inline bool encode_keys(TensorMap* tensor, DType dtype, const void* data, const Strides& s,
                        int64_t batch, int64_t heads, int64_t rows, int64_t dim, int box_rows,
                        CUtensorMapL2promotion promotion = kPromotion) {
  tensor->head_step = s.head != 0;
  tensor->batch_step = s.batch != 0;
  return encode_tensor_map<4>(tensor, dtype, data, {dim, rows, heads, batch},
                              {s.row, s.head, s.batch}, {64, box_rows, 1, 1}, promotion);
}

// Q or O, in boxes of `box_rows` rows of a tile.
inline bool encode_queries(TensorMap* tensor, DType dtype, const void* data, const Strides& s,
                           int64_t batch, int64_t heads, int64_t queries, int64_t dim, int box_rows,
                           const Grouping& grouping, CUtensorMapL2promotion promotion) {
  tensor->head_step = s.head != 0;
  tensor->batch_step = s.batch != 0;
  const int group = grouping.rows(1);
  return encode_tensor_map<5>(tensor, dtype, data, {dim, group, queries, heads / group, batch},
                              {s.head, s.row, group * s.head, s.batch},
                              {64, group, box_rows / group, 1, 1}, promotion);
}

}  // namespace attnscope
