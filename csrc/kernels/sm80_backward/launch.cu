#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <utility>

#include "attn/device.h"
#include "kernels/sm80_backward/kernel.cuh"
#include "kernels/sm80_backward/launch.h"
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

// Carves a workspace for a tile out of `memory`; `bytes` becomes its size.
BackwardWorkspace workspace_at(const BackwardParams& bp, const BackwardTile& tile, char* memory,
                               int64_t* bytes) {
  const ForwardParams& p = bp.forward;
  const auto round_up = [](int64_t n, int64_t to) { return (n + to - 1) / to * to; };
  BackwardWorkspace work{};
  work.rows = p.packed() ? round_up(p.total_q + int64_t{p.batch} * kWorkRows, kWorkRows)
                         : p.batch * round_up(p.seqlen_q, kWorkRows);
  work.head_dim = tile.head_dim;
  const int64_t rows = work.rows * p.heads_q;
  int64_t used = 0;
  const auto take = [&](auto*& pointer, int64_t count) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(memory + used);
    used += round_up(count * sizeof(*pointer), 256);
  };
  take(work.lse, rows);
  take(work.delta, rows);
  take(work.dq, rows * tile.head_dim);
  take(work.turns, bp.deterministic ? rows / tile.block_m : 0);
  take(work.started, 1);
  *bytes = used;
  return work;
}

template <class Config>
cudaError_t launch(const BackwardParams& params, cudaStream_t stream) {
  using Element = typename Config::Element;
  BackwardParams bp = params;
  const ForwardParams& p = bp.forward;
  const auto blocks_of = [](int64_t rows, int64_t block) { return (rows + block - 1) / block; };
  const int64_t row_blocks = blocks_of(p.seqlen_q, kWorkRows) * p.batch;
  const int64_t key_blocks = blocks_of(p.seqlen_k, Config::kBlockN);
  const int64_t heads_kv = int64_t{p.batch} * p.heads_kv;
  const int64_t clearing = p.packed() ? p.heads_q + p.heads_kv : 0;
  // Divide: the product of large sizes could overflow 64 bits.
  if (row_blocks > (INT_MAX - clearing) / std::max(p.heads_q, 1) ||
      (heads_kv > 0 && key_blocks > INT_MAX / heads_kv)) {
    return cudaErrorInvalidConfiguration;
  }
  const int rows = static_cast<int>(row_blocks * p.heads_q);
  bp.deterministic = bp.deterministic && rows > 0;  // otherwise no kernel clears the counters
  int64_t bytes = 0;
  BackwardCall call{};
  call.workspace = workspace_at(bp, Config::kTile, static_cast<char*>(bp.workspace), &bytes);
  call.scores = score_scales(p);
  call.exponent_scale = call.scores.transform >= kCap
                            ? call.scores.scale_log2
                            : static_cast<float>(p.scale * 1.4426950408889634);
  call.inverse_softcap = call.scores.transform >= kCap
                             ? static_cast<float>(std::min(1.0 / p.softcap, double{FLT_MAX}))
                             : 0.0f;
  const bool causal = p.window_right >= 0;
  call.last_first = bp.deterministic && causal;
  const int64_t q_bytes = int64_t{p.seqlen_q} * (p.heads_q / std::max(p.heads_kv, 1)) *
                          (2 * (p.head_dim + p.head_dim_v) + 4 * Config::kHeadDim);
  call.order = tile_order(static_cast<int>(key_blocks), p.batch, p.heads_kv, p.heads_kv, q_bytes,
                          causal && p.window_left < 0);

  if (rows + clearing > 0) {
    preprocess_kernel<Element><<<static_cast<unsigned>(rows + clearing), kSideThreads, 0, stream>>>(
        bp, call.workspace, rows, Config::kBlockM);
  }
  if (key_blocks * heads_kv > 0) {
    constexpr int kSharedBytes = sizeof(BackwardShared<Config>);
    static_assert(kSharedBytes == Config::kTile.shared_bytes(),
                  "the tile table and the struct disagree");
    if (cudaError_t error =
            allow_shared_memory<backward_kernel<Config>>(current_device().device, kSharedBytes);
        error != cudaSuccess) {
      return error;
    }
    backward_kernel<Config><<<static_cast<unsigned>(key_blocks * heads_kv),
                              dim3(Config::kGroupThreads, 2), kSharedBytes, stream>>>(bp, call);
  }
  if (rows > 0) {
    postprocess_kernel<Element><<<rows, kSideThreads, 0, stream>>>(bp, call.workspace);
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
  int64_t bytes = 0;
  workspace_at(params, kBackwardTiles[row], nullptr, &bytes);
  return bytes;
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
