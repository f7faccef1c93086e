// Strips of the cache as rows of a tile in the form that products take (attention_arithmetic.hpp).
#pragma once

#include "attention_arithmetic.hpp"
#include "cache_write.hpp"

namespace kvt {

// Numbers first .. first + 15 of a strip, without their scales.
template <int32_t type>
KVT_INLINE Floats load_numbers(const uint8_t* strip, int64_t first) {
  if constexpr (type == KV_F32) {
    return Floats::load(reinterpret_cast<const float*>(strip) + first);
  } else if constexpr (type == KV_F16) {
    return Floats::load_half(reinterpret_cast<const uint16_t*>(strip) + first);
  } else if constexpr (type == KV_Q8_0) {
    return Floats::load_int8(reinterpret_cast<const int8_t*>(strip) + first);
  } else {
    return Floats::load_nibbles(strip + first / 2);
  }
}

// Scales of one group of dimensions for all 16 places.
inline Floats load_scales(int32_t type, const uint8_t* strip, int32_t dim, int32_t group) {
  const auto* scales = reinterpret_cast<const uint16_t*>(strip + strip_number_bytes(type, dim));
  return Floats::load_half(scales + group * kStrip);
}

// target: 16 columns of [dim / kPerLane][stride] lanes.
template <int32_t type>
inline void expand_keys(const uint8_t* strip, int32_t dim, float* target, int64_t stride) {
  using Arithmetic = typename ArithmeticOf<type>::Type;
  if constexpr (type == KV_F32) {
    for (int32_t i = 0; i < dim; ++i) {
      load_numbers<type>(strip, i * kStrip).store(target + i * stride);
    }
    return;
  }
  Floats low = Floats::all(1.0f), high = low;  // scales of places 0..7 and 8..15, each twice
  for (int32_t i = 0; i < dim; i += 2) {
    if (is_rotated(type) && i % kKvGroup == 0) {
      const Floats scales = load_scales(type, strip, dim, i / kKvGroup);
      zip(scales, scales, low, high);
    }
    Floats first = load_numbers<type>(strip, i * kStrip);
    Floats second = load_numbers<type>(strip, i * kStrip + 16);
    if (is_rotated(type)) {
      first = first * low;
      second = second * high;
    }
    Arithmetic::put_mixed(target + i / Arithmetic::kPerLane * stride, stride, first, second);
  }
}

// Scales of all groups and places of a strip as f32 [groups][16].
inline void unpack_scales(int32_t type, const uint8_t* strip, int32_t dim, float* target) {
  for (int32_t group = 0; group < num_scales(dim); ++group) {
    load_scales(type, strip, dim, group).store(target + group * kStrip);
  }
}

// target: [16 / kPerLane][dim] lanes; dim is padded.
template <int32_t type>
inline void expand_values(const uint8_t* strip, int32_t dim, float* target) {
  using Arithmetic = typename ArithmeticOf<type>::Type;
  if constexpr (type == KV_F32) {
    for (int32_t i = 0; i < dim * kStrip; i += 16) load_numbers<type>(strip, i).store(target + i);
    return;
  }
  float scales[kMaxHeadDim / kKvGroup * kStrip];
  if (is_rotated(type)) unpack_scales(type, strip, dim, scales);
  for (int32_t place = 0; place < kStrip; place += 2) {
    float* const row = target + place / Arithmetic::kPerLane * static_cast<int64_t>(dim);
    for (int32_t i = 0; i < dim; i += 16) {
      const float* const scale = scales + i / kKvGroup * kStrip + place;
      if constexpr (type == KV_Q4_0) {
        const Floats x = load_numbers<type>(strip, place * dim + i) * Floats::all(scale[0]);
        const Floats y = load_numbers<type>(strip, (place + 1) * dim + i) * Floats::all(scale[1]);
        Arithmetic::put_rows(row + i, dim, x, y);
      } else {
        Floats first = load_numbers<type>(strip, place * dim + 2 * i);
        Floats second = load_numbers<type>(strip, place * dim + 2 * i + 16);
        if constexpr (type == KV_Q8_0) {
          const Floats both = Floats::alternating(scale[0], scale[1]);
          first = first * both;
          second = second * both;
        }
        Arithmetic::put_mixed(row + i, dim, first, second);
      }
    }
  }
}

}  // namespace kvt
