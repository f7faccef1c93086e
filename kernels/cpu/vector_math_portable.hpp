// Floats on any machine: four of the compiler's generic vectors (SSE2, NEON, or plain registers).
#pragma once

#include <cstdint>
#include <cstring>

namespace kvt {

typedef float Quad __attribute__((vector_size(16)));
typedef int32_t QuadInt __attribute__((vector_size(16)));
typedef uint16_t Shorts __attribute__((vector_size(16)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

#if defined(__clang__)
#define KVT_SHUFFLE(Index, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define KVT_SHUFFLE(Index, a, b, ...) __builtin_shuffle(a, b, Index{__VA_ARGS__})
#endif

// Reinterpretation, and four numbers from memory converted to another type.
template <class To, class From>
inline To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "only names change");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
// Eight unsigned numbers of 16 bits as 32, the first or the second four.
inline QuadInt widen(Shorts x, bool second) {
  const Shorts zero = {};
  return bits_as<QuadInt>(second ? KVT_SHUFFLE(Shorts, x, zero, 4, 12, 5, 13, 6, 14, 7, 15)
                                 : KVT_SHUFFLE(Shorts, x, zero, 0, 8, 1, 9, 2, 10, 3, 11));
}
// Four of sixteen unsigned bytes as 32 bits.
inline QuadInt widen(Bytes x, int quad) {
  const Bytes zero = {};
  const Bytes half =
      quad < 2 ? KVT_SHUFFLE(Bytes, x, zero, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
               : KVT_SHUFFLE(Bytes, x, zero, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30,
                             15, 31);
  return widen(bits_as<Shorts>(half), quad % 2 != 0);
}

// f16 to f32, with infinities, NaN and subnormal numbers.
inline Quad halves_to_floats(QuadInt halves) {
  const Quad far = {0x1p112f, 0x1p112f, 0x1p112f, 0x1p112f};  // from f16's exponents to f32's
  const QuadInt magnitude = (halves & 0x7fff) << 13, sign = (halves & 0x8000) << 16;
  const QuadInt scaled = bits_as<QuadInt>(bits_as<Quad>(magnitude) * far);
  const QuadInt is_special = (halves & 0x7c00) == 0x7c00;
  const QuadInt special = magnitude | 0x7f800000;
  return bits_as<Quad>(sign | (is_special & special) | (~is_special & scaled));
}

// f32 to f16, to nearest, ties to even.
inline uint16_t float_to_half(float value) {
  const auto bits = bits_as<uint32_t>(value), magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  } else if (magnitude >= 0x477ff000) {  // rounds to 65536 or more
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {  // subnormal: adding 0.5 leaves units of 2^-24
    half = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000;
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
    Shorts halves[2];
    std::memcpy(halves, source, sizeof halves);
    return {{halves_to_floats(widen(halves[0], false)), halves_to_floats(widen(halves[0], true)),
             halves_to_floats(widen(halves[1], false)), halves_to_floats(widen(halves[1], true))}};
  }
  static Floats of_bytes(Bytes bytes, int32_t less) {
    const auto quad = [&](int i) { return __builtin_convertvector(widen(bytes, i) - less, Quad); };
    return {{quad(0), quad(1), quad(2), quad(3)}};
  }
  static Floats load_int8(const int8_t* source) {
    Bytes bytes;
    std::memcpy(&bytes, source, sizeof bytes);
    return of_bytes(bytes ^ 0x80, 128);
  }
  static Floats load_nibbles(const uint8_t* source) {  // 8 bytes, low bits first, less 8
    Bytes bytes = {};
    std::memcpy(&bytes, source, 8);
    const Bytes low = bytes & 15, high = bytes >> 4;
    return of_bytes(KVT_SHUFFLE(Bytes, low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22,
                                7, 23),
                    8);
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
  const Floats x = a, y = b;
  for (int i = 0; i < 4; ++i) {
    Floats& part = i < 2 ? first : second;
    part.quads[2 * i % 4] = KVT_SHUFFLE(QuadInt, x.quads[i], y.quads[i], 0, 4, 1, 5);
    part.quads[2 * i % 4 + 1] = KVT_SHUFFLE(QuadInt, x.quads[i], y.quads[i], 2, 6, 3, 7);
  }
}
inline void unzip(const Floats& first, const Floats& second, Floats& a, Floats& b) {
  const Floats parts[2] = {first, second};
  for (int i = 0; i < 4; ++i) {
    const Quad *const pair = parts[i / 2].quads + 2 * (i % 2);
    a.quads[i] = KVT_SHUFFLE(QuadInt, pair[0], pair[1], 0, 2, 4, 6);
    b.quads[i] = KVT_SHUFFLE(QuadInt, pair[0], pair[1], 1, 3, 5, 7);
  }
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
