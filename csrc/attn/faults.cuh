// Delays at the steps of a kernel's protocol: copies, releases, tiles handed out. Only with
// -DATTNSCOPE_FAULTS; otherwise every call is empty. A protocol is correct if no delay changes a
// bit of the output. `attnscope stress` builds a library with this flag, sets plans and compares.
//
// Late copies   Another warp issues a copy that is late, since the producer must go on to later
//               copies. The mailbox has room for one.
// Planted       -DATTNSCOPE_UNGUARDED_RING removes the guard of attn/ring.cuh, to test that the
//               stress finds the race. In the backward, dS may be overwritten before its last read,
//               and dQ is added out of turn.
//               -DATTNSCOPE_PLANTED_RACE lets the scheduler write a tile's description without
//               waiting for its readers, to test that racecheck finds it.
#pragma once

#include <cstdint>

#ifdef ATTNSCOPE_FAULTS
#include <cuda_runtime.h>

#include <vector>

#include "ptx/clock.cuh"
#endif

namespace attnscope {

enum class Fault : uint32_t {
  kLateCopy,     // a copy of K or V (backward: or Q, dO) arrives after later copies
  kCopy,         // their producer pauses before a copy
  kQuery,        // forward: the producer of Q pauses before a copy
  kRelease,      // a consumer releases a buffer late
  kReleaseTile,  // a reader of a tile's description releases it late
  kTile,         // a tile is handed out late; backward: or prepared late
  kScores,       // backward: P, dS or dQ is passed on late
  kAdd,          // backward: dQ is added late to global memory
  kTurn,         // backward: a turn to add dQ is taken or passed on late
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

// racecheck follows an mbarrier arrival for the lane that arrives, and not what other lanes of the
// warp read before a __syncwarp. For that tool every lane arrives where a warp has read ordinary
// data; 32 arrivals at one barrier take time, so elsewhere one lane does.
#ifdef ATTNSCOPE_RACECHECK
constexpr bool kEveryLaneArrives = true;
#else
constexpr bool kEveryLaneArrives = false;
#endif
constexpr int kWarpArrivals = kEveryLaneArrives ? 32 : 1;

#ifdef ATTNSCOPE_FAULTS

struct FaultPlan {
  uint32_t seed;
  uint32_t kinds;   // bit i: Fault i may happen
  uint32_t rate;    // of 65,536 occasions
  uint32_t cycles;  // at most
};

// Each source file has a plan of its own.
static __constant__ FaultPlan g_faults;

using FaultSetter = cudaError_t (*)(const FaultPlan&);

// Those of all source files.
inline std::vector<FaultSetter>& fault_setters() {
  static std::vector<FaultSetter> setters;
  return setters;
}

static const bool g_has_setter = [] {
  fault_setters().push_back(
      [](const FaultPlan& plan) { return cudaMemcpyToSymbol(g_faults, &plan, sizeof(plan)); });
  return true;
}();

// The delay of occasion number `count` of a warp: 0 for none.
__device__ __forceinline__ uint32_t fault_cycles(Fault fault, int count) {
  const uint32_t kind = static_cast<uint32_t>(fault);
  if (!(g_faults.kinds >> kind & 1u)) return 0;
  uint32_t h = g_faults.seed * 0x9E3779B1u ^ (blockIdx.x * 0x85EBCA77u + threadIdx.x / 32);
  h = (h ^ h >> 15) * 0xC2B2AE3Du + static_cast<uint32_t>(count) * 16 + kind;
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

__device__ __forceinline__ void inject(Fault, int) {}

#endif

}  // namespace attnscope
