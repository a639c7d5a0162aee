#include "binding/forward.h"

#include <algorithm>
#include <limits>

#include "binding/nvtx.h"

namespace attnscope::binding {
namespace {

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kIntMax = std::numeric_limits<int32_t>::max();

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
      STD_TORCH_CHECK(false,
                      "q: dtype not supported; allowed: float16, bfloat16, float32, float64");
  }
}

// Kernels read rows as 16-byte vectors through any batch, row and head stride.
bool has_usable_strides(const Tensor& t) {
  const int64_t vector = 16 / static_cast<int64_t>(t.element_size());
  const int64_t last = t.dim() - 1;
  if (t.size(last) > 1 && t.stride(last) != 1) return false;
  if (reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 != 0) return false;
  for (int64_t i = 0; i < last; ++i) {
    if (t.size(i) > 1 && t.stride(i) % vector != 0) return false;
  }
  return true;
}

Tensor readable(const Tensor& t) {
  if (has_usable_strides(t)) return t;
  NvtxRange range(Range::kCopy);
  return t.is_contiguous() ? torch::stable::clone(t) : torch::stable::contiguous(t);
}

Strides strides_of(const Tensor& t) {
  if (t.dim() == 3) return {0, t.stride(0), t.stride(1)};
  return {t.stride(0), t.stride(1), t.stride(2)};
}

void check_cu_seqlens(const Tensor& t, const char* name, int64_t entries, const Tensor& q) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int, name, ": dtype must be int32");
  STD_TORCH_CHECK(t.dim() == 1 && t.size(0) == entries && entries >= 1, name,
                  ": must have shape [batch + 1], the same for q and k");
  STD_TORCH_CHECK(t.is_contiguous(), name, ": must be contiguous");
  STD_TORCH_CHECK(t.device() == q.device(), name, ": must be on q's device");
}

void check_inputs(const Tensor& q, const Tensor& k, const Tensor& v, bool packed,
                  const ForwardOptions& o) {
  const int64_t rank = packed ? 3 : 4;
  const int64_t heads = rank - 2;
  const int64_t dim = rank - 1;
  STD_TORCH_CHECK(q.dim() == rank && k.dim() == rank && v.dim() == rank, "q, k, v: have ", q.dim(),
                  ", ", k.dim(), ", ", v.dim(), " dimensions; allowed: ", rank);
  STD_TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(),
                  "q, k, v: dtypes differ");
  STD_TORCH_CHECK(k.device() == q.device() && v.device() == q.device(), "q, k, v: devices differ");
  for (const auto* t : {&q, &v}) {
    const int64_t d = t->size(dim);
    STD_TORCH_CHECK(d >= 8 && d <= kMaxHeadDim && d % 8 == 0, "head_dim is ", d,
                    "; allowed: multiples of 8 up to ", kMaxHeadDim);
  }
  STD_TORCH_CHECK(k.size(dim) == q.size(dim), "k: head_dim is ", k.size(dim), ", q has ",
                  q.size(dim));
  STD_TORCH_CHECK(v.size(heads) == k.size(heads), "v: ", v.size(heads), " heads, k has ",
                  k.size(heads));
  STD_TORCH_CHECK(k.size(heads) > 0 && q.size(heads) % k.size(heads) == 0, "q: ", q.size(heads),
                  " heads are not a multiple of k's ", k.size(heads));
  for (int64_t i = 0; i < heads; ++i) {
    STD_TORCH_CHECK(v.size(i) == k.size(i), "v: size ", v.size(i), " of dimension ", i, ", k has ",
                    k.size(i));
  }
  STD_TORCH_CHECK(packed || k.size(0) == q.size(0), "k: batch is ", k.size(0), ", q has ",
                  q.size(0));
  STD_TORCH_CHECK(o.window_left >= -1, "window_left is ", o.window_left, "; allowed: -1 or more");
  STD_TORCH_CHECK(o.window_right >= -1, "window_right is ", o.window_right,
                  "; allowed: -1 or more");
  STD_TORCH_CHECK(o.softcap >= 0, "softcap is ", o.softcap, "; allowed: 0 (none) or more");
  STD_TORCH_CHECK(!packed || (o.max_seqlen_q >= 0 && o.max_seqlen_k >= 0),
                  "max_seqlen_q, max_seqlen_k: are ", o.max_seqlen_q, ", ", o.max_seqlen_k,
                  "; allowed: 0 or more");
}

}  // namespace

ForwardCall prepare_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                            const std::optional<Tensor>& cu_seqlens_q,
                            const std::optional<Tensor>& cu_seqlens_k, const ForwardOptions& o) {
  STD_TORCH_CHECK(cu_seqlens_q.has_value() == cu_seqlens_k.has_value(),
                  "cu_seqlens_q, cu_seqlens_k: give both or neither");
  const bool packed = cu_seqlens_q.has_value();
  check_inputs(q, k, v, packed, o);
  if (packed) {
    check_cu_seqlens(*cu_seqlens_q, "cu_seqlens_q", cu_seqlens_q->size(0), q);
    check_cu_seqlens(*cu_seqlens_k, "cu_seqlens_k", cu_seqlens_q->size(0), q);
  }

  const int64_t first = packed ? 0 : 1;  // the row dimension
  const int64_t batch = packed ? cu_seqlens_q->size(0) - 1 : q.size(0);
  const int64_t rows_q = q.size(first), rows_k = k.size(first);
  const int64_t seqlen_q = packed ? std::min(o.max_seqlen_q, rows_q) : rows_q;
  const int64_t seqlen_k = packed ? std::min(o.max_seqlen_k, rows_k) : rows_k;
  const int64_t heads_q = q.size(first + 1), head_dim_v = v.size(first + 2);
  for (const int64_t n : {batch, rows_q, rows_k, heads_q}) {
    STD_TORCH_CHECK(n <= kIntMax, "a dimension of ", n, " is too large; allowed: up to ", kIntMax);
  }

  ForwardCall call{{}, readable(q), readable(k), readable(v), q, q};
  if (packed) {
    call.out = torch::stable::new_empty(q, {rows_q, heads_q, head_dim_v});
    call.lse = torch::stable::new_empty(q, {heads_q, rows_q}, ScalarType::Float);
  } else {
    call.out = torch::stable::new_empty(q, {batch, rows_q, heads_q, head_dim_v});
    call.lse = torch::stable::new_empty(q, {batch, heads_q, rows_q}, ScalarType::Float);
  }

  ForwardParams& p = call.params;
  p.q = call.q.const_data_ptr();
  p.k = call.k.const_data_ptr();
  p.v = call.v.const_data_ptr();
  p.out = call.out.mutable_data_ptr();
  p.lse = static_cast<float*>(call.lse.mutable_data_ptr());
  p.q_stride = strides_of(call.q);
  p.k_stride = strides_of(call.k);
  p.v_stride = strides_of(call.v);
  p.out_stride = strides_of(call.out);
  p.lse_batch_stride = packed ? 0 : heads_q * rows_q;
  p.lse_head_stride = rows_q;
  p.cu_seqlens_q = packed ? static_cast<const int32_t*>(cu_seqlens_q->const_data_ptr()) : nullptr;
  p.cu_seqlens_k = packed ? static_cast<const int32_t*>(cu_seqlens_k->const_data_ptr()) : nullptr;
  p.total_q = packed ? rows_q : batch * rows_q;
  p.total_k = packed ? rows_k : batch * rows_k;
  p.batch = static_cast<int>(batch);
  p.seqlen_q = static_cast<int>(seqlen_q);
  p.seqlen_k = static_cast<int>(seqlen_k);
  p.heads_q = static_cast<int>(heads_q);
  p.heads_kv = static_cast<int>(k.size(first + 1));
  p.head_dim = static_cast<int>(q.size(first + 2));
  p.head_dim_v = static_cast<int>(head_dim_v);
  p.dtype = to_dtype(q.scalar_type());
  p.scale = o.scale;
  p.softcap = o.softcap;
  // A bound that reaches past every key is no bound.
  const auto bound = [&](int64_t window) {
    return static_cast<int>(window >= seqlen_q + seqlen_k ? -1 : window);
  };
  p.window_left = bound(o.window_left);
  p.window_right = o.causal ? 0 : bound(o.window_right);
  return call;
}

}  // namespace attnscope::binding
