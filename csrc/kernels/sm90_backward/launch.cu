#include <cuda_runtime.h>

#include <algorithm>
#include <climits>

#include "attn/device.h"
#include "kernels/sm90_backward/kernel.cuh"
#include "kernels/sm90_backward/launch.h"
#include "kernels/sm90_backward/postprocess.cuh"
#include "kernels/sm90_backward/preprocess.cuh"

namespace attnscope::sm90 {
namespace {

constexpr int ceil_div(int value, int divisor) { return value / divisor + (value % divisor != 0); }

bool encode_tensor_maps(BackwardArguments& a, const BackwardTile& t) {
  const ForwardParams& p = a.params.forward;
  const int64_t batch = p.packed() ? 1 : p.batch;
  const int64_t rows_q = p.packed() ? p.total_q : p.seqlen_q,
                rows_k = p.packed() ? p.total_k : p.seqlen_k;
  return encode_keys(&a.k, p.dtype, p.k, p.k_stride, batch, p.heads_kv, rows_k, p.head_dim,
                     t.block_n) &&
         encode_keys(&a.v, p.dtype, p.v, p.v_stride, batch, p.heads_kv, rows_k, p.head_dim_v,
                     t.block_n) &&
         encode_keys(&a.q, p.dtype, p.q, p.q_stride, batch, p.heads_q, rows_q, p.head_dim,
                     t.block_m) &&
         encode_keys(&a.dout, p.dtype, a.params.dout, a.params.dout_stride, batch, p.heads_q,
                     rows_q, p.head_dim_v, t.block_m);
}

// Blocks of queries, and tiles of keys, of the whole call.
int64_t query_places(const ForwardParams& p, const BackwardTile& t) {
  return p.heads_q * block_count(p.packed(), p.total_q, p.seqlen_q, p.batch, t.block_m);
}
int64_t key_tiles(const ForwardParams& p, const BackwardTile& t) {
  return p.heads_kv * block_count(p.packed(), p.total_k, p.seqlen_k, p.batch, t.block_n);
}

// Launches a kernel that may start before the one before has ended, see launch_dependents.
cudaError_t launch_early(void (*kernel)(BackwardArguments), unsigned blocks, int threads,
                         int shared_bytes, cudaStream_t stream, const BackwardArguments& a) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, a);
}

template <class Config>
cudaError_t launch(const BackwardParams& params, const DeviceFacts& device, cudaStream_t stream) {
  const ForwardParams& p = params.forward;
  constexpr BackwardTile kTile = Config::kTile;
  BackwardArguments a{};
  a.params = params;
  a.scores = score_scales(p);
  a.scale = static_cast<float>(p.scale);
  a.inverse_cap = p.softcap > 0 ? static_cast<float>(1.0 / p.softcap) : 0.0f;
  a.packed = p.packed();
  a.group = p.heads_q / std::max(p.heads_kv, 1);
  a.heads_kv = Divisor::of(std::max(p.heads_kv, 1));
  a.query_blocks =
      static_cast<int>(block_count(a.packed, p.total_q, p.seqlen_q, p.batch, Config::kBlockM));
  a.all_queries = Divisor::of(std::max(a.query_blocks, 1));
  a.dense_queries = Divisor::of(std::max(ceil_div(p.seqlen_q, Config::kBlockM), 1));
  a.key_blocks = Divisor::of(
      std::max<int>(1, block_count(a.packed, p.total_k, p.seqlen_k, p.batch, Config::kBlockN)));
  const int64_t bytes =
      int64_t{p.seqlen_q} * a.group * (2 * (p.head_dim + p.head_dim_v) + 4 * Config::kHeadDim);
  const bool first_are_longest = p.window_right >= 0 && p.window_left < 0;
  a.order = tile_order(ceil_div(p.seqlen_k, Config::kBlockN), p.batch, p.heads_kv, p.heads_kv,
                       bytes, first_are_longest);
  if (params.deterministic && !first_are_longest) {
    // Tiles that take turns one after the other start one after the other, see Turns: at any time
    // tiles of about `section` heads run.
    a.order.section =
        std::clamp(device.sms / std::max(a.order.m_blocks, 1), 1, std::max(a.order.heads, 1));
  }
  const BackwardWorkspace w = backward_layout(params);
  char* workspace = static_cast<char*>(params.workspace);
  a.statistics = reinterpret_cast<float*>(workspace);
  a.gradient = reinterpret_cast<float*>(workspace + w.gradient);
  a.tickets = params.deterministic ? reinterpret_cast<int*>(workspace + w.tickets) : nullptr;
  a.counter = reinterpret_cast<int*>(workspace + w.counter);

  if (p.total_q > 0 && p.total_k > 0 && !encode_tensor_maps(a, kTile)) {
    return cudaErrorInvalidValue;
  }
  constexpr int kSharedBytes = sizeof(BackwardShared<Config>);
  static_assert(kSharedBytes <= 232448, "shared memory of a thread block");
  if (cudaError_t error = allow_shared_memory<backward_kernel<Config>>(device.device, kSharedBytes);
      error != cudaSuccess) {
    return error;
  }
  const bool empty = p.batch == 0;
  const auto places = static_cast<unsigned>(empty ? 0 : query_places(p, kTile));
  const auto tiles = static_cast<unsigned>(empty || p.total_k == 0 ? 0 : key_tiles(p, kTile));
  backward_preprocess_kernel<Config><<<std::max(places, 1u), kPreprocessThreads, 0, stream>>>(a);
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess && tiles > 0) {
    error = launch_early(backward_kernel<Config>, tiles, Config::kThreads, kSharedBytes, stream, a);
  }
  if (error == cudaSuccess && places > 0) {
    error = launch_early(backward_postprocess_kernel<Config>, places, 128 * Config::kConsumers, 0,
                         stream, a);
  }
  return error;
}

template <class Element>
cudaError_t launch_row(const BackwardParams& p, const DeviceFacts& device, cudaStream_t stream) {
  if (backward_tile(p.forward) == 0) return launch<BackwardConfig<Element, 0>>(p, device, stream);
  static_assert(kBackwardTileCount == 2, "a row of the table has no launch");
  return launch<BackwardConfig<Element, 1>>(p, device, stream);
}

}  // namespace

const char* unsupported_backward(const BackwardParams& params) {
  const ForwardParams& p = params.forward;
  if (current_device().major != 9) return "the device is not of compute capability 9.0";
  if (p.softcap >= kWideCap) return "softcap is 256 or more";
  if (tensor_map_encoder() == nullptr) return "the driver has no cuTensorMapEncodeTiled";
  const int row = backward_tile(p);
  if (row < 0) return "the head dim is above 128";
  const int64_t rows_q = p.packed() ? p.total_q : p.seqlen_q,
                rows_k = p.packed() ? p.total_k : p.seqlen_k;
  if ((rows_q > 1 && (p.q_stride.row == 0 || params.dout_stride.row == 0)) ||
      (rows_k > 1 && (p.k_stride.row == 0 || p.v_stride.row == 0))) {
    return "rows have a stride of zero";
  }
  const BackwardTile& t = kBackwardTiles[row];
  if (query_places(p, t) > INT_MAX || key_tiles(p, t) > INT_MAX) return "too many blocks of rows";
  return nullptr;
}

int64_t backward_workspace(const BackwardParams& params) { return backward_layout(params).bytes; }

const char* launch_backward(const BackwardParams& params, void* stream) {
  const ForwardParams& p = params.forward;
  const DeviceFacts device = current_device();
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = p.dtype == DType::kBFloat16
                                ? launch_row<__nv_bfloat16>(params, device, cuda_stream)
                                : launch_row<__half>(params, device, cuda_stream);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace attnscope::sm90
