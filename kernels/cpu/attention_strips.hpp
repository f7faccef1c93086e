// Where the cache keeps a tile, and reading it without expanding it first.
#pragma once

#include "attention_rows.hpp"
#include "cache_expand.hpp"

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
  for (int64_t i = 0; i < bytes; i += static_cast<int64_t>(kLine)) fetch_line(first + i, false);
}

// For a single register tile of rows, expanding would be writing and reading for nothing: numbers
// are converted as they are read, where one load gives one vector of lanes.
template <int32_t type>
constexpr bool kIsDirect = type == KV_F32 || ArithmeticOf<type>::Type::kPerLane == 2;

// Scales of a tile as its numbers meet them.
struct TileScales {
  // Keys: [strips][groups][16 places][2]. Values: [strips][groups][16 places].
  alignas(64) float keys[Strips::kCount * kMaxHeadDim / kKvGroup * kStrip * 2];
  alignas(64) float values[Strips::kCount * kMaxHeadDim / kKvGroup * kStrip];
};

template <int32_t key_type, int32_t value_type>
inline void unpack_scales(const AttentionShape& shape, const Strips& strips, TileScales& scales) {
  const int32_t key_dim = shape.layout.head_dim, width = shape.width;
  float *keys = scales.keys, *values = scales.values;
  for (int32_t i = 0; i < Strips::kCount; ++i) {
    for (int32_t group = 0; is_rotated(key_type) && group < num_scales(key_dim); ++group) {
      const Floats each = load_scales(key_type, strips.keys[i], key_dim, group);
      Floats low, high;
      zip(each, each, low, high);
      low.store(keys);
      high.store(keys + 16);
      keys += 32;
    }
    if (!is_rotated(value_type)) continue;
    unpack_scales(value_type, strips.values[i], width, values);
    values += num_scales(width) * kStrip;
  }
}

// The keys of a tile as a factor; fetches the values of the tile meanwhile, `fetch` bytes a step.
template <int32_t type>
struct StripKeys {
  const Strips& strips;
  const float* scales;
  int64_t num_groups;
  int64_t fetch;
  bool once;  // no other chunk may read the same

  KVT_INLINE Floats load(int64_t step, int64_t column) const {
    const int64_t strip = column / kStrip;
    const uint8_t* const numbers = strips.keys[strip];
    fetch_line(strips.values[strip] + step * fetch, once);
    if constexpr (type == KV_F32) {
      return load_numbers<type>(numbers, step * 16);
    } else {
      Floats first = load_numbers<type>(numbers, step * 32);
      Floats second = load_numbers<type>(numbers, step * 32 + 16);
      if constexpr (is_rotated(type)) {
        const float* const scale = scales + (strip * num_groups + step * 2 / kKvGroup) * 32;
        first = first * Floats::load(scale);
        second = second * Floats::load(scale + 16);
      }
      return ArithmeticOf<type>::Type::join(first, second);
    }
  }
};

// The values of a tile as a factor; fetches the keys of the next meanwhile.
template <int32_t type>
struct StripValues {
  const Strips& strips;
  const Strips& next;
  const float* scales;
  int64_t num_groups;
  int64_t width;
  int64_t fetch;
  bool once;

  KVT_INLINE Floats load(int64_t step, int64_t column) const {
    constexpr int64_t kPerLane = ArithmeticOf<type>::Type::kPerLane, kRows = kStrip / kPerLane;
    const int64_t strip = step / kRows, row = step % kRows;
    const uint8_t* const numbers = strips.values[strip];
    fetch_line(next.keys[strip] + (row * width + column) / 16 * fetch, once);
    const int64_t first = row * width * kPerLane + column * (type == KV_Q4_0 ? 1 : kPerLane);
    const float* const scale = scales + (strip * num_groups + column / kKvGroup) * kStrip + 2 * row;
    if constexpr (type == KV_F32) {
      return load_numbers<type>(numbers, first);
    } else if constexpr (type == KV_F16) {
      return join(load_numbers<type>(numbers, first), load_numbers<type>(numbers, first + 16));
    } else if constexpr (type == KV_Q8_0) {
      const Floats both = Floats::alternating(scale[0], scale[1]);
      return join(load_numbers<type>(numbers, first) * both,
                  load_numbers<type>(numbers, first + 16) * both);
    } else {
      Floats low, high;  // of two places, whose dimensions alternate
      zip(load_numbers<type>(numbers, first) * Floats::all(scale[0]),
          load_numbers<type>(numbers, first + width) * Floats::all(scale[1]), low, high);
      return join(low, high);
    }
  }

 private:
  static KVT_INLINE Floats join(Floats first, Floats second) {
    return ArithmeticOf<type>::Type::join(first, second);
  }
};

}  // namespace kvt
