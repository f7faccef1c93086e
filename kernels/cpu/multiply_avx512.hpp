// Products with AVX-512 VNNI and BF16: 32 outputs (two registers) by up to six rows.
//
// Of 32 registers, 12 hold integer sums of a group, 12 the float sums of all groups, 2 weights. The
// order of float operations per output is that of all kernels: convert, times d, plus times the
// activations' scale, plus m times their sum.
#pragma once

#include "multiply_tile.hpp"

namespace kvt {

// sums[i] += the four products of weights[4i..] (unsigned) and q (signed).
KVT_INLINE IntLanes dot4(IntLanes sums, ByteLanes weights, IntLanes q) {
  return (IntLanes)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)q);
}

template <int kRows>
KVT_INLINE void store_sums(const FloatLanes (&sums)[kRows][2], float* out) {
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    store(out + kPanelRows * row, sums[row][0]);
    store(out + kPanelRows * row + kLanes, sums[row][1]);
  }
}

// Integer products of the inputs of one scale. They start at minus the zero point times the sum of
// the activations, so the zero point costs nothing.
template <int32_t kType, int kRows, int kPart>
KVT_INLINE void multiply_integers(const uint8_t* group, const InputGroup& input,
                                  IntLanes (&dots)[kRows][2]) {
  constexpr Format kFormat = format_of(kType);
  constexpr int kVectors = kGroupVectors / kFormat.parts();
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    IntLanes first{};
    if (!kFormat.has_min()) {
      const int32_t minus =
          kFormat.has_halves() ? input.minus_half[kPart][row] : input.minus_sum[row];
      first = splat(minus) << kFormat.zero_shift;
    }
    dots[row][0] = dots[row][1] = first;
  }
#pragma GCC unroll 8
  for (int j = kPart * kVectors; j < (kPart + 1) * kVectors; ++j) {
    const ByteLanes w0 = weights<kType>(group, j);
    const ByteLanes w1 = weights<kType>(group + piece_offset(kFormat, 1), j);
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      const IntLanes q = splat(load<int32_t>(input.q[row] + 4 * j));
      dots[row][0] = dot4(dots[row][0], w0, q);
      dots[row][1] = dot4(dots[row][1], w1, q);
    }
  }
}

// scale * sum of q, of the inputs that one min is for.
template <bool kHasHalves>
KVT_INLINE FloatLanes input_sum(const InputGroup& input, int row, int part) {
  if (!kHasHalves) return splat(input.sum[row]);
  return splat(input.scale[row]) * to_floats(-splat(input.minus_half[part][row]));
}

// The inputs of one scale in group `g` of a block.
template <int32_t kType, int kRows, int kPart>
KVT_INLINE void multiply_part(const uint8_t* block, const uint8_t* group, int g,
                              const InputGroup& input, FloatLanes (&sums)[kRows][2]) {
  constexpr Format kFormat = format_of(kType);
  IntLanes dots[kRows][2];
  multiply_integers<kType, kRows, kPart>(group, input, dots);
#pragma GCC unroll 2
  for (int piece = 0; piece < kPieces; ++piece) {
    const ScaleLanes scales = read_scales<kType>(block, group, g, piece, kPart);
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      const FloatLanes scaled = to_floats(dots[row][piece]) * scales.d;
      sums[row][piece] = fma(scaled, splat(input.scale[row]), sums[row][piece]);
      if (!kFormat.has_min()) continue;
      const FloatLanes sum = input_sum<kFormat.has_halves()>(input, row, kPart);
      sums[row][piece] = fma(scales.m, sum, sums[row][piece]);
    }
  }
}

template <int32_t kType, int kRows>
void multiply_tile(const Tile& tile) {
  constexpr Format kFormat = format_of(kType);
  FloatLanes sums[kRows][2] = {};
  const uint8_t* panel = tile.panel;
  const auto* input = static_cast<const InputGroup*>(tile.inputs);
  Fetch fetch = tile.fetch;
  for (int64_t done = 0; done < tile.cols; done += kFormat.block()) {
    const uint8_t* group = panel + kFormat.header_bytes();
    for (int g = 0; g < kFormat.groups(); ++g, ++input, group += kFormat.group_bytes()) {
      fetch.step();
      multiply_part<kType, kRows, 0>(panel, group, g, *input, sums);
      if constexpr (kFormat.has_halves()) {
        multiply_part<kType, kRows, 1>(panel, group, g, *input, sums);
      }
    }
    panel += kFormat.block_bytes();
  }
  store_sums<kRows>(sums, tile.out);
}

// sums += weights of 16 rows * input: a value, or the two products of a pair.
template <int32_t kType>
KVT_INLINE FloatLanes multiply_lanes(const uint8_t* weights, const uint8_t* input,
                                     FloatLanes sums) {
  if constexpr (kType == kF32) {
    return fma(load<FloatLanes>(weights), splat(load<float>(input)), sums);
  } else if constexpr (kType == kF16) {
    return fma(load_f16(weights), splat(load<float>(input)), sums);
  } else {
    const __m512i pair = _mm512_set1_epi32(load<int32_t>(input));
    return (FloatLanes)_mm512_dpbf16_ps((__m512)sums, load<__m512bh>(weights), (__m512bh)pair);
  }
}

template <int32_t kType, int kRows>
void multiply_float_tile(const Tile& tile) {
  constexpr int kStep = kLanes * float_bytes(kType) * (is_paired(kType) ? 2 : 1);
  constexpr int kSteps = is_paired(kType) ? 16 : 32;  // for 32 inputs
  const int64_t count = padded_cols(tile.cols) / (is_paired(kType) ? 2 : 1);
  FloatLanes sums[kRows][2] = {};
  const uint8_t* weights = tile.panel;
  const auto* inputs = static_cast<const uint8_t*>(tile.inputs);
  Fetch fetch = tile.fetch;
  for (int64_t k = 0; k < count; ++k, weights += 2 * kStep, inputs += 4 * kInputRows) {
    if (k % kSteps == 0) fetch.step();
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      for (int piece = 0; piece < kPieces; ++piece) {
        sums[row][piece] =
            multiply_lanes<kType>(weights + kStep * piece, inputs + 4 * row, sums[row][piece]);
      }
    }
  }
  store_sums<kRows>(sums, tile.out);
}

}  // namespace kvt
