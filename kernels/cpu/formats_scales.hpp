// Reading the scales of packed panels, sixteen rows at a time.
#pragma once

#include "formats.hpp"

namespace kvt {

// Of 16 rows and the inputs of one scale: value = d * u + m.
struct ScaleLanes {
  F32x16 d, m;
};

// 2^(e - 128), the scale of MXFP4; the two smallest are subnormal floats.
KVT_INLINE F32x16 exponent_scale(U8x16 exponents) {
  const I32x16 e = widen(exponents);
  const I32x16 tiny = e < 2;
  return (F32x16)((tiny & (0x200000 << (e & 1))) | (~tiny & ((e - 1) << 23)));
}

// `block` is the block's first byte, `group` that of its group number `g`; `half` 0 or 1: which 16
// rows; `part` 0 or 1: which 16 inputs, for types that have scales for so few.
template <int32_t kType>
KVT_INLINE ScaleLanes read_scales(const uint8_t* block, const uint8_t* group, int g, int half,
                                  int part) {
  constexpr Format kFormat = format_of(kType);
  const uint8_t* after = group + 2 * kFormat.half_bytes();
  ScaleLanes scales{};
  if constexpr (kFormat.scales == kHalfScale || kFormat.scales == kHalfMin) {
    scales.d = from_f16(after + 32 * half);
    if constexpr (kFormat.has_min()) scales.m = from_f16(after + 64 + 32 * half);
  } else if constexpr (kFormat.scales == kExponent) {
    scales.d = exponent_scale(load<U8x16>(after + 16 * half));
  } else {
    scales.d = from_f16(block + 32 * half);
    if constexpr (kFormat.has_min()) scales.m = -from_f16(block + 64 + 32 * half);
  }
  if constexpr (kFormat.scales == kByteScale) {
    scales.d *= to_floats(load<I8x16>(block + 64 + 32 * g + 16 * half));
  } else if constexpr (kFormat.scales == kByteMin) {
    const uint8_t* bytes = block + 128 + 64 * g + 16 * half;
    scales.d *= to_floats(load<U8x16>(bytes));
    scales.m *= to_floats(load<U8x16>(bytes + 32));
  } else if constexpr (kFormat.scales == kHalvesScale) {
    scales.d *= to_floats(load<I8x16>(block + 64 + 64 * g + 32 * part + 16 * half));
  } else if constexpr (kFormat.scales == kHalvesMin) {
    const U8x16 bytes = load<U8x16>(block + 128 + 64 * g + 32 * part + 16 * half);
    scales.d *= to_floats(bytes & 15);
    scales.m *= to_floats(bytes >> 4);
  }
  return scales;
}

}  // namespace kvt
