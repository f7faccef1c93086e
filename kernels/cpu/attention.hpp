// Attention over the paged cache: chunks of prompts and single rows of many requests in one call.
//
// 1. Keys are taken in tiles of 64 and splits of 512, both at absolute positions. A row runs an
//    online softmax over the tiles of each split, then merges the splits in ascending order.
// 2. So one row gives the same bits alone, in any batch, in any chunking, on any number of threads:
//    a tile that it does not see changes nothing, and who computes a split does not matter.
// 3. The heads of one kv head share one read of its keys and values.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cache.hpp"
#include "team.hpp"

namespace kvt {

// Rows first_row .. of a step are one request's tokens at positions start ..; blocks[i] holds its
// positions i * block_size ... Entries that no row sees (behind a window) are not read.
struct ChunkView {
  int64_t first_row;
  int32_t num_rows;
  int64_t start;
  const int32_t* blocks;
};

struct Attention {
  const Cache* cache;       // K and V of the rows are written already
  const float* q;           // [N][num_heads][head_dim], after rope
  float* out;               // [N][num_heads][value_dim]
  const ChunkView* chunks;
  int32_t num_chunks;
  int32_t num_heads;        // a multiple of kv_heads; head h reads kv head h / (heads / kv_heads)
  float scale;              // of q k
  float softcap;            // scores become softcap * tanh(score / softcap); 0: none
  int32_t window;           // a row at p sees p - window + 1 .. p; 0: all up to p
  const float* sinks;       // [num_heads]: a score that takes weight and has no value; null: none
  std::byte* shared;        // one for all workers, aligned to 64 bytes: results of splits
  int64_t shared_bytes;     // any size: less only means less balance between threads
};

// out = softmax(cap(scale q k)) v for all rows. A stage: all workers call it together; it passes
// barriers inside and needs one behind it. Worker::scratch needs attention_worker_bytes().
inline void attend(Worker& worker, const Attention& attention);

// Private scratch per worker.
inline int64_t attention_worker_bytes(const CacheLayout& layout, int32_t num_heads);

// A good size of `shared` for steps with max_rows rows in short chunks (single tokens of different
// requests, say) of at most max_context tokens each; at most 64 MiB.
inline int64_t attention_shared_bytes(const CacheLayout& layout, int32_t num_heads,
                                      int64_t max_rows, int64_t max_context);

}  // namespace kvt

#include "attention_stage.hpp"  // the definitions
