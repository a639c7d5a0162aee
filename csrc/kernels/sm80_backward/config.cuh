// Tile table of the portable backward kernel, read by the launcher, the occupancy table and the
// tests. Plain C++.
#pragma once

namespace attnscope::sm80 {

struct BackwardTile {
  int head_dim;       // rounded up; smaller head dims are zero-filled
  int block_m;        // query rows per step
  int block_n;        // keys per thread block
  int warps;          // half of them compute P and dV, the others dS, dK and dQ
  int stages;         // Q and dO tiles in flight
  int blocks_per_sm;  // minimum passed to __launch_bounds__
  const char* reason;

  constexpr int threads() const { return 32 * warps; }
  // A warp has 32 keys; this many warps of a group share them, each with its own columns.
  constexpr int column_warps() const { return warps / 2 * 32 / block_n; }
  constexpr int shared_bytes() const {
    const int score_tiles = column_warps() > 1 ? 3 : 2;
    return 4 * head_dim * (block_n + stages * block_m) + 2 * score_tiles * block_m * block_n +
           8 * stages * block_m + 128;
  }
};

// Deliberately not `inline`, see sm80_forward/config.cuh. Rows of a head dim stand in the order of
// preference: a device takes the first that fits in the shared memory of a thread block.
constexpr BackwardTile kBackwardTiles[] = {
    {64, 128, 128, 8, 2, 1, "163 KB"},
    {64, 64, 128, 8, 2, 1, "for devices with 99 KB of shared memory"},
    {96, 64, 128, 8, 2, 1, "129 KB"},
    {128, 64, 128, 8, 2, 1, "161 KB"},
    {128, 32, 64, 4, 2, 1, "for devices with 99 KB of shared memory"},
    {192, 64, 64, 8, 2, 1, "for devices with 227 KB of shared memory"},
    {256, 64, 64, 8, 2, 1, "for devices with 227 KB of shared memory"},
    {256, 32, 64, 8, 2, 1, "for devices with 163 KB of shared memory"},
    {256, 32, 32, 4, 1, 1, "for devices with 99 KB of shared memory"},
};

constexpr int kBackwardTileCount = sizeof(kBackwardTiles) / sizeof(kBackwardTiles[0]);

// Table row for a head dim (the larger of Q's and V's) on a device whose thread blocks may have
// `shared_bytes` of shared memory; -1 if there is none.
constexpr int backward_row(int head_dim, int shared_bytes) {
  for (int row = 0; row < kBackwardTileCount; ++row) {
    const BackwardTile& tile = kBackwardTiles[row];
    if (head_dim <= tile.head_dim && tile.shared_bytes() <= shared_bytes) return row;
  }
  return -1;
}

// Whether a Hopper card takes the row. The others are for cards with less shared memory.
constexpr bool serves_hopper(int row) {
  return backward_row(kBackwardTiles[row].head_dim, 227 * 1024) == row;
}

}  // namespace attnscope::sm80
