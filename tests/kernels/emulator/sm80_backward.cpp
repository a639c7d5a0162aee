// Runs the portable backward kernels on the CPU and compares with fp64: one line a case.
//
// Usage: sm80_backward CASE ..., each `name=value,...`, see Case.
#include "emulator.h"
#include "kernels/sm80_backward/kernel.cuh"
#include "kernels/sm80_backward/plan.h"
#include "kernels/sm80_backward/postprocess.cuh"
#include "kernels/sm80_backward/preprocess.cuh"

namespace attnscope::sm80 {
alignas(1024) char shared_memory[emulator::kSharedBytes];
}

using namespace attnscope;
using namespace attnscope::sm80;

namespace {

struct Case {
  int batch = 1, heads_q = 1, heads_kv = 1, seqlen_q = 64, seqlen_k = 64;
  int head_dim = 64, head_dim_v = 0;
  int left = -1, right = -1, half = 0, dlse = 0, deterministic = 0, row = -1;
  int packed = 0;  // the sequences have lengths 0, 1/3, 2/3 .. of the longest, one is too long
  double softcap = 0, scale = 0;
};

Case parse(const char* text) {
  Case c;
  const std::pair<const char*, int*> integers[] = {
      {"B", &c.batch},     {"Hq", &c.heads_q},   {"Hkv", &c.heads_kv},  {"Sq", &c.seqlen_q},
      {"Sk", &c.seqlen_k}, {"D", &c.head_dim},   {"Dv", &c.head_dim_v}, {"left", &c.left},
      {"right", &c.right}, {"half", &c.half},    {"dlse", &c.dlse},     {"det", &c.deterministic},
      {"row", &c.row},     {"packed", &c.packed}};
  while (*text) {
    const char* equal = std::strchr(text, '=');
    const std::string name(text, equal);
    bool known = false;
    for (const auto& [key, value] : integers) {
      if (name == key) *value = std::atoi(equal + 1), known = true;
    }
    if (name == "cap") c.softcap = std::atof(equal + 1), known = true;
    if (name == "scale") c.scale = std::atof(equal + 1), known = true;
    if (!known) emulator::fail("unknown name");
    text = std::strchr(equal, ',');
    if (text == nullptr) break;
    ++text;
  }
  if (c.head_dim_v == 0) c.head_dim_v = c.head_dim;
  if (c.scale == 0) c.scale = 1 / std::sqrt(c.head_dim);
  return c;
}

// [rows, heads, dim] with a gap after each row; NaN until set.
template <class Element>
struct Tensor {
  int64_t rows;
  int heads, dim;
  int64_t row_stride;
  std::vector<Element> data;

  Tensor(int64_t rows_, int heads_, int dim_, int gap)
      : rows(rows_), heads(heads_), dim(dim_), row_stride(int64_t{heads_} * dim_ + gap) {
    data.assign(rows * row_stride + 8, from_float<Element>(NAN));
  }
  Element* aligned() {
    return reinterpret_cast<Element*>((reinterpret_cast<uintptr_t>(data.data()) + 15) / 16 * 16);
  }
  Element& at(int64_t row, int head, int d) {
    return aligned()[row * row_stride + int64_t{head} * dim + d];
  }
  Strides strides(int64_t seqlen) const { return {seqlen * row_stride, row_stride, dim}; }
};

struct Segments {
  std::vector<int32_t> cu;
  int64_t total = 0;
  int max_length = 0;

  Segments(const Case& c, int length, int first_row) {
    max_length = length;
    if (!c.packed) {
      total = int64_t{c.batch} * length;
      return;
    }
    cu.push_back(first_row);
    for (int i = 0; i < c.batch; ++i) {
      const int rows = i == 1 ? length + 3 : length * (i % 4) / 3;
      cu.push_back(cu.back() + rows);
    }
    total = cu.back() + 5;
  }
  int64_t begin(int batch) const { return cu.empty() ? int64_t{batch} * max_length : cu[batch]; }
  int length(int batch) const {
    return cu.empty() ? max_length : std::min(cu[batch + 1] - cu[batch], max_length);
  }
};

template <class Config>
void run_kernels(const BackwardParams& params, const BackwardPlan& plan) {
  using Element = typename Config::Element;
  static_assert(sizeof(BackwardShared<Config>) == Config::kTile.shared_bytes());
  BackwardParams p = params;
  p.deterministic = plan.deterministic;
  emulator::launch(static_cast<int>(plan.row_blocks + plan.clear_blocks), kSideThreads, 1, [&] {
    preprocess_kernel<Element>(p, plan.call.workspace, static_cast<int>(plan.row_blocks),
                               Config::kBlockM);
  });
  emulator::launch(static_cast<int>(plan.key_blocks), Config::kGroupThreads, 2,
                   [&] { backward_kernel<Config>(p, plan.call); });
  emulator::launch(static_cast<int>(plan.row_blocks), kSideThreads, 1,
                   [&] { postprocess_kernel<Element>(p, plan.call.workspace); });
}

template <class Element, int... kRows>
void run_row(int row, const BackwardParams& p, const BackwardPlan& plan,
             std::integer_sequence<int, kRows...>) {
  constexpr void (*kRuns[])(const BackwardParams&, const BackwardPlan&) = {
      run_kernels<BackwardConfig<Element, kBackwardTiles[kRows].head_dim,
                                 kBackwardTiles[kRows].block_m, kBackwardTiles[kRows].block_n>>...};
  kRuns[row](p, plan);
}

using Gradient = std::vector<double>;

// Largest error as a fraction of the largest gradient, of 0.01 at least; infinite where one is not
// finite.
template <class Element>
double error_of(const char* name, Tensor<Element>& got, const Gradient& want) {
  double error = 0, size = 0.01;
  int64_t worst = -1, index = 0;
  for (int64_t row = 0; row < got.rows; ++row) {
    for (int head = 0; head < got.heads; ++head) {
      for (int d = 0; d < got.dim; ++d, ++index) {
        double e = std::fabs(to_float(got.at(row, head, d)) - want[index]);
        if (std::isnan(e)) e = INFINITY;
        if (e > error || worst < 0) error = e, worst = index;
        size = std::max(size, std::fabs(want[index]));
      }
    }
  }
  const int d = worst % got.dim, head = worst / got.dim % got.heads;
  std::printf(" %s %.4f", name, error / size);
  if (error / size > 0.02) {
    const int64_t row = worst / got.dim / got.heads;
    std::printf(" (row %ld head %d column %d: %g, not %g)", static_cast<long>(row), head, d,
                to_float(got.at(row, head, d)), want[worst]);
  }
  return error / size;
}

template <class Element>
bool run(const Case& c) {
  const Segments sq(c, c.seqlen_q, 2), sk(c, c.seqlen_k, 1);
  const int group = c.heads_q / c.heads_kv;
  Tensor<Element> q(sq.total, c.heads_q, c.head_dim, 8), k(sk.total, c.heads_kv, c.head_dim, 16),
      v(sk.total, c.heads_kv, c.head_dim_v, 0), out(sq.total, c.heads_q, c.head_dim_v, 0),
      dout(sq.total, c.heads_q, c.head_dim_v, 24), dq(sq.total, c.heads_q, c.head_dim, 0),
      dk(sk.total, c.heads_kv, c.head_dim, 0), dv(sk.total, c.heads_kv, c.head_dim_v, 0);
  const int64_t lse_head = c.packed ? sq.total : c.seqlen_q;
  const int64_t lse_batch = c.packed ? 0 : int64_t{c.heads_q} * c.seqlen_q;
  std::vector<float> lse(sq.total * c.heads_q, NAN), dlse(sq.total * c.heads_q, NAN);
  Gradient want_q(sq.total * c.heads_q * c.head_dim), want_k(sk.total * c.heads_kv * c.head_dim),
      want_v(sk.total * c.heads_kv * c.head_dim_v);

  std::mt19937 engine(7);
  std::normal_distribution<float> normal;
  const auto fill = [&](Tensor<Element>& t, const Segments& s) {
    for (int b = 0; b < c.batch; ++b) {
      for (int64_t row = s.begin(b); row < s.begin(b) + s.length(b); ++row) {
        for (int head = 0; head < t.heads; ++head) {
          for (int d = 0; d < t.dim; ++d) t.at(row, head, d) = from_float<Element>(normal(engine));
        }
      }
    }
  };
  fill(q, sq), fill(dout, sq), fill(k, sk), fill(v, sk);

  for (int b = 0; b < c.batch; ++b) {
    const int rows = sq.length(b), keys = sk.length(b);
    for (int h = 0; h < c.heads_q; ++h) {
      for (int i = 0; i < rows; ++i) {
        const int64_t row = sq.begin(b) + i;
        const int diagonal = i + keys - rows;
        const int first = c.left < 0 ? 0 : std::max(0, diagonal - c.left);
        const int end = c.right < 0 ? keys : std::max(0, std::min(keys, diagonal + c.right + 1));
        std::vector<double> t(keys), slope(keys, 1.0);
        double sum = 0;
        for (int j = first; j < end; ++j) {
          for (int d = 0; d < c.head_dim; ++d) {
            t[j] += double{to_float(q.at(row, h, d))} *
                    to_float(k.at(sk.begin(b) + j, h / group, d)) * c.scale;
          }
          if (c.softcap > 0) {
            const double tanh = std::tanh(t[j] / c.softcap);
            t[j] = c.softcap * tanh;
            slope[j] = 1 - tanh * tanh;
          }
          sum += std::exp(t[j]);
        }
        const double log_sum = std::log(sum);
        const int64_t at = (c.packed ? row : i) + b * lse_batch + h * lse_head;
        lse[at] = static_cast<float>(log_sum);
        dlse[at] = normal(engine);
        std::vector<double> o(c.head_dim_v);
        for (int j = first; j < end; ++j) {
          for (int d = 0; d < c.head_dim_v; ++d) {
            o[d] += std::exp(t[j] - log_sum) * to_float(v.at(sk.begin(b) + j, h / group, d));
          }
        }
        double delta = c.dlse ? -dlse[at] : 0;
        for (int d = 0; d < c.head_dim_v; ++d) {
          out.at(row, h, d) = from_float<Element>(static_cast<float>(o[d]));
          delta += o[d] * to_float(dout.at(row, h, d));
        }
        for (int j = first; j < end; ++j) {
          const int64_t key = sk.begin(b) + j;
          const double p = std::exp(t[j] - log_sum);
          double dp = 0;
          for (int d = 0; d < c.head_dim_v; ++d) {
            const double g = to_float(dout.at(row, h, d));
            dp += g * to_float(v.at(key, h / group, d));
            want_v[(key * c.heads_kv + h / group) * c.head_dim_v + d] += p * g;
          }
          const double ds = p * (dp - delta) * slope[j] * c.scale;
          for (int d = 0; d < c.head_dim; ++d) {
            want_q[(row * c.heads_q + h) * c.head_dim + d] +=
                ds * to_float(k.at(key, h / group, d));
            want_k[(key * c.heads_kv + h / group) * c.head_dim + d] +=
                ds * to_float(q.at(row, h, d));
          }
        }
      }
    }
  }

  BackwardParams p{};
  ForwardParams& f = p.forward;
  f.q = q.aligned(), f.k = k.aligned(), f.v = v.aligned(), f.out = out.aligned();
  f.lse = lse.data();
  f.q_stride = q.strides(c.seqlen_q), f.out_stride = out.strides(c.seqlen_q);
  f.k_stride = k.strides(c.seqlen_k), f.v_stride = v.strides(c.seqlen_k);
  f.lse_batch_stride = lse_batch, f.lse_head_stride = lse_head;
  f.cu_seqlens_q = c.packed ? sq.cu.data() : nullptr;
  f.cu_seqlens_k = c.packed ? sk.cu.data() : nullptr;
  f.total_q = sq.total, f.total_k = sk.total;
  f.batch = c.batch, f.seqlen_q = c.seqlen_q, f.seqlen_k = c.seqlen_k;
  f.heads_q = c.heads_q, f.heads_kv = c.heads_kv;
  f.head_dim = c.head_dim, f.head_dim_v = c.head_dim_v;
  f.dtype = std::is_same_v<Element, __half> ? DType::kFloat16 : DType::kBFloat16;
  f.scale = c.scale, f.softcap = c.softcap, f.window_left = c.left, f.window_right = c.right;
  p.dout = dout.aligned(), p.dlse = c.dlse ? dlse.data() : nullptr;
  p.dq = dq.aligned(), p.dk = dk.aligned(), p.dv = dv.aligned();
  p.dout_stride = dout.strides(c.seqlen_q), p.dq_stride = dq.strides(c.seqlen_q);
  p.dk_stride = dk.strides(c.seqlen_k), p.dv_stride = dv.strides(c.seqlen_k);
  p.deterministic = c.deterministic;
  const int row = c.row >= 0 ? c.row : backward_row(std::max(c.head_dim, c.head_dim_v), 232448);
  const BackwardTile& tile = kBackwardTiles[row];
  std::vector<char> workspace(backward_plan(p, tile).workspace_bytes + 256, char{-1});
  p.workspace =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace.data()) + 255) / 256 * 256);
  constexpr std::make_integer_sequence<int, kBackwardTileCount> kRows;
  run_row<Element>(row, p, backward_plan(p, tile), kRows);

  std::printf("tile %d %dx%d:", tile.head_dim, tile.block_m, tile.block_n);
  const double worst = std::max(
      {error_of("dq", dq, want_q), error_of("dk", dk, want_k), error_of("dv", dv, want_v)});
  std::printf("%s\n", worst <= 0.02 ? "" : " WRONG");
  std::fflush(stdout);
  return worst <= 0.02;
}

}  // namespace

int main(int count, char** arguments) {
  emulator::shared = shared_memory;
  bool passed = true;
  for (int i = 1; i < count; ++i) {
    std::printf("%s ", arguments[i]);
    const Case c = parse(arguments[i]);
    passed = (c.half ? run<__half>(c) : run<__nv_bfloat16>(c)) && passed;
  }
  return passed ? 0 : 1;
}
