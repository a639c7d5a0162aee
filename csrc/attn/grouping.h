// Query heads that share a key head, side by side in a tile.
#pragma once

#ifdef __CUDACC__
#define ATTNSCOPE_HOST_DEVICE __host__ __device__
#else
#define ATTNSCOPE_HOST_DEVICE
#endif

namespace attnscope {

// A row of the tile is a (query, head) pair; the 1 << log2 heads of a query are adjacent. A
// sequence has 1 << log2 rows for each query.
struct Grouping {
  int log2;

  ATTNSCOPE_HOST_DEVICE int rows(int queries) const { return queries << log2; }
  ATTNSCOPE_HOST_DEVICE int query(int row) const { return row >> log2; }
  ATTNSCOPE_HOST_DEVICE int head(int row) const { return row & ((1 << log2) - 1); }
};

}  // namespace attnscope
