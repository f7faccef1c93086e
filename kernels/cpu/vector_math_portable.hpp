// Floats on any machine: four of the compiler's generic vectors (SSE2, NEON, or plain registers).
#pragma once

#include <cstdint>
#include <cstring>

namespace kvt {

typedef float Quad __attribute__((vector_size(16)));
typedef int32_t QuadInt __attribute__((vector_size(16)));

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// f16 to f32 and back (to nearest, ties to even), with infinities, NaN and subnormal numbers.
inline float half_to_float(uint16_t half) {
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const float far = float_of_bits(0x77800000);  // 2^112: from the exponents of f16 to those of f32
  const uint32_t scaled = bits_of_float(float_of_bits(magnitude) * far);
  const uint32_t special = magnitude | 0x7f800000;
  return float_of_bits(sign | ((half & 0x7c00) == 0x7c00 ? special : scaled));
}
inline uint16_t float_to_half(float value) {
  const uint32_t bits = bits_of_float(value), magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  } else if (magnitude >= 0x477ff000) {  // rounds to 65536 or more
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {  // subnormal: adding 0.5 leaves units of 2^-24
    half = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000;
  } else {
    half = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  }
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | half);
}

struct Floats {
  Quad quads[4];

  static Floats all(float value) {
    const Quad quad = {value, value, value, value};
    return {{quad, quad, quad, quad}};
  }
  static Floats alternating(float even, float odd) {
    const Quad quad = {even, odd, even, odd};
    return {{quad, quad, quad, quad}};
  }
  static Floats zero() { return all(0.0f); }
  static Floats load(const float* source) {
    Floats result;
    std::memcpy(&result, source, sizeof result);
    return result;
  }
  static Floats load_half(const uint16_t* source) {
    float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = half_to_float(source[i]);
    return load(lanes);
  }
  static Floats load_int8(const int8_t* source) {
    float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = static_cast<float>(source[i]);
    return load(lanes);
  }
  static Floats load_nibbles(const uint8_t* source) {  // 8 bytes, low bits first, less 8
    float lanes[16];
    for (int i = 0; i < 8; ++i) {
      lanes[2 * i] = static_cast<float>((source[i] & 15) - 8);
      lanes[2 * i + 1] = static_cast<float>((source[i] >> 4) - 8);
    }
    return load(lanes);
  }
  void store(float* target) const { std::memcpy(target, quads, sizeof quads); }
  void store_half(uint16_t* target) const {
    float lanes[16];
    store(lanes);
    for (int i = 0; i < 16; ++i) target[i] = float_to_half(lanes[i]);
  }
};

template <class Function>
inline Floats each_quad(Function function) {
  return {{function(0), function(1), function(2), function(3)}};
}

inline Floats operator+(const Floats& a, const Floats& b) {
  return each_quad([&](int i) { return a.quads[i] + b.quads[i]; });
}
inline Floats operator-(const Floats& a, const Floats& b) {
  return each_quad([&](int i) { return a.quads[i] - b.quads[i]; });
}
inline Floats operator*(const Floats& a, const Floats& b) {
  return each_quad([&](int i) { return a.quads[i] * b.quads[i]; });
}
inline Floats operator/(const Floats& a, const Floats& b) {
  return each_quad([&](int i) { return a.quads[i] / b.quads[i]; });
}
// a b + c, rounded twice: without hardware a fused one takes hundreds of cycles.
inline Floats fma(const Floats& a, const Floats& b, const Floats& c) { return a * b + c; }
// Where b is NaN the result is NaN; a must not be.
inline Floats max(const Floats& a, const Floats& b) {
  return each_quad([&](int i) { return a.quads[i] > b.quads[i] ? a.quads[i] : b.quads[i]; });
}
inline Floats min(const Floats& a, const Floats& b) {
  return each_quad([&](int i) { return a.quads[i] < b.quads[i] ? a.quads[i] : b.quads[i]; });
}
struct Parts {
  Floats whole, fraction;
};
// The fraction is in [0, 1]: a whole number may come out as one less and 1, but 0 does not.
inline Parts split(const Floats& a) {
  const Floats magic = Floats::all(12582912.0f);  // 1.5 * 2^23: the sum has no room for fractions
  const Floats whole = ((a - Floats::all(0.5f)) + magic) - magic;
  return {whole, a - whole};
}
// a 2^b for whole b, 0 where b < -126.
inline Floats scale2(const Floats& a, const Floats& b) {
  return each_quad([&](int i) {
    const QuadInt exponent = __builtin_convertvector(b.quads[i], QuadInt) << 23;
    const QuadInt is_small = b.quads[i] < -126.0f;  // not so for NaN, which stays
    return reinterpret_cast<Quad>((reinterpret_cast<QuadInt>(a.quads[i]) + exponent) & ~is_small);
  });
}
// Lane i of a where bit i of `bits` is set, else of b.
inline Floats select(uint16_t bits, const Floats& a, const Floats& b) {
  const QuadInt each = {1, 2, 4, 8};
  return each_quad([&](int i) {
    const int32_t four = bits >> (4 * i) & 15;
    const QuadInt wanted = each & four;
    return wanted != 0 ? a.quads[i] : b.quads[i];
  });
}

// a0 b0 a1 b1 ... in two parts, and back.
inline void zip(const Floats& a, const Floats& b, Floats& first, Floats& second) {
  float lanes[2][16], mixed[32];
  a.store(lanes[0]);
  b.store(lanes[1]);
  for (int i = 0; i < 32; ++i) mixed[i] = lanes[i % 2][i / 2];
  first = Floats::load(mixed);
  second = Floats::load(mixed + 16);
}
inline void unzip(const Floats& first, const Floats& second, Floats& a, Floats& b) {
  float lanes[2][16], mixed[32];
  first.store(mixed);
  second.store(mixed + 16);
  for (int i = 0; i < 32; ++i) lanes[i % 2][i / 2] = mixed[i];
  a = Floats::load(lanes[0]);
  b = Floats::load(lanes[1]);
}

inline float largest(const Floats& a) {
  float lanes[16];
  a.store(lanes);
  float result = lanes[0];
  for (int i = 1; i < 16; ++i) result = lanes[i] > result ? lanes[i] : result;
  return result;
}
inline float sum(const Floats& a) {
  float lanes[16];
  a.store(lanes);
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

}  // namespace kvt
