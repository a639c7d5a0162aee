// Rings of shared-memory buffers between a producer and consumers.
//
// Each buffer has two mbarriers, `full` and `empty`. Use number n of the ring takes buffer n modulo
// kStages. The producer waits for `empty` of the buffer's last use, fills the buffer and completes
// `full`. A consumer waits for `full`, reads and arrives on `empty`.
//
// Invariant: who waits on a barrier waits for each of its phases, in order. A parity wait cannot
// distinguish a phase from the phase two before it. A consumer that skips a phase may pass its next
// wait at once, and read a buffer before it is filled. So a consumer that does not need a buffer
// also waits for `full` before it releases the buffer. tests/stress/test_ring_model.py explores the
// states.
#pragma once

namespace attnscope {

// Use number `count` of a ring: which buffer, and the parity of its barriers' phase.
template <int kStages>
struct Slot {
  int stage;
  int parity;
  __device__ __forceinline__ explicit Slot(int count) {
    __builtin_assume(count >= 0);
    stage = count % kStages;
    parity = count / kStages & 1;
  }
};

}  // namespace attnscope
