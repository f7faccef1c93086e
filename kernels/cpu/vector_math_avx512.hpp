// Floats on AVX-512: one register.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kvt {

struct Floats {
  __m512 lanes;

  static Floats all(float value) { return {_mm512_set1_ps(value)}; }
  static Floats alternating(float even, float odd) {
    return {_mm512_mask_blend_ps(0xaaaa, _mm512_set1_ps(even), _mm512_set1_ps(odd))};
  }
  static Floats zero() { return {_mm512_setzero_ps()}; }
  static Floats load(const float* source) { return {_mm512_loadu_ps(source)}; }
  static Floats load_half(const uint16_t* source) {  // 16 f16
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)))};
  }
  static Floats load_int8(const int8_t* source) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
  }
  static Floats load_nibbles(const uint8_t* source) {  // 8 bytes, low bits first, less 8
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(source));
    const __m128i four_bits = _mm_set1_epi8(15);
    const __m128i low = _mm_and_si128(bytes, four_bits);
    const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), four_bits);
    const __m128i numbers = _mm_sub_epi8(_mm_unpacklo_epi8(low, high), _mm_set1_epi8(8));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(numbers))};
  }
  void store(float* target) const { _mm512_storeu_ps(target, lanes); }
  void store_half(uint16_t* target) const {
    const __m256i half = _mm512_cvtps_ph(lanes, _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), half);
  }
};

inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.lanes, b.lanes)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.lanes, b.lanes)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.lanes, b.lanes)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.lanes, b.lanes)}; }
inline Floats fma(Floats a, Floats b, Floats c) {  // a b + c
  return {_mm512_fmadd_ps(a.lanes, b.lanes, c.lanes)};
}
// Where b is NaN the result is NaN; a must not be.
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.lanes, b.lanes)}; }
inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.lanes, b.lanes)}; }
struct Parts {
  Floats whole, fraction;
};
// a = floor(a) + fraction; `whole` is for scale2 alone, which takes the floor itself.
inline Parts split(Floats a) {
  constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  return {a, {_mm512_reduce_ps(a.lanes, kDown)}};
}
// a 2^b
inline Floats scale2(Floats a, Floats b) { return {_mm512_scalef_ps(a.lanes, b.lanes)}; }
// Lane i of a where bit i of `bits` is set, else of b.
inline Floats select(uint16_t bits, Floats a, Floats b) {
  return {_mm512_mask_blend_ps(bits, b.lanes, a.lanes)};
}
// a0 b0 a1 b1 ... in two parts, and back.
inline void zip(Floats a, Floats b, Floats& first, Floats& second) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  first = {_mm512_permutex2var_ps(a.lanes, low, b.lanes)};
  second = {_mm512_permutex2var_ps(a.lanes, high, b.lanes)};
}
inline void unzip(Floats first, Floats second, Floats& a, Floats& b) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  a = {_mm512_permutex2var_ps(first.lanes, even, second.lanes)};
  b = {_mm512_permutex2var_ps(first.lanes, odd, second.lanes)};
}
inline float largest(Floats a) { return _mm512_reduce_max_ps(a.lanes); }
inline float sum(Floats a) { return _mm512_reduce_add_ps(a.lanes); }

}  // namespace kvt
