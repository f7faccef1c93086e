// Integer products in plain C++, for processors without AVX2.
#pragma once

#include "multiply_tile.hpp"

namespace kvt {

typedef int16_t ShortLanes __attribute__((vector_size(4 * kLanes)));

// 16 bits each, repeated.
KVT_INLINE ShortLanes pair_lanes(int8_t first, int8_t second) {
  const auto high = static_cast<uint32_t>(static_cast<int32_t>(second)) << 16;
  return (ShortLanes)splat(static_cast<int32_t>(high | static_cast<uint16_t>(first)));
}

// The two halves of each lane, added.
KVT_INLINE IntLanes add_halves(ShortLanes pairs) {
  const auto lanes = (IntLanes)pairs;
  return (lanes << 16 >> 16) + (lanes >> 16);
}

// Integer products of the inputs of one scale with a piece's weights, less the zero point. One
// product of two bytes fits in 16 bits.
template <int32_t kType, int kRows, int kPart>
KVT_INLINE void multiply_integers(const uint8_t* planes, const InputGroup& input,
                                  IntLanes (&dots)[kRows]) {
  constexpr Format kFormat = format_of(kType);
  constexpr int kVectors = kGroupVectors / kFormat.parts();
  for (int row = 0; row < kRows; ++row) {
    const int32_t minus =
        kFormat.has_halves() ? input.minus_half[kPart][row] : input.minus_sum[row];
    dots[row] = splat(minus * kFormat.zero());
  }
  for (int j = kPart * kVectors; j < (kPart + 1) * kVectors; ++j) {
    const auto words = (WordLanes)weights<kType>(planes, j);
    const auto even = (ShortLanes)(words & 255), odd = (ShortLanes)(words >> 8);
    for (int row = 0; row < kRows; ++row) {
      const int8_t* q = input.q[row] + 4 * j;
      dots[row] += add_halves(even * pair_lanes(q[0], q[2]));
      dots[row] += add_halves(odd * pair_lanes(q[1], q[3]));
    }
  }
}

}  // namespace kvt
