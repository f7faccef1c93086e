// One row of activations: a panel is read once, unpacked in registers.
#pragma once

#include "multiply_avx512.hpp"

namespace kvt {

constexpr int kAhead = 4096;  // bytes between what is read and what is fetched

KVT_INLINE void fetch(const uint8_t* first, int bytes) {
#pragma GCC unroll 18
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(first + kAhead + i, 0, 3);
}

// Group `g` of a block for 16 rows.
template <int32_t kType>
KVT_INLINE F32x16 add_group(const uint8_t* block, const uint8_t* group, int g, int half,
                            const InputGroup& input, F32x16 sum) {
  constexpr Format kFormat = format_of(kType);
  constexpr bool kHasHalves = kFormat.has_halves(), kHasMin = kFormat.has_min();
  constexpr int kParts = kHasHalves ? 2 : 1, kVectors = kGroupVectors / kParts;
  const uint8_t* planes = group + half * kFormat.half_bytes();
  for (int part = 0; part < kParts; ++part) {
    I32x16 dots = first_sum<kHasHalves, kHasMin>(input, 0, part, kFormat.zero_shift);
#pragma GCC unroll 8
    for (int j = part * kVectors; j < (part + 1) * kVectors; ++j) {
      dots = dot4(dots, weights<kType>(planes, j), four(input.q[0] + 4 * j));
    }
    const ScaleLanes scales = read_scales<kType>(block, group, g, half, part);
    sum = fma(to_floats(dots) * scales.d, splat(input.scale[0]), sum);
    if (kHasMin) sum = fma(scales.m, input_sum<kHasHalves>(input, 0, part), sum);
  }
  return sum;
}

// out [32]: the products of a panel with the first row of the input.
template <int32_t kType>
void multiply_vector(const uint8_t* panel, const Input& input, float* out) {
  constexpr Format kFormat = format_of(kType);
  const auto* x = reinterpret_cast<const InputGroup*>(input.groups);
  F32x16 first{}, last{};
  for (int64_t done = 0; done < input.cols; done += kFormat.block()) {
    const uint8_t* group = panel + kFormat.header_bytes();
    fetch(panel, kFormat.header_bytes());
    for (int g = 0; g < kFormat.groups(); ++g, ++x, group += kFormat.group_bytes()) {
      fetch(group, kFormat.group_bytes());
      first = add_group<kType>(panel, group, g, 0, *x, first);
      last = add_group<kType>(panel, group, g, 1, *x, last);
    }
    panel += kFormat.block_bytes();
  }
  store(out, first);
  store(out + kLanes, last);
}

// F32 and F16, read as they are packed; the order of sums is the tile's.
template <int32_t kType>
void multiply_float_vector(const uint8_t* panel, const Input& input, float* out) {
  constexpr int kHalf = kLanes * float_bytes(kType);
  const auto* x = reinterpret_cast<const float*>(input.floats);
  F32x16 first{}, last{};
  for (int64_t k = 0; k < padded_cols(input.cols); ++k, panel += 2 * kHalf, x += kInputRows) {
    __builtin_prefetch(panel + kAhead);
    if constexpr (kType == kF32) {
      first = fma(load<F32x16>(panel), splat(*x), first);
      last = fma(load<F32x16>(panel + kHalf), splat(*x), last);
    } else {
      first = fma(from_f16(panel), splat(*x), first);
      last = fma(from_f16(panel + kHalf), splat(*x), last);
    }
  }
  store(out, first);
  store(out + kLanes, last);
}

}  // namespace kvt
