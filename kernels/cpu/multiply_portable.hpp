// Products in plain C++, for processors without AVX2.
#pragma once

#include "multiply_tile.hpp"

namespace kvt {
namespace portable {

// Sixteen rows' weights of one scale: bytes [vector][row][4], d and m.
struct Part {
  alignas(64) uint8_t weights[kGroupVectors][64];
  int first, last;  // vectors
  ScaleLanes scales;
};

// Add the products with activation row `row` to sums [16].
template <int32_t kType>
void add_part(const Part& part, const InputGroup& input, int row, int32_t minus, float* sums) {
  constexpr Format kFormat = format_of(kType);
  alignas(64) int32_t dots[kLanes];
  std::fill_n(dots, kLanes, kFormat.has_min() ? 0 : minus * kFormat.zero());
  for (int j = part.first; j < part.last; ++j) {
    const int8_t* q = input.q[row] + 4 * j;
    for (int r = 0; r < kLanes; ++r) {
      const uint8_t* w = part.weights[j] + 4 * r;
      dots[r] += w[0] * q[0] + w[1] * q[1] + w[2] * q[2] + w[3] * q[3];
    }
  }
  const F32x16 scaled = to_floats(load<I32x16>(dots)) * part.scales.d;
  F32x16 sum = fma(scaled, splat(input.scale[row]), load<F32x16>(sums));
  if (kFormat.has_min()) {
    sum = fma(part.scales.m, splat(input.scale[row] * static_cast<float>(-minus)), sum);
  }
  store(sums, sum);
}

template <int32_t kType>
void add_group(const uint8_t* block, const uint8_t* group, int g, const InputGroup& input, int rows,
               float* out) {
  constexpr Format kFormat = format_of(kType);
  constexpr int kVectors = kGroupVectors / kFormat.parts();
  for (int half = 0; half < 2; ++half) {
    Part part;
    for (int j = 0; j < kGroupVectors; ++j) {
      store(part.weights[j], weights<kType>(group + half * kFormat.half_bytes(), j));
    }
    for (int p = 0; p < kFormat.parts(); ++p) {
      part.first = p * kVectors;
      part.last = part.first + kVectors;
      part.scales = read_scales<kType>(block, group, g, half, p);
      for (int row = 0; row < rows; ++row) {
        const int32_t minus =
            kFormat.has_halves() ? input.minus_half[p][row] : input.minus_sum[row];
        add_part<kType>(part, input, row, minus, out + row * kPanelRows + half * kLanes);
      }
    }
  }
}

template <int32_t kType>
float weight_at(const uint8_t* panel, int64_t k, int row) {
  if constexpr (kType == kF32) return load<float>(panel + (k * kPanelRows + row) * 4);
  if constexpr (kType == kF16) return from_f16(load<uint16_t>(panel + (k * kPanelRows + row) * 2));
  const auto half = load<uint16_t>(panel + ((k / 2 * kPanelRows + row) * 2 + k % 2) * 2);
  return bits_to_float(uint32_t{half} << 16);
}

}  // namespace portable

template <int32_t kType, int kRows>
void multiply_tile(const Tile& tile) {
  constexpr Format kFormat = format_of(kType);
  const auto* input = static_cast<const InputGroup*>(tile.inputs);
  const uint8_t* panel = tile.panel;
  std::fill_n(tile.out, kRows * kPanelRows, 0.0f);
  for (int64_t done = 0; done < tile.cols; done += kFormat.block()) {
    const uint8_t* group = panel + kFormat.header_bytes();
    for (int g = 0; g < kFormat.groups(); ++g, ++input, group += kFormat.group_bytes()) {
      portable::add_group<kType>(panel, group, g, *input, kRows, tile.out);
    }
    panel += kFormat.block_bytes();
  }
}

template <int32_t kType, int kRows>
void multiply_float_tile(const Tile& tile) {
  const auto* inputs = static_cast<const float*>(tile.inputs);
  std::fill_n(tile.out, kRows * kPanelRows, 0.0f);
  for (int64_t k = 0; k < tile.cols; ++k, inputs += kInputRows) {
    float weights[kPanelRows];
    for (int r = 0; r < kPanelRows; ++r) weights[r] = portable::weight_at<kType>(tile.panel, k, r);
    for (int row = 0; row < kRows; ++row) {
      for (int r = 0; r < kPanelRows; ++r) {
        tile.out[row * kPanelRows + r] += weights[r] * inputs[row];
      }
    }
  }
}

}  // namespace kvt
