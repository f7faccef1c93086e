// Activations in the forms that products read: blocks of six rows, input by input.
#pragma once

#include <algorithm>

#include "formats.hpp"

namespace kvt {

constexpr int kInputRows = 6;  // of a block: with 32 outputs, what 32 registers hold

// 32 inputs of six rows: x = scale * q.
struct alignas(64) InputGroup {
  int8_t q[kInputRows][32];
  float scale[kInputRows];
  float sum[kInputRows];                // scale * sum of q
  int32_t minus_sum[kInputRows];        // -sum of q
  int32_t minus_half[2][kInputRows];    // the same of the first and last 16
};
static_assert(sizeof(InputGroup) == 320, "five cache lines");

constexpr int64_t input_blocks(int64_t n) { return (n + kInputRows - 1) / kInputRows; }

// Whether inputs are multiplied as pairs of bfloat16.
constexpr bool is_paired([[maybe_unused]] int32_t type) {
#if defined(__AVX512VNNI__)
  return type == kBF16;
#else
  return false;
#endif
}

inline uint32_t input_form(int32_t type) {
  return is_quantised(type) ? kForm8 : is_paired(type) ? kFormBf16 : kFormFloat;
}

namespace input {

inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

inline int64_t bytes8(int64_t n, int64_t cols) {
  return input_blocks(n) * (cols / 32) * static_cast<int64_t>(sizeof(InputGroup));
}
inline int64_t bytes_float(int64_t n, int64_t cols) {
  return aligned(input_blocks(n) * kInputRows * padded_cols(cols) * 4);
}
inline int64_t bytes_bf16(int64_t n, int64_t cols) { return bytes_float(n, cols) / 2 + 64; }

// Rounds to nearest even below 2^22: the sum's last bit stands for 1.
constexpr float kRound = 12582912.0f;
constexpr float kSmallest = 0x1p-120f;  // below, 127 / amax is not finite: taken for zero

// The magnitude as bits: also orders NaN, above infinity, so that it ends up in the scale.
inline int32_t largest_bits(const float* x) {
  int32_t largest = 0;
  for (int i = 0; i < 32; ++i) {
    const auto bits = static_cast<int32_t>(float_to_bits(x[i]) & 0x7fffffffu);
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// x [32] to int8; returns the scale.
inline float quantise(const float* x, int8_t* q) {
  const float amax = bits_to_float(static_cast<uint32_t>(largest_bits(x)));
  const bool is_zero = amax < kSmallest;
  const float inverse = is_zero ? 0.0f : 127.0f / amax;
  for (int i = 0; i < 32; ++i) {
    q[i] = static_cast<int8_t>(float_to_bits(x[i] * inverse + kRound));
  }
  return is_zero ? 0.0f : amax / 127.0f;
}

// 32 inputs of one row into its place of a group.
inline void prepare_group(const float* x, InputGroup& group, int row);

#if !defined(__AVX512VNNI__)  // else: input_avx512.hpp
inline void prepare_group(const float* x, InputGroup& group, int row) {
  int8_t q[32];
  const float scale = quantise(x, q);
  int32_t first = 0, last = 0;
  for (int i = 0; i < 16; ++i) first += q[i];
  for (int i = 16; i < 32; ++i) last += q[i];
  std::memcpy(group.q[row], q, 32);
  group.scale[row] = scale;
  group.sum[row] = scale * static_cast<float>(first + last);
  group.minus_sum[row] = -(first + last);
  group.minus_half[0][row] = -first;
  group.minus_half[1][row] = -last;
}
#endif

inline void prepare_row(const Input& input, const float* x, int64_t row) {
  const int64_t block = row / kInputRows;
  const int place = static_cast<int>(row % kInputRows);
  if (input.forms & kForm8) {
    auto* group = reinterpret_cast<InputGroup*>(input.groups) + block * (input.cols / 32);
    for (int64_t g = 0; g < input.cols / 32; ++g) prepare_group(x + 32 * g, group[g], place);
  }
  const int64_t cols = padded_cols(input.cols);
  if (input.forms & kFormFloat) {
    float* target = reinterpret_cast<float*>(input.floats) + block * cols * kInputRows + place;
    for (int64_t k = 0; k < input.cols; ++k) target[k * kInputRows] = x[k];
    if (cols > input.cols) target[input.cols * kInputRows] = 0.0f;
  }
  if (input.forms & kFormBf16) {
    auto* target = reinterpret_cast<uint16_t*>(input.halves) + block * cols * kInputRows;
    for (int64_t k = 0; k < cols; ++k) {
      target[k / 2 * 2 * kInputRows + 2 * place + k % 2] = k < input.cols ? to_bf16(x[k]) : 0;
    }
  }
}

}  // namespace input

inline int64_t input_bytes(int64_t n, int64_t cols, uint32_t forms) {
  int64_t bytes = 0;
  if (forms & kForm8) bytes += input::bytes8(n, cols);
  if (forms & kFormFloat) bytes += input::bytes_float(n, cols);
  if (forms & kFormBf16) bytes += input::aligned(input::bytes_bf16(n, cols));
  return bytes;
}

inline void input_bind(Input& input, std::byte* memory, int64_t n, int64_t cols, uint32_t forms) {
  input = Input{n, cols, forms, nullptr, nullptr, nullptr};
  if (forms & kForm8) {
    input.groups = memory;
    memory += input::bytes8(n, cols);
  }
  if (forms & kFormFloat) {
    input.floats = memory;
    memory += input::bytes_float(n, cols);
  }
  if (forms & kFormBf16) input.halves = memory;
}

inline void input_prepare(const Input& input, const float* x, int64_t stride, int64_t first,
                          int64_t count) {
  for (int64_t row = first; row < first + count; ++row) {
    input::prepare_row(input, x + row * stride, row);
  }
}

}  // namespace kvt

#if defined(__AVX512VNNI__)
#include "input_avx512.hpp"
#endif
