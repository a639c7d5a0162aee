// Marks that the roles of a kernel write to global memory: when each state began. Only with
// -DATTNSCOPE_TIMELINE=<element>; otherwise every call is empty.
//
// Layout    uint32 words in rows of 16. Each block has one row of its own, then for each lane (a
//           role) one end row, tile_rows + 1 rows for its tiles and step_rows + 1 for its steps.
// Marks     the lane, the number of the tile or step, and the word address a mark. A mark is a
//           clock reading and a store, without atomics or waits. A word of 0 is no mark.
// Overflow  rows past the capacity go to the spare last row; the end row counts all rows.
// Reader    python/attnscope/timeline/recording.py.
#pragma once

#include <cstdint>

#ifdef ATTNSCOPE_TIMELINE
#include "ptx/clock.cuh"
#endif

namespace attnscope {

#ifdef ATTNSCOPE_TIMELINE

struct TimelineBuffer {
  uint32_t* words;
  int lanes;
  int tile_rows;
  int step_rows;
};

__constant__ TimelineBuffer g_timeline;

// The marks of one lane. Only the thread whose `elected` is true writes.
class Timeline {
 public:
  __device__ __forceinline__ Timeline(int lane, bool elected) : elected_(elected) {
    const int lane_rows = g_timeline.tile_rows + g_timeline.step_rows + 3;
    first_row_ = blockIdx.x * (1 + g_timeline.lanes * lane_rows) + 1 + lane * lane_rows;
  }

  // A state of tile number `tile` begins.
  __device__ __forceinline__ void tile(int tile, int mark) const {
    put(tile_row(tile), mark, now());
  }
  // A state of step number `step` begins.
  __device__ __forceinline__ void step(int step, int mark) const {
    put(first_row_ + 2 + g_timeline.tile_rows + min(step, g_timeline.step_rows), mark, now());
  }
  // What tile number `tile` is.
  __device__ __forceinline__ void note(int tile, int word, int value) const {
    put(tile_row(tile), word, value);
  }
  // The lane has done `tiles` tiles and `steps` steps.
  __device__ __forceinline__ void finish(int tiles, int steps) const {
    put(first_row_, 5, tiles);
    put(first_row_, 6, steps);
    put_clocks(first_row_);
  }
  // The block begins. Called before the roles diverge, so that no mark is earlier.
  static __device__ __forceinline__ void begin(bool elected) {
    const Timeline timeline(0, elected);
    timeline.put(timeline.first_row_ - 1, 5, 1);
    timeline.put_clocks(timeline.first_row_ - 1);
  }

 private:
  static __device__ __forceinline__ uint32_t now() { return max(ptx::clock_low(), 1u); }
  __device__ __forceinline__ int tile_row(int tile) const {
    return first_row_ + 1 + min(tile, g_timeline.tile_rows);
  }
  __device__ __forceinline__ void put_clocks(int row) const {
    const uint64_t cycles = clock64(), nanoseconds = ptx::global_timer();
    put(row, 0, ptx::sm_id());
    put(row, 1, static_cast<uint32_t>(cycles));
    put(row, 2, static_cast<uint32_t>(cycles >> 32));
    put(row, 3, static_cast<uint32_t>(nanoseconds));
    put(row, 4, static_cast<uint32_t>(nanoseconds >> 32));
  }
  __device__ __forceinline__ void put(int row, int word, uint32_t value) const {
    if (elected_) {
      asm volatile("st.global.u32 [%0], %1;" ::"l"(g_timeline.words + int64_t{row} * 16 + word),
                   "r"(value)
                   : "memory");
    }
  }

  int first_row_;
  bool elected_;
};

#else

class Timeline {
 public:
  __device__ __forceinline__ Timeline(int, bool) {}
  __device__ __forceinline__ void tile(int, int) const {}
  __device__ __forceinline__ void step(int, int) const {}
  __device__ __forceinline__ void note(int, int, int) const {}
  __device__ __forceinline__ void finish(int, int) const {}
  static __device__ __forceinline__ void begin(bool) {}
};

#endif

}  // namespace attnscope
