// Tiles of the Hopper forward kernel, as data. Plain C++.
#pragma once

namespace attnscope::sm90 {

struct ForwardTile {
  int head_dim;          // rounded up; smaller head dims are zero-filled by the copy engine
  int block_m;           // query rows of a thread block, 64 a consumer warpgroup
  int block_n;           // keys of one step
  int stages;            // K and V tiles in flight
  bool take_turns;       // consumers issue their products one after the other
  bool overlap_maximum;  // look for a new maximum beside the exponentials, not before them
  const char* reason;

  constexpr int consumers() const { return block_m / 64; }
  constexpr int threads() const { return 128 * (consumers() + 1); }
  constexpr int shared_bytes() const {
    return 2 * head_dim * (block_m + 2 * stages * block_n) + 1024;  // and barriers
  }
};

inline constexpr ForwardTile kForwardTiles[] = {
    {64, 192, 128, 2, true, false, "placeholder"},
    {128, 128, 128, 2, false, true, "placeholder"},
    {256, 128, 80, 2, false, false, "placeholder"},
};

constexpr ForwardTile forward_tile(int head_dim) {
  for (const ForwardTile& tile : kForwardTiles) {
    if (head_dim <= tile.head_dim) return tile;
  }
  return {};
}

}  // namespace attnscope::sm90
