// What a backward call launches: grids, workspace and constants. Host only, no CUDA.
#pragma once

#include <algorithm>
#include <cfloat>
#include <climits>
#include <cstdint>
#include <type_traits>

#include "attn/params.h"
#include "kernels/sm80_backward/config.cuh"
#include "kernels/sm80_backward/workspace.cuh"

namespace attnscope::sm80 {

struct BackwardPlan {
  BackwardCall call;
  int64_t workspace_bytes;
  int64_t row_blocks;    // blocks of kWorkRows query rows
  int64_t clear_blocks;  // for rows outside any segment
  int64_t key_blocks;    // thread blocks of the main kernel
  bool deterministic;

  bool fits() const { return row_blocks <= INT_MAX - clear_blocks && key_blocks <= INT_MAX; }
};

// Carves a workspace out of `memory`.
inline int64_t place_workspace(BackwardWorkspace& work, const BackwardParams& params,
                               const BackwardTile& tile, char* memory) {
  const ForwardParams& p = params.forward;
  const auto round_up = [](int64_t n, int64_t to) { return (n + to - 1) / to * to; };
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
  take(work.turns, params.deterministic ? rows / tile.block_m : 0);
  take(work.started, 1);
  return used;
}

inline BackwardPlan backward_plan(const BackwardParams& params, const BackwardTile& tile) {
  const ForwardParams& p = params.forward;
  const auto blocks_of = [](int64_t rows, int64_t block) { return (rows + block - 1) / block; };
  BackwardPlan plan{};
  BackwardCall& call = plan.call;
  plan.workspace_bytes =
      place_workspace(call.workspace, params, tile, static_cast<char*>(params.workspace));
  // Lengths have 31 bits, and so have the products batch * heads: these fit in 64.
  plan.row_blocks = blocks_of(p.seqlen_q, kWorkRows) * (int64_t{p.batch} * p.heads_q);
  plan.clear_blocks = p.packed() ? int64_t{p.heads_q} + p.heads_kv : 0;
  const int64_t key_blocks = blocks_of(p.seqlen_k, tile.block_n);
  plan.key_blocks = key_blocks * (int64_t{p.batch} * p.heads_kv);
  // Without rows no kernel clears the counters, and none is needed.
  plan.deterministic = params.deterministic && plan.row_blocks > 0;

  call.scores = score_scales(p);
  call.inverse_softcap =
      p.softcap > 0 ? static_cast<float>(std::min(1.0 / p.softcap, double{FLT_MAX})) : 0.0f;
  // Under a causal mask the first key block has the most queries: it comes first, unless blocks
  // wait for their turn. In the opposite order a block reaches a query block after the next key
  // block has left it.
  const bool causal = p.window_right >= 0;
  call.last_first = plan.deterministic && causal;
  const int64_t head_bytes = int64_t{p.seqlen_q} * (p.heads_q / std::max(p.heads_kv, 1)) *
                             (2 * (p.head_dim + p.head_dim_v) + 4 * tile.head_dim);
  call.order = tile_order(static_cast<int>(key_blocks), p.batch, p.heads_kv,
                          std::max(p.heads_kv, 1), head_bytes, causal && p.window_left < 0);
  return plan;
}

}  // namespace attnscope::sm80
