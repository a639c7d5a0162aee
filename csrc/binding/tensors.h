// Tensors in the binding: checks, strides, allocation. An op checks its arguments here, once; the
// Python side only explains a refusal (attnscope.argument_checks).
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <vector>

#include "attn/params.h"

namespace attnscope::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kIntMax = std::numeric_limits<int32_t>::max();
// Kernels index rows and tiles with 32-bit integers and look up to 1024 rows ahead.
constexpr int64_t kMaxRows = (int64_t{1} << 31) - 1024;
constexpr int64_t kMaxTiles = (int64_t{1} << 30) - 1;
constexpr int64_t kMinTileRows = 64;  // of any kernel

// q, k and v of a call, dense or packed.
struct AttentionTensors {
  const Tensor& q;                            // [B, Sq, Hq, D] or [Tq, Hq, D]
  const Tensor& k;                            // [B, Sk, Hkv, D] or [Tk, Hkv, D]
  const Tensor& v;                            // [B, Sk, Hkv, Dv] or [Tk, Hkv, Dv]
  const std::optional<Tensor>& cu_seqlens_q;  // int32 [B + 1], or neither
  const std::optional<Tensor>& cu_seqlens_k;
};

// Sizes of a call, in 64 bits until `check_sizes` has passed.
struct AttentionSizes {
  bool packed;
  int64_t batch;
  int64_t rows_q, rows_k;      // Sq and Sk, or Tq and Tk
  int64_t seqlen_q, seqlen_k;  // Sq and Sk, or the longest segments
  int64_t heads_q, heads_kv;
  int64_t head_dim, head_dim_v;
};

// Throws unless dtypes, devices, shapes and lengths fit together as an attention call, and fit the
// kernels' 32-bit indices.
AttentionSizes check_attention(const AttentionTensors& tensors, int64_t max_seqlen_q,
                               int64_t max_seqlen_k);

// Throws unless every product that a kernel computes in 32 bits fits. heads_q must be > 0.
void check_sizes(const AttentionSizes& sizes);

// Throws unless 0 or a normal float32 number.
void check_float32(double value, const char* rule);

DType to_dtype(ScalarType type);

// The tensor, or a copy that kernels can read as rows of 16-byte vectors.
Tensor readable(const Tensor& t);

// The same, with rows apart from each other: a copy of a tensor that is expanded.
Tensor readable_apart(const Tensor& t);

// Throws unless `t` has these sizes, this dtype and q's device. `name` is the argument's.
void check_like(const Tensor& t, const char* name, const std::vector<int64_t>& sizes,
                ScalarType dtype, const Tensor& q);

// The tensor, or a contiguous copy.
Tensor contiguous(const Tensor& t);

// Element strides of [batch, row, head].
Strides strides_of(const Tensor& t);

// Contiguous and uninitialized, on `like`'s device.
Tensor empty_like_device(const Tensor& like, std::initializer_list<int64_t> sizes, int32_t dtype);

int32_t dtype_code(const Tensor& t);
int32_t float32_code();
int32_t byte_code();

}  // namespace attnscope::binding
