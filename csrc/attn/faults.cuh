// Delays at the steps of a kernel's protocol: copies, releases, tiles handed out. Only with
// -DATTNSCOPE_FAULTS; otherwise every call is empty. A protocol is right if no delay changes a bit
// of the output. `attnscope stress` builds the library with it, sets plans and compares.
//
// Late copies   A copy that is late alone, behind later ones, is handed to another warp: the one
//               that issues copies must go on. The mailbox has room for one.
// Planted       -DATTNSCOPE_UNGUARDED_RING takes the invariant of attn/ring.cuh out again, to see
//               that the stress finds it. -DATTNSCOPE_PLANTED_RACE lets the scheduler write a
//               tile's description without a wait for its readers, to see that racecheck finds it.
#pragma once

#include <cstdint>

#ifdef ATTNSCOPE_FAULTS
#include "ptx/clock.cuh"
#endif

namespace attnscope {

enum class Fault : uint32_t {
  kLateCopy,     // K or V arrives after copies issued later
  kCopy,         // the producer of K and V pauses before a copy
  kQuery,        // the producer of Q pauses before a copy
  kRelease,      // a consumer releases a K or V buffer late
  kReleaseTile,  // a reader of a tile's description releases it late
  kTile,         // a tile is handed out late
  kCheck,        // V is checked late
};

#ifdef ATTNSCOPE_UNGUARDED_RING
constexpr bool kGuardedRing = false;
#else
constexpr bool kGuardedRing = true;
#endif

#ifdef ATTNSCOPE_PLANTED_RACE
constexpr bool kGuardedTiles = false;
#else
constexpr bool kGuardedTiles = true;
#endif

#ifdef ATTNSCOPE_FAULTS

constexpr bool kFaults = true;

struct FaultPlan {
  uint32_t seed;
  uint32_t kinds;   // bit i: Fault i may happen
  uint32_t rate;    // of 65,536 occasions
  uint32_t cycles;  // at most
};

__constant__ FaultPlan g_faults;

// The delay of occasion number `count` of a warp: 0 for none.
__device__ __forceinline__ uint32_t fault_cycles(Fault fault, int count) {
  const uint32_t kind = static_cast<uint32_t>(fault);
  if (!(g_faults.kinds >> kind & 1u)) return 0;
  uint32_t h = g_faults.seed * 0x9E3779B1u ^ (blockIdx.x * 0x85EBCA77u + threadIdx.x / 32);
  h = (h ^ h >> 15) * 0xC2B2AE3Du + static_cast<uint32_t>(count) * 8 + kind;
  h = (h ^ h >> 13) * 0x27D4EB2Fu;
  h = (h ^ h >> 16) * 0x165667B1u;
  h ^= h >> 15;
  return (h & 0xffffu) < g_faults.rate ? (h >> 16) * uint64_t{g_faults.cycles} >> 16 : 0;
}

__device__ __forceinline__ void fault_wait(uint32_t cycles) {
  const uint32_t start = ptx::clock_low();
  while (ptx::clock_low() - start < cycles) {
  }
}

__device__ __forceinline__ void inject(Fault fault, int count) {
  fault_wait(fault_cycles(fault, count));
}

#else

constexpr bool kFaults = false;

__device__ __forceinline__ void inject(Fault, int) {}

#endif

}  // namespace attnscope
