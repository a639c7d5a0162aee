// Tiles of the Hopper forward kernel, as data. Plain C++.
#pragma once

namespace attnscope::sm90 {

struct ForwardTile {
  int head_dim;      // rounded up; smaller head dims are zero-filled by the copy engine
  int block_m;       // query rows of a thread block, 64 a consumer warpgroup
  int block_n;       // keys of one step
  int q_stages;      // Q tiles in flight: the present one and the next, or one
  int stages;        // K and V tiles in flight
  bool take_turns;   // consumers issue their products one after the other
  bool keep_scores;  // through the softmax; else they are computed again when the maximum rose
  int causal_rows;   // serves causal calls of up to this many query rows only; 0: every call
  const char* reason;

  constexpr int consumers() const { return block_m / 64; }
  constexpr int threads() const { return 128 * (consumers() + 1); }
  constexpr int shared_bytes() const {
    return 2 * head_dim * (q_stages * block_m + 2 * stages * block_n) + 1024;  // and barriers
  }
};

// Reasons: TFLOP/s, or the geometric mean of the speed over the best peer's, on an H200
// (docs/perf-log.md).
inline constexpr ForwardTile kForwardTiles[] = {
    {64, 128, 128, 2, 3, false, true, 1024,
     "causal S = 512, 1024: 199, 283; 192 rows, much of them masked: 188, 259"},
    {64, 192, 128, 2, 3, true, false, 0, "S = 16384: 547; 128 rows 491, 112 keys 531"},
    {128, 128, 128, 2, 2, false, true, 0, "0.94; 112 keys 0.89"},
    {256, 128, 64, 1, 2, false, true, 0, "1.01; 80 keys, scores not kept: 0.98"},
};
inline constexpr int kForwardTileCount = sizeof(kForwardTiles) / sizeof(kForwardTiles[0]);

// The first row that serves the call; -1 if none does.
constexpr int choose_forward_tile(int head_dim, int rows, bool causal) {
  for (int i = 0; i < kForwardTileCount; ++i) {
    const ForwardTile& t = kForwardTiles[i];
    if (head_dim <= t.head_dim && (t.causal_rows == 0 || (causal && rows <= t.causal_rows)))
      return i;
  }
  return -1;
}

constexpr ForwardTile forward_tile(int head_dim, int block_m) {
  for (const ForwardTile& t : kForwardTiles) {
    if (head_dim == t.head_dim && block_m == t.block_m) return t;
  }
  return {};
}

}  // namespace attnscope::sm90
