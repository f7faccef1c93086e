// Products in plain C++, for processors without AVX2.
#pragma once

#include "multiply_tile.hpp"

namespace kvt {
namespace portable {

// Integer products of 16 rows' inputs [4 * first, 4 * last) with one row of activations.
inline void dot(const uint8_t* weights, const int8_t* q, int first, int last, int32_t* sums) {
  for (int j = first; j < last; ++j) {
    for (int r = 0; r < kLanes; ++r) {
      const uint8_t* w = weights + 64 * j + 4 * r;
      sums[r] += w[0] * q[4 * j] + w[1] * q[4 * j + 1] + w[2] * q[4 * j + 2] + w[3] * q[4 * j + 3];
    }
  }
}

// Add one scale's inputs of 16 rows to the sums of activation row `row`.
template <bool kHasHalves, bool kHasMin>
void add_part(const Tile& tile, const uint8_t* weights, const InputGroup& input, int row, int part,
              int half, float* sums) {
  constexpr Kind kKind{kHasHalves, kHasMin};
  const int32_t minus = kHasHalves ? input.minus_half[part][row] : input.minus_sum[row];
  int32_t dots[kLanes];
  std::fill_n(dots, kLanes, kHasMin ? 0 : minus * (1 << tile.zero_shift));
  dot(weights + 512 * half, input.q[row], part * 4, kHasHalves ? part * 4 + 4 : 8, dots);
  const F32x16 d = load<F32x16>(weights + kKind.scale_offset(part, half));
  F32x16 sum = fma(to_floats(load<I32x16>(dots)) * d, splat(input.scale[row]), load<F32x16>(sums));
  if constexpr (kHasMin) {
    const F32x16 m = load<F32x16>(weights + kKind.min_offset(part, half));
    const float weight =
        kHasHalves ? input.scale[row] * static_cast<float>(-minus) : input.sum[row];
    sum = fma(m, splat(weight), sum);
  }
  store(sums, sum);
}

}  // namespace portable

template <int kRows, bool kHasHalves, bool kHasMin>
void multiply_tile(const Tile& tile) {
  constexpr Kind kKind{kHasHalves, kHasMin};
  std::fill_n(tile.out, kRows * kPanelRows, 0.0f);
  for (int64_t g = 0; g < tile.groups; ++g) {
    const uint8_t* weights = tile.weights + g * kKind.group_bytes();
    for (int row = 0; row < kRows; ++row) {
      for (int half = 0; half < 2; ++half) {
        float* sums = tile.out + row * kPanelRows + half * kLanes;
        for (int part = 0; part < kKind.parts(); ++part) {
          portable::add_part<kHasHalves, kHasMin>(tile, weights, tile.inputs[g], row, part, half,
                                                  sums);
        }
      }
    }
  }
}

template <int kRows>
void multiply_float_tile(const FloatTile& tile) {
  const auto* weights = static_cast<const float*>(tile.weights);
  const auto* inputs = static_cast<const float*>(tile.inputs);
  std::fill_n(tile.out, kRows * kPanelRows, 0.0f);
  for (int64_t k = 0; k < tile.count; ++k, weights += kPanelRows, inputs += kInputRows) {
    for (int row = 0; row < kRows; ++row) {
      for (int r = 0; r < kPanelRows; ++r) {
        tile.out[row * kPanelRows + r] += weights[r] * inputs[row];
      }
    }
  }
}

}  // namespace kvt
