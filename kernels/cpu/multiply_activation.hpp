// What happens to finished products: bias, accumulation, gates.
#pragma once

#include <cstring>

#include "matrix.hpp"
#include "vector_math.hpp"

namespace kvt {

// x / (1 + 2^-u); NaN stays NaN.
inline Floats times_sigmoid(Floats x, Floats u) {
  const Floats power = exp2(min(Floats::all(126.0f), Floats::zero() - u));
  return x / (Floats::all(1.0f) + power);
}

inline Floats silu(Floats x) { return times_sigmoid(x, x * Floats::all(kLog2E)); }

// x / 2 (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3).
inline Floats gelu_tanh(Floats x) {
  const Floats cubed = fma(x * x * x, Floats::all(0.044715f), x);
  return times_sigmoid(x, cubed * Floats::all(2.0f * 0.7978845608f * kLog2E));
}

inline Floats activate(Floats x, int32_t activation) {
  if (activation == kSilu) return silu(x);
  return activation == kGeluTanh ? gelu_tanh(x) : x;
}

// gpt-oss: gate sigmoid(1.702 gate) (up + 1), gate at most 7 and up within 7 of 0; NaN stays NaN.
inline Floats clamped(Floats gate, Floats up) {
  const Floats limit = Floats::all(7.0f);
  gate = min(limit, gate);
  up = max(Floats::zero() - limit, min(limit, up));
  return times_sigmoid(gate, gate * Floats::all(1.702f * kLog2E)) * (up + Floats::all(1.0f));
}

inline Floats gated(Floats gate, Floats up, int32_t activation) {
  return activation == kClamped ? clamped(gate, up) : activate(gate, activation) * up;
}

constexpr int kFloats = 16;  // in one value of the type Floats

// Call change(place, count) for sixteen values at a time; the last count may be smaller.
template <class Change>
inline void for_lanes(int64_t count, Change change) {
  for (int64_t i = 0; i < count; i += kFloats) {
    change(i, static_cast<int>(count - i < kFloats ? count - i : kFloats));
  }
}

inline Floats load_some(const float* source, int count) {
  if (count == kFloats) return Floats::load(source);
  float values[kFloats] = {};
  std::memcpy(values, source, static_cast<size_t>(count) * sizeof(float));
  return Floats::load(values);
}

inline void store_some(Floats value, float* target, int count) {
  if (count == kFloats) return value.store(target);
  float values[kFloats];
  value.store(values);
  std::memcpy(target, values, static_cast<size_t>(count) * sizeof(float));
}

inline void gate_values(float* up, const float* gate, int64_t count, int32_t activation) {
  for_lanes(count, [&](int64_t i, int n) {
    store_some(gated(load_some(gate + i, n), load_some(up + i, n), activation), up + i, n);
  });
}

inline void activate_values(float* x, int64_t count, int32_t activation) {
  for_lanes(count, [&](int64_t i, int n) {
    store_some(activate(load_some(x + i, n), activation), x + i, n);
  });
}

// x += bias, or null.
inline void add_bias(float* x, const float* bias, int64_t count) {
  for_lanes(bias ? count : 0, [&](int64_t i, int n) {
    store_some(load_some(x + i, n) + load_some(bias + i, n), x + i, n);
  });
}

// x *= sigmoid(gate)
inline void sigmoid_gate(float* x, const float* gate, int64_t count) {
  for_lanes(count, [&](int64_t i, int n) {
    const Floats power = load_some(gate + i, n) * Floats::all(kLog2E);
    store_some(times_sigmoid(load_some(x + i, n), power), x + i, n);
  });
}

// sums [count] to out, with bias (or null) and, if asked, what was there.
inline void finish(const float* sums, const float* bias, bool accumulate, int64_t count,
                   float* out) {
  for_lanes(count, [&](int64_t i, int n) {
    Floats value = load_some(sums + i, n);
    if (bias) value = value + load_some(bias + i, n);
    if (accumulate) value = value + load_some(out + i, n);
    store_some(value, out + i, n);
  });
}

}  // namespace kvt
