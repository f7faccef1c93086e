// A block of rows over the tiles of one split.
#pragma once

#include "attention_latent.hpp"
#include "attention_rows.hpp"
#include "attention_strips.hpp"

namespace kvt {

// Values of keys that were never written must not enter sums, not even with weight 0: they may be
// no numbers.
template <class Arithmetic>
inline void clear_values(const RowBlock& block, int64_t tile, float* values) {
  const int32_t width = block.shape->width;
  const int64_t first = block.last_key() + 1 - tile * kTile;
  for (int64_t key = std::max<int64_t>(first, 0); key < kTile; ++key) {
    if (Arithmetic::kPerLane == 1) {
      std::fill_n(values + key * width, width, 0.0f);
    } else {
      auto* const halves = reinterpret_cast<uint16_t*>(values + key / 2 * width) + key % 2;
      for (int32_t i = 0; i < width; ++i) halves[2 * i] = 0;
    }
  }
}

// Expand a tile into the worker's memory and fetch the next.
template <int32_t key_type, int32_t value_type>
inline void expand_tile(const RowBlock& block, int64_t tile, const Strips& strips,
                        const Strips& next, const RowMemory& memory) {
  using Values = typename ArithmeticOf<value_type>::Type;
  const AttentionShape& shape = *block.shape;
  const int64_t strip_lanes = kStrip / Values::kPerLane * static_cast<int64_t>(shape.width);
  for (int32_t i = 0; i < Strips::kCount; ++i) {
    prefetch(next.keys[i], shape.key_bytes);
    prefetch(next.values[i], shape.value_bytes);
    float* const values = memory.values + i * strip_lanes;
    float* const keys = memory.keys + i * kStrip;
    if (!strips.keys[i]) {
      std::fill_n(values, strip_lanes, 0.0f);
      continue;
    }
    expand_keys<key_type>(strips.keys[i], shape.layout.head_dim, keys, kTile);
    if (shape.layout.is_latent) turn_keys<Values>(keys, shape.layout.head_dim, shape.width, values);
    else expand_values<value_type>(strips.values[i], shape.width, values);
  }
  clear_values<Values>(block, tile, memory.values);
}

// Set rows up as rows first .. of a block, kTileRows or what is left; false: they see no key.
inline bool take_rows(const RowBlock& block, int64_t tile, int32_t first, const RowMemory& memory,
                      TileRows& rows) {
  const AttentionShape& shape = *block.shape;
  const Visible visible{shape.call->window};
  rows.count = std::min(kTileRows, block.num_rows() - first);
  rows.q = {memory.q + first * shape.q_stride, shape.q_stride};
  rows.softmax = memory.softmax + first;
  rows.sums = memory.sums + static_cast<int64_t>(first) * shape.width;
  uint64_t any = 0;
  for (int32_t i = 0; i < rows.count; ++i) {
    any |= rows.visible[i] = visible.keys(block.position(first + i) - tile * kTile);
  }
  return any != 0;
}

template <class KeyArithmetic, class ValueArithmetic, class Keys, class Values>
inline void attend_tile(const RowBlock& block, int64_t tile, const RowMemory& memory,
                        const KeyTile<Keys, Values>& factors) {
  TileRows rows;
  for (int32_t first = 0; first < block.num_rows(); first += kTileRows) {
    if (!take_rows(block, tile, first, memory, rows)) continue;
    score_rows<KeyArithmetic>(factors, rows);
    weigh_rows<ValueArithmetic>(factors.cap, rows);
    sum_values<ValueArithmetic>(factors, rows);
  }
}

// Without expanding: a tile whose places are all written, against at most kTileRows rows.
template <int32_t key_type, int32_t value_type>
inline void attend_direct(const RowBlock& block, int64_t tile, const Strips& strips,
                          const Strips& next, const RowMemory& memory) {
  using Keys = typename ArithmeticOf<key_type>::Type;
  using Values = typename ArithmeticOf<value_type>::Type;
  const AttentionShape& shape = *block.shape;
  const int64_t steps = shape.layout.head_dim / Keys::kPerLane, width = shape.width;
  const int64_t loads = kStrip / Values::kPerLane * width / 16;  // of a strip of values
  const bool once = shape.call->num_chunks == 1;  // several may have a prefix in common
  TileScales scales;
  unpack_scales<key_type, value_type>(shape, strips, scales);
  const KeyTile<StripKeys<key_type>, StripValues<value_type>> factors{
      {strips, scales.keys, num_scales(shape.layout.head_dim), shape.value_bytes / steps, once},
      {strips, next, scales.values, num_scales(shape.width), width, shape.key_bytes / loads,
       once},
      steps, shape.width, shape.cap};
  attend_tile<Keys, Values>(block, tile, memory, factors);
}

template <int32_t key_type, int32_t value_type>
inline void attend_rows(const RowBlock& block, int64_t tile, const Strips& strips,
                        const Strips& next, const RowMemory& memory) {
  using Keys = typename ArithmeticOf<key_type>::Type;
  using Values = typename ArithmeticOf<value_type>::Type;
  if constexpr (kIsDirect<key_type> && kIsDirect<value_type>) {
    const bool is_whole = strips.keys[0] && (tile + 1) * kTile <= block.last_key() + 1;
    if (is_whole && block.num_rows() <= kTileRows && !block.shape->layout.is_latent) {
      return attend_direct<key_type, value_type>(block, tile, strips, next, memory);
    }
  }
  expand_tile<key_type, value_type>(block, tile, strips, next, memory);
  const AttentionShape& shape = *block.shape;
  const KeyTile<Lanes, Lanes> factors{{memory.keys, kTile}, {memory.values, shape.width},
                                      shape.layout.head_dim / Keys::kPerLane, shape.width,
                                      shape.cap};
  attend_tile<Keys, Values>(block, tile, memory, factors);
}

// Softmax and sums of all rows of a block over one split.
template <int32_t key_type, int32_t value_type>
inline void attend_split(const RowBlock& block, int64_t split, const RowMemory& memory) {
  std::fill_n(memory.softmax, block.num_rows(), RowSoftmax{});
  std::fill_n(memory.sums, static_cast<int64_t>(block.num_rows()) * block.shape->width, 0.0f);
  const int64_t first = std::max(split * kSplit, block.first_key()) / kTile;
  const int64_t last = std::min((split + 1) * kSplit - 1, block.last_key()) / kTile;
  Strips strips = find_strips(block, first);
  for (const uint8_t* keys : strips.keys) prefetch(keys, block.shape->key_bytes);
  for (int64_t tile = first; tile <= last; ++tile) {
    const Strips next = tile < last ? find_strips(block, tile + 1) : strips;
    attend_rows<key_type, value_type>(block, tile, strips, next, memory);
    strips = next;
  }
}

}  // namespace kvt
