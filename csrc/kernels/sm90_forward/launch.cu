#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <type_traits>
#include <utility>

#include "attn/device.h"
#include "kernels/sm90_forward/kernel.cuh"
#include "kernels/sm90_forward/launch.h"

namespace attnscope::sm90 {
namespace {

using ForwardKernel = void (*)(ForwardArguments);

template <class Config>
constexpr ForwardKernel kernel_of() {
  constexpr int kSharedBytes = sizeof(ForwardShared<Config>);
  static_assert(kSharedBytes == Config::kTile.shared_bytes(),
                "the tile table and the struct disagree");
  static_assert(Config::kBlocksPerSm * (kSharedBytes + 1024) <= 233472, "shared memory of an SM");
  return forward_kernel<Config>;
}

using RowKernels = KernelTable<ForwardKernel, kForwardTileCount>;

template <class Element, int... kRows>
RowKernels& row_kernels(std::integer_sequence<int, kRows...>) {
  static RowKernels kernels{{kernel_of<RowConfig<Element, kRows>>()...}, {}};
  return kernels;
}

cudaError_t launch(const ForwardParams& p, RowKernels& kernels, int row, Grouping grouping,
                   const DeviceFacts& device, cudaStream_t stream) {
  if (p.total_q == 0 || p.heads_q == 0) return cudaSuccess;
  ForwardArguments a{};
  a.params = p;
  a.scores = reciprocal_scales(p);
  a.grouping = grouping;
  const ForwardTile& tile = kForwardTiles[row];
  const int together = heads_together(tile, grouping.log2, p.heads_q, p.heads_kv);
  const int heads = ceil_div((p.heads_q >> grouping.log2) / together, tile.heads_per_tile);
  a.together = Divisor::of(together);
  a.heads = Divisor::of(heads);
  a.heads_per_key = Divisor::of(std::max(p.heads_q / std::max(p.heads_kv, 1), 1));
  const int rows = grouping.rows(p.seqlen_q);
  const int64_t units = int64_t{ceil_div(rows, 64)} * together;
  if (units > kMostTiles) return cudaErrorInvalidConfiguration;
  const int m_blocks = ceil_div(static_cast<int>(units), tile.head_units());
  const int64_t kv_bytes = int64_t{p.seqlen_k} * (p.head_dim + p.head_dim_v) * 2;
  ForwardCall call = forward_call(p);
  call.heads_kv = p.heads_kv;  // those of the tensors
  a.order = tile_order(m_blocks, p.batch, heads, ceil_div(p.heads_kv, tile.heads_per_tile),
                       kv_bytes, !call.tiles_alike());
  // In a packed batch: one sequence that has most rows.
  if (p.packed()) call.batch = 1;
  if (call.tiles_alike() && (!p.packed() || 2 * int64_t{p.seqlen_q} >= p.total_q)) {
    const ForwardTiles tiles = balanced(tile, grouping.log2, call, device.sms).tiles;
    a.order.last = static_cast<int>(tiles.last_sets);
    a.last_m_blocks = static_cast<int>(tiles.last_m_blocks);
    if (p.packed() && a.order.last > 0) {
      a.long_units = static_cast<int>(units);
      a.long_tiles = static_cast<int>(tiles.count());
    }
    if (!p.packed() && a.order.last == 0 && units % tile.head_units() != 0) {
      // Some tiles have 64 rows less. They come last and balance the end of the launch.
      a.order.last = std::min(a.order.heads, ceil_div(device.sms, std::max(m_blocks, 1)));
    }
  }
  a.prefetch_tiles = call.keys_seen() <= kPrefetchKeys;
  // The first tiles of a section read its K and V from memory, the others from L2.
  if (a.prefetch_tiles) a.order.section = std::min(a.order.section, kShortSection);
  a.section = Divisor::of(a.order.section);
  a.section_tiles = Divisor::of(static_cast<int>(
      std::clamp<int64_t>(int64_t{a.order.section} * m_blocks, 1, kMostTiles)));  // dense: no more
  // Two sequences of a packed batch may have most rows: then both have lower tiles at their end.
  const int64_t ends = int64_t{a.order.last} * (p.packed() ? p.batch : 1);
  const int64_t tiles = a.order.tiles() + ends * (a.last_m_blocks - a.order.m_blocks);
  // The sequences of a packed batch have at most `tiles` tiles, and usually far fewer.
  if (tiles > kMostTiles && !p.packed()) return cudaErrorInvalidConfiguration;
  a.tiles = static_cast<int>(std::min<int64_t>(tiles, kMostTiles));
  a.packed = p.packed();
  // Where the longest has twice as many keys as the mean, or more.
  const bool varied = 2 * p.total_k <= int64_t{p.batch} * p.seqlen_k;
  a.turns = varied && p.batch <= kOrderedSequences ? kSequenceTurns : 1;
  a.hides_keys = a.packed || p.window_left >= 0 || p.window_right >= 0;

  const int64_t batch = p.packed() ? 1 : p.batch;
  const int64_t rows_q = p.packed() ? p.total_q : p.seqlen_q,
                rows_k = p.packed() ? p.total_k : p.seqlen_k;
  const CUtensorMapL2promotion promotion =
      p.seqlen_k <= kNarrowKeys ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : kPromotion;
  if (p.total_k > 0 && !(encode_queries(&a.q, p.dtype, p.q, p.q_stride, batch, p.heads_q, rows_q,
                                        p.head_dim, 64, grouping, promotion) &&
                         encode_keys(&a.k, p.dtype, p.k, p.k_stride, batch, p.heads_kv, rows_k,
                                     p.head_dim, tile.block_n, promotion) &&
                         encode_keys(&a.v, p.dtype, p.v, p.v_stride, batch, p.heads_kv, rows_k,
                                     p.head_dim_v, tile.block_n, promotion) &&
                         encode_queries(&a.out, p.dtype, p.out, p.out_stride, batch, p.heads_q,
                                        rows_q, p.head_dim_v, 16, grouping, promotion))) {
    return cudaErrorInvalidValue;
  }

  const ForwardKernel kernel = kernels.kernel[row];
  if (cudaError_t error =
          allow_shared_memory(kernel, kernels.allowed[row], device.device, tile.shared_bytes());
      error != cudaSuccess) {
    return error;
  }
  int64_t most_tiles = a.tiles;
  if (p.packed()) {  // with ascending cu_seqlens there are no more
    const int64_t most_units = (p.total_q << grouping.log2) / 64 + p.batch;
    most_tiles =
        std::min(most_tiles, (most_units * together / tile.head_units() + p.batch) * heads);
  }
  const int64_t blocks =
      std::clamp<int64_t>(most_tiles, 1, int64_t{tile.blocks_per_sm} * device.sms);
  if (a.tiles > blocks) {  // otherwise each block has one tile at most
    if (cudaError_t error = tile_counter(device.device, stream, &a.counter); error != cudaSuccess) {
      return error;
    }
  }
  kernel<<<static_cast<unsigned>(blocks), tile.threads(), tile.shared_bytes(), stream>>>(a);
  return cudaGetLastError();
}

}  // namespace

const char* unsupported_forward(const ForwardParams& p) {
  if (current_device().major != 9) return "the device is not of compute capability 9.0";
  if (p.softcap >= kWideCap) return "softcap is 256 or more";
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
  const DeviceFacts device = current_device();
  constexpr std::make_integer_sequence<int, kForwardTileCount> kRows;
#ifdef ATTNSCOPE_TIMELINE  // the one element type that is compiled
  RowKernels& kernels = row_kernels<ATTNSCOPE_TIMELINE>(kRows);
#else
  RowKernels& kernels =
      p.dtype == DType::kBFloat16 ? row_kernels<__nv_bfloat16>(kRows) : row_kernels<__half>(kRows);
#endif
  const ForwardChoice choice = choose_forward(forward_call(p), device.sms);
  const cudaError_t error =
      choice.row < 0 ? cudaErrorInvalidValue
                     : launch(p, kernels, choice.row, {choice.grouping}, device, cuda_stream);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace attnscope::sm90

#ifdef ATTNSCOPE_FAULTS
// Sets the delays of the launches that follow on the current device; null, or CUDA's message.
extern "C" __attribute__((visibility("default"))) const char* attnscope_set_faults(
    uint32_t seed, uint32_t kinds, uint32_t rate, uint32_t cycles) {
  const attnscope::FaultPlan plan{seed, kinds, rate, cycles};
  for (const attnscope::FaultSetter set : attnscope::fault_setters()) {
    if (const cudaError_t error = set(plan); error != cudaSuccess) return cudaGetErrorString(error);
  }
  return nullptr;
}
#endif

#ifdef ATTNSCOPE_TIMELINE
#include "kernels/sm90_forward/record.cuh"
#endif
