// Products for registers of eight lanes or less: 8 outputs by up to six rows, four times a panel.
//
// What differs between instruction sets is multiply_integers(). The order of float operations per
// output is that of all kernels: convert, times d, plus times the activations' scale, plus m times
// their sum.
#pragma once

#if defined(__AVX2__)
#include "multiply_avx2.hpp"
#else
#include "multiply_portable.hpp"
#endif

namespace kvt {

template <int32_t kType, int kRows, int kPart>
KVT_INLINE void multiply_part(const uint8_t* block, const uint8_t* group, int g, int piece,
                              const InputGroup& input, FloatLanes (&sums)[kRows]) {
  constexpr Format kFormat = format_of(kType);
  IntLanes dots[kRows];
  multiply_integers<kType, kRows, kPart>(group + piece_offset(kFormat, piece), input, dots);
  const ScaleLanes scales = read_scales<kType>(block, group, g, piece, kPart);
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    const FloatLanes scaled = to_floats(dots[row]) * scales.d;
    sums[row] = fma(scaled, splat(input.scale[row]), sums[row]);
    if (!kFormat.has_min()) continue;
    float sum = input.sum[row];
    if (kFormat.has_halves()) {
      sum = input.scale[row] * static_cast<float>(-input.minus_half[kPart][row]);
    }
    sums[row] = fma(scales.m, splat(sum), sums[row]);
  }
}

template <int32_t kType, int kRows>
void multiply_tile(const Tile& tile) {
  constexpr Format kFormat = format_of(kType);
  Fetch fetch = tile.fetch;
  for (int piece = 0; piece < kPieces; ++piece) {
    FloatLanes sums[kRows] = {};
    const uint8_t* panel = tile.panel;
    const auto* input = static_cast<const InputGroup*>(tile.inputs);
    for (int64_t done = 0; done < tile.cols; done += kFormat.block()) {
      const uint8_t* group = panel + kFormat.header_bytes();
      for (int g = 0; g < kFormat.groups(); ++g, ++input, group += kFormat.group_bytes()) {
        if (piece == 0) fetch.step();
        multiply_part<kType, kRows, 0>(panel, group, g, piece, *input, sums);
        if constexpr (kFormat.has_halves()) {
          multiply_part<kType, kRows, 1>(panel, group, g, piece, *input, sums);
        }
      }
      panel += kFormat.block_bytes();
    }
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      store(tile.out + row * kPanelRows + piece * kLanes, sums[row]);
    }
  }
}

// A piece's weights of input `k`.
template <int32_t kType>
KVT_INLINE FloatLanes load_weights(const uint8_t* panel, int64_t k, int row) {
  if constexpr (kType == kF32) return load<FloatLanes>(panel + (k * kPanelRows + row) * 4);
  if constexpr (kType == kF16) return load_f16(panel + (k * kPanelRows + row) * 2);
  const auto pairs = load<IntLanes>(panel + (k / 2 * kPanelRows + row) * 4);
  return (FloatLanes)(k % 2 ? pairs & static_cast<int32_t>(0xffff0000u) : pairs << 16);
}

template <int32_t kType, int kRows>
void multiply_float_tile(const Tile& tile) {
  Fetch fetch = tile.fetch;
  for (int piece = 0; piece < kPieces; ++piece) {
    FloatLanes sums[kRows] = {};
    const auto* inputs = static_cast<const float*>(tile.inputs);
    for (int64_t k = 0; k < tile.cols; ++k, inputs += kInputRows) {
      if (piece == 0 && k % 32 == 0) fetch.step();
      const FloatLanes w = load_weights<kType>(tile.panel, k, piece * kLanes);
#pragma GCC unroll 6
      for (int row = 0; row < kRows; ++row) sums[row] = fma(w, splat(inputs[row]), sums[row]);
    }
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      store(tile.out + row * kPanelRows + piece * kLanes, sums[row]);
    }
  }
}

}  // namespace kvt
