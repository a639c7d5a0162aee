#include <cuda_runtime.h>

#include <algorithm>
#include <climits>

#include "attn/device.h"
#include "kernels/sm90_backward/kernel.cuh"
#include "kernels/sm90_backward/launch.h"
#include "kernels/sm90_backward/order.h"
#include "kernels/sm90_backward/postprocess.cuh"
#include "kernels/sm90_backward/row_kernels.cuh"

namespace attnscope::sm90 {
namespace {

template <class Config>
RowKernels& row_kernels() {
  constexpr int kPostThreads = 128 * Config::kGradientParts;
  static RowKernels kernels{checked_tile<Config, BackwardShared<Config>>(),
                            backward_preprocess_kernel<Config>,
                            backward_kernel<Config>,
                            backward_postprocess_kernel<Config>,
                            backward_kernel<WithParts<Config>>,
                            backward_postprocess_kernel<WithParts<Config>>,
                            /*blocks=*/1,
                            kPostThreads,
                            kSumBlocks<Config, kPostThreads / 32>,
                            /*key_rows=*/Config::kBlockN,
                            /*query_rows=*/Config::kBlockM,
                            /*stored_rows=*/Config::kStoresByTma ? 16 : 0};
  return kernels;
}

template <class Element>
RowKernels& narrow_kernels(int row) {
  switch (row) {
    case 0:
      return row_kernels<BackwardConfig<Element, 0>>();
    case 1:
      return row_kernels<BackwardConfig<Element, 1>>();
    case 2:
      return row_kernels<BackwardConfig<Element, 2>>();
    case 3:
      return row_kernels<BackwardConfig<Element, 3>>();
    default:
      return row_kernels<BackwardConfig<Element, 4>>();
  }
}

RowKernels& kernels_of(const ForwardParams& p, int row) {
  static_assert(kBackwardTileCount == 7, "a row of the table has no kernels");
#ifdef ATTNSCOPE_TIMELINE  // the one element type that is compiled, and no wide kernel
  return narrow_kernels<ATTNSCOPE_TIMELINE>(row);
#else
  if (kBackwardTiles[row].wide()) return wide_kernels(p);
  return p.dtype == DType::kBFloat16 ? narrow_kernels<__nv_bfloat16>(row)
                                     : narrow_kernels<__half>(row);
#endif
}

// Boxes of `key_rows` rows of K and V, `query_rows` of Q and dO, and `stored_rows` of dK and dV; 0:
// these need no maps.
bool encode_tensor_maps(BackwardArguments& a, int key_rows, int query_rows, int stored_rows) {
  const ForwardParams& p = a.params.forward;
  const int64_t batch = p.packed() ? 1 : p.batch;
  const int64_t rows_q = p.packed() ? p.total_q : p.seqlen_q,
                rows_k = p.packed() ? p.total_k : p.seqlen_k;
  return encode_keys(&a.k, p.dtype, p.k, p.k_stride, batch, p.heads_kv, rows_k, p.head_dim,
                     key_rows) &&
         encode_keys(&a.v, p.dtype, p.v, p.v_stride, batch, p.heads_kv, rows_k, p.head_dim_v,
                     key_rows) &&
         encode_keys(&a.q, p.dtype, p.q, p.q_stride, batch, p.heads_q, rows_q, p.head_dim,
                     query_rows) &&
         encode_keys(&a.dout, p.dtype, a.params.dout, a.params.dout_stride, batch, p.heads_q,
                     rows_q, p.head_dim_v, query_rows) &&
         (stored_rows == 0 || (encode_keys(&a.dk, p.dtype, a.params.dk, a.params.dk_stride, batch,
                                           p.heads_kv, rows_k, p.head_dim, stored_rows) &&
                               encode_keys(&a.dv, p.dtype, a.params.dv, a.params.dv_stride, batch,
                                           p.heads_kv, rows_k, p.head_dim_v, stored_rows)));
}

// Launches a kernel that may start before the one before has ended, see launch_dependents.
cudaError_t launch_kernel(BackwardKernel kernel, unsigned blocks, int threads, int shared_bytes,
                          cudaStream_t stream, const BackwardArguments& a) {
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

constexpr int64_t kZeroedFloats = 1 << 20;

// Whether a thread block takes all tiles of a key head, and stores the head's dQ itself. dQ in fp32
// then lies in a place of the thread block and stays in L2: it needs no zeroes, no turns and no
// postprocess. The places must fit in L2, and every query must see a key. The heads must fill the
// card evenly, or have one tile each. Q and dO are read again for each tile, from DRAM where they
// do not fit.
bool takes_whole_heads(const ForwardParams& p, const BackwardTile& t, int sms) {
  constexpr int64_t kL2Share = 18 << 20;  // with 36 MB, Q and dO no longer fit beside it
  if (!t.takes_whole_heads() || p.packed() || p.seqlen_q == 0 || p.window_left >= 0) return false;
  const int first_rows = std::min(t.block_m, p.seqlen_q);
  if (p.window_right >= 0 && first_rows + p.seqlen_k - p.seqlen_q + p.window_right <= 0) {
    return false;
  }
  const int64_t rows = int64_t{ceil_div(p.seqlen_q, t.block_m)} * t.block_m;
  if (sms * rows * (p.heads_q / p.heads_kv) * t.head_dim * 4 > kL2Share) return false;
  if (p.seqlen_k <= t.block_n) return true;
  const int64_t heads = int64_t{p.batch} * p.heads_kv, turns = (heads + sms - 1) / sms;
  return heads * 10 >= turns * sms * 9;
}

cudaError_t launch(const BackwardParams& params, RowKernels& kernels, const BackwardChoice& choice,
                   const DeviceFacts& device, cudaStream_t stream) {
  const ForwardParams& p = params.forward;
  const TileParts& split = choice.split;
  const BackwardTile& tile = *kernels.tile;
  BackwardArguments a{};
  a.params = params;
  a.scores = score_scales(p);
  a.scale = static_cast<float>(p.scale);
  a.inverse_cap = p.softcap > 0 ? static_cast<float>(1.0 / p.softcap) : 0.0f;
  a.packed = p.packed();
  a.group = p.heads_q / std::max(p.heads_kv, 1);
  a.heads_kv = Divisor::of(std::max(p.heads_kv, 1));
  a.query_blocks =
      static_cast<int>(block_count(a.packed, p.total_q, p.seqlen_q, p.batch, tile.block_m));
  a.all_queries = Divisor::of(std::max(a.query_blocks, 1));
  a.dense_queries = Divisor::of(std::max(ceil_div(p.seqlen_q, tile.block_m), 1));
  const int64_t bytes =
      int64_t{p.seqlen_q} * a.group * (2 * (p.head_dim + p.head_dim_v) + 4 * tile.head_dim);
  const bool first_are_longest = is_causal(p);
  a.order = tile_order(ceil_div(p.seqlen_k, tile.block_n), p.batch, p.heads_kv, p.heads_kv, bytes,
                       first_are_longest);
  const int slots = device.sms / kernels.blocks;
  if (a.packed) {
    const int64_t blocks = block_count(true, p.total_k, p.seqlen_k, p.batch, tile.block_n);
    a.order = {static_cast<int>(blocks), p.heads_kv, 1, 0};
  }
  a.parts_have_heads = split.split > 0 && split.have_heads;
  if (a.parts_have_heads) a.order.heads *= split.parts;
  if (a.packed) {
    a.order.section = choose_section_of_packed(a.order, p, tile.block_n, slots, choice.has_turns);
  } else if (first_are_longest) {
    a.order.section = split.split > 0 && !split.have_heads
                          ? a.order.heads
                          : choose_section(a.order, slots, choice.has_turns);
  } else if (choice.has_turns) {
    a.order.section = choose_section_of_turns(a.order, slots, tile.wide());
  }
  const BackwardWorkspace w = backward_layout(params, choice);
  char* workspace = static_cast<char*>(params.workspace);
  a.statistics = reinterpret_cast<float*>(workspace);
  a.gradient = reinterpret_cast<float*>(workspace + w.gradient);
  a.partial = reinterpret_cast<float*>(workspace + w.parts);
  a.tickets = choice.has_turns ? reinterpret_cast<int*>(workspace + w.tickets) : nullptr;
  a.counter = reinterpret_cast<int*>(workspace + w.counter);

  if (p.total_q > 0 && p.total_k > 0 &&
      !encode_tensor_maps(a, kernels.key_rows, kernels.query_rows, kernels.stored_rows)) {
    return cudaErrorInvalidValue;
  }
  const bool empty = p.batch == 0;
  const auto places = static_cast<unsigned>(empty ? 0 : query_places(p, tile));
  const auto tiles = static_cast<unsigned>(empty || p.total_k == 0 ? 0 : key_tiles(p, tile));
  a.whole_heads = tiles > 0 && takes_whole_heads(p, tile, device.sms);
  if (a.whole_heads) a.tickets = nullptr;
  a.whole_tiles = a.tiles = a.whole_heads ? p.batch * p.heads_kv : static_cast<int>(tiles);
  unsigned post_blocks = places;
  if (tiles > 0 && !a.whole_heads) {
    a.whole_tiles = static_cast<int>(split.whole);
    a.tiles = static_cast<int>(split.units());
    a.parts = Divisor::of(split.parts);
    post_blocks += static_cast<unsigned>(split.split * kernels.sum_blocks);
  }
  a.slots = slots;
  if (lists_tiles(p, choice.has_turns) && (choice.has_turns || a.tiles > slots)) {
    a.tile_list = reinterpret_cast<Tile*>(workspace + w.tile_list);
  } else if (a.tickets != nullptr && first_are_longest) {
    a.alternates = a.tiles > slots && a.order.section < a.order.heads;
  }
  // Zeroes of a small dQ stay in L2, and cost less than the wait for a first part.
  const bool is_small = int64_t{places} * tile.block_m * tile.head_dim <= kZeroedFloats;
  if (!tile.wide() && !a.whole_heads && (choice.has_turns || !is_small)) {
    a.claims = reinterpret_cast<int*>(workspace + w.claims);
  }
  const bool has_parts = a.whole_tiles < a.tiles;
  const BackwardKernel main = has_parts ? kernels.main_of_parts : kernels.main;
  if (cudaError_t error =
          allow_shared_memory(main, kernels.allowed[has_parts], device.device, tile.shared_bytes());
      error != cudaSuccess) {
    return error;
  }
  kernels.pre<<<std::max(places, 1u), kPreprocessThreads, 0, stream>>>(a);
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess && tiles > 0) {
    const auto blocks = static_cast<unsigned>(std::min(a.tiles, slots) * kernels.blocks);
    error = launch_kernel(main, blocks, tile.threads(), tile.shared_bytes(), stream, a);
  }
  if (error == cudaSuccess && post_blocks > 0 && !a.whole_heads) {
    // The main kernel lets no other start early: this one starts when its last thread block ends,
    // and profilers count no wait as its time.
    error = launch_kernel(has_parts ? kernels.post_of_parts : kernels.post, post_blocks,
                          kernels.post_threads, 0, stream, a);
  }
  return error;
}

}  // namespace

const char* unsupported_backward(const BackwardParams& params) {
  const ForwardParams& p = params.forward;
  const DeviceFacts device = current_device();
  if (device.major != 9) return "the device is not of compute capability 9.0";
  if (p.softcap >= kWideCap) return "softcap is 256 or more";
  if (tensor_map_encoder() == nullptr) return "the driver has no cuTensorMapEncodeTiled";
  const int row = choose_backward(p, device.sms, params.deterministic).row;
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
  const int sms = current_device().sms;
  return backward_layout(params, choose_backward(params.forward, sms, params.deterministic)).bytes;
}

const char* launch_backward(const BackwardParams& params, void* stream) {
  const DeviceFacts device = current_device();
  const BackwardChoice choice = choose_backward(params.forward, device.sms, params.deterministic);
  const cudaError_t error = launch(params, kernels_of(params.forward, choice.row), choice, device,
                                   static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace attnscope::sm90

#ifdef ATTNSCOPE_TIMELINE
#include "kernels/sm90_backward/record.cuh"
#endif
