// How raw scores q k^T become exponents, decided once on the host.
#pragma once

#include "attn/params.h"

namespace attnscope {

// Plain path: P = 2^(s * scale_log2 - max). With softcap, or a scale that is not positive (whose
// maximum is not the raw scores' maximum), the scores are made final first: transform.
struct ScoreScales {
  bool transform;
  float factor;   // of the raw scores when transforming: the scale, or 2 log2(e) scale / softcap
  float softcap;  // 0: none
  float scale_log2;
};

inline ScoreScales score_scales(const ForwardParams& p) {
  constexpr double kLog2e = 1.4426950408889634;
  const bool transform = p.softcap > 0 || !(p.scale > 0);
  const double factor = p.softcap > 0 ? 2.0 * kLog2e * p.scale / p.softcap : p.scale;
  return {transform, static_cast<float>(factor), static_cast<float>(p.softcap),
          static_cast<float>((transform ? 1.0 : p.scale) * kLog2e)};
}

}  // namespace attnscope
