#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <utility>

#include "kernels/sm90_forward/kernel.cuh"
#include "kernels/sm90_forward/launch.h"

namespace attnscope::sm90 {
namespace {

// The driver's encoder, without linking libcuda.
decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &result);
    const bool found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return found ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function) : nullptr;
  }();
  return encode;
}

CUtensorMapDataType map_type(DType dtype) {
  return dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                   : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

// Boxes of `box` elements, the first 64 of them a swizzled row of 128 bytes. Strides in elements,
// of all dimensions but the first; one of 0 is of a dimension whose size is taken to be 1.
template <int kRank>
bool encode(TensorMap* tensor, DType dtype, const void* data, const int64_t (&sizes)[kRank],
            const int64_t (&strides)[kRank - 1], const int (&box)[kRank]) {
  cuuint64_t map_sizes[kRank], map_strides[kRank - 1];
  cuuint32_t map_box[kRank], steps[kRank];
  for (int i = 0; i < kRank; ++i) {
    const bool expanded = i > 0 && strides[i - 1] == 0;
    map_sizes[i] = expanded ? 1 : static_cast<cuuint64_t>(sizes[i]);
    map_box[i] = static_cast<cuuint32_t>(box[i]);
    steps[i] = 1;
    // A dimension of one may have any stride; the encoder wants multiples of 16 bytes.
    if (i > 0)
      map_strides[i - 1] = map_sizes[i] > 1 ? static_cast<cuuint64_t>(2 * strides[i - 1]) : 16;
  }
  return tensor_map_encoder()(&tensor->map, map_type(dtype), kRank, const_cast<void*>(data),
                              map_sizes, map_strides, map_box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                              CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// K or V: [batch, heads, rows, dim] in boxes of `box_rows` rows.
bool encode_keys(TensorMap* tensor, DType dtype, const void* data, const Strides& s, int64_t batch,
                 int64_t heads, int64_t rows, int64_t dim, int box_rows) {
  tensor->head_step = s.head != 0;
  tensor->batch_step = s.batch != 0;
  return encode<4>(tensor, dtype, data, {dim, rows, heads, batch}, {s.row, s.head, s.batch},
                   {64, box_rows, 1, 1});
}

// Q or O: [batch, groups, queries, heads of a group, dim] in boxes of `box_rows` rows of a tile.
bool encode_queries(TensorMap* tensor, DType dtype, const void* data, const Strides& s,
                    int64_t batch, int64_t heads, int64_t queries, int64_t dim, int box_rows,
                    const Grouping& grouping) {
  tensor->head_step = s.head != 0;
  tensor->batch_step = s.batch != 0;
  const int group = grouping.rows(1);
  return encode<5>(tensor, dtype, data, {dim, group, queries, heads / group, batch},
                   {s.head, s.row, group * s.head, s.batch}, {64, group, box_rows / group, 1, 1});
}

constexpr int ceil_div(int value, int divisor) { return (value + divisor - 1) / divisor; }

int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

// Rows see more keys the later they come.
bool is_causal(const ForwardParams& p) { return p.window_right >= 0 && p.window_left < 0; }

template <class Config>
cudaError_t launch(const ForwardParams& p, Grouping grouping, cudaStream_t stream) {
  ForwardArguments a{};
  a.params = p;
  a.scores = score_scales(p);
  a.grouping = grouping;
  const int heads = ceil_div(p.heads_q >> a.grouping.log2, Config::kOwnHeads);
  a.heads = Divisor::of(std::max(heads, 1));
  a.heads_per_key = Divisor::of(std::max(p.heads_q / std::max(p.heads_kv, 1), 1));
  const int rows = a.grouping.rows(p.seqlen_q);
  const int m_blocks = ceil_div(rows, Config::kBlockM);
  const int64_t kv_bytes =
      int64_t{p.seqlen_k} * (p.head_dim + p.head_dim_v) * sizeof(typename Config::Element);
  a.order = tile_order(m_blocks, p.batch, heads, ceil_div(p.heads_kv, Config::kOwnHeads), kv_bytes,
                       is_causal(p));
  if (!is_causal(p) && ceil_div(rows, 64) % Config::kHeadConsumers != 0) {
    // Some tiles have 64 rows less; as the last ones they even out the end.
    a.order.last = std::min(a.order.heads, ceil_div(kMultiprocessors, std::max(m_blocks, 1)));
  }
  int64_t tiles = a.order.tiles();
  if (p.packed()) {
    tiles = std::min(tiles, ((p.total_q << a.grouping.log2) / Config::kBlockM + p.batch) * heads);
  }
  if (tiles > kMostTiles) return cudaErrorInvalidConfiguration;
  a.tiles = static_cast<int>(tiles);
  a.eager = p.seqlen_k <= kEagerKeys;
  a.packed = p.packed();
  if (p.total_q == 0 || p.heads_q == 0) return cudaSuccess;

  const int64_t batch = p.packed() ? 1 : p.batch;
  const int64_t rows_q = p.packed() ? p.total_q : p.seqlen_q,
                rows_k = p.packed() ? p.total_k : p.seqlen_k;
  if (p.total_k > 0 && !(encode_queries(&a.q, p.dtype, p.q, p.q_stride, batch, p.heads_q, rows_q,
                                        p.head_dim, 64, a.grouping) &&
                         encode_keys(&a.k, p.dtype, p.k, p.k_stride, batch, p.heads_kv, rows_k,
                                     p.head_dim, Config::kBlockN) &&
                         encode_keys(&a.v, p.dtype, p.v, p.v_stride, batch, p.heads_kv, rows_k,
                                     p.head_dim_v, Config::kBlockN) &&
                         encode_queries(&a.out, p.dtype, p.out, p.out_stride, batch, p.heads_q,
                                        rows_q, p.head_dim_v, 16, a.grouping))) {
    return cudaErrorInvalidValue;
  }

  a.counter = tile_counter(stream);
  if (a.counter == nullptr) return cudaErrorMemoryAllocation;

  constexpr int kSharedBytes = sizeof(ForwardShared<Config>);
  static_assert(kSharedBytes == Config::kTile.shared_bytes(),
                "the tile table and the struct disagree");
  static_assert(Config::kBlocksPerSm * (kSharedBytes + 1024) <= 233472, "shared memory of an SM");
  const auto kernel = forward_kernel<Config>;
  if (cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
      error != cudaSuccess) {
    return error;
  }
  const int most = Config::kBlocksPerSm * device_attribute(cudaDevAttrMultiProcessorCount);
  const int blocks = std::clamp(a.tiles, 1, most);
  kernel<<<blocks, Config::kThreads, kSharedBytes, stream>>>(a);
  return cudaGetLastError();
}

// The launch of row `kIndex` of the tile table.
template <class Element, int kIndex>
cudaError_t launch_row(const ForwardParams& p, Grouping grouping, cudaStream_t stream) {
  constexpr ForwardTile kTile = kForwardTiles[kIndex];
  return launch<ForwardConfig<Element, kTile.head_dim, kTile.block_m>>(p, grouping, stream);
}

template <class Element, int... kIndices>
cudaError_t launch_chosen(const ForwardParams& p, cudaStream_t stream,
                          std::integer_sequence<int, kIndices...>) {
  constexpr cudaError_t (*kLaunches[])(const ForwardParams&, Grouping,
                                       cudaStream_t) = {launch_row<Element, kIndices>...};
  // Heads of an expanded q cannot be grouped: as if each had keys of its own.
  const int heads_kv = p.q_stride.head != 0 ? p.heads_kv : p.heads_q;
  const ForwardChoice choice =
      choose_forward(std::max(p.head_dim, p.head_dim_v), p.seqlen_q, p.heads_q, heads_kv, p.batch,
                     is_causal(p), p.packed());
  if (choice.row < 0) return cudaErrorInvalidValue;
  return kLaunches[choice.row](p, {choice.grouping}, stream);
}

}  // namespace

const char* unsupported_forward(const ForwardParams& p) {
  if (device_attribute(cudaDevAttrComputeCapabilityMajor) != 9) {
    return "the device is not of compute capability 9.0";
  }
  if (tensor_map_encoder() == nullptr) return "the driver has no cuTensorMapEncodeTiled";
  const int64_t rows_q = p.packed() ? p.total_q : p.seqlen_q,
                rows_k = p.packed() ? p.total_k : p.seqlen_k;
  if ((rows_q > 1 && p.q_stride.row == 0) ||
      (rows_k > 1 && (p.k_stride.row == 0 || p.v_stride.row == 0))) {
    return "rows have a stride of zero";
  }
  return nullptr;
}

const char* launch_forward(const ForwardParams& p, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  constexpr std::make_integer_sequence<int, kForwardTileCount> kRows;
  const cudaError_t error = p.dtype == DType::kBFloat16
                                ? launch_chosen<__nv_bfloat16>(p, cuda_stream, kRows)
                                : launch_chosen<__half>(p, cuda_stream, kRows);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace attnscope::sm90

#ifdef ATTNSCOPE_TIMELINE
#include "kernels/sm90_forward/record.cuh"
#endif
