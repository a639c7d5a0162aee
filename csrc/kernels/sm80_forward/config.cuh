// Tile table of the portable forward kernel, read by the launcher, the occupancy table and the
// tests. Plain C++.
#pragma once

namespace attnscope::sm80 {

struct ForwardTile {
  int head_dim;  // rounded up; smaller head dims are zero-filled
  int block_m;   // query rows per thread block
  int block_n;   // keys per step
  int warps;
  int stages;           // K and V tiles in flight
  bool q_in_registers;  // keep Q fragments for the whole tile, or reload them per key block
  int blocks_per_sm;    // minimum passed to __launch_bounds__
  const char* reason;

  constexpr int threads() const { return 32 * warps; }
  constexpr int shared_bytes() const { return 2 * head_dim * (block_m + 2 * stages * block_n); }
};

// Chosen by the geometric mean speedup over FlashAttention-2 on an H200: S = 512, 2048, 8192,
// causal and not (docs/perf-log.md). With 32 rows per warp, each K or V fragment feeds two
// products.
// Deliberately not `inline`: the dynamic linker would merge the tables of two builds loaded in one
// process.
constexpr ForwardTile kForwardTiles[] = {
    {64, 128, 64, 4, 2, true, 2, "1.10; 96 keys 1.09, 80 keys 1.09, 96 keys without Q kept 1.08"},
    {96, 128, 64, 4, 1, false, 2, "1.05; two stages 1.02, Q kept 0.94"},
    {128, 128, 48, 4, 2, false, 2, "1.14; 64 keys in one stage 1.16, but it spills; 80 keys 1.02"},
    {192, 64, 64, 4, 1, true, 2, "1.17; Q read again 1.11, 32 rows a warp by 32 keys 1.08"},
    {256, 64, 64, 4, 1, false, 2, "1.07; 48 keys 1.03, 128 rows by 32 keys in 8 warps 0.90"},
};

constexpr int kForwardTileCount = sizeof(kForwardTiles) / sizeof(kForwardTiles[0]);

// Table row for a head dim (the larger of Q's and V's); -1 if there is none.
constexpr int forward_row(int head_dim) {
  for (int row = 0; row < kForwardTileCount; ++row) {
    if (head_dim <= kForwardTiles[row].head_dim) return row;
  }
  return -1;
}

}  // namespace attnscope::sm80
