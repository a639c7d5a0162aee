// How raw scores q k^T become exponents, decided once on the host.
#pragma once

#include <algorithm>
#include <cfloat>

#include "attn/params.h"

namespace attnscope {

// From this softcap on, cap - 2 cap / (e^2x + 1) cancels too many bits where x is small.
constexpr double kWideCap = 256.0;
constexpr double kLog2e = 1.4426950408889634;

// What is done to raw scores before the row maximum is taken.
enum ScoreTransform : int { kNoTransform, kScale, kCap, kCapWide };

// Plain path: P = 2^(s * scale_log2 - max). With softcap, or a scale that is not positive (whose
// maximum is not the raw scores' maximum), the scores are made final first: transform.
struct ScoreScales {
  ScoreTransform transform;
  float factor;   // of the raw scores: the scale, or for kCap 2 log2(e) scale / softcap
  float softcap;  // 0: none
  float scale_log2;
};

inline ScoreScales score_scales(const ForwardParams& p) {
  constexpr double kMax = FLT_MAX;
  const ScoreTransform transform = p.softcap >= kWideCap ? kCapWide
                                   : p.softcap > 0       ? kCap
                                   : p.scale > 0         ? kNoTransform
                                                         : kScale;
  // Bounded: with an infinite factor a score of 0 would become NaN.
  const double factor =
      transform == kCap ? std::clamp(2.0 * kLog2e * p.scale / p.softcap, -kMax, kMax) : p.scale;
  return {transform, static_cast<float>(factor), static_cast<float>(p.softcap),
          static_cast<float>((transform == kNoTransform ? p.scale : 1.0) * kLog2e)};
}

// For a kernel that takes capped scores as cap_to_reciprocals leaves them: the log-sum-exp then
// lacks the softcap.
inline ScoreScales reciprocal_scales(const ForwardParams& p) {
  ScoreScales scales = score_scales(p);
  if (scales.transform == kCap) scales.scale_log2 = static_cast<float>(2.0 * kLog2e * p.softcap);
  return scales;
}

}  // namespace attnscope
