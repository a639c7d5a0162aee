// Tiles of the portable forward kernel, as data: the launcher, the occupancy table and the tests
// read the same rows. Plain C++.
#pragma once

namespace attnscope::sm80 {

struct ForwardTile {
  int head_dim;       // rounded up; smaller head dims are zero-filled
  int block_m;        // query rows of a thread block
  int block_n;        // keys of one step
  int warps;
  int stages;         // K and V tiles in flight
  bool q_in_registers;  // Q fragments kept for the whole tile, or read again for every key block
  int blocks_per_sm;  // what __launch_bounds__ asks the compiler for
  const char* reason;

  constexpr int threads() const { return 32 * warps; }
  constexpr int shared_bytes() const { return 2 * head_dim * (block_m + 2 * stages * block_n); }
};

inline constexpr ForwardTile kForwardTiles[] = {
    {64, 128, 112, 4, 2, false, 2, "placeholder"},
    {96, 128, 64, 4, 1, false, 2, "placeholder"},
    {128, 128, 48, 4, 2, false, 2, "placeholder"},
    {192, 64, 64, 4, 1, false, 2, "placeholder"},
    {256, 64, 64, 4, 1, false, 2, "placeholder"},
};

constexpr ForwardTile forward_tile(int head_dim) {
  for (const ForwardTile& tile : kForwardTiles) {
    if (head_dim <= tile.head_dim) return tile;
  }
  return {};
}

}  // namespace attnscope::sm80
