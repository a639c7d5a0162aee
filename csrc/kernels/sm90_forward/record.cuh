// The C interface of the instrumented forward, see attn/timeline_record.cuh.
#pragma once

#include "attn/device.h"
#include "attn/timeline_record.cuh"
#include "kernels/sm90_forward/config.cuh"
#include "kernels/sm90_forward/launch.h"

// What the caller's buffer and reader are made for.
struct TimelineTile {
  int block_m, block_n, blocks_per_sm, consumers, heads_per_tile, key_parts, heads_side_by_side;
};

// Tensors as dense_call says. Null, or why it was not launched.
ATTNSCOPE_EXPORT const char* attnscope_timeline_forward(const void* q, const void* k, const void* v,
                                                        void* out, float* lse, int batch,
                                                        int seqlen_q, int seqlen_k, int heads_q,
                                                        int heads_kv, int head_dim, bool causal,
                                                        double scale, const TimelineTile* tile,
                                                        void* stream) {
  attnscope::ForwardParams p =
      attnscope::dense_call(batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, causal, scale);
  p.q = q;
  p.k = k;
  p.v = v;
  p.out = out;
  p.lse = lse;
  if (const char* reason = attnscope::sm90::unsupported_forward(p)) return reason;
  const auto choice = attnscope::sm90::choose_forward(attnscope::sm90::forward_call(p),
                                                      attnscope::current_device().sms);
  const auto& t = attnscope::sm90::kForwardTiles[choice.row];
  if (t.block_m != tile->block_m || t.block_n != tile->block_n ||
      t.blocks_per_sm != tile->blocks_per_sm || t.consumers() != tile->consumers ||
      t.heads_per_tile != tile->heads_per_tile || t.key_parts != tile->key_parts ||
      1 << choice.grouping != tile->heads_side_by_side)
    return attnscope::kOtherTile;
  return attnscope::sm90::launch_forward(p, stream);
}
