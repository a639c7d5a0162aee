// Parts of a tile, added up (sum_parts.cuh): each part stores numbers as the accumulators of its
// warps, by first_piece and store_piece; then the thread blocks of the postprocess run. dK and dV
// must be the sums over the parts that have a step: some blocks of queries, or some heads. Rows of
// whole tiles and columns past the head dim must stay as they were, and what no part has stored
// (NaN) must not be read.
#include "emulator.h"
#undef __shared__
#define __shared__ static  // blocks run one after the other
#include "kernels/sm90_backward/parts.cuh"
#include "kernels/sm90_backward/sum_parts.cuh"

using namespace attnscope;
using namespace attnscope::sm90;

namespace {

template <int kRow, int kRows, int kKeys, bool kToEnd>
struct Config {
  using Element = __nv_bfloat16;
  static constexpr BackwardTile kTile = kBackwardTiles[kRow];
  static constexpr int kHeadDim = kTile.head_dim, kColumnBlocks = kHeadDim / 64;
  static constexpr int kBlockM = kRows, kBlockN = kKeys, kConsumers = kKeys / 64;
  static constexpr bool kSeenToEnd = kToEnd, kParts = true;
  static_assert(kTile.block_m == kRows && kTile.block_n == kKeys);
};

struct Call {
  int head_dim, head_dim_v, seqlen_q, seqlen_k, right, parts;
  bool deterministic, have_heads;
};

constexpr int kBatch = 2, kHeads = 3, kGroup = 5, kPadding = 8;
long g_sums;

// What a part has in row `row` and column `column` of dV (0) or dK (1): sums are exact.
float number(int split, int part, int gradient, int row, int column) {
  return static_cast<float>((split * 5 + part * 11 + gradient * 17 + row * 3 + column) % 31);
}

// The message of what is wrong, or null.
template <class Config, int kWarps>
const char* check(const Call& c) {
  using Element = typename Config::Element;
  constexpr BackwardTile kTile = Config::kTile;
  const auto blocks_of = [](int rows, int block) { return (rows + block - 1) / block; };
  BackwardArguments a{};
  ForwardParams& p = a.params.forward;
  p.batch = kBatch;
  p.heads_q = kHeads * kGroup;
  p.heads_kv = kHeads;
  p.seqlen_q = c.seqlen_q;
  p.seqlen_k = c.seqlen_k;
  p.total_q = int64_t{kBatch} * c.seqlen_q;
  p.total_k = int64_t{kBatch} * c.seqlen_k;
  p.head_dim = c.head_dim;
  p.head_dim_v = c.head_dim_v;
  p.window_left = -1;
  p.window_right = c.right;
  a.group = kGroup;
  a.scale = 0.5f;
  a.heads_kv = Divisor::of(kHeads);
  a.dense_queries = Divisor::of(blocks_of(c.seqlen_q, Config::kBlockM));
  const int key_blocks = blocks_of(c.seqlen_k, Config::kBlockN),
            tiles = key_blocks * kBatch * kHeads;
  a.order = {key_blocks, kBatch * kHeads * (c.have_heads ? c.parts : 1), c.right >= 0 ? 2 : 1, 0};
  int ticket = 0;
  a.tickets = c.deterministic ? &ticket : nullptr;
  a.whole_tiles = c.have_heads ? 0 : tiles / 3;
  a.parts_have_heads = c.have_heads;
  a.parts = Divisor::of(c.parts);
  const int splits = tiles - a.whole_tiles;
  std::vector<float> partial(splits * c.parts * Config::kBlockN * Config::kHeadDim * 2, NAN);
  a.partial = partial.data();
  const Element unwritten{0x7fc1};
  const auto strides = [&](int dim) {
    return Strides{int64_t{c.seqlen_k} * kHeads * (dim + kPadding), kHeads * (dim + kPadding),
                   dim + kPadding};
  };
  a.params.dk_stride = strides(c.head_dim);
  a.params.dv_stride = strides(c.head_dim_v);
  std::vector<Element> dk(kBatch * a.params.dk_stride.batch, unwritten);
  std::vector<Element> dv(kBatch * a.params.dv_stride.batch, unwritten);
  std::vector<Element> want_dk = dk, want_dv = dv;
  a.params.dk = dk.data();
  a.params.dv = dv.data();

  struct Sum {
    KeyTile tile;  // its first part's
    std::vector<float> of[2] = {std::vector<float>(Config::kBlockN * Config::kHeadDim),
                                std::vector<float>(Config::kBlockN * Config::kHeadDim)};
  };
  KeyTile t;
  std::vector<Sum> sums(splits);
  emulator::launch(1, kTile.block_n * 2, 1, [&] {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int unit = 0; unit < splits * c.parts; ++unit) {
      if (warp == 0) describe_unit<Config>(a, a.whole_tiles + unit, 0, t);
      __syncthreads();
      const bool has_steps = t.rows > 0 && t.begin < t.end;
      if (threadIdx.x == 0 && t.part == 0) sums[t.split].tile = t;
      for (int gradient = 0; has_steps && gradient < 2; ++gradient) {
        float4* piece = first_piece<Config>(a, t.split, t.part, gradient, warp * 16);
        for (int block = 0; block < Config::kColumnBlocks; ++block) {
          float x[32];
          for (int i = 0; i < 32; ++i) {
            const int row = warp * 16 + lane / 4 + i % 4 / 2 * 8;
            const int column = block * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2;
            x[i] = number(t.split, t.part, gradient, row, column);
            sums[t.split].of[gradient][row * Config::kHeadDim + column] += x[i];
          }
          store_piece(piece + block * 256, x);
        }
      }
      __syncthreads();
    }
  });
  for (const Sum& sum : sums) {  // a tile's rows of the call
    const KeyTile& tile = sum.tile;
    const auto store = [&](std::vector<Element>& out, const Strides& stride, int dim,
                           const std::vector<float>& from, float factor) {
      for (int row = 0; tile.first_key + row < c.seqlen_k && row < Config::kBlockN; ++row) {
        for (int column = 0; column < dim; ++column) {
          out[tile.batch * stride.batch + (tile.k_row + row) * stride.row +
              tile.head_kv * stride.head + column] =
              from_float<Element>(from[row * Config::kHeadDim + column] * factor);
          ++g_sums;
        }
      }
    };
    store(want_dv, a.params.dv_stride, c.head_dim_v, sum.of[0], 1.0f);
    store(want_dk, a.params.dk_stride, c.head_dim, sum.of[1], a.scale);
  }
  emulator::launch(splits * kSumBlocks<Config, kWarps>, kWarps * 32, 1, [&] {
    sum_parts<Config, Config, kWarps>(a, blockIdx.x, threadIdx.x / 32 * 2048);
  });
  const auto same = [](const std::vector<Element>& x, const std::vector<Element>& y) {
    return std::memcmp(x.data(), y.data(), x.size() * sizeof(Element)) == 0;
  };
  if (!same(dv, want_dv)) return "dv";
  if (!same(dk, want_dk)) return "dk";
  return nullptr;
}

}  // namespace

int main() {
  emulator::shared = static_cast<char*>(std::aligned_alloc(1024, emulator::kSharedBytes));
  for (const int right : {-1, 0}) {
    for (const int parts : {2, 5}) {
      for (const int kind : {0, 1, 2, 3}) {
        // The last queries see every key: each tile has a step.
        const Call c{0, 0, 300, 290, right, parts, kind % 2 != 0, kind >= 2};
        const auto with = [&](int head_dim, int head_dim_v) {
          Call call = c;
          call.head_dim = head_dim;
          call.head_dim_v = head_dim_v;
          return call;
        };
        const char* wrong = check<Config<0, 64, 192, false>, 4>(with(40, 64));
        if (wrong == nullptr) wrong = check<Config<1, 64, 128, false>, 4>(with(64, 8));
        if (wrong == nullptr) wrong = check<Config<2, 128, 128, false>, 8>(with(64, 56));
        if (wrong == nullptr) wrong = check<Config<3, 80, 128, true>, 8>(with(72, 128));
        if (wrong == nullptr) wrong = check<Config<4, 64, 128, false>, 8>(with(128, 96));
        if (wrong == nullptr) wrong = check<Config<5, 64, 128, false>, 4>(with(192, 136));
        if (wrong == nullptr) wrong = check<Config<6, 64, 128, false>, 4>(with(200, 256));
        if (wrong != nullptr) {
          std::printf("window right %d, %d parts: %s is wrong\n", right, parts, wrong);
          return 1;
        }
      }
    }
  }
  std::printf("%ld sums\n", g_sums);
}
