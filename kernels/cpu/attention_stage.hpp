// Sharing attention out: items of the first phase are (chunk, kv head, block of rows), or a single
// split of these where a few rows see many keys; then a second phase merges the splits.
#pragma once

#include "attention_split.hpp"

namespace kvt {

constexpr int64_t kMaxShared = int64_t{64} << 20;

// How one chunk is shared out.
struct ChunkItems {
  int64_t row_blocks;
  int64_t first_split, num_splits;
  bool is_split;       // an item is one split
  int64_t count;       // items
  float* shared;       // where is_split: [rows][heads][splits][split_floats]
};

// Of a split's result: peak, weight, padding to 16, sums.
inline int64_t split_floats(const AttentionShape& shape) { return 16 + shape.width; }

// Walks the chunks in order. Every worker walks alike, so all agree on what is an item.
class ItemWalk {
 public:
  ItemWalk(const AttentionShape& shape, bool are_few)
      : shape_(shape), are_few_(are_few), shared_(reinterpret_cast<float*>(shape.call->shared)) {
    enter(0);
  }

  int32_t chunk() const { return chunk_; }
  const ChunkItems& items() const { return items_; }
  bool is_at_end() const { return chunk_ == shape_.call->num_chunks; }
  void advance() { enter(chunk_ + 1); }

 private:
  void enter(int32_t chunk) {
    chunk_ = chunk;
    if (is_at_end()) return;
    const Attention& call = *shape_.call;
    const ChunkView& view = call.chunks[chunk];
    const int64_t positions = shape_.num_positions;
    items_.row_blocks = (view.num_rows + positions - 1) / positions;
    items_.first_split = RowBlock::first_visible(call, view.start) / kSplit;
    items_.num_splits = (view.start + view.num_rows - 1) / kSplit + 1 - items_.first_split;
    const int64_t needed =
        view.num_rows * call.num_heads * items_.num_splits * split_floats(shape_) * 4;
    const bool is_short = items_.row_blocks == 1 || are_few_;
    items_.is_split =
        is_short && items_.num_splits > 1 && used_ + needed <= call.shared_bytes;
    items_.count = items_.row_blocks * shape_.layout.kv_heads;
    if (!items_.is_split) return;
    items_.count *= items_.num_splits;
    items_.shared = shared_ + used_ / 4;
    used_ += needed;
  }

  const AttentionShape& shape_;
  bool are_few_;
  float* shared_;
  int64_t used_ = 0;  // bytes
  int32_t chunk_ = 0;
  ChunkItems items_{};
};

struct ItemCounts {
  int64_t items = 0;
  int64_t merges = 0;  // (row, kv head) with several splits
};

inline ItemCounts count_items(const AttentionShape& shape, bool are_few) {
  ItemCounts counts;
  for (ItemWalk walk(shape, are_few); !walk.is_at_end(); walk.advance()) {
    counts.items += walk.items().count;
    if (walk.items().is_split) {
      counts.merges += static_cast<int64_t>(shape.call->chunks[walk.chunk()].num_rows) *
                       shape.layout.kv_heads;
    }
  }
  return counts;
}

inline float* split_result(const AttentionShape& shape, const ChunkItems& items, int64_t row,
                           int64_t head, int64_t split) {
  const int64_t index = (row * shape.call->num_heads + head) * items.num_splits + split;
  return items.shared + index * split_floats(shape);
}

inline void store_split(const RowBlock& block, const ChunkItems& items, int64_t split,
                        const RowMemory& memory) {
  const AttentionShape& shape = *block.shape;
  for (int32_t r = 0; r < block.num_rows(); ++r) {
    const int64_t head = block.kv_head * shape.group + r % shape.group;
    float* const result =
        split_result(shape, items, block.first + r / shape.group, head, split);
    result[0] = memory.softmax[r].peak;
    result[1] = sum(Floats::load(memory.softmax[r].weights));
    std::copy_n(memory.sums + static_cast<int64_t>(r) * shape.width, shape.width, result + 16);
  }
}

// All splits of a block, one after the other.
template <int32_t key_type, int32_t value_type>
inline void attend_block(const RowBlock& block, const RowMemory& memory) {
  const AttentionShape& shape = *block.shape;
  const int64_t width = shape.width;
  std::fill_n(memory.totals, block.num_rows(), RowTotal{});
  std::fill_n(memory.total_sums, block.num_rows() * width, 0.0f);
  for (int64_t split = block.first_key() / kSplit; split <= block.last_key() / kSplit; ++split) {
    attend_split<key_type, value_type>(block, split, memory);
    for (int32_t r = 0; r < block.num_rows(); ++r) {
      const float weight = sum(Floats::load(memory.softmax[r].weights));
      merge({memory.softmax[r].peak, weight}, memory.sums + r * width, shape.width,
            memory.totals[r], memory.total_sums + r * width);
    }
  }
  for (int32_t r = 0; r < block.num_rows(); ++r) {
    finish_row(shape, block.index(r), memory.totals[r], memory.total_sums + r * width);
  }
}

// Item `item` of a chunk. Blocks of later rows, which see more keys, come first: what is started
// last should be short. Heads follow each other, since they are neighbours in the cache.
template <int32_t key_type, int32_t value_type>
inline void attend_item(const AttentionShape& shape, const ItemWalk& walk, int64_t item,
                        const RowMemory& memory) {
  const ChunkItems& items = walk.items();
  const ChunkView& chunk = shape.call->chunks[walk.chunk()];
  const int64_t splits = items.is_split ? items.num_splits : 1, heads = shape.layout.kv_heads;
  const int64_t split = item / heads % splits;
  const int64_t row_block = items.row_blocks - 1 - item / heads / splits;
  const auto first = static_cast<int32_t>(row_block * shape.num_positions);
  const RowBlock block{&shape, &chunk, static_cast<int32_t>(item % heads), first,
                       std::min(shape.num_positions, chunk.num_rows - first)};
  prepare_q<typename ArithmeticOf<key_type>::Type>(block, memory);
  if (!items.is_split) return attend_block<key_type, value_type>(block, memory);
  attend_split<key_type, value_type>(block, items.first_split + split, memory);
  store_split(block, items, split, memory);
}

// Merge the splits of one row for the heads of one kv head.
inline void merge_row(const AttentionShape& shape, const ItemWalk& walk, int64_t item) {
  const ChunkItems& items = walk.items();
  const int64_t row = item / shape.layout.kv_heads, kv_head = item % shape.layout.kv_heads;
  const int64_t step_row = shape.call->chunks[walk.chunk()].first_row + row;
  alignas(64) float sums[kMaxHeadDim];
  for (int64_t head = kv_head * shape.group; head < (kv_head + 1) * shape.group; ++head) {
    RowTotal total;
    std::fill_n(sums, shape.width, 0.0f);
    for (int64_t split = 0; split < items.num_splits; ++split) {
      const float* const result = split_result(shape, items, row, head, split);
      merge({result[0], result[1]}, result + 16, shape.width, total, sums);
    }
    finish_row(shape, step_row * shape.call->num_heads + head, total, sums);
  }
}

template <int32_t key_type, int32_t value_type>
inline void attend_as(Worker& worker, const AttentionShape& shape) {
  RowMemory memory;
  memory.bind(worker.scratch, shape);
  const bool are_few = count_items(shape, false).items < 4 * worker.num_threads;
  const ItemCounts counts = count_items(shape, are_few);
  ItemWalk walk(shape, are_few);
  int64_t passed = 0;  // items of the chunks before walk's
  for (int64_t item; (item = worker.take(counts.items)) >= 0;) {
    for (; item - passed >= walk.items().count; walk.advance()) passed += walk.items().count;
    attend_item<key_type, value_type>(shape, walk, item - passed, memory);
  }
  if (!counts.merges) return;
  worker.barrier();
  ItemWalk merges(shape, are_few);
  passed = 0;
  for (int64_t item; (item = worker.take(counts.merges)) >= 0;) {
    const auto count = [&] {
      const int64_t rows = shape.call->chunks[merges.chunk()].num_rows;
      return merges.items().is_split ? rows * shape.layout.kv_heads : 0;
    };
    for (; item - passed >= count(); merges.advance()) passed += count();
    merge_row(shape, merges, item - passed);
  }
}

template <int32_t key_type>
inline void attend_with_keys(Worker& worker, const AttentionShape& shape) {
  switch (shape.layout.value_type) {
    case KV_F32: return attend_as<key_type, KV_F32>(worker, shape);
    case KV_F16: return attend_as<key_type, KV_F16>(worker, shape);
    case KV_Q8_0: return attend_as<key_type, KV_Q8_0>(worker, shape);
    case KV_Q4_0: return attend_as<key_type, KV_Q4_0>(worker, shape);
  }
}

inline void attend(Worker& worker, const Attention& attention) {
  const AttentionShape shape = shape_of(attention, worker.num_threads);
  switch (shape.layout.key_type) {
    case KV_F32: return attend_with_keys<KV_F32>(worker, shape);
    case KV_F16: return attend_with_keys<KV_F16>(worker, shape);
    case KV_Q8_0: return attend_with_keys<KV_Q8_0>(worker, shape);
    case KV_Q4_0: return attend_with_keys<KV_Q4_0>(worker, shape);
  }
}

inline int64_t attention_worker_bytes(const CacheLayout& layout, int32_t num_heads) {
  RowMemory memory;
  return memory.bind(nullptr, shape_of(layout, num_heads)) - static_cast<std::byte*>(nullptr);
}

inline int64_t attention_shared_bytes(const CacheLayout& layout, int32_t num_heads,
                                      int64_t max_rows, int64_t max_context) {
  const int64_t splits = max_context / kSplit + 1;
  const int64_t row_bytes = num_heads * split_floats(shape_of(layout, num_heads)) * 4;
  return std::min(kMaxShared, max_rows * splits * row_bytes);
}

}  // namespace kvt
