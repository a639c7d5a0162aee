// The block kernels of one instruction set, by dtype. Included by block_<isa>.cpp alone.
#pragma once

#include "cpu/backward_kernel.h"
#include "cpu/forward_kernel.h"

namespace attnscope::cpu::ATTNSCOPE_ISA {
namespace {

template <class ComputeType, class ElementType>
struct Types {
  using Compute = ComputeType;
  using Element = ElementType;
};

template <class Run>
void with_types(DType dtype, const Run& run) {
  switch (dtype) {
    case DType::kFloat16:
      return run(Types<float, Float16>());
    case DType::kBFloat16:
      return run(Types<float, BFloat16>());
    case DType::kFloat32:
      return run(Types<float, float>());
    case DType::kFloat64:
      return run(Types<double, double>());
  }
}

void forward_block(const ForwardParams& p, const Block& block, void* scratch) {
  with_types(p.dtype, [&](auto types) {
    using T = typename decltype(types)::Compute;
    forward_as<T, typename decltype(types)::Element>(p, block, static_cast<T*>(scratch));
  });
}

void backward_queries(const BackwardParams& p, const Block& block, void* scratch,
                      void* statistics) {
  with_types(p.forward.dtype, [&](auto types) {
    using T = typename decltype(types)::Compute;
    query_gradients<T, typename decltype(types)::Element>(p, block, static_cast<T*>(scratch),
                                                          static_cast<T*>(statistics));
  });
}

void backward_keys(const BackwardParams& p, const Block& block, void* scratch, void* statistics) {
  with_types(p.forward.dtype, [&](auto types) {
    using T = typename decltype(types)::Compute;
    key_gradients<T, typename decltype(types)::Element>(p, block, static_cast<T*>(scratch),
                                                        static_cast<T*>(statistics));
  });
}

}  // namespace

const BlockKernels kBlockKernels{forward_block, backward_queries, backward_keys};

}  // namespace attnscope::cpu::ATTNSCOPE_ISA
