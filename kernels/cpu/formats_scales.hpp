// Reading the scales of packed panels, a piece of rows at a time.
#pragma once

#include "formats.hpp"

namespace kvt {

// Of a piece of rows and the inputs of one scale: value = d * u + m.
struct ScaleLanes {
  FloatLanes d, m;
};

// 2^(e - 128), the scale of MXFP4; the two smallest are subnormal floats.
KVT_INLINE FloatLanes exponent_scale(IntLanes e) {
  const IntLanes tiny = e < 2;
  return (FloatLanes)((tiny & (0x200000 << (e & 1))) | (~tiny & ((e - 1) << 23)));
}

// `block` is the block's first byte, `group` that of its group number `g`; `part` 0 or 1: which 16
// inputs, for types that have scales for so few.
template <int32_t kType>
KVT_INLINE ScaleLanes read_scales(const uint8_t* block, const uint8_t* group, int g, int piece,
                                  int part) {
  constexpr Format kFormat = format_of(kType);
  const int row = piece * kLanes;
  const uint8_t* after = group + 2 * kFormat.half_bytes();
  ScaleLanes scales{};
  if constexpr (kFormat.scales == kHalfScale || kFormat.scales == kHalfMin) {
    scales.d = load_f16(after + 2 * row);
    if constexpr (kFormat.has_min()) scales.m = load_f16(after + 64 + 2 * row);
  } else if constexpr (kFormat.scales == kExponent) {
    scales.d = exponent_scale(load_unsigned(after + row));
  } else {
    scales.d = load_f16(block + 2 * row);
    if constexpr (kFormat.has_min()) scales.m = -load_f16(block + 64 + 2 * row);
  }
  if constexpr (kFormat.scales == kByteScale) {
    scales.d *= to_floats(load_signed(block + 64 + 32 * g + row));
  } else if constexpr (kFormat.scales == kByteMin) {
    const uint8_t* bytes = block + 128 + 64 * g + row;
    scales.d *= to_floats(load_unsigned(bytes));
    scales.m *= to_floats(load_unsigned(bytes + 32));
  } else if constexpr (kFormat.scales == kHalvesScale) {
    scales.d *= to_floats(load_signed(block + 64 + 64 * g + 32 * part + row));
  } else if constexpr (kFormat.scales == kHalvesMin) {
    const IntLanes bytes = load_unsigned(block + 128 + 64 * g + 32 * part + row);
    scales.d *= to_floats(bytes & 15);
    scales.m *= to_floats(bytes >> 4);
  }
  return scales;
}

}  // namespace kvt
