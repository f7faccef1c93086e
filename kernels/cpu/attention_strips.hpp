// Where the cache keeps a tile, and reading it without expanding it first.
#pragma once

#include "attention_rows.hpp"

namespace kvt {

// The strips of a tile's keys and values, null where no row of a block sees any of their places.
struct Strips {
  static constexpr int kCount = kTile / kStrip;

  const uint8_t* keys[kCount] = {};
  const uint8_t* values[kCount] = {};
};

inline Strips find_strips(const RowBlock& block, int64_t tile) {
  const AttentionShape& shape = *block.shape;
  const Cache& cache = *shape.call->cache;
  const auto per_block = static_cast<uint32_t>(shape.layout.block_size / kStrip);
  const int64_t first = block.first_key() / kStrip, last = block.last_key() / kStrip;
  Strips strips;
  for (int64_t i = 0; i < Strips::kCount; ++i) {
    const int64_t strip = tile * Strips::kCount + i;
    if (strip < first || strip > last) continue;
    const auto index = static_cast<uint32_t>(strip);  // divides faster than 64 bits
    const int64_t number = block.chunk->blocks[index / per_block];
    const int64_t at =
        (number * shape.layout.kv_heads + block.kv_head) * per_block + index % per_block;
    strips.keys[i] = cache.keys + at * shape.key_bytes;
    strips.values[i] = cache.values + at * shape.value_bytes;
  }
  return strips;
}

inline void prefetch(const uint8_t* first, int64_t bytes) {
  if (!first) return;
  for (int64_t i = 0; i < bytes; i += static_cast<int64_t>(kLine)) __builtin_prefetch(first + i);
}

#if defined(__AVX512BF16__)

// For a single register tile of rows, expanding would be writing and reading for nothing: numbers
// are converted as they are read. Keys fetch the values of their tile, values the next keys.
template <int32_t type>
constexpr bool kIsDirect = type == KV_F16;

inline Floats load_half_pairs(const uint8_t* line) {
  const auto* halves = reinterpret_cast<const uint16_t*>(line);
  return Pairs::join(Floats::load_half(halves), Floats::load_half(halves + 16));
}

struct StripKeys {
  const Strips& strips;

  Floats load(int64_t step, int64_t column) const {
    const int64_t strip = column / kStrip, offset = step * 64;
    __builtin_prefetch(strips.values[strip] + offset);
    return load_half_pairs(strips.keys[strip] + offset);
  }
};

struct StripValues {
  const Strips& strips;
  const Strips& next;
  int64_t width;

  Floats load(int64_t step, int64_t column) const {
    const int64_t strip = step / (kStrip / 2), row = step % (kStrip / 2);
    const int64_t offset = (row * width + column) * 4;
    __builtin_prefetch(next.keys[strip] + offset);
    return load_half_pairs(strips.values[strip] + offset);
  }
};

#else

template <int32_t>
constexpr bool kIsDirect = false;
struct StripKeys {};
struct StripValues {};

#endif

}  // namespace kvt
