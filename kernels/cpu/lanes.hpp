// Sixteen lanes at a time, written once for all instruction sets with the compiler's vector types.
//
// On AVX-512 one value is one register; elsewhere the compiler splits it, so loops that need all
// registers (multiply_*.hpp) are written for each instruction set, and all else is written here.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Vectors wider than a register are passed in memory; nothing here is called across libraries.
#pragma GCC diagnostic ignored "-Wpsabi"

#define KVT_INLINE inline __attribute__((always_inline))

namespace kvt {

typedef float F32x16 __attribute__((vector_size(64)));
typedef int32_t I32x16 __attribute__((vector_size(64)));
typedef uint16_t U16x32 __attribute__((vector_size(64)));
typedef uint8_t U8x64 __attribute__((vector_size(64)));
typedef uint8_t U8x16 __attribute__((vector_size(16)));
typedef int8_t I8x16 __attribute__((vector_size(16)));
typedef uint16_t U16x16 __attribute__((vector_size(32)));

constexpr int kLanes = 16;

template <class T>
KVT_INLINE T load(const void* source) {
  T value;
  std::memcpy(&value, source, sizeof value);
  return value;
}

template <class T>
KVT_INLINE void store(void* target, T value) {
  std::memcpy(target, &value, sizeof value);
}

KVT_INLINE F32x16 splat(float value) {
#if defined(__AVX512F__)
  return (F32x16)_mm512_set1_ps(value);
#else
  return F32x16{} + value;
#endif
}

KVT_INLINE I32x16 splat(int32_t value) {
#if defined(__AVX512F__)
  return (I32x16)_mm512_set1_epi32(value);
#else
  return I32x16{} + value;
#endif
}

// a * b + c, rounded once where the processor can.
KVT_INLINE F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
#if defined(__AVX512F__)
  return (F32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  F32x16 result;
  for (int i = 0; i < kLanes; i += 8) {
    const __m256 sum = _mm256_fmadd_ps(_mm256_loadu_ps((const float*)&a + i),
                                       _mm256_loadu_ps((const float*)&b + i),
                                       _mm256_loadu_ps((const float*)&c + i));
    std::memcpy((float*)&result + i, &sum, sizeof sum);
  }
  return result;
#else
  return a * b + c;
#endif
}

// Sixteen small integers. Compilers take the general conversion apart, byte by byte.
KVT_INLINE I32x16 widen(U8x16 value) {
#if defined(__AVX512F__)
  return (I32x16)_mm512_cvtepu8_epi32((__m128i)value);
#else
  return __builtin_convertvector(value, I32x16);
#endif
}

KVT_INLINE I32x16 widen(I8x16 value) {
#if defined(__AVX512F__)
  return (I32x16)_mm512_cvtepi8_epi32((__m128i)value);
#else
  return __builtin_convertvector(value, I32x16);
#endif
}

KVT_INLINE F32x16 to_floats(I32x16 value) { return __builtin_convertvector(value, F32x16); }
KVT_INLINE F32x16 to_floats(U8x16 value) { return to_floats(widen(value)); }
KVT_INLINE F32x16 to_floats(I8x16 value) { return to_floats(widen(value)); }

KVT_INLINE float bits_to_float(uint32_t bits) { return load<float>(&bits); }
KVT_INLINE uint32_t float_to_bits(float value) { return load<uint32_t>(&value); }

// IEEE half precision to float, exact for all values.
KVT_INLINE float from_f16(uint16_t half) {
  const uint32_t magnitude = half & 0x7fffu;
  const uint32_t sign = (half & 0x8000u) << 16;
  // As a float, the bits of a half stand for a value smaller by 2^112, subnormals included.
  float value = bits_to_float(magnitude << 13) * 0x1p112f;
  if (magnitude >= 0x7c00u) value = bits_to_float((magnitude << 13) | 0x7f800000u);
  return bits_to_float(float_to_bits(value) | sign);
}

// Sixteen halves to floats.
KVT_INLINE F32x16 from_f16(const void* source) {
#if defined(__AVX512F__)
  return (F32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)source));
#elif defined(__F16C__)
  F32x16 result;
  for (int i = 0; i < 2; ++i) {
    const __m256 part = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)source + i));
    std::memcpy((float*)&result + 8 * i, &part, sizeof part);
  }
  return result;
#else
  const I32x16 half = __builtin_convertvector(load<U16x16>(source), I32x16);
  const I32x16 magnitude = (half & 0x7fff) << 13;
  const I32x16 special = ((half & 0x7fff) >= 0x7c00);  // all ones where infinite or NaN
  const I32x16 value = (I32x16)((F32x16)magnitude * 0x1p112f);
  return (F32x16)(((special & (magnitude | 0x7f800000)) | (~special & value)) |
                  ((half & 0x8000) << 16));
#endif
}

// Float to half, rounded to nearest even; what is too large becomes infinite.
inline uint16_t to_f16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint16_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x47800000u) return sign | 0x7c00u;  // 65536
  if (magnitude < 0x38800000u) {                         // below the normal halves: 2^-14
    // Adding 1/2 leaves a multiple of 2^-24, the step of subnormal halves, in the low bits.
    return sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u);
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return sign | ((rounded - 0x38000000u) >> 13);
}

// Float to bfloat16, rounded to nearest even; NaN stays NaN.
KVT_INLINE uint16_t to_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x40u;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// table[code] for bytes below 16.
KVT_INLINE U8x64 look_up(const uint8_t* table, U8x64 codes) {
#if defined(__AVX512BW__)
  const __m512i wide = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  return (U8x64)_mm512_shuffle_epi8(wide, (__m512i)codes);
#elif defined(__AVX2__)
  const __m256i wide = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  U8x64 result;
  for (int i = 0; i < 64; i += 32) {
    const __m256i part = _mm256_loadu_si256((const __m256i*)((const uint8_t*)&codes + i));
    const __m256i values = _mm256_shuffle_epi8(wide, part);
    std::memcpy((uint8_t*)&result + i, &values, sizeof values);
  }
  return result;
#else
  for (int i = 0; i < 64; ++i) codes[i] = table[codes[i]];
  return codes;
#endif
}

}  // namespace kvt
