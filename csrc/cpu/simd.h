// Vectors of ATTNSCOPE_VECTOR_BYTES and the functions that softmax needs, in one namespace per
// instruction set. Only block_<isa>.cpp includes this file, below its target pragma. Do not use
// templates of the standard library: the linker would share them with code for older machines.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace attnscope::cpu::ATTNSCOPE_ISA {
namespace {

template <class T>
struct Simd;

template <>
struct Simd<float> {
  typedef float Vec __attribute__((vector_size(ATTNSCOPE_VECTOR_BYTES)));
  typedef int32_t IntVec __attribute__((vector_size(ATTNSCOPE_VECTOR_BYTES)));
  static constexpr int kLanes = ATTNSCOPE_VECTOR_BYTES / sizeof(float);
};

template <>
struct Simd<double> {
  typedef double Vec __attribute__((vector_size(ATTNSCOPE_VECTOR_BYTES)));
  static constexpr int kLanes = ATTNSCOPE_VECTOR_BYTES / sizeof(double);
};

template <class T>
using Vec = typename Simd<T>::Vec;

template <class T>
inline constexpr int kLanes = Simd<T>::kLanes;

template <class T>
inline Vec<T> load(const T* from) {
  Vec<T> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class T>
inline void store(T* to, Vec<T> v) {
  std::memcpy(to, &v, sizeof v);
}

template <class T>
inline Vec<T> broadcast(T x) {
  return x - Vec<T>{};  // not x + 0: that would turn -0 into 0
}

// e^x for x <= 80: minimax polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2], error below 1.5 ulp;
// results under the smallest normal number are 0. NaN stays NaN.
inline Vec<float> exp(Vec<float> x) {
  const Vec<float> least = broadcast(-87.33654f);
  const Vec<float> magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec<float> bounded = x < least ? least : x;
  const Vec<float> shifted = bounded * 1.442695041f + magic;
  const Vec<float> n = shifted - magic;
  // ln 2 in two parts: the first has few enough bits that n times it is exact.
  const Vec<float> f = (bounded - n * 0.693145751953125f) - n * 1.428606820e-6f;
  Vec<float> p = broadcast(1.383684614e-3f);
  p = p * f + 8.374815778e-3f;
  p = p * f + 4.166822557e-2f;
  p = p * f + 1.666642017e-1f;
  p = p * f + 4.999999208e-1f;
  p = p * f + 1.000000036f;
  p = p * f + 1.0f;
  Simd<float>::IntVec exponent;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  exponent = (exponent << 23) + (127 << 23);
  Vec<float> power;
  std::memcpy(&power, &exponent, sizeof power);
  return x < least ? Vec<float>{} : p * power;
}

inline Vec<double> exp(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = ::exp(x[i]);
  return x;
}

// Odd minimax polynomial up to 1/2, error below 1 ulp; beyond, 1 - 2 / (e^2x + 1), below 3 ulp.
inline Vec<float> tanh(Vec<float> x) {
  const Vec<float> limit = broadcast(10.0f);  // tanh is 1 from 9.02 on
  const Vec<float> size = x < 0.0f ? -x : x;
  const Vec<float> capped = size > limit ? limit : size;
  const Vec<float> large = 1.0f - 2.0f / (exp(2.0f * capped) + 1.0f);
  const Vec<float> z = x * x;
  Vec<float> p = broadcast(1.725699421e-2f);
  p = p * z - 5.305295209e-2f;
  p = p * z + 1.332598732e-1f;
  p = p * z - 3.333314838e-1f;
  return size < 0.5f ? x + x * z * p : (x < 0.0f ? -large : large);
}

inline Vec<double> tanh(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = ::tanh(x[i]);
  return x;
}

}  // namespace
}  // namespace attnscope::cpu::ATTNSCOPE_ISA
