// Rings of shared-memory buffers between a producer and consumers.
//
// Each buffer has two mbarriers, `full` and `empty`. Use number n of the ring takes buffer n modulo
// kStages. The producer waits for `empty` of the use before it, fills the buffer, completes `full`;
// a consumer waits for `full`, reads, arrives on `empty`.
//
// Invariant: who waits on a barrier waits for each of its phases, in order. A parity wait cannot
// tell a phase from the one two before it: whoever leaves one out may pass the next wait at once,
// and read a buffer before it is filled. So a consumer that has no use for a buffer waits for
// `full` all the same before it releases the buffer. tests/test_ring_model.py explores the states.
#pragma once

namespace attnscope {

// Use number `count` of a ring: which buffer, and the parity of its barriers' phase.
template <int kStages>
struct Slot {
  int stage;
  int parity;
  __device__ __forceinline__ explicit Slot(int count)
      : stage(count % kStages), parity(count / kStages & 1) {}
};

}  // namespace attnscope
