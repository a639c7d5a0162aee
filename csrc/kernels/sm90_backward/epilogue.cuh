// Stores fp32 accumulators as rows of a gradient.
#pragma once

#include "kernels/sm90_backward/parts.cuh"
#include "kernels/sm90_backward/shared.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/tma.cuh"

namespace attnscope::sm90 {

// Puts `factor` times a warp's 16 rows of 64 columns into 2 KB of shared memory, swizzled in chunks
// of 8 columns.
template <class Element>
__device__ __forceinline__ void stage_rows(const float* x, float factor, uint32_t shared) {
  const int lane = threadIdx.x % 32;
  // A lane writes row lane % 16 and chunk lane / 16 of a pair.
  const uint32_t write = shared + lane % 16 * 128 + ((lane / 16 ^ lane % 8) * 16);
#pragma unroll
  for (int chunk = 0; chunk < 8; chunk += 2) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = x + 4 * chunk + 2 * i;
      words[i] = ptx::pack<Element>(pair[0] * factor, pair[1] * factor);
    }
    ptx::stmatrix_x4(write ^ chunk * 16, words);
  }
}

// Stores rows that stage_rows put there: eight lanes write 128 contiguous bytes of a row. `out` is
// the first element; rows from `rows` and columns from `columns` on are left out. `lane`: from
// ptx::lane() where a main loop has no register for it.
template <class Element>
__device__ __forceinline__ void copy_rows(int lane, uint32_t shared, Element* out,
                                          int64_t row_stride, int rows, int columns) {
  // A lane reads row lane / 8 and chunk lane % 8.
  const uint32_t read = shared + lane / 8 * 128 + ((lane % 8 ^ lane / 8) * 16);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 value = ptx::load_shared_v4((read ^ i % 2 * 64) + i * 512);
    const int row = lane / 8 + i * 4, column = lane % 8 * 8;
    if (row < rows && column < columns) {
      *reinterpret_cast<uint4*>(out + row * row_stride + column) = value;
    }
  }
}

// Stores `factor` times a warp's 16 rows of 64 columns, by way of 2 KB of shared memory, which only
// this warp uses.
template <class Element>
__device__ __forceinline__ void store_rows(const float* x, float factor, uint32_t shared,
                                           Element* out, int64_t row_stride, int rows,
                                           int columns) {
  stage_rows<Element>(x, factor, shared);
  __syncwarp();
  copy_rows(threadIdx.x % 32, shared, out, row_stride, rows, columns);
  __syncwarp();
}

// dV or dK of the call.
struct KeyGradient {
  const TensorMap& tensor;
  void* data;
  const Strides& stride;
  int columns;
  float factor;
  int number;  // see first_piece
};

__device__ __forceinline__ KeyGradient value_gradient(const BackwardArguments& a) {
  return {a.dv, a.params.dv, a.params.dv_stride, a.params.forward.head_dim_v, 1.0f, 0};
}
__device__ __forceinline__ KeyGradient key_gradient(const BackwardArguments& a) {
  return {a.dk, a.params.dk, a.params.dk_stride, a.params.forward.head_dim, a.scale, 1};
}

// Where row number `row` of tile `t` is.
template <class Element>
__device__ __forceinline__ Element* row_of(const KeyGradient& gradient, const KeyTile& t, int row) {
  return static_cast<Element*>(gradient.data) + t.batch * gradient.stride.batch +
         int64_t{t.k_row + row} * gradient.stride.row + t.head_kv * gradient.stride.head;
}

// Stores a consumer's dV and dK of tile `t`, by way of 2 KB for each warp at `staging`.
template <class Config>
__device__ __forceinline__ void store_key_gradients(const BackwardArguments& a, const KeyTile& t,
                                                    int consumer, uint32_t staging,
                                                    const float (&dk)[Config::kHeadDim / 2],
                                                    const float (&dv)[Config::kHeadDim / 2]) {
  using Element = typename Config::Element;
  const int first = consumer * 64 + threadIdx.x / 32 % 4 * 16;
  const auto store = [&](const float* x, const KeyGradient& gradient) {
    if (Config::kParts && t.split >= 0) {
      float4* const piece = first_piece<Config>(a, t.split, t.part, gradient.number, first);
#pragma unroll
      for (int block = 0; block < Config::kColumnBlocks; ++block) {
        store_piece(piece + block * 256, x + 32 * block);
      }
      return;
    }
    Element* out = row_of<Element>(gradient, t, first);
#pragma unroll
    for (int block = 0; block < Config::kColumnBlocks; ++block) {
      store_rows<Element>(x + 32 * block, gradient.factor, staging, out + block * 64,
                          gradient.stride.row, t.rows - first, gradient.columns - block * 64);
    }
  };
  store(dv, value_gradient(a));
  store(dk, key_gradient(a));
}

// Stores a warp's 16 rows of dV or dK by TMA, from row `first` of tile `t` on. The first lane's
// group of stores reads 2 KB at `staging`. TMA leaves out rows past the end of the tensor. Rows
// past the end of a packed sequence belong to the next one: the warp then stores the rows before
// itself.
template <class Config>
__device__ __forceinline__ void store_key_gradient_by_tma(const BackwardArguments& a,
                                                          const KeyTile& t, int first,
                                                          const KeyGradient& gradient,
                                                          const float* x, uint32_t staging) {
  using Element = typename Config::Element;
  static_assert(Config::kColumnBlocks == 1, "a warp has room for one column block");
  if (Config::kParts && t.split >= 0) {
    store_piece(first_piece<Config>(a, t.split, t.part, gradient.number, first), x);
    ptx::tma_store_commit();
    return;
  }
  const int rows = t.rows - first;
  stage_rows<Element>(x, gradient.factor, staging);
  ptx::fence_proxy_async();
  __syncwarp();
  if (rows >= 16 || (rows > 0 && !a.packed)) {
    if (ptx::lane() == 0) {
      const TensorMap& tensor = gradient.tensor;
      ptx::tma_store_4d(&tensor.map, staging, 0, t.k_row + first, t.head_kv * tensor.head_step,
                        t.batch * tensor.batch_step);
    }
  } else if (rows > 0) {
    copy_rows(ptx::lane(), staging, row_of<Element>(gradient, t, first), gradient.stride.row, rows,
              gradient.columns);
  }
  ptx::tma_store_commit();
}

// Puts a part of a warpgroup's dQ, or of dQ transposed, into shared memory: contiguous shares of
// the warps, see kernel.cuh.
template <class Config>
__device__ __forceinline__ void stage_query_part(uint32_t staging, int part, const float* dq) {
  constexpr int kGroups = Config::kPartFloats / (4 * 32 * 4);  // of 4 floats of each lane
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const uint32_t address =
      staging + part * (Config::kPartFloats * 4) + warp * (kGroups * 512) + lane * 16;
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    ptx::store_shared_v4(address + n * 512, dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
  }
}

// A lane's first four of a warp's 16 rows of a part of dQ, which begins at `gradient`.
template <class Config>
__device__ __forceinline__ const float4* query_part(const float* gradient, int part) {
  const int thread = ptx::thread() % 128;
  return reinterpret_cast<const float4*>(gradient + part * Config::kPartFloats +
                                         thread / 32 * 1024 + thread % 32 * 4);
}

// Loads such rows from L2: TMA has added to them.
__device__ __forceinline__ void load_query_part(float (&x)[32], const float4* part) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 value = __ldcg(part + i * 32);
    x[4 * i] = value.x;
    x[4 * i + 1] = value.y;
    x[4 * i + 2] = value.z;
    x[4 * i + 3] = value.w;
  }
}

// Stores such rows of part number `part` as rows of dq. `b` is the block of queries.
template <class Config>
__device__ __forceinline__ void store_query_part(const BackwardArguments& a, const float (&x)[32],
                                                 const RowBlock& b, int head, int part,
                                                 uint32_t staging) {
  using Element = typename Config::Element;
  const int unit = Config::kUnits == 1 ? 0 : part / Config::kColumnBlocks;
  const int row = unit * 64 + ptx::thread() / 32 % 4 * 16;
  const int column = (part - unit * Config::kColumnBlocks) * 64;
  if (row >= b.rows) return;
  const Strides& stride = a.params.dq_stride;
  Element* out = static_cast<Element*>(a.params.dq) + b.segment.batch * stride.batch +
                 head * stride.head + (b.segment.row + b.first + row) * stride.row + column;
  store_rows<Element>(x, a.scale, staging, out, stride.row, b.rows - row,
                      a.params.forward.head_dim - column);
}

}  // namespace attnscope::sm90
