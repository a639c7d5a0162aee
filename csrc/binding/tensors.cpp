#include "binding/tensors.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "binding/nvtx.h"

namespace attnscope::binding {
namespace {

// Rows are read as 16-byte vectors through any batch, row and head stride.
bool has_usable_strides(const Tensor& t) {
  const int64_t vector = 16 / static_cast<int64_t>(t.element_size());
  const auto sizes = t.sizes();
  const auto strides = t.strides();
  const size_t last = sizes.size() - 1;
  if (sizes[last] > 1 && strides[last] != 1) return false;
  if (reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 != 0) return false;
  for (size_t i = 0; i < last; ++i) {
    if (sizes[i] > 1 && strides[i] % vector != 0) return false;
  }
  return true;
}

void check_cu_seqlens(const Tensor& t, const char* name, int64_t entries, const Tensor& q) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int, name, " must have dtype int32");
  STD_TORCH_CHECK(t.dim() == 1 && t.size(0) == entries && entries >= 1, name,
                  " must have shape [batch + 1], the same for q and k");
  STD_TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
  STD_TORCH_CHECK(t.device() == q.device(), name, " must be on q's device");
}

void check_tensors(const Tensor& q, const Tensor& k, const Tensor& v, int64_t rank) {
  STD_TORCH_CHECK(q.dim() == rank && k.dim() == rank && v.dim() == rank, "q, k, v must have ", rank,
                  " dimensions, got ", q.dim(), ", ", k.dim(), ", ", v.dim());
  STD_TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(),
                  "q, k, v must have one dtype");
  STD_TORCH_CHECK(k.device() == q.device() && v.device() == q.device(),
                  "q, k, v must be on one device");
}

void check_shapes(const Tensor& q, const Tensor& k, const Tensor& v, int64_t rank) {
  const int64_t heads = rank - 2, dim = rank - 1;
  const auto q_sizes = q.sizes(), k_sizes = k.sizes(), v_sizes = v.sizes();
  for (const int64_t d : {q_sizes[dim], v_sizes[dim]}) {
    STD_TORCH_CHECK(d >= 8 && d <= kMaxHeadDim && d % 8 == 0,
                    "head_dim must be a multiple of 8 up to ", kMaxHeadDim, ", got ", d);
  }
  STD_TORCH_CHECK(k_sizes[dim] == q_sizes[dim], "k must have q's head_dim, ", q_sizes[dim],
                  ", got ", k_sizes[dim]);
  STD_TORCH_CHECK(k_sizes[heads] > 0 && q_sizes[heads] > 0 && q_sizes[heads] % k_sizes[heads] == 0,
                  "q must have a multiple of k's ", k_sizes[heads], " heads, got ", q_sizes[heads]);
  for (int64_t i = 0; i <= heads; ++i) {
    STD_TORCH_CHECK(v_sizes[i] == k_sizes[i], "v must have k's size ", k_sizes[i], " in dimension ",
                    i, ", got ", v_sizes[i]);
  }
  STD_TORCH_CHECK(rank == 3 || k_sizes[0] == q_sizes[0], "k must have q's batch, ", q_sizes[0],
                  ", got ", k_sizes[0]);
}

}  // namespace

// Divisions keep the test itself from overflow.
void check_sizes(const AttentionSizes& s) {
  STD_TORCH_CHECK(s.batch == 0 || s.heads_q <= kIntMax / s.batch,
                  "batch * heads_q must be <= ", kIntMax, ", got ", s.batch, " * ", s.heads_q);
  for (const int64_t rows : {s.rows_q, s.rows_k, s.seqlen_q + s.seqlen_k}) {
    STD_TORCH_CHECK(rows <= kMaxRows,
                    "rows of q, of k, and seqlen_q + seqlen_k must be <= ", kMaxRows, ", got ",
                    rows);
  }
  int64_t tiles = (s.seqlen_q + kMinTileRows - 1) / kMinTileRows * s.batch;
  if (s.packed) tiles = std::min(tiles, s.rows_q / kMinTileRows + s.batch);
  STD_TORCH_CHECK(tiles <= kMaxTiles / s.heads_q, "query tiles (", kMinTileRows,
                  " rows of a head) must be <= ", kMaxTiles, ", got ", tiles, " * ", s.heads_q);
}

AttentionSizes check_attention(const AttentionTensors& t, int64_t max_seqlen_q,
                               int64_t max_seqlen_k) {
  STD_TORCH_CHECK(t.cu_seqlens_q.has_value() == t.cu_seqlens_k.has_value(),
                  "cu_seqlens_q, cu_seqlens_k must be given together");
  const bool packed = t.cu_seqlens_q.has_value();
  const int64_t rank = packed ? 3 : 4;
  check_tensors(t.q, t.k, t.v, rank);
  check_shapes(t.q, t.k, t.v, rank);

  const int64_t rows = rank - 3;  // the dimension
  AttentionSizes s{};
  s.packed = packed;
  s.rows_q = s.seqlen_q = t.q.size(rows);
  s.rows_k = s.seqlen_k = t.k.size(rows);
  s.heads_q = t.q.size(rows + 1);
  s.heads_kv = t.k.size(rows + 1);
  s.head_dim = t.q.size(rows + 2);
  s.head_dim_v = t.v.size(rows + 2);
  if (packed) {
    const int64_t entries = t.cu_seqlens_q->dim() > 0 ? t.cu_seqlens_q->size(0) : 0;
    check_cu_seqlens(*t.cu_seqlens_q, "cu_seqlens_q", entries, t.q);
    check_cu_seqlens(*t.cu_seqlens_k, "cu_seqlens_k", entries, t.q);
    STD_TORCH_CHECK(max_seqlen_q >= 0 && max_seqlen_k >= 0,
                    "max_seqlen_q, max_seqlen_k must be >= 0, got ", max_seqlen_q, ", ",
                    max_seqlen_k);
    s.batch = entries - 1;
    s.seqlen_q = std::min(max_seqlen_q, s.rows_q);
    s.seqlen_k = std::min(max_seqlen_k, s.rows_k);
  } else {
    s.batch = t.q.size(0);
  }
  check_sizes(s);
  return s;
}

void check_float32(double value, const char* rule) {
  const double size = std::fabs(value);
  STD_TORCH_CHECK(value == 0 || (size >= std::numeric_limits<float>::min() &&
                                 size <= std::numeric_limits<float>::max()),
                  rule, " must be 0 or a normal float32 number, got ", value);
}

DType to_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Double:
      return DType::kFloat64;
    default:
      STD_TORCH_CHECK(false, "q must have dtype float16, bfloat16, float32 or float64");
  }
}

Tensor readable(const Tensor& t) {
  if (has_usable_strides(t)) return t;
  NvtxRange range(Range::kCopy);
  return t.is_contiguous() ? torch::stable::clone(t) : torch::stable::contiguous(t);
}

Tensor readable_apart(const Tensor& t) {
  const auto sizes = t.sizes();
  const auto strides = t.strides();
  bool apart = true;
  for (size_t i = 0; i < sizes.size(); ++i) apart &= sizes[i] <= 1 || strides[i] != 0;
  if (apart) return readable(t);
  NvtxRange range(Range::kCopy);
  return torch::stable::contiguous(t);
}

Tensor contiguous(const Tensor& t) {
  if (t.is_contiguous()) return t;
  NvtxRange range(Range::kCopy);
  return torch::stable::contiguous(t);
}

void check_like(const Tensor& t, const char* name, const std::vector<int64_t>& sizes,
                ScalarType dtype, const Tensor& q) {
  STD_TORCH_CHECK(t.scalar_type() == dtype, name,
                  dtype == ScalarType::Float ? " must have dtype float32" : " must have q's dtype");
  STD_TORCH_CHECK(t.device() == q.device(), name, " must be on q's device");
  bool same = t.dim() == static_cast<int64_t>(sizes.size());
  for (size_t i = 0; same && i < sizes.size(); ++i) same = t.size(i) == sizes[i];
  if (same) return;
  std::ostringstream message;
  const auto print = [&](const auto& shape) {
    const char* separator = "[";
    for (const int64_t size : shape) {
      message << separator << size;
      separator = ", ";
    }
    message << (shape.size() == 0 ? "[]" : "]");
  };
  message << name << " must have shape ";
  print(sizes);
  message << ", got ";
  print(t.sizes());
  STD_TORCH_CHECK(false, message.str());
}

Strides strides_of(const Tensor& t) {
  const auto strides = t.strides();
  if (strides.size() == 3) return {0, strides[0], strides[1]};
  return {strides[0], strides[1], strides[2]};
}

// aoti_torch_empty_strided takes a third of the time of torch::stable::new_empty.
Tensor empty_like_device(const Tensor& like, std::initializer_list<int64_t> sizes, int32_t dtype) {
  int64_t strides[4];
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes.begin()[i], 1);
  }
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(),
                                                  strides, dtype, device_type,
                                                  like.get_device_index(), &handle));
  return Tensor(handle);
}

int32_t dtype_code(const Tensor& t) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  return dtype;
}

int32_t float32_code() { return aoti_torch_dtype_float32(); }

int32_t byte_code() { return aoti_torch_dtype_uint8(); }

}  // namespace attnscope::binding
