// Attention backward with mma.sync (sm_80 and later): dK, dV, and dQ / scale in fp32.
//
// Problem   gradients of out = softmax(mask(cap(q k^T scale))) v, see attn/params.h.
// Tile      block_n keys per thread block, whose dK and dV stay in registers. A step takes block_m
//           queries that see some of the keys, query head by query head of the group.
// Roles     two groups of warps. One computes S^T = K Q^T, P^T and dV += P^T dO; the other
//           dP^T = V dO^T, dS^T = P^T (dP^T - delta), dK += dS^T Q and dQ += dS K. A warp's P^T and
//           dS^T are A operands as they stand in registers.
// Pipeline  P goes through shared memory, one barrier a step: one group takes its exponentials of
//           the next step while the other is in its products. cp.async loads a step ahead.
// dQ        is added to a workspace in fp32, in turns if deterministic (keys.cuh).
// Limits    bf16, fp16; head dims in multiples of 8 up to 256.
// Test      tests/ops/test_backward_gpu.py; bench: attnscope bench --impl cuda-sm80.
#pragma once

#include "kernels/sm80_backward/keys.cuh"
#include "kernels/sm80_backward/values.cuh"
#include "ptx/sync.cuh"

namespace attnscope::sm80 {

template <class Config>
__global__ void __launch_bounds__(Config::kTile.threads(), Config::kTile.blocks_per_sm)
    backward_kernel(const __grid_constant__ BackwardParams p,
                    const __grid_constant__ BackwardCall call) {
  extern __shared__ __align__(128) char shared_memory[];
  auto& shared = *reinterpret_cast<BackwardShared<Config>*>(shared_memory);

  if (threadIdx.x + threadIdx.y == 0) {
    // Deterministic: a block waits for blocks of lower numbers. Numbers are given out as blocks
    // start, so each of those is running or done.
    const int number = p.deterministic ? ptx::atomic_add(call.workspace.started, 1) : blockIdx.x;
    const Tile tile = tile_at(call.order, number);
    const int batch = tile.head / p.forward.heads_kv, head = tile.head % p.forward.heads_kv;
    const int index = call.last_first ? tile.m_block : call.order.m_blocks - 1 - tile.m_block;
    // Without a mask, neighbouring blocks start at different queries: their dQ adds do not meet.
    const bool rotate = !p.deterministic && p.forward.window_left < 0 && p.forward.window_right < 0;
    shared.at.set(p.forward, call.workspace, batch, head, index, rotate);
  }
  __syncthreads();
  if (shared.at.first_key() >= shared.at.seg_k.length) return;
  if (threadIdx.y == 0) {
    value_group<Config>(p, call, shared);
  } else {
    key_group<Config>(p, call, shared);
  }
}

}  // namespace attnscope::sm80
