// What the roles of the wide kernel share, see wide.cuh.
#pragma once

#include "kernels/sm90_backward/barriers.cuh"
#include "kernels/sm90_backward/shared.cuh"
#include "ptx/cluster.cuh"

namespace attnscope::sm90 {

// A tile of keys as describe_tile knows it: of a cluster, with 64 keys for each thread block.
template <bool kParts_>
struct WideTileConfig {
  static constexpr int kBlockM = 64;
  static constexpr int kBlockN = 64 * kWideRanks;
  static constexpr int kConsumers = kWideRanks;
  static constexpr bool kSeenToEnd = false, kParts = kParts_;
  static constexpr int kAdders = kWideRanks;  // to a ticket, for each tile
};

template <class Element_, int kRow>
struct WideConfig {
  using Element = Element_;
  static constexpr BackwardTile kTile = kBackwardTiles[kRow];
  static constexpr int kRanks = kWideRanks;  // thread blocks of a cluster
  static constexpr int kHeadDim = kTile.head_dim;
  static constexpr int kColumnBlocks = kHeadDim / 64;
  static constexpr int kBlockM = 64;
  static constexpr int kBlockN = 64;  // keys of a thread block
  static constexpr int kStages = kTile.stages;
  // dO comes in parts of columns. What fits: with two ranks, head dim 256 has room for three
  // halves.
  static constexpr int kDoutParts = kTile.dout_parts();
  static constexpr int kDoutStages = kTile.dout_stages();         // buffers for parts
  static constexpr int kDoutBlocks = kHeadDim / 64 / kDoutParts;  // column blocks of a part
  // dQ leaves by way of shared memory where there is room, else from registers.
  static constexpr bool kStagesGradient = kTile.stages_gradient();
  static constexpr int kGradientStages = 2;
  static constexpr int kStagedFloats = 512;
  static constexpr int kScoreStages = kTile.score_stages();
  static constexpr int kThreads = kTile.threads();
  static constexpr bool kParts = false;  // see WithParts
  // Each multiprocessor has 512 registers for the four threads of one number. The first warpgroup
  // loads, the others see wide.cuh.
  static constexpr int kProducerRegisters = 32;
  static constexpr int kValueRegisters = 208;
  static constexpr int kKeyRegisters = 208;
  static constexpr int kQueryRegisters = 64;
  static constexpr int kRowBytes = 128;  // one swizzled row of a 64-element column block
  static constexpr int kColumnBytes = 64 * kRowBytes;       // of a column block of 64 rows
  static constexpr int kTileBytes = 2 * 64 * kHeadDim;      // of K, V, Q or dO
  static constexpr int kScoreBytes = 2 * 64 * 64;           // of a rank's dS
  static constexpr int kStatisticsBytes = 4 * 2 * kBlockM;  // lse_log2 and delta
  // dQ [64, kHeadDim] is computed in products of kProductColumns columns. Two ranks compute each
  // half of them; of three column blocks they take turns at the second.
  static constexpr int kProductColumns = 64;
  // dV and dK are accumulated in slices of columns: the compiler takes a product whose accumulators
  // fit into the registers of the launch, 128.
  static constexpr int kSlices = kDoutParts;  // a part of dO is for a slice of dV
  static constexpr int kSliceColumns = kHeadDim / kSlices;
  static constexpr int kPeerBlocks = 2;                       // column blocks of the other rank's K
  static constexpr int kGradientFloats = kBlockM * kHeadDim;  // of dQ of a block
  static constexpr int kUnits = 1;                            // of rows of it
  static constexpr int kPartFloats = 64 * 64;                 // of a column block of it

  static_assert(kHeadDim == 192 || kHeadDim == 256, "two ranks share 3 or 4 column blocks");
  static_assert(kRanks == 2, "a rank has one peer");
};

// make_probabilities packs P, and leaves dS / dT P in fp32.
template <class Config>
struct WideWeights : Config {
  static constexpr bool kEarlyValues = true;
};

// The scores of 16 queries.
template <class Config>
struct WideQuarter : Config {
  static constexpr int kBlockM = 16;
};

// Barriers are named by the event that completes them. Those marked with * count the arrivals of
// both ranks: what they guard is written to both, or by the other.
template <class Config>
struct WideShared {
  using Element = typename Config::Element;
  static constexpr int kTileElements = 64 * Config::kHeadDim;
  static constexpr int kQueryBuffers = Config::kStages, kDoutBuffers = Config::kDoutStages;
  static constexpr int kScoreBuffers = Config::kScoreStages;
  // K and V of a tile; the next one's are in the other's place. So K comes when the last dP is
  // done, and V after the last dQ.
  alignas(1024) Element keys[2][kTileElements];
  // The columns of the other rank's K for this rank's part of dQ.
  alignas(1024) Element peer_k[Config::kPeerBlocks * 64 * 64];
  alignas(1024) Element q[kQueryBuffers][kTileElements];
  alignas(1024) Element dout[kDoutBuffers][64 * 64 * Config::kDoutBlocks];
  alignas(1024) Element ds[kScoreBuffers][Config::kRanks][64 * 64];  // dS [queries, a rank's keys]
  // P, or with softcap P (1 - tanh^2); at the end of a tile: dV on the way out.
  alignas(1024) uint4 weights[4][128];
  alignas(1024) Element dk[64 * 64];  // dK on the way out
  static constexpr int kStaged =      // dQ of each warp, on its way out
      Config::kStagesGradient ? 4 * Config::kGradientStages * Config::kStagedFloats : 1;
  alignas(128) float dq[kStaged];
  alignas(128) float statistics[kQueryBuffers][2][Config::kBlockM];  // lse_log2, delta
  KeyTile tile[kTileBuffers];
  alignas(16) int taken[4];  // rank 0: the index of a tile, on its way to rank 1
  alignas(16) int index[4];  // rank 1: the same, received
  int number;                // of the tile that the scheduler takes next
  uint64_t tile_full[kTileBuffers], tile_empty[kTileBuffers];
  uint64_t tile_wanted;              // all loads of a tile have been issued
  uint64_t index_full, index_empty;  // of rank 1, of rank 0
  uint64_t k_full, v_full, peer_full;
  uint64_t k_empty;  // K and peer_k
  uint64_t v_empty;
  uint64_t q_full[kQueryBuffers];   // Q and statistics
  uint64_t q_empty[kQueryBuffers];  // *
  uint64_t dout_full[kDoutBuffers];
  uint64_t dout_empty[kDoutBuffers];  // *
  uint64_t weights_full, weights_empty;
  uint64_t ds_full[kScoreBuffers];             // dS of all ranks
  uint64_t ds_empty[kScoreBuffers];            // *
  uint64_t turn_full, turn_added, turn_empty;  // calls with turns
#ifdef ATTNSCOPE_FAULTS
  LateLoad late_load;
#endif
};

// A position in the ring of parts of dO: as Slot, without a division.
template <class Config>
struct DoutRing {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void advance(int parts) {
    const bool wraps = stage + parts >= Config::kDoutStages;
    stage += parts - (wraps ? Config::kDoutStages : 0);
    parity ^= static_cast<int>(wraps);
  }
  __device__ __forceinline__ DoutRing after(int parts) const {
    DoutRing next = *this;
    next.advance(parts);
    return next;
  }
};

// What the three consumers do alike.
template <class Config>
class WideRole {
 protected:
  using Element = typename Config::Element;
  static constexpr int kBlockM = Config::kBlockM;

  __device__ __forceinline__ WideRole(const BackwardArguments& a, WideShared<Config>& s, int rank)
      : a(a), s(s), rank(rank) {}

  // Waits for tile number `tiles`. False if there is none.
  __device__ __forceinline__ bool take_tile() {
    wait(s.tile_full[tiles & 1], tiles >> 1 & 1);
    const KeyTile& t = tile();
    order = uniform_block_order<Config>(a, t);
    full_begin = ptx::uniform(t.consumer[rank].full_begin);
    full_end = ptx::uniform(t.consumer[rank].full_end);
    steps = (order.end - order.begin) * uniform_head_count<Config>(a, t);
    return ptx::uniform(t.rows) != 0;
  }

  // This warp has read the tile's description for the last time.
  __device__ __forceinline__ void release_tile() {
    inject(Fault::kReleaseTile, tiles);
    release(s.tile_empty[tiles & 1]);
    first += steps;
    ++tiles;
  }

  __device__ __forceinline__ const KeyTile& tile() const { return s.tile[tiles & 1]; }
  __device__ __forceinline__ Element* keys() const { return s.keys[tiles & 1]; }
  __device__ __forceinline__ Element* values() const { return s.keys[tiles & 1 ^ 1]; }

  // Keys of rank `r`.
  __device__ __forceinline__ int rows(int r) const { return min(max(tile().rows - 64 * r, 0), 64); }
  __device__ __forceinline__ bool is_boundary() const {
    return order.block < full_begin || order.block >= full_end;
  }
  // A packed sequence ends within the block of queries.
  __device__ __forceinline__ bool is_ragged() const {
    return a.packed && tile().seqlen_q - order.block * kBlockM < kBlockM;
  }

  // release() of each rank's barrier.
  __device__ __forceinline__ static void release_ranks(uint64_t& barrier) {
    const int lane = threadIdx.x % 32;
    __syncwarp();
    for (int i = 0; i < (kEveryLaneArrives ? Config::kRanks : 1); ++i) {
      ptx::cluster_arrive_if(
          ptx::cluster_address(ptx::shared_address(&barrier), (lane + i) % Config::kRanks),
          kEveryLaneArrives || lane < Config::kRanks);
    }
  }

  // Zeroes rows of `blocks` column blocks from `first` on: they belong to another sequence, may
  // hold NaN, and this warpgroup's product multiplies them by 0. Others may read them meanwhile:
  // what they compute of them is masked.
  __device__ __forceinline__ static void clear_rows(Element* tile, int blocks, int first,
                                                    int barrier) {
    constexpr int kChunks = Config::kRowBytes / 16;
#pragma unroll 1
    for (int column = 0; column < blocks; ++column) {
#pragma unroll 1
      for (int i = first * kChunks + threadIdx.x % 128; i < 64 * kChunks; i += 128) {
        reinterpret_cast<uint4*>(tile)[column * 64 * kChunks + i] = uint4{};
      }
    }
    ptx::fence_proxy_async();
    ptx::named_barrier(barrier, 128);
  }

  // On the uniform datapath, and computed again for each use: with 64-bit descriptors of its own
  // for each product, the loop would take all registers. A descriptor has no room for the upper
  // bits of an address, which are the rank.
  __device__ __forceinline__ static ptx::WgmmaDescriptor descriptor(uint32_t shared) {
    return {static_cast<uint32_t>(ptx::uniform(shared & 0x3ffff)), Config::kColumnBytes};
  }
  __device__ __forceinline__ static ptx::WgmmaDescriptor descriptor(const Element* tile,
                                                                    int stage = 0) {
    return descriptor(ptx::shared_address(tile) + stage * Config::kTileBytes);
  }
  __device__ __forceinline__ ptx::WgmmaDescriptor dout(int stage) const {
    return descriptor(ptx::shared_address(s.dout) +
                      stage * (Config::kDoutBlocks * Config::kColumnBytes));
  }

  const BackwardArguments& a;
  WideShared<Config>& s;
  const int rank;
  BlockOrder order{0, 0, 0, 1};
  int full_begin, full_end;  // blocks of queries, see KeyTile
  int steps;
  int tiles = 0;  // the number of the tile
  int first = 0;  // the number of its first step, of all tiles
};

}  // namespace attnscope::sm90
