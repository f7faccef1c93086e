// Sizes of blocks, and writing and copying places.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cache.hpp"
#include "hadamard.hpp"
#include "vector_math.hpp"

namespace kvt {

constexpr int32_t kMaxHeadDim = 1024;

constexpr bool is_rotated(int32_t type) { return type == KV_Q8_0 || type == KV_Q4_0; }
inline int32_t padded_dim(int32_t dim) { return (dim + kStrip - 1) / kStrip * kStrip; }
inline int32_t num_scales(int32_t dim) { return (dim + kKvGroup - 1) / kKvGroup; }

// Bytes of the numbers of a strip of `dim` dimensions, without scales.
inline int64_t strip_number_bytes(int32_t type, int32_t dim) {
  const int64_t count = static_cast<int64_t>(dim) * kStrip;
  switch (type) {
    case KV_F32: return count * 4;
    case KV_F16: return count * 2;
    case KV_Q8_0: return count;
    case KV_Q4_0: return count / 2;
    default: return -1;
  }
}

inline int64_t strip_bytes(int32_t type, int32_t dim) {
  const int64_t numbers = strip_number_bytes(type, dim);
  if (!is_rotated(type)) return numbers;
  return (numbers + num_scales(dim) * kStrip * 2 + 63) / 64 * 64;
}

inline bool is_supported(const CacheLayout& layout) {
  const auto is_dim = [](int32_t dim) { return dim >= 2 && dim <= kMaxHeadDim && dim % 2 == 0; };
  return layout.block_size > 0 && layout.block_size % kStrip == 0 && layout.kv_heads > 0 &&
         is_dim(layout.head_dim) && is_dim(layout.value_dim) &&
         (!layout.is_latent || layout.value_dim <= layout.head_dim) &&
         strip_number_bytes(layout.key_type, 2) > 0 && strip_number_bytes(layout.value_type, 2) > 0;
}

inline int64_t key_strip_bytes(const CacheLayout& layout) {
  return strip_bytes(layout.key_type, layout.head_dim);
}
inline int64_t value_strip_bytes(const CacheLayout& layout) {
  if (layout.is_latent) return 0;
  return strip_bytes(layout.value_type, padded_dim(layout.value_dim));
}

// Numbers that are rotated together, of keys and of values.
inline int32_t key_rotation(const CacheLayout& layout) {
  return rotation_size(layout.is_latent ? layout.head_dim | layout.value_dim : layout.head_dim);
}
inline int32_t value_rotation(const CacheLayout& layout) {
  return layout.is_latent ? key_rotation(layout) : rotation_size(layout.value_dim);
}

inline int64_t key_block_bytes(const CacheLayout& layout) {
  if (!is_supported(layout)) return -1;
  return layout.kv_heads * (layout.block_size / kStrip) * key_strip_bytes(layout);
}
inline int64_t value_block_bytes(const CacheLayout& layout) {
  if (!is_supported(layout)) return -1;
  return layout.kv_heads * (layout.block_size / kStrip) * value_strip_bytes(layout);
}

// One token's numbers of one head as they are stored, in order of dimension: f16, or whole numbers
// (Q4_0's are 0..15) with a scale per group.
struct StoredRow {
  uint16_t halves[kMaxHeadDim];
  int8_t numbers[kMaxHeadDim];
  uint16_t scales[kMaxHeadDim / kKvGroup];
};

inline void round_to_half(const float* row, int32_t dim, StoredRow& out) {
  for (int32_t i = 0; i < dim; i += kStrip) Floats::load(row + i).store_half(out.halves + i);
}

inline uint16_t scale_to_half(float scale) {
  uint16_t half[kStrip];
  Floats::all(scale).store_half(half);
  return half[0];
}

// GGUF's Q8_0: scale = largest magnitude / 127, numbers rounded to nearest, half away from zero.
inline void quantise_q8(const float* row, int32_t dim, StoredRow& out) {
  for (int32_t first = 0; first < dim; first += kKvGroup) {
    const int32_t end = std::min(first + kKvGroup, dim);
    float peak = 0.0f;
    for (int32_t i = first; i < end; ++i) peak = std::max(peak, std::fabs(row[i]));
    const float scale = peak / 127.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    for (int32_t i = first; i < end; ++i) {
      const float x = row[i] * inverse;
      out.numbers[i] = static_cast<int8_t>(static_cast<int32_t>(x + std::copysign(0.5f, x)));
    }
    out.scales[first / kKvGroup] = scale_to_half(scale);
  }
}

// GGUF's Q4_0: the number of largest magnitude becomes -8; stored with 8 added.
inline void quantise_q4(const float* row, int32_t dim, StoredRow& out) {
  for (int32_t first = 0; first < dim; first += kKvGroup) {
    const int32_t end = std::min(first + kKvGroup, dim);
    float peak = 0.0f;
    for (int32_t i = first; i < end; ++i) {
      if (std::fabs(row[i]) > std::fabs(peak)) peak = row[i];
    }
    const float scale = peak / -8.0f, inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
    for (int32_t i = first; i < end; ++i) {
      const int32_t number = static_cast<int32_t>(row[i] * inverse + 8.5f);
      out.numbers[i] = static_cast<int8_t>(std::min(number, 15));
    }
    out.scales[first / kKvGroup] = scale_to_half(scale);
  }
}

// `row` has padded_dim(dim) numbers, zero behind dim; rotated in place where the type wants it.
inline void encode_row(int32_t type, float* row, int32_t dim, int32_t rotation, StoredRow& out) {
  if (is_rotated(type)) hadamard(row, dim, rotation);
  const int32_t padded = padded_dim(dim);
  if (type == KV_F16) round_to_half(row, padded, out);
  if (type == KV_Q8_0) quantise_q8(row, padded, out);
  if (type == KV_Q4_0) quantise_q4(row, padded, out);
}

inline void put_scales(uint8_t* strip, int64_t number_bytes, int32_t dim, int32_t place,
                       const StoredRow& row) {
  auto* const scales = reinterpret_cast<uint16_t*>(strip + number_bytes);
  for (int32_t i = 0; i < num_scales(dim); ++i) scales[i * kStrip + place] = row.scales[i];
}

inline void put_key(int32_t type, uint8_t* strip, int32_t dim, int32_t place, const float* floats,
                    const StoredRow& row) {
  if (type == KV_F32) {
    auto* const target = reinterpret_cast<float*>(strip) + place;
    for (int32_t i = 0; i < dim; ++i) target[i * kStrip] = floats[i];
  } else if (type == KV_F16) {
    for (int32_t i = 0; i < dim; i += 2) {
      std::memcpy(strip + (i * kStrip + 2 * place) * 2, row.halves + i, 4);
    }
  } else if (type == KV_Q8_0) {
    for (int32_t i = 0; i < dim; i += 2) {
      std::memcpy(strip + i * kStrip + 2 * place, row.numbers + i, 2);
    }
  } else {
    for (int32_t i = 0; i < dim; i += 2) {
      const int number = row.numbers[i] | row.numbers[i + 1] << 4;
      strip[i / 2 * kStrip + place] = static_cast<uint8_t>(number);
    }
  }
  if (is_rotated(type)) put_scales(strip, strip_number_bytes(type, dim), dim, place, row);
}

// `dim` is padded.
inline void put_value(int32_t type, uint8_t* strip, int32_t dim, int32_t place, const float* floats,
                      const StoredRow& row) {
  const int64_t pair = static_cast<int64_t>(place / 2) * dim * 2 + place % 2;  // of dimension 0
  if (type == KV_F32) {
    std::copy_n(floats, dim, reinterpret_cast<float*>(strip) + static_cast<int64_t>(place) * dim);
  } else if (type == KV_F16) {
    auto* const target = reinterpret_cast<uint16_t*>(strip) + pair;
    for (int32_t i = 0; i < dim; ++i) target[2 * i] = row.halves[i];
  } else if (type == KV_Q8_0) {
    auto* const target = reinterpret_cast<int8_t*>(strip) + pair;
    for (int32_t i = 0; i < dim; ++i) target[2 * i] = row.numbers[i];
  } else {
    for (int32_t i = 0; i < dim; i += 2) {
      const int number = row.numbers[i] | row.numbers[i + 1] << 4;
      strip[(place * dim + i) / 2] = static_cast<uint8_t>(number);
    }
  }
  if (is_rotated(type)) put_scales(strip, strip_number_bytes(type, dim), dim, place, row);
}

inline void cache_write(const Cache& cache, int64_t block, int32_t place, const float* k,
                        const float* v) {
  const CacheLayout& layout = cache.layout;
  const int32_t key_dim = layout.head_dim, value_dim = layout.value_dim;
  const int64_t strips = layout.block_size / kStrip, strip = place / kStrip;
  const int64_t key_bytes = key_strip_bytes(layout), value_bytes = value_strip_bytes(layout);
  alignas(64) float row[kMaxHeadDim];
  StoredRow stored;
  for (int64_t head = 0; head < layout.kv_heads; ++head) {
    const int64_t at = (block * layout.kv_heads + head) * strips + strip;
    std::fill(std::copy_n(k + head * key_dim, key_dim, row), row + padded_dim(key_dim), 0.0f);
    encode_row(layout.key_type, row, key_dim, key_rotation(layout), stored);
    put_key(layout.key_type, cache.keys + at * key_bytes, key_dim, place % kStrip, row, stored);
    if (layout.is_latent) continue;
    std::fill(std::copy_n(v + head * value_dim, value_dim, row), row + padded_dim(value_dim), 0.0f);
    encode_row(layout.value_type, row, value_dim, value_rotation(layout), stored);
    put_value(layout.value_type, cache.values + at * value_bytes, padded_dim(value_dim),
              place % kStrip, row, stored);
  }
}

// Copy whole strips of the places.
inline void copy_strips(uint8_t* pool, int64_t block_bytes, const CacheLayout& layout,
                        const int64_t blocks[2], int32_t num_tokens) {
  const int64_t head_bytes = block_bytes / layout.kv_heads;
  const int64_t strips = (num_tokens + kStrip - 1) / kStrip;
  const int64_t bytes = head_bytes / (layout.block_size / kStrip) * strips;
  for (int64_t head = 0; head < layout.kv_heads; ++head) {
    const int64_t at = head * head_bytes;
    std::memcpy(pool + blocks[1] * block_bytes + at, pool + blocks[0] * block_bytes + at,
                static_cast<size_t>(bytes));
  }
}

inline void cache_copy(const Cache& cache, int64_t source, int64_t target, int32_t num_tokens) {
  const int64_t blocks[2] = {source, target};
  copy_strips(cache.keys, key_block_bytes(cache.layout), cache.layout, blocks, num_tokens);
  if (cache.layout.is_latent) return;
  copy_strips(cache.values, value_block_bytes(cache.layout), cache.layout, blocks, num_tokens);
}

}  // namespace kvt
