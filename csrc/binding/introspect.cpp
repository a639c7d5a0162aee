// attnscope::kernels, choose_forward and choose_backward: the tile tables compiled into this build,
// and which row serves a call, as JSON. None needs a device.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <string>

#include "attn/score_scales.h"
#include "binding/forward.h"
#include "binding/json_object.h"
#include "kernels/sm80_backward/config.cuh"
#include "kernels/sm80_forward/config.cuh"
#include "kernels/sm90_backward/config.cuh"
#include "kernels/sm90_forward/config.cuh"

namespace attnscope::binding {
namespace {

JsonObject describe(const sm80::ForwardTile& t) {
  JsonObject json;
  json.add("kernel", "sm80_forward")
      .add("head_dim", t.head_dim)
      .add("block_m", t.block_m)
      .add("block_n", t.block_n)
      .add("heads_per_tile", 1)
      .add("warps", t.warps)
      .add("threads", t.threads())
      .add("stages", t.stages)
      .add("q_in_registers", t.q_in_registers)
      .add("shared_bytes", t.shared_bytes())
      .add("blocks_per_sm", t.blocks_per_sm)
      .add("reason", t.reason);
  return json;
}

JsonObject describe(const sm90::ForwardTile& t) {
  JsonObject json;
  json.add("kernel", "sm90_forward")
      .add("head_dim", t.head_dim)
      .add("head_dim_v", t.head_dim_v)
      .add("block_m", t.block_m)
      .add("block_n", t.block_n)
      .add("heads_per_tile", t.heads_per_tile)
      .add("key_parts", t.key_parts)
      .add("consumers", t.consumers())
      .add("threads", t.threads())
      .add("q_stages", t.q_stages)
      .add("stages", t.stages)
      .add("scores_live", t.scores_live)
      .add("producer_registers", t.producer_registers())
      .add("consumer_registers", t.consumer_registers())
      .add("shared_bytes", t.shared_bytes())
      .add("blocks_per_sm", t.blocks_per_sm)
      .add("min_queries", t.min_queries)
      .add_unless("max_queries", t.max_queries, sm90::kAnyQueries)
      .add_unless("max_queries_causal", t.max_queries_causal, sm90::kAnyQueries)
      .add("groups_heads", t.takes_groups)
      .add("grouped_only", t.grouped_only())
      .add("reason", t.reason);
  return json;
}

JsonObject describe(const sm80::BackwardTile& t) {
  JsonObject json;
  json.add("kernel", "sm80_backward")
      .add("head_dim", t.head_dim)
      .add("block_m", t.block_m)
      .add("block_n", t.block_n)
      .add("warps", t.warps)
      .add("threads", t.threads())
      .add("stages", t.stages)
      .add("shared_bytes", t.shared_bytes())
      .add("blocks_per_sm", t.blocks_per_sm)
      .add("reason", t.reason);
  return json;
}

JsonObject describe(const sm90::BackwardTile& t) {
  JsonObject json;
  json.add("kernel", "sm90_backward")
      .add("row", static_cast<int>(&t - sm90::kBackwardTiles))
      .add("head_dim", t.head_dim)
      .add("block_m", t.block_m)
      .add("block_n", t.block_n)
      .add("cluster", t.wide() ? sm90::kWideRanks : 1)
      .add("consumers", t.wide() ? 3 : t.consumers())
      .add("threads", t.threads())
      .add("stages", t.stages)
      .add("serves_softcap", t.early_values || t.wide())
      .add("long_queries", t.long_queries)
      .add("step_time", t.step_time)
      .add("tile_time", t.tile_time)
      .add("causal_time", t.causal_time)
      .add("shared_bytes", t.shared_bytes())
      .add("blocks_per_sm", 1)
      .add("reason", t.reason);
  return json;
}

std::string kernels() {
  std::string json;
  const auto append = [&](const JsonObject& row) {
    json += (json.empty() ? "" : ", ") + row.text();
  };
  for (const auto& t : sm80::kForwardTiles) append(describe(t));
  for (const auto& t : sm90::kForwardTiles) append(describe(t));
  for (const auto& t : sm80::kBackwardTiles) append(describe(t));
  for (const auto& t : sm90::kBackwardTiles) append(describe(t));
  return "[" + json + "]";
}

constexpr int64_t kMaxSms = 65535;

struct Device {
  int64_t sms;
  int64_t capability;
};

void check(const AttentionSizes& s, const Device& device) {
  for (const int64_t d : {s.head_dim, s.head_dim_v}) {
    STD_TORCH_CHECK(d >= 8 && d <= kMaxHeadDim && d % 8 == 0,
                    "head_dim must be a multiple of 8 up to ", kMaxHeadDim, ", got ", d);
  }
  STD_TORCH_CHECK(s.batch >= 0 && s.batch <= kIntMax, "batch must be 0 to ", kIntMax, ", got ",
                  s.batch);
  for (const int64_t length : {s.seqlen_q, s.seqlen_k}) {
    STD_TORCH_CHECK(length >= 0 && length <= kMaxRows, "seqlen_q, seqlen_k must be 0 to ", kMaxRows,
                    ", got ", length);
  }
  STD_TORCH_CHECK(s.heads_kv > 0 && s.heads_q > 0 && s.heads_q % s.heads_kv == 0,
                  "heads_q must be a multiple of heads_kv, got ", s.heads_q, " and ", s.heads_kv);
  STD_TORCH_CHECK(device.sms >= 1 && device.sms <= kMaxSms, "sms must be 1 to ", kMaxSms, ", got ",
                  device.sms);
  STD_TORCH_CHECK(device.capability >= 80, "capability must be >= 80 (10 * major + minor), got ",
                  device.capability);
  check_sizes(s);
}

// Tiles, thread blocks, and waves of them over the device: at most, if the batch is packed.
void add_counts(JsonObject& json, long long tiles, long long blocks, int64_t resident) {
  json.add("tiles", tiles)
      .add("blocks", blocks)
      .add("resident_blocks", resident)
      .add("waves", (tiles + resident - 1) / resident);
}

// What is reported of every choice.
JsonObject choice_of(const char* kernel, const JsonObject& tile, const char* rule, int heads,
                     bool causal, const char* not_sm90) {
  JsonObject json;
  json.add("kernel", kernel)
      .add("tile", tile)
      .add("rule", rule)
      .add("heads_side_by_side", heads)
      .add("causal", causal)
      .add("not_sm90", not_sm90);
  return json;
}

// Tiles of keys of a call whose sequences all have the longest length.
long long tiles_of_keys(const ForwardParams& p, int block_n) {
  return (p.seqlen_k + block_n - 1LL) / block_n * p.batch * p.heads_kv;
}

std::string choose_forward_sm90(const ForwardParams& p, bool packed, const Device& device) {
  const int sms = static_cast<int>(device.sms);
  sm90::ForwardCall call = sm90::forward_call(p);
  call.heads_kv = p.heads_kv;
  call.packed = packed;
  const sm90::ForwardChoice choice = sm90::choose_forward(call, sms);
  const sm90::ForwardTile& t = sm90::kForwardTiles[choice.row];
  const bool alike = call.tiles_alike() && !packed;
  const long long tiles = (alike ? sm90::balanced(t, choice.grouping, call, sms).tiles
                                 : sm90::tiles_of(t, choice.grouping, call))
                              .count();
  const int64_t resident = t.blocks_per_sm * device.sms;
  const char* const rule = choice.grouping > 0 ? "grouped heads"
                           : choice.row == sm90::first_tile(call)
                               ? "first row whose bounds include the call"
                               : "least time by estimate";
  JsonObject json =
      choice_of("sm90_forward", describe(t), rule, 1 << choice.grouping, call.causal, nullptr);
  add_counts(json, tiles, std::min<long long>(tiles, resident), resident);
  return json.text();
}

// Why the Hopper kernel does not serve a call whose tensors it can address; empty if it does.
std::string unsupported_sm90(const ForwardParams& p, const Device& device) {
  if (device.capability / 10 != 9) {
    return "the device has compute capability " + std::to_string(device.capability / 10) + "." +
           std::to_string(device.capability % 10) + "; the Hopper kernel needs 9.0";
  }
  return p.softcap >= kWideCap ? "softcap is 256 or more" : "";
}

std::string choose_forward_sm80(const ForwardParams& p, bool packed, const Device& device,
                                const std::string& not_sm90) {
  const sm80::ForwardTile& t =
      sm80::kForwardTiles[sm80::forward_row(std::max(p.head_dim, p.head_dim_v))];
  const long long tiles = (p.seqlen_q + t.block_m - 1LL) / t.block_m * p.batch * p.heads_q;
  JsonObject json = choice_of("sm80_forward", describe(t), "the row of the head dim", 1,
                              is_causal(p), not_sm90.c_str());
  // A packed call has one more block a head: it clears rows that no tile covers.
  add_counts(json, tiles, tiles + (packed ? p.heads_q : 0), t.blocks_per_sm * device.sms);
  return json.text();
}

constexpr char kFirstRow[] = "first row that serves the call";

std::string choose_backward_sm90(const ForwardParams& p, const Device& device, bool deterministic) {
  const auto [row, has_turns, split] =
      sm90::choose_backward(p, static_cast<int>(device.sms), deterministic);
  const sm90::BackwardTile& t = sm90::kBackwardTiles[row];
  const int ranks = t.wide() ? sm90::kWideRanks : 1;  // thread blocks of a tile
  const int64_t slots = std::max<int64_t>(device.sms / ranks, 1);
  JsonObject json =
      choice_of("sm90_backward", describe(t), t.has_rivals() ? "least estimated time" : kFirstRow,
                1, is_causal(p), nullptr);
  add_counts(json, tiles_of_keys(p, t.block_n), std::min(split.units(), slots) * ranks, slots);
  json.add("turns", has_turns).add("split_tiles", split.split).add("parts", split.parts);
  return json.add("parts_of", split.have_heads ? "query heads" : "queries").text();
}

// Shared memory that a thread block may have, in bytes.
int block_shared_bytes(int64_t capability) {
  switch (capability) {
    case 80:
    case 87:
      return 163 << 10;
    case 86:
    case 89:
    case 120:
    case 121:
      return 99 << 10;
    default:
      return 227 << 10;
  }
}

std::string choose_backward_sm80(const ForwardParams& p, const Device& device,
                                 const std::string& not_sm90) {
  const sm80::BackwardTile& t = sm80::kBackwardTiles[sm80::backward_row(
      std::max(p.head_dim, p.head_dim_v), block_shared_bytes(device.capability))];
  const long long tiles = tiles_of_keys(p, t.block_n);
  JsonObject json =
      choice_of("sm80_backward", describe(t), kFirstRow, 1, is_causal(p), not_sm90.c_str());
  add_counts(json, tiles, tiles, t.blocks_per_sm * device.sms);
  return json.text();
}

template <bool kBackward>
std::string choose(int64_t head_dim, int64_t head_dim_v, int64_t seqlen_q, int64_t seqlen_k,
                   int64_t batch, int64_t heads_q, int64_t heads_kv, bool causal,
                   int64_t window_left, int64_t window_right, bool packed, double softcap,
                   int64_t sms, int64_t capability, bool deterministic) {
  AttentionSizes s{};
  s.packed = packed;
  s.batch = batch;
  s.seqlen_q = seqlen_q;
  s.seqlen_k = seqlen_k;
  s.heads_q = heads_q;
  s.heads_kv = heads_kv;
  s.head_dim = head_dim;
  s.head_dim_v = head_dim_v;
  const Device device{sms, capability};
  check(s, device);
  check_window(window_left, window_right);
  STD_TORCH_CHECK(softcap >= 0, "softcap must be >= 0 (0: none), got ", softcap);
  check_float32(softcap, "softcap");
  ForwardParams p{};
  p.batch = static_cast<int>(batch);
  p.seqlen_q = static_cast<int>(seqlen_q);
  p.seqlen_k = static_cast<int>(seqlen_k);
  p.heads_q = static_cast<int>(heads_q);
  p.heads_kv = static_cast<int>(heads_kv);
  p.head_dim = static_cast<int>(head_dim);
  p.head_dim_v = static_cast<int>(head_dim_v);
  p.softcap = softcap;
  set_window(p, causal, window_left, window_right);
  const std::string not_sm90 = unsupported_sm90(p, device);
  if constexpr (kBackward) {
    constexpr int32_t kNoBounds = 0;
    if (packed) p.cu_seqlens_q = p.cu_seqlens_k = &kNoBounds;  // not read
    p.total_q = batch * seqlen_q;
    p.total_k = batch * seqlen_k;
    return not_sm90.empty() ? choose_backward_sm90(p, device, deterministic)
                            : choose_backward_sm80(p, device, not_sm90);
  }
  return not_sm90.empty() ? choose_forward_sm90(p, packed, device)
                          : choose_forward_sm80(p, packed, device, not_sm90);
}

}  // namespace
}  // namespace attnscope::binding

STABLE_TORCH_LIBRARY_IMPL(attnscope, CompositeExplicitAutograd, m) {
  m.impl("kernels", TORCH_BOX(&attnscope::binding::kernels));
  m.impl("choose_forward", TORCH_BOX(&attnscope::binding::choose<false>));
  m.impl("choose_backward", TORCH_BOX(&attnscope::binding::choose<true>));
}
