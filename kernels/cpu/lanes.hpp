// Vectors of the processor's own width, written once for all instruction sets with the compiler's
// vector types: sixteen lanes with AVX-512, else eight (split where registers are smaller).
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

// Begin to bring a line into the cache. What a step reads `once` shall not displace what it finds
// there again: a stream of weights past the third cache leaves the interpreter's memory in it, and
// what lies between two steps takes half the time.
KVT_INLINE void fetch_line(const void* line, bool once) {
  if (once) __builtin_prefetch(line, 0, 0);
  else __builtin_prefetch(line);
}

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

typedef float FloatLanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes)));
typedef uint16_t WordLanes __attribute__((vector_size(4 * kLanes)));  // twice as many
typedef uint8_t ByteLanes __attribute__((vector_size(4 * kLanes)));   // four times as many

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

KVT_INLINE FloatLanes splat(float value) {
#if defined(__AVX512F__)
  return (FloatLanes)_mm512_set1_ps(value);
#else
  return FloatLanes{} + value;
#endif
}

KVT_INLINE IntLanes splat(int32_t value) {
#if defined(__AVX512F__)
  return (IntLanes)_mm512_set1_epi32(value);
#else
  return IntLanes{} + value;
#endif
}

// a * b + c, rounded once where the processor can.
KVT_INLINE FloatLanes fma(FloatLanes a, FloatLanes b, FloatLanes c) {
#if defined(__AVX512F__)
  return (FloatLanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (FloatLanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

KVT_INLINE FloatLanes to_floats(IntLanes value) {
  return __builtin_convertvector(value, FloatLanes);
}

// Small integers. Compilers take a general conversion apart, byte by byte.
KVT_INLINE IntLanes load_unsigned(const uint8_t* source) {
#if defined(__AVX512F__)
  return (IntLanes)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)source));
#elif defined(__AVX2__)
  return (IntLanes)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)source));
#else
  IntLanes value{};
  for (int i = 0; i < kLanes; ++i) value[i] = source[i];
  return value;
#endif
}

KVT_INLINE IntLanes load_signed(const uint8_t* source) {
  return ((load_unsigned(source) ^ 0x80) - 0x80);
}

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

KVT_INLINE FloatLanes load_f16(const uint8_t* source) {
#if defined(__AVX512F__)
  return (FloatLanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)source));
#elif defined(__F16C__)
  return (FloatLanes)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)source));
#else
  FloatLanes value{};
  for (int i = 0; i < kLanes; ++i) value[i] = from_f16(load<uint16_t>(source + 2 * i));
  return value;
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

// table[code] for codes below 16.
KVT_INLINE ByteLanes look_up(const uint8_t* table, ByteLanes codes) {
#if defined(__AVX512BW__)
  const __m512i wide = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  return (ByteLanes)_mm512_shuffle_epi8(wide, (__m512i)codes);
#elif defined(__AVX2__)
  const __m256i wide = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return (ByteLanes)_mm256_shuffle_epi8(wide, (__m256i)codes);
#else
  for (int i = 0; i < 4 * kLanes; ++i) codes[i] = table[codes[i]];
  return codes;
#endif
}

}  // namespace kvt
