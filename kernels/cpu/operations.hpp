// Operations on rows of float32 besides products and attention. Definitions: kernels/reference.py.
// Each row's numbers are added in one fixed order, whoever computes it.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "kvt.h"
#include "operations_vector.hpp"

namespace kvt {

// Sum of squares; four vectors at once hide the latency of the additions.
inline float sum_of_squares(const float* x, int64_t size) {
  Floats sums[4] = {Floats::zero(), Floats::zero(), Floats::zero(), Floats::zero()};
  int64_t i = 0;
  for (; i + 4 * kWidth <= size; i += 4 * kWidth) {
    for (int64_t k = 0; k < 4; ++k) {
      const Floats value = Floats::load(x + i + k * kWidth);
      sums[k] = fma(value, value, sums[k]);
    }
  }
  for (; i < size; i += kWidth) {
    const Floats value = load_some(x + i, size - i);
    sums[0] = fma(value, value, sums[0]);
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Sum of products in 16 lanes, ascending.
inline float dot(const float* a, const float* b, int64_t count) {
  Floats sums = Floats::zero();
  for (int64_t i = 0; i < count; i += kWidth) {
    sums = fma(load_some(a + i, count - i), load_some(b + i, count - i), sums);
  }
  return sum(sums);
}

inline float norm_factor(const float* x, int64_t size, float eps) {
  return 1.0f / std::sqrt(sum_of_squares(x, size) / static_cast<float>(size) + eps);
}

// out = x / sqrt(mean(x^2) + eps) * weight; out may be x.
inline void rms_norm_row(const float* x, const float* weight, float eps, int64_t size, float* out) {
  const float factor = norm_factor(x, size, eps);
  for (int64_t i = 0; i < size; ++i) out[i] = x[i] * factor * weight[i];
}

// Sum in four vectors, like sum_of_squares.
inline float sum_of_values(const float* x, int64_t size) {
  Floats sums[4] = {Floats::zero(), Floats::zero(), Floats::zero(), Floats::zero()};
  int64_t i = 0;
  for (; i + 4 * kWidth <= size; i += 4 * kWidth) {
    for (int64_t k = 0; k < 4; ++k) sums[k] = sums[k] + Floats::load(x + i + k * kWidth);
  }
  for (; i < size; i += kWidth) sums[0] = sums[0] + load_some(x + i, size - i);
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// out = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight (+ bias, or null); out may be x.
inline void layer_norm_row(const float* x, const float* weight, const float* bias, float eps,
                           int64_t size, float* out) {
  const float mean = sum_of_values(x, size) / static_cast<float>(size);
  for (int64_t i = 0; i < size; ++i) out[i] = x[i] - mean;
  rms_norm_row(out, weight, eps, size, out);
  for (int64_t i = 0; bias && i < size; ++i) out[i] += bias[i];
}

// target += scale * norm of x.
inline void add_norm_row(const float* x, const float* weight, float eps, float scale, int64_t size,
                         float* target) {
  const float factor = norm_factor(x, size, eps) * scale;
  for (int64_t i = 0; i < size; ++i) target[i] += x[i] * factor * weight[i];
}

// target += scale * x.
inline void add_scaled_row(const float* x, float scale, int64_t size, float* target) {
  for (int64_t i = 0; i < size; ++i) target[i] += x[i] * scale;
}

// x = cap * tanh(x / cap).
inline void softcap_values(float* x, int64_t count, float cap) {
  const Floats inverse = Floats::all(1.0f / cap), factor = Floats::all(cap);
  for (int64_t i = 0; i < count; i += kWidth) {
    const Floats value = load_some(x + i, count - i);
    store_some(x + i, tanh(value * inverse) * factor, count - i);
  }
}

// What queries at a position are multiplied by (Mistral 3).
inline float temperature_at(const kvt_attention& attention, int64_t position) {
  if (attention.temperature_length == 0) return 1.0f;
  const auto steps = static_cast<double>(position / attention.temperature_length);
  return static_cast<float>(1.0 + static_cast<double>(attention.temperature) * std::log1p(steps));
}

// A kind of rope: per pair its angle at position 1, in double: at position 100,000 a float32 angle
// is already wrong by 0.004.
struct Rope {
  int32_t style;
  int32_t num_pairs;
  double magnitude;
  std::vector<double> frequencies;  // [num_pairs]
};

inline Rope make_rope(const kvt_rope& kind, const float* factors) {
  Rope rope{kind.style, kind.num_rotated / 2, kind.magnitude, {}};
  for (int32_t i = 0; i < rope.num_pairs; ++i) {
    const double exponent = -2.0 * i / kind.num_rotated;
    double frequency = std::pow(kind.base, exponent) * kind.scale;
    if (factors) frequency /= static_cast<double>(factors[i]);
    rope.frequencies.push_back(frequency);
  }
  return rope;
}

// cos and sin [num_pairs] of one position.
inline void rope_row(const Rope& rope, int64_t position, float* cosines, float* sines) {
  for (int32_t i = 0; i < rope.num_pairs; ++i) {
    const double angle = static_cast<double>(position) * rope.frequencies[static_cast<size_t>(i)];
    cosines[i] = static_cast<float>(std::cos(angle) * rope.magnitude);
    sines[i] = static_cast<float>(std::sin(angle) * rope.magnitude);
  }
}

// Rotate the pairs of one head in place: (a, b) becomes (a cos - b sin, a sin + b cos).
inline void rotate_head(float* __restrict x, const float* __restrict cosines,
                        const float* __restrict sines, int64_t num_pairs, int32_t style) {
  if (style == KVT_ROPE_NORM) {
    for (int64_t i = 0; i < num_pairs; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cosines[i] - b * sines[i];
      x[2 * i + 1] = a * sines[i] + b * cosines[i];
    }
    return;
  }
  for (int64_t i = 0; i < num_pairs; ++i) {
    const float a = x[i], b = x[i + num_pairs];
    x[i] = a * cosines[i] - b * sines[i];
    x[i + num_pairs] = a * sines[i] + b * cosines[i];
  }
}

}  // namespace kvt
