// Panels unpacked for products with many rows: bytes and float scales, one stream.
//
// For each group of 32 inputs: vectors 0..7 of the first 16 rows, then of the last 16 (64 bytes
// each); then d as float32, and m for types that have it: [part][32 rows].
#pragma once

#include "formats_scales.hpp"

namespace kvt {

constexpr int kGroupVectors = 8;

// What the product with unpacked weights must know of a type at compile time.
struct Kind {
  bool has_halves;  // two scales for 32 inputs
  bool has_min;

  constexpr int parts() const { return has_halves ? 2 : 1; }
  constexpr int group_bytes() const { return 1024 + 128 * parts() * (has_min ? 2 : 1); }
  // Where the scales of 16 rows begin.
  constexpr int scale_offset(int part, int half) const { return 1024 + 128 * part + 64 * half; }
  constexpr int min_offset(int part, int half) const {
    return scale_offset(part, half) + 128 * parts();
  }
};

constexpr Kind kind_of(int32_t type) {
  const Format format = format_of(type);
  return {format.has_halves(), format.has_min()};
}

template <int32_t kType>
KVT_INLINE void unpack_half(const uint8_t* block, const uint8_t* group, int g, int half,
                            uint8_t* target) {
  constexpr Format kFormat = format_of(kType);
  constexpr Kind kKind = kind_of(kType);
  const uint8_t* planes = group + half * kFormat.half_bytes();
#pragma GCC unroll 8
  for (int j = 0; j < kGroupVectors; ++j) {
    store(target + 512 * half + 64 * j, weights<kType>(planes, j));
  }
  for (int part = 0; part < kKind.parts(); ++part) {
    const ScaleLanes scales = read_scales<kType>(block, group, g, half, part);
    store(target + kKind.scale_offset(part, half), scales.d);
    if (kKind.has_min) store(target + kKind.min_offset(part, half), scales.m);
  }
}

// A panel of `cols` inputs to cols / 32 groups of kind_of(kType).group_bytes().
template <int32_t kType>
void unpack_panel(const uint8_t* panel, int64_t cols, uint8_t* target) {
  constexpr Format kFormat = format_of(kType);
  for (int64_t done = 0; done < cols; done += kFormat.block()) {
    const uint8_t* group = panel + kFormat.header_bytes();
    for (int g = 0; g < kFormat.groups(); ++g) {
      unpack_half<kType>(panel, group, g, 0, target);
      unpack_half<kType>(panel, group, g, 1, target);
      group += kFormat.group_bytes();
      target += kind_of(kType).group_bytes();
    }
    panel += kFormat.block_bytes();
  }
}

// F16, and BF16 where activations stay float: a panel to float32 [cols][32].
template <int32_t kType>
void widen_panel(const uint8_t* panel, int64_t cols, uint8_t* target) {
  if constexpr (kType == kF16) {
    for (int64_t i = 0; i < padded_cols(cols) * 2; ++i) {
      store(target + 64 * i, from_f16(panel + 32 * i));
    }
  } else {
    const auto* pairs = reinterpret_cast<const uint16_t*>(panel);
    auto* values = reinterpret_cast<float*>(target);
    for (int64_t k = 0; k < padded_cols(cols); ++k, values += 32) {
      const uint16_t* source = pairs + k / 2 * 64 + k % 2;
      for (int r = 0; r < 32; ++r) values[r] = bits_to_float(uint32_t{source[2 * r]} << 16);
    }
  }
}

}  // namespace kvt
