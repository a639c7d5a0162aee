// Runs kernels on the CPU: each thread of a block is a coroutine, and warp instructions are
// executed when all 32 lanes have reached them. Warps take turns in random order. Blocks run one
// after the other, in order.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define __CUDACC__
#define __device__
#define __host__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_assume(condition)

using std::max;
using std::min;

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct Index {
  int x, y;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

constexpr int kSharedBytes = 232448, kStackBytes = 128 << 10, kBarriers = 16;
inline char* shared;  // kSharedBytes, the kernel's dynamic shared memory

struct Warp {
  int arrived = 0;
  int generation = 0;
  const void* operation = nullptr;  // the instruction that lanes have reached
  void* operands[32] = {};
};

struct Barrier {
  int arrived = 0;
  int generation = 0;
};

struct Copy {
  void* to;
  const void* from;  // null: zeros
};

struct Thread {
  ucontext_t context;  // of the start
  jmp_buf at;          // later: jumps need no system call
  std::unique_ptr<char[]> stack;
  Index index;
  bool started, finished;
  const int* waits_for = nullptr;  // a generation, and its value while the thread waits
  int value = 0;
  std::vector<Copy> copies;               // not committed
  std::vector<std::vector<Copy>> groups;  // committed
};

inline std::vector<Thread> threads;
inline std::vector<Warp> warps;
inline Barrier barriers[kBarriers];
inline jmp_buf scheduler;
inline int current = 0;
inline std::function<void()> kernel;
inline std::mt19937 random_engine{1};
inline long switches = 0;

[[noreturn]] inline void fail(const char* message) {
  std::printf("emulator: %s (block %d, thread %d %d)\n", message, blockIdx.x, threadIdx.x,
              threadIdx.y);
  std::fflush(stdout);
  std::_Exit(3);
}

inline Thread& self() { return threads[current]; }

inline void yield() {
  if (_setjmp(self().at) == 0) _longjmp(scheduler, 1);
}

// Runs a thread until it yields.
inline void resume(Thread& thread) {
  if (_setjmp(scheduler) != 0) return;
  if (thread.started) _longjmp(thread.at, 1);
  thread.started = true;
  setcontext(&thread.context);
}

// Waits until `generation` changes.
inline void wait_for(const int& generation) {
  self().waits_for = &generation;
  self().value = generation;
  while (generation == self().value) yield();
  self().waits_for = nullptr;
}

// A warp instruction: `execute` gets the operands of 32 lanes.
template <class Operand, class Execute>
void warp_instruction(const void* operation, Operand& operand, Execute execute) {
  Warp& warp = warps[current / 32];
  if (warp.arrived > 0 && warp.operation != operation) fail("lanes at different instructions");
  warp.operation = operation;
  warp.operands[current % 32] = &operand;
  if (++warp.arrived < 32) {
    wait_for(warp.generation);
    return;
  }
  Operand* operands[32];
  for (int lane = 0; lane < 32; ++lane) operands[lane] = static_cast<Operand*>(warp.operands[lane]);
  execute(operands);
  warp.arrived = 0;
  ++warp.generation;
}

inline void barrier(int id, int count) {
  Barrier& b = barriers[id];
  if (++b.arrived < count) {
    wait_for(b.generation);
    return;
  }
  b.arrived = 0;
  ++b.generation;
}

inline char* shared_at(uint32_t address, int bytes) {
  if (address % bytes != 0 || address + bytes > kSharedBytes) fail("bad shared address");
  return shared + address;
}

inline void entry() {
  kernel();
  self().finished = true;
  while (true) yield();
}

inline void run_block() {
  std::memset(shared, 0xff, kSharedBytes);  // NaN
  const int count = static_cast<int>(threads.size());
  for (Thread& t : threads) {
    t.started = t.finished = false;
    t.waits_for = nullptr;
    getcontext(&t.context);
    t.context.uc_stack.ss_sp = t.stack.get();
    t.context.uc_stack.ss_size = kStackBytes;
    t.context.uc_link = nullptr;
    makecontext(&t.context, entry, 0);
  }
  int running = count;
  for (int idle = 0; running > 0;) {
    const int warp = random_engine() % (count / 32);
    bool progress = false;
    for (int rounds = 1 + random_engine() % 64; rounds > 0; --rounds) {
      bool moved = false;
      for (int i = warp * 32; i < warp * 32 + 32; ++i) {
        Thread& t = threads[i];
        if (t.finished || (t.waits_for != nullptr && *t.waits_for == t.value)) continue;
        current = i;
        threadIdx = t.index;
        resume(t);
        ++switches;
        moved = true;
        running -= t.finished;
      }
      progress |= moved;
      if (!moved) break;
    }
    idle = progress ? 0 : idle + 1;
    if (idle > 10000) fail("deadlock");
  }
  for (Thread& t : threads) {
    if (!t.groups.empty() || !t.copies.empty()) {
      for (const auto& group : t.groups) {
        if (!group.empty()) fail("a copy was never waited for");
      }
      t.groups.clear();
    }
  }
}

// Launches `body` as a kernel of `blocks` blocks of x * y threads.
inline void launch(int blocks, int x, int y, std::function<void()> body) {
  kernel = std::move(body);
  threads.resize(x * y);
  warps.assign(x * y / 32, {});
  std::fill(barriers, barriers + kBarriers, Barrier{});
  for (int i = 0; i < x * y; ++i) {
    if (!threads[i].stack) threads[i].stack.reset(new char[kStackBytes]);
    threads[i].index = {i % x, i / x};
  }
  blockDim = {x, y};
  gridDim = {blocks, 1};
  for (int block = 0; block < blocks; ++block) {
    blockIdx = {block, 0};
    run_block();
  }
}

}  // namespace emulator

inline void __syncthreads() { emulator::barrier(0, static_cast<int>(emulator::threads.size())); }
inline void __syncwarp() {
  static const char operation = 0;
  int none = 0;
  emulator::warp_instruction(&operation, none, [](int**) {});
}
inline float __shfl_xor_sync(unsigned, float value, int distance) {
  static const char operation = 0;
  struct Operand {
    float value, result;
    int distance;
  } operand{value, 0, distance};
  emulator::warp_instruction(&operation, operand, [](Operand** lanes) {
    for (int i = 0; i < 32; ++i) lanes[i]->result = lanes[i ^ lanes[i]->distance]->value;
  });
  return operand.result;
}
inline int vote(int value, bool all) {
  static const char operation = 0;
  struct Operand {
    int value;
    bool all;
  } operand{value, all};
  emulator::warp_instruction(&operation, operand, [](Operand** lanes) {
    int any = 0, every = 1;
    for (int i = 0; i < 32; ++i) any |= lanes[i]->value, every &= lanes[i]->value;
    for (int i = 0; i < 32; ++i) lanes[i]->value = lanes[i]->all ? every : any;
  });
  return operand.value;
}
inline bool __any_sync(unsigned, bool value) { return vote(value, false); }
inline bool __all_sync(unsigned, bool value) { return vote(value, true); }
inline unsigned __ballot_sync(unsigned, bool value) {
  static const char operation = 0;
  unsigned bits = value;
  emulator::warp_instruction(&operation, bits, [](unsigned** lanes) {
    unsigned all = 0;
    for (int i = 0; i < 32; ++i) all |= *lanes[i] << i;
    for (int i = 0; i < 32; ++i) *lanes[i] = all;
  });
  return bits;
}
inline int __shfl_sync(unsigned, int value, int lane) {
  static const char operation = 0;
  struct Operand {
    int value, lane;
  } operand{value, lane};
  emulator::warp_instruction(&operation, operand, [](Operand** lanes) {
    int values[32];
    for (int i = 0; i < 32; ++i) values[i] = lanes[i]->value;
    for (int i = 0; i < 32; ++i) lanes[i]->value = values[lanes[i]->lane];
  });
  return operand.value;
}
template <class Value>
Value __ldcg(const Value* address) {
  return *address;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(uint64_t{a} * b >> 32);
}
inline void __nanosleep(unsigned) {
  static long calls = 0;
  if (++calls > 1000000) emulator::fail("waits for a later block");
  emulator::yield();
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
