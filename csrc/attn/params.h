// The one description of an attention call that passes from the binding to every kernel, on either
// device. Plain C++: no torch, no CUDA.
#pragma once

#include <cstdint>

namespace attnscope {

// Rounded up; neither is negative.
template <class Value, class Size>
constexpr auto ceil_div(Value value, Size divisor) {
  return value / divisor + (value % divisor != 0);
}

enum class DType : int { kFloat16, kBFloat16, kFloat32, kFloat64 };

// Element strides of [batch, row, head, :]; the last dimension is contiguous. Packed tensors
// ([tokens, heads, dim]) have batch == 0.
struct Strides {
  int64_t batch;
  int64_t row;
  int64_t head;
};

struct ForwardParams {
  const void* q;  // [B, Sq, Hq, D] or [Tq, Hq, D]
  const void* k;  // [B, Sk, Hkv, D] or [Tk, Hkv, D]
  const void* v;  // [B, Sk, Hkv, Dv] or [Tk, Hkv, Dv]
  void* out;      // [B, Sq, Hq, Dv] or [Tq, Hq, Dv], contiguous
  float* lse;     // [B, Hq, Sq] or [Hq, Tq], contiguous, natural logarithm

  Strides q_stride;
  Strides k_stride;
  Strides v_stride;
  Strides out_stride;
  int64_t lse_batch_stride;  // Hq * Sq; 0 when packed
  int64_t lse_head_stride;   // Sq, or Tq when packed

  // Packed batches: int32 [B + 1] on the tensors' device; both null when dense. Their contents are
  // not trusted: kernels clamp them to [0, total].
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k;
  int64_t total_q;  // B * Sq, or Tq
  int64_t total_k;

  int batch;
  int seqlen_q;  // Sq, or max_seqlen_q when packed
  int seqlen_k;
  int heads_q;
  int heads_kv;
  int head_dim;
  int head_dim_v;
  DType dtype;

  double scale;      // double for the fp64 kernel; the others round it
  double softcap;    // 0: none
  int window_left;   // -1: unbounded
  int window_right;  // -1: unbounded; causal is 0

  constexpr bool packed() const { return cu_seqlens_q != nullptr; }
};

// Whether later rows see more keys.
constexpr bool is_causal(const ForwardParams& p) {
  return p.window_right >= 0 && p.window_left < 0;
}

// The backward of one forward call. Gradients are contiguous, in the shape and dtype of q, k and v.
struct BackwardParams {
  ForwardParams forward;  // the call; its `out` and `lse` are read, in these strides

  const void* dout;   // like out
  const float* dlse;  // like lse, in its strides; null: zero
  void* dq;
  void* dk;
  void* dv;
  Strides dout_stride;
  Strides dq_stride;
  Strides dk_stride;
  Strides dv_stride;

  void* workspace;     // of the size that the kernel asked for, uninitialized, 256-byte aligned
  bool deterministic;  // the same bits in every call
};

}  // namespace attnscope
