// Sixteen float lanes on every instruction set, and what softmax and activations need of them.
//
// Each library has one Floats type; lanes never mix except in the two reductions, whose order is
// fixed, so a lane's bits do not depend on its neighbours.
#pragma once

#include "lanes.hpp"

#if defined(__AVX512VNNI__)
#include "vector_math_avx512.hpp"
#elif defined(__AVX2__)
#include "vector_math_avx2.hpp"
#else
#include "vector_math_portable.hpp"
#endif

namespace kvt {

constexpr float kLog2E = 1.44269504088896341f;

// 2^f on [0, 1], exact at 0, relative error 1.6e-7: the minimax polynomial of degree 5.
inline Floats exp2_fraction(Floats f) {
  Floats sum = Floats::all(0.00186713021f);
  sum = fma(sum, f, Floats::all(0.00901703002f));
  sum = fma(sum, f, Floats::all(0.0557999133f));
  sum = fma(sum, f, Floats::all(0.24016445f));
  sum = fma(sum, f, Floats::all(0.693151312f));
  return fma(sum, f, Floats::all(1.0f));
}

// 2^x for any finite x < 128: exactly 1 at 0, and 0 far below (from -150 on, in libraries without
// AVX-512 from -126 on). NaN stays NaN; minus infinity gives NaN, more than 128 infinity or NaN.
inline Floats exp2(Floats x) {
  const Parts parts = split(x);
  return scale2(exp2_fraction(parts.fraction), parts.whole);
}

inline Floats exp(Floats x) { return exp2(x * Floats::all(kLog2E)); }

// tanh(x / (2 log2 e)) given x: with the factor folded into x, no multiplication is left.
inline Floats tanh_half_log2(Floats x) {
  const Floats one = Floats::all(1.0f);
  const Floats power = exp2(min(Floats::all(126.0f), x));
  return one - Floats::all(2.0f) / (power + one);
}

inline Floats tanh(Floats x) { return tanh_half_log2(x * Floats::all(2.0f * kLog2E)); }

}  // namespace kvt
