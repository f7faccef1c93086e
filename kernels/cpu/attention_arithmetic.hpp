// How numbers of the cache enter products: as f32, or as pairs of bf16 where the processor
// multiplies those. Either way a tile is a matrix of 4-byte lanes, [steps][columns].
#pragma once

#include "cache.hpp"
#include "vector_math.hpp"

namespace kvt {

// One number per lane.
struct Singles {
  static constexpr int kPerLane = 1;
  static Floats step(Floats sum, Floats a, Floats b) { return fma(a, b, sum); }
  // 32 numbers in a row.
  static void put(float* target, Floats first, Floats second) {
    first.store(target);
    second.store(target + 16);
  }
  // x0 y0 x1 y1 ... as steps: x in one row of the tile, y in the next.
  static void put_mixed(float* target, int64_t stride, Floats first, Floats second) {
    Floats x, y;
    unzip(first, second, x, y);
    put_rows(target, stride, x, y);
  }
  static void put_rows(float* target, int64_t stride, Floats x, Floats y) {
    x.store(target);
    y.store(target + stride);
  }
  // The 16 numbers of one key; there is room for them.
  static void put_turned(const Floats* key, int32_t, float* target) { key->store(target); }
};

#if defined(__AVX512BF16__)

// Two bf16 per lane; the products of a step are added in f32, subnormal numbers count as 0.
struct Pairs {
  static constexpr int kPerLane = 2;
  static Floats step(Floats sum, Floats a, Floats b) {
    const auto bf16 = [](Floats x) { return (__m512bh)_mm512_castps_si512(x.lanes); };
    return {_mm512_dpbf16_ps(sum.lanes, bf16(a), bf16(b))};
  }
  static void put(float* target, Floats first, Floats second) {
    join(first, second).store(target);
  }
  static Floats join(Floats first, Floats second) {
    const __m512bh pairs = _mm512_cvtne2ps_pbh(second.lanes, first.lanes);
    return {_mm512_castsi512_ps((__m512i)pairs)};
  }
  static void put_mixed(float* target, int64_t, Floats first, Floats second) {
    put(target, first, second);
  }
  static void put_rows(float* target, int64_t, Floats x, Floats y) {
    Floats first, second;
    zip(x, y, first, second);
    put(target, first, second);
  }
  // 32 numbers of two keys, each in pairs; there is room for `count`, a multiple of 16.
  static void put_turned(const Floats* keys, int32_t count, float* target) {
    const __m512i a = _mm512_castps_si512(keys[0].lanes), b = _mm512_castps_si512(keys[1].lanes);
    const __mmask32 odd = 0xaaaaaaaa;
    const Floats low{_mm512_castsi512_ps(_mm512_mask_mov_epi16(a, odd, _mm512_slli_epi32(b, 16)))};
    const Floats high{_mm512_castsi512_ps(_mm512_mask_mov_epi16(_mm512_srli_epi32(a, 16), odd, b))};
    Floats first, second;
    zip(low, high, first, second);
    first.store(target);
    if (count > 16) second.store(target + 16);
  }
};

template <int32_t type>
struct ArithmeticOf {
  using Type = Pairs;
};
template <>
struct ArithmeticOf<KV_F32> {
  using Type = Singles;
};

#else

template <int32_t type>
struct ArithmeticOf {
  using Type = Singles;
};

#endif

}  // namespace kvt
