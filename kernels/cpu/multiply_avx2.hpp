// Integer products with AVX2.
//
// There is no instruction that adds four products of bytes: two are multiplied and added to 16
// bits, several such sums are added there while they cannot overflow, and then widened. Weights of
// more than 7 bits are multiplied by magnitude, with their sign moved to the activations.
#pragma once

#include "multiply_tile.hpp"

namespace kvt {

// Weights of 8 bits would overflow 16 bits as unsigned numbers: they are taken as signed ones.
constexpr bool is_signed(const Format& format) { return format.zero() == 128; }

constexpr int largest_weight(const Format& format) {
  int largest = (1 << format.bits) - 1;
  if (format.table) largest = format.table[7];  // tables ascend to there
  return largest;
}

// How many sums of two products fit in 16 bits.
constexpr int num_sums(const Format& format) {
  if (is_signed(format)) return 1;
  const int most = 32767 / (2 * 127 * largest_weight(format));
  return most >= 8 ? 8 : most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

// sums += weights * q, in pairs.
template <bool kIsSigned>
KVT_INLINE __m256i add_pairs(__m256i sums, __m256i weights, __m256i q) {
  if (kIsSigned) {
    const __m256i turned = _mm256_sign_epi8(q, weights);
    return _mm256_add_epi16(sums, _mm256_maddubs_epi16(_mm256_abs_epi8(weights), turned));
  }
  return _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, q));
}

// Integer products of the inputs of one scale with a piece's weights, less the zero point.
template <int32_t kType, int kRows, int kPart>
KVT_INLINE void multiply_integers(const uint8_t* planes, const InputGroup& input,
                                  IntLanes (&dots)[kRows]) {
  constexpr Format kFormat = format_of(kType);
  constexpr int kVectors = kGroupVectors / kFormat.parts();
  constexpr int kSums = num_sums(kFormat) < kVectors ? num_sums(kFormat) : kVectors;
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    const int32_t minus =
        kFormat.has_halves() ? input.minus_half[kPart][row] : input.minus_sum[row];
    const int32_t first = is_signed(kFormat) ? 0 : minus * kFormat.zero();
    dots[row] = splat(first);
  }
#pragma GCC unroll 8
  for (int begin = 0; begin < kVectors; begin += kSums) {
    __m256i pairs[kRows];
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) pairs[row] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) {
      const int j = kPart * kVectors + begin + i;
      auto w = (__m256i)weights<kType>(planes, j);
      if (is_signed(kFormat)) w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
#pragma GCC unroll 6
      for (int row = 0; row < kRows; ++row) {
        const __m256i q = _mm256_set1_epi32(load<int32_t>(input.q[row] + 4 * j));
        pairs[row] = add_pairs<is_signed(kFormat)>(pairs[row], w, q);
      }
    }
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      const __m256i sums = _mm256_madd_epi16(pairs[row], _mm256_set1_epi16(1));
      dots[row] += (IntLanes)sums;
    }
  }
}

}  // namespace kvt
