// The key blocks that a tile of query rows visits, and which of them need a mask.
#pragma once

namespace attnscope {

// Query i sees keys j with i + shift - left <= j <= i + shift + right, shift = Sk - Sq; a bound of
// -1 means unbounded. Rows and keys count from the start of their sequence. The binding turns a
// bound of Sq + Sk or more into -1, so the sums below stay in range.
struct Window {
  int shift;
  int left;
  int right;

  __device__ __forceinline__ int first_key(int row) const {
    return left < 0 ? 0 : max(0, row + shift - left);
  }
  // One past the last key.
  __device__ __forceinline__ int end_key(int row, int seqlen_k) const {
    return right < 0 ? seqlen_k : max(0, min(seqlen_k, row + shift + right + 1));
  }
  // The queries that see a key: the first, and one past the last.
  __device__ __forceinline__ int first_row(int key) const {
    return right < 0 ? 0 : max(0, key - shift - right);
  }
  __device__ __forceinline__ int end_row(int key, int seqlen_q) const {
    return left < 0 ? seqlen_q : max(0, min(seqlen_q, key - shift + left + 1));
  }
};

struct BlockRange {
  int begin;       // first key block
  int end;         // one past the last
  int full_begin;  // every row sees every key of blocks [full_begin, full_end)
  int full_end;
};

__device__ __forceinline__ BlockRange block_range(const Window& window, int row_begin, int row_end,
                                                  int seqlen_k, int block_n) {
  const int key_begin = window.first_key(row_begin);
  const int key_end = window.end_key(row_end - 1, seqlen_k);
  BlockRange range;
  range.begin = key_begin / block_n;
  range.end = key_end <= key_begin ? range.begin : (key_end + block_n - 1) / block_n;
  range.full_begin = (window.first_key(row_end - 1) + block_n - 1) / block_n;
  range.full_end = window.end_key(row_begin, seqlen_k) / block_n;
  return range;
}

// Blocks of which every step takes `parts`, one after the other: the steps whose part number `part`
// is in the range.
__device__ __forceinline__ BlockRange of_part(const BlockRange& range, int part, int parts) {
  const auto steps = [&](int block) { return (block + parts - 1 - part) / parts; };
  return {steps(range.begin), steps(range.end), steps(range.full_begin), steps(range.full_end)};
}

}  // namespace attnscope
