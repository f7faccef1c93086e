// Quantising activations on AVX-512: what input.hpp does, 32 inputs in two registers.
#pragma once

#include <immintrin.h>

namespace kvt {
namespace input {

// The largest magnitude, NaN above all: magnitudes order as integers.
inline float largest_magnitude(__m512 a, __m512 b) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512i all = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a), magnitude),
                                       _mm512_and_si512(_mm512_castps_si512(b), magnitude));
  const __m256i eight =
      _mm256_max_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(four));
}

inline void prepare_group(const float* x, InputGroup& group, int row) {
  const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
  const float largest = largest_magnitude(a, b);
  const bool is_zero = largest < kSmallest;
  const __m512 inverse = _mm512_set1_ps(is_zero ? 0.0f : 127.0f / largest);
  const float scale = is_zero ? 0.0f : largest / 127.0f;
  const __m128i low = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)));
  const __m128i high = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(b, inverse)));
  const __m256i q = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(group.q[row]), q);
  // Sums of four, then of all sixteen of each half.
  __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), q);
  sums = _mm256_hadd_epi32(sums, sums);
  sums = _mm256_hadd_epi32(sums, sums);
  const int32_t first = _mm256_extract_epi32(sums, 0), last = _mm256_extract_epi32(sums, 4);
  group.scale[row] = scale;
  group.sum[row] = scale * static_cast<float>(first + last);
  group.minus_sum[row] = -(first + last);
  group.minus_half[0][row] = -first;
  group.minus_half[1][row] = -last;
}

}  // namespace input
}  // namespace kvt
