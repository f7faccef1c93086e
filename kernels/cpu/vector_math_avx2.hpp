// Floats on AVX2 with FMA and F16C: two registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kvt {

struct Floats {
  __m256 low, high;

  static Floats all(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  static Floats alternating(float even, float odd) {
    const __m256 eight = _mm256_setr_ps(even, odd, even, odd, even, odd, even, odd);
    return {eight, eight};
  }
  static Floats zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Floats load(const float* source) {
    return {_mm256_loadu_ps(source), _mm256_loadu_ps(source + 8)};
  }
  static Floats load_half(const uint16_t* source) {  // 16 f16
    const auto* halves = reinterpret_cast<const __m128i*>(source);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
  }
  static Floats of_int8(__m128i bytes) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
  }
  static Floats load_int8(const int8_t* source) {
    return of_int8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
  }
  static Floats load_nibbles(const uint8_t* source) {  // 8 bytes, low bits first, less 8
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(source));
    const __m128i four_bits = _mm_set1_epi8(15);
    const __m128i low = _mm_and_si128(bytes, four_bits);
    const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), four_bits);
    const __m128i numbers = _mm_sub_epi8(_mm_unpacklo_epi8(low, high), _mm_set1_epi8(8));
    return of_int8(numbers);
  }
  void store(float* target) const {
    _mm256_storeu_ps(target, low);
    _mm256_storeu_ps(target + 8, high);
  }
  void store_half(uint16_t* target) const {
    auto* halves = reinterpret_cast<__m128i*>(target);
    _mm_storeu_si128(halves, _mm256_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT));
  }
};

inline Floats operator+(Floats a, Floats b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
inline Floats operator-(Floats a, Floats b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
inline Floats operator*(Floats a, Floats b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
inline Floats operator/(Floats a, Floats b) {
  return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
inline Floats fma(Floats a, Floats b, Floats c) {  // a b + c
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
// Where b is NaN the result is NaN; a must not be.
inline Floats max(Floats a, Floats b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
inline Floats min(Floats a, Floats b) {
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
struct Parts {
  Floats whole, fraction;
};
inline Parts split(Floats a) {
  const Floats whole{_mm256_floor_ps(a.low), _mm256_floor_ps(a.high)};
  return {whole, a - whole};
}

inline __m256 scale2(__m256 a, __m256 b) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(b), 23);
  const __m256 scaled =
      _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), exponent));
  const __m256 is_small = _mm256_cmp_ps(b, _mm256_set1_ps(-126.0f), _CMP_LT_OQ);
  return _mm256_andnot_ps(is_small, scaled);
}
// a 2^b for whole b, 0 where b < -126.
inline Floats scale2(Floats a, Floats b) { return {scale2(a.low, b.low), scale2(a.high, b.high)}; }

inline __m256 lanes_of(uint32_t bits) {
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i wanted = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), each);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(wanted, each));
}
// Lane i of a where bit i of `bits` is set, else of b.
inline Floats select(uint16_t bits, Floats a, Floats b) {
  return {_mm256_blendv_ps(b.low, a.low, lanes_of(bits & 255u)),
          _mm256_blendv_ps(b.high, a.high, lanes_of(bits >> 8))};
}

inline __m256 swap_middle(__m256 a) {  // pairs of lanes 0 2 1 3
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(a), 0xd8));
}
// a0 b0 a1 b1 ... in two parts, and back.
inline void zip(Floats a, Floats b, Floats& first, Floats& second) {
  const auto mix = [](__m256 x, __m256 y) -> Floats {
    const __m256 low = _mm256_unpacklo_ps(x, y), high = _mm256_unpackhi_ps(x, y);
    return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
  };
  first = mix(a.low, b.low);
  second = mix(a.high, b.high);
}
inline void unzip(Floats first, Floats second, Floats& a, Floats& b) {
  a = {swap_middle(_mm256_shuffle_ps(first.low, first.high, 0x88)),
       swap_middle(_mm256_shuffle_ps(second.low, second.high, 0x88))};
  b = {swap_middle(_mm256_shuffle_ps(first.low, first.high, 0xdd)),
       swap_middle(_mm256_shuffle_ps(second.low, second.high, 0xdd))};
}

inline float largest(Floats a) {
  const __m256 eight = _mm256_max_ps(a.low, a.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline float sum(Floats a) {
  const __m256 eight = _mm256_add_ps(a.low, a.high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

}  // namespace kvt
