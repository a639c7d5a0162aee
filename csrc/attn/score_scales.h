// How raw scores q k^T become exponents, decided once on the host.
#pragma once

#include <algorithm>
#include <cfloat>

#include "attn/params.h"

namespace attnscope {

// From this softcap on, cap - 2 cap / (e^2x + 1) cancels too many bits where x is small.
constexpr double kWideCap = 256.0;

// Plain path: P = 2^(s * scale_log2 - max). With softcap, or a scale that is not positive (whose
// maximum is not that of the raw scores), the scores are made final first: transform.
struct ScoreScales {
  bool transform;
  float factor;       // of the raw scores: the scale, or 2 log2(e) scale / softcap below kWideCap
  float softcap;      // 0: none
  float inverse_cap;  // 1 / softcap from kWideCap on, else 0
  float scale_log2;
};

inline ScoreScales score_scales(const ForwardParams& p) {
  constexpr double kLog2e = 1.4426950408889634, kMax = FLT_MAX;
  const bool transform = p.softcap > 0 || !(p.scale > 0);
  const bool wide = p.softcap >= kWideCap;
  // Bounded: with an infinite factor a score of 0 would become NaN.
  const double factor = p.softcap > 0 && !wide
                            ? std::clamp(2.0 * kLog2e * p.scale / p.softcap, -kMax, kMax)
                            : p.scale;
  return {transform, static_cast<float>(factor), static_cast<float>(p.softcap),
          wide ? static_cast<float>(1.0 / p.softcap) : 0.0f,
          static_cast<float>((transform ? 1.0 : p.scale) * kLog2e)};
}

}  // namespace attnscope
