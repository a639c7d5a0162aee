"""Device functions for extreme values, compiled for the host: their arithmetic and addresses.

tests/kernels/device_stubs replaces the PTX wrappers and CUDA headers by plain C++. A test sets
threadIdx.x to choose the thread.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
CXX = shutil.which("g++")

pytestmark = pytest.mark.skipif(CXX is None, reason="no g++")


def run(program: str, tmp_path: Path) -> str:
    binary = tmp_path / "program"
    includes = [f"-I{ROOT / 'tests/kernels/device_stubs'}", f"-I{ROOT / 'csrc'}"]
    command = [CXX, "-std=c++17", "-O1", "-w", *includes, "-x", "c++", "-", "-o", binary]
    subprocess.run(command, input=program, text=True, check=True)
    result = subprocess.run([binary], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    return result.stdout


SOFTCAP = """
#include "host_device.h"
#include "attn/scores.cuh"
using namespace attnscope;
int main() {
  for (double cap : {1e-30, 30.0, 255.0, 256.0, 1e3, 1e6, 1e12, 1e37, 3e38}) {
    for (double scale : {0.125, -2.0}) {
      ForwardParams p{};
      p.scale = scale;
      p.softcap = cap;
      const ScoreScales scales = score_scales(p);
      const auto capped = [&](float raw) {
        float s[4] = {raw, raw, raw, raw};
        transform_scores(s, scales);
        return s[3];
      };
      for (int i = -4000; i <= 4000; ++i) {
        for (double unit : {1.0, cap}) {
          const double size = std::pow(10.0, i / 1000.0) * unit / 8;
          const float raw = static_cast<float>(i % 2 ? size : -size);
          if (!(std::fabs(raw * scale) < 3e38)) continue;
          const double want = cap * std::tanh(static_cast<double>(raw) * scale / cap);
          const double error = std::fabs(capped(raw) - want);
          if (cap < 256) {
            float s[4] = {raw, raw, raw, raw};
            cap_to_reciprocals(s, scales);
            if (!(std::fabs(cap + 2 * cap * s[1] - want) <= cap * 2e-7)) return 5;
          }
          // Relative from the wide caps on, else of the cap, of which few bits are lost.
          const double allowed = (cap < 256 ? cap : std::fabs(want)) * 4e-7;
          if (!(error <= allowed)) {
            std::printf("cap %g scale %g raw %g: off by %g", cap, scale, raw, error);
            return 1;
          }
        }
      }
      const float sign = scale > 0 ? 1 : -1, top = static_cast<float>(cap);
      if (capped(INFINITY) != sign * top || capped(-INFINITY) != -sign * top) return 2;
      if (!std::isnan(capped(NAN)) || capped(0.0f) != 0) return 3;
    }
  }
  const bool giant = is_giant(0x1p20f) && is_giant(-0x1p20f) && is_giant(1e38f);
  return giant && !is_giant(1e6f) && !is_giant(-FLT_MAX) && !is_giant(INFINITY) ? 0 : 4;
}
"""


def test_softcap_is_exact_at_every_size(tmp_path):
    run(SOFTCAP, tmp_path)


NONFINITE = """
#include "host_device.h"
#include "kernels/sm80_forward/nonfinite.cuh"
using namespace attnscope;
using namespace attnscope::sm80;

template <class Config>
bool check() {
  using Element = typename Config::Element;
  using Source = TileSource<Config>;
  constexpr int kKeys = Config::kBlockN, kDim = Config::kHeadDim;
  const auto each_thread = [](auto work) {
    for (threadIdx.x = 0; threadIdx.x < Config::kThreads; ++threadIdx.x) work();
  };

  // A thread's own chunks are those that it copies, and all threads' together are the tile.
  std::set<uint32_t> all;
  bool same = true;
  each_thread([&] {
    ptx::copied.clear();
    Source(nullptr, {}, {}, 0, kDim).template load<kKeys>(0, 0, kKeys, 0);
    std::set<uint32_t> own;
    const uint32_t first = tile_offset<Config, kKeys>(Source::lane_row(), Source::lane_chunk());
    for (int i = 0; i < Source::template kOwnChunks<kKeys>; ++i) {
      own.insert(first + Source::template own_chunk<kKeys>(i));
    }
    same = same && own == ptx::copied;
    all.insert(own.begin(), own.end());
  });
  if (!same || all.size() * 16 != sizeof(Element) * kKeys * kDim) return false;

  alignas(16) static char tile[2 * kKeys * kDim];
  static float v[kKeys][kDim];
  const float bad[] = {INFINITY, -INFINITY, NAN};
  for (int key = 0; key < kKeys; ++key) {
    for (int d = 0; d < kDim; ++d) {
      v[key][d] = (key * kDim + d) % 131 == 0 ? bad[(key + d) % 3] : -1.5f;
      const Element element = from_float<Element>(v[key][d]);
      std::memcpy(tile + tile_offset<Config, kKeys>(key, d / 8) + d % 8 * 2, &element, 2);
    }
  }
  const Window window{20, 9, 3};
  const int first_key = 100, seqlen_k = first_key + kKeys - 5;
  int right = 0, changed = 0;
  each_thread([&] {
    float o[Config::kRowTiles][kDim / 2] = {};
    const int lane = threadIdx.x % 32;
    const int row = 64 + threadIdx.x / 32 * Config::kRowTiles * 16 + lane / 4;
    add_nonfinite<Config>(o, tile, window, row, first_key, seqlen_k);
    for (int i = 0; i < Config::kRowTiles * kDim / 2; ++i) {
      const int m = i / (kDim / 2), j = i % (kDim / 2);
      const int diagonal = row + m * 16 + j % 4 / 2 * 8 + window.shift;
      const int d = j / 4 * 8 + lane % 4 * 2 + j % 2;
      float want = 0;
      for (int key = first_key; key < seqlen_k; ++key) {
        const float x = v[key - first_key][d];
        if (key >= diagonal - 9 && key <= diagonal + 3 && !std::isfinite(x)) want += x;
      }
      right += std::isnan(want) ? std::isnan(o[m][j]) : o[m][j] == want;
      changed += want != 0;
    }
  });
  if (right != Config::kBlockM * kDim || changed == 0) return false;

  bool before = false, after = false;
  each_thread([&] { before = before || own_chunks_nonfinite<Config>(tile); });
  each_thread([&] { clear_nonfinite<Config>(tile); });
  each_thread([&] { after = after || own_chunks_nonfinite<Config>(tile); });
  for (int key = 0; key < kKeys; ++key) {
    for (int d = 0; d < kDim; d += 2) {
      uint32_t word;
      std::memcpy(&word, tile + tile_offset<Config, kKeys>(key, d / 8) + d % 8 * 2, 4);
      const float2 x = unpack<Element>(word);
      for (int i = 0; i < 2; ++i) {
        if ((i ? x.y : x.x) != (std::isfinite(v[key][d + i]) ? -1.5f : 0.0f)) return false;
      }
    }
  }
  return before && !after;
}

template <class Element, int... kRows>
bool check_all(std::integer_sequence<int, kRows...>) {
  return (check<ForwardConfig<Element, kForwardTiles[kRows].head_dim>>() && ...);
}

int main() {
  constexpr std::make_integer_sequence<int, kForwardTileCount> kRows;
  return check_all<__half>(kRows) && check_all<__nv_bfloat16>(kRows) ? 0 : 1;
}
"""


def test_nonfinite_values_of_a_tile_go_to_the_rows_that_see_them(tmp_path):
    run(NONFINITE, tmp_path)
