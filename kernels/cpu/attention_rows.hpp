// A block of rows (positions x heads of one kv head) over the splits that they see.
#pragma once

#include "attention.hpp"
#include "attention_tile.hpp"
#include "cache_write.hpp"

namespace kvt {

constexpr int32_t kSplit = 512;    // keys
// Rows of a block: many make the expansion of a tile cheap, few give all threads something to do.
constexpr int32_t kMaxBlockRows = 384, kMinBlockRows = 48;
constexpr int32_t kBlocksPerThread = 8;

// What all items of a call have in common.
struct AttentionShape {
  const Attention* call;
  CacheLayout layout;
  int32_t group;          // heads per kv head
  int32_t num_positions;  // of a block of rows
  int32_t width;          // value_dim rounded up to 16
  int64_t q_stride;       // lanes of a row of q
  float q_factor;         // scale, and what makes powers of two out of scores
  float cap;              // in units of log 2; 0: none
  int64_t key_bytes, value_bytes;  // of a strip

  int64_t max_rows() const { return static_cast<int64_t>(num_positions) * group; }
};

inline int32_t per_lane(int32_t type) {
  return type == KV_F32 ? Singles::kPerLane : ArithmeticOf<KV_F16>::Type::kPerLane;
}

inline AttentionShape shape_of(const CacheLayout& layout, int32_t num_heads) {
  AttentionShape shape{};
  shape.layout = layout;
  shape.group = num_heads / layout.kv_heads;
  shape.num_positions = std::max(kMaxBlockRows / shape.group, 1);
  shape.width = padded_dim(layout.value_dim);
  shape.key_bytes = key_strip_bytes(layout);
  shape.value_bytes = value_strip_bytes(layout);
  shape.q_stride = (layout.head_dim + 31) / 32 * 32 / per_lane(layout.key_type);
  return shape;
}

inline AttentionShape shape_of(const Attention& call, int32_t num_threads) {
  AttentionShape shape = shape_of(call.cache->layout, call.num_heads);
  shape.call = &call;
  shape.q_factor = call.softcap != 0.0f ? 2.0f * kLog2E * call.scale / call.softcap
                                        : kLog2E * call.scale;
  shape.cap = kLog2E * call.softcap;
  int64_t rows = 0;  // of one head in every group
  for (int32_t i = 0; i < call.num_chunks; ++i) rows += call.chunks[i].num_rows;
  rows *= shape.layout.kv_heads;
  const int64_t wanted = int64_t{kBlocksPerThread} * num_threads;
  while (rows < wanted * shape.num_positions && shape.max_rows() > kMinBlockRows &&
         shape.num_positions > 1) {
    shape.num_positions = (shape.num_positions + 1) / 2;
  }
  return shape;
}

// Softmax of a row over several splits: weight is the sum of weights relative to 2^peak.
struct RowTotal {
  float peak = kNoPeak;
  float weight = 0.0f;
};

// Private memory of a worker.
struct RowMemory {
  float* q;             // lanes [rows][q_stride]
  float* keys;          // a tile of lanes
  float* values;
  RowSoftmax* softmax;  // [rows]
  float* sums;          // [rows][width], of the current split
  RowTotal* totals;     // [rows]
  float* total_sums;    // [rows][width]

  // Lays the parts out from `start` on; returns the end.
  std::byte* bind(std::byte* start, const AttentionShape& shape) {
    const auto rows = static_cast<size_t>(shape.max_rows());
    const auto width = static_cast<size_t>(shape.width);
    const auto next = [&start](size_t bytes) {
      std::byte* const part = start;
      start += (bytes + 63) / 64 * 64;
      return part;
    };
    q = reinterpret_cast<float*>(next(rows * static_cast<size_t>(shape.q_stride) * 4));
    keys = reinterpret_cast<float*>(next(static_cast<size_t>(shape.layout.head_dim) * kTile * 4));
    values = reinterpret_cast<float*>(next(width * kTile * 4));
    softmax = reinterpret_cast<RowSoftmax*>(next(rows * sizeof(RowSoftmax)));
    sums = reinterpret_cast<float*>(next(rows * width * 4));
    totals = reinterpret_cast<RowTotal*>(next(rows * sizeof(RowTotal)));
    total_sums = reinterpret_cast<float*>(next(rows * width * 4));
    return start;
  }
};

// Rows of one chunk: positions first .. first + count - 1 (counted from the chunk's first row), all
// heads of one kv head; row r is position r / group, head r % group.
struct RowBlock {
  const AttentionShape* shape;
  const ChunkView* chunk;
  int32_t kv_head;
  int32_t first, count;

  int32_t num_rows() const { return count * shape->group; }
  int64_t position(int32_t row) const { return chunk->start + first + row / shape->group; }
  int64_t last_key() const { return chunk->start + first + count - 1; }
  int64_t first_key() const { return first_visible(*shape->call, chunk->start + first); }
  // Index of a row's head in q and out, [N][heads].
  int64_t index(int32_t row) const {
    const int64_t step_row = chunk->first_row + first + row / shape->group;
    return step_row * shape->call->num_heads + kv_head * shape->group + row % shape->group;
  }
  static int64_t first_visible(const Attention& call, int64_t position) {
    return call.window ? std::max<int64_t>(position - call.window + 1, 0) : 0;
  }
};

template <class Arithmetic>
inline void prepare_q(const RowBlock& block, const RowMemory& memory) {
  const AttentionShape& shape = *block.shape;
  const int32_t dim = shape.layout.head_dim, padded = (dim + 31) / 32 * 32;
  alignas(64) float row[kMaxHeadDim];
  for (int32_t r = 0; r < block.num_rows(); ++r) {
    const float* const q = shape.call->q + block.index(r) * dim;
    for (int32_t i = 0; i < dim; ++i) row[i] = q[i] * shape.q_factor;
    std::fill(row + dim, row + padded, 0.0f);
    if (is_rotated(shape.layout.key_type)) hadamard(row, dim, key_rotation(shape.layout));
    float* const lanes = memory.q + r * shape.q_stride;
    for (int32_t i = 0; i < padded; i += 32) {
      Arithmetic::put(lanes + i / Arithmetic::kPerLane, Floats::load(row + i),
                      Floats::load(row + i + 16));
    }
  }
}

// Add a split's sums[width] to the total's. A split without a visible key changes nothing.
inline void merge(RowTotal split, const float* sums, int32_t width, RowTotal& total,
                  float* total_sums) {
  const float peak = std::max(total.peak, split.peak);
  const Floats old_part = exp2(Floats::all(total.peak - peak));
  const Floats new_part = exp2(Floats::all(split.peak - peak));
  float weight[16];
  fma(Floats::all(total.weight), old_part, Floats::all(split.weight) * new_part).store(weight);
  for (int32_t i = 0; i < width; i += 16) {
    const Floats added = Floats::load(sums + i) * new_part;
    fma(Floats::load(total_sums + i), old_part, added).store(total_sums + i);
  }
  total = {peak, weight[0]};
}

// Divide by the weights, the sink's among them, and store one row of one head.
inline void finish_row(const AttentionShape& shape, int64_t index, RowTotal total, float* sums) {
  const Attention& call = *shape.call;
  const int32_t dim = shape.layout.value_dim;
  const float* const sinks = call.sinks;
  if (sinks) {
    alignas(64) const float none[kMaxHeadDim] = {};
    const float sink = std::max(sinks[index % call.num_heads] * kLog2E, kNoPeak);
    merge({sink, 1.0f}, none, shape.width, total, sums);
  }
  const float inverse = 1.0f / total.weight;
  for (int32_t i = 0; i < dim; ++i) sums[i] *= inverse;
  if (is_rotated(shape.layout.value_type)) hadamard(sums, dim, value_rotation(shape.layout));
  std::copy_n(sums, dim, call.out + index * dim);
}

}  // namespace kvt
