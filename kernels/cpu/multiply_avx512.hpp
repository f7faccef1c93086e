// Products with AVX-512 VNNI: 32 outputs (two registers) by up to six rows.
//
// Of 32 registers, 12 hold integer sums of a group, 12 the float sums of all groups, 2 weights. The
// order of float operations per output is that of all kernels: convert, times d, plus times the
// activations' scale, plus m times their sum.
#pragma once

#include "multiply_tile.hpp"

namespace kvt {

// sums[i] += the four products of weights[4i..] (unsigned) and q (signed).
KVT_INLINE I32x16 dot4(I32x16 sums, U8x64 weights, I32x16 q) {
  return (I32x16)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)q);
}

KVT_INLINE I32x16 four(const int8_t* q) { return splat(load<int32_t>(q)); }

// Sums start at minus the zero point times the sum of activations: the zero point costs nothing.
template <bool kHasHalves, bool kHasMin>
KVT_INLINE I32x16 first_sum(const InputGroup& input, int row, int part, int zero_shift) {
  if (kHasMin) return I32x16{};
  return splat(kHasHalves ? input.minus_half[part][row] : input.minus_sum[row]) << zero_shift;
}

// scale * sum of q, of the inputs that one min is for.
template <bool kHasHalves>
KVT_INLINE F32x16 input_sum(const InputGroup& input, int row, int part) {
  if (!kHasHalves) return splat(input.sum[row]);
  return splat(input.scale[row]) * to_floats(-splat(input.minus_half[part][row]));
}

template <int kRows, bool kHasHalves, bool kHasMin>
void multiply_tile(const Tile& tile) {
  constexpr Kind kKind{kHasHalves, kHasMin};
  F32x16 sums[kRows][2] = {};
  const uint8_t* weights = tile.weights;
  const InputGroup* input = tile.inputs;
  for (int64_t g = 0; g < tile.groups; ++g, ++input, weights += kKind.group_bytes()) {
    for (int part = 0; part < kKind.parts(); ++part) {
      I32x16 dots[kRows][2];
#pragma GCC unroll 6
      for (int row = 0; row < kRows; ++row) {
        dots[row][0] = dots[row][1] =
            first_sum<kHasHalves, kHasMin>(*input, row, part, tile.zero_shift);
      }
      constexpr int kVectors = kGroupVectors / kKind.parts();
#pragma GCC unroll 8
      for (int j = part * kVectors; j < (part + 1) * kVectors; ++j) {
        const U8x64 w0 = load<U8x64>(weights + 64 * j);
        const U8x64 w1 = load<U8x64>(weights + 512 + 64 * j);
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row) {
          const I32x16 q = four(input->q[row] + 4 * j);
          dots[row][0] = dot4(dots[row][0], w0, q);
          dots[row][1] = dot4(dots[row][1], w1, q);
        }
      }
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const F32x16 d = load<F32x16>(weights + kKind.scale_offset(part, half));
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row) {
          const F32x16 scaled = to_floats(dots[row][half]) * d;
          sums[row][half] = fma(scaled, splat(input->scale[row]), sums[row][half]);
        }
        if (!kHasMin) continue;
        const F32x16 m = load<F32x16>(weights + kKind.min_offset(part, half));
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row) {
          sums[row][half] = fma(m, input_sum<kHasHalves>(*input, row, part), sums[row][half]);
        }
      }
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    store(tile.out + 32 * row, sums[row][0]);
    store(tile.out + 32 * row + 16, sums[row][1]);
  }
}

template <int kRows>
void multiply_float_tile(const FloatTile& tile) {
  const auto* weights = static_cast<const float*>(tile.weights);
  const auto* inputs = static_cast<const float*>(tile.inputs);
  F32x16 sums[kRows][2] = {};
  for (int64_t k = 0; k < tile.count; ++k, weights += kPanelRows, inputs += kInputRows) {
    const F32x16 w0 = load<F32x16>(weights), w1 = load<F32x16>(weights + kLanes);
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      const F32x16 x = splat(inputs[row]);
      sums[row][0] = fma(w0, x, sums[row][0]);
      sums[row][1] = fma(w1, x, sums[row][1]);
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    store(tile.out + 32 * row, sums[row][0]);
    store(tile.out + 32 * row + 16, sums[row][1]);
  }
}

#if defined(__AVX512BF16__)
KVT_INLINE F32x16 dot2(F32x16 sums, U8x64 weights, I32x16 pair) {
  return (F32x16)_mm512_dpbf16_ps((__m512)sums, (__m512bh)weights, (__m512bh)pair);
}

template <int kRows>
void multiply_bf16_tile(const FloatTile& tile) {
  const auto* weights = static_cast<const uint8_t*>(tile.weights);
  const auto* inputs = static_cast<const int32_t*>(tile.inputs);
  F32x16 sums[kRows][2] = {};
  for (int64_t k = 0; k < tile.count; ++k, weights += 128, inputs += kInputRows) {
    const U8x64 w0 = load<U8x64>(weights), w1 = load<U8x64>(weights + 64);
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      const I32x16 x = splat(inputs[row]);
      sums[row][0] = dot2(sums[row][0], w0, x);
      sums[row][1] = dot2(sums[row][1], w1, x);
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    store(tile.out + 32 * row, sums[row][0]);
    store(tile.out + 32 * row + 16, sums[row][1]);
  }
}
#endif

}  // namespace kvt
