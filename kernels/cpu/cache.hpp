// The KV cache of one layer: pools of blocks of keys and of values.
//
// A block holds block_size token places of all kv heads as [kv_heads][block_size / 16] strips. A
// strip is 16 places of one kv head, laid out so that attention loads it without shuffling:
//
//   type   keys                                values (width: value_dim rounded up to 16)
//   F16    [head_dim / 2][16 places][2]        [16 / 2 pairs of places][width][2]
//   F32    [head_dim][16 places]               [16 places][width]
//   Q8_0   int8 [head_dim / 2][16 places][2]   int8 [16 / 2 pairs of places][width][2]
//   Q4_0   bytes [head_dim / 2][16 places]     bytes [16 places][width / 2]
//
// Q8_0 and Q4_0 strips end with their scales, f16 [groups][16 places], one per place and group of
// 32 dimensions (the last group may be shorter); the numbers are GGUF's. A Q4_0 byte holds two
// neighbouring dimensions, the even one in its low bits. Quantised keys or values are rotated by a
// Hadamard matrix over the largest power of two that divides the head size, which spreads outliers.
// In a latent cache a key's first value_dim numbers are the value, and there are no values besides;
// there the power of two divides both sizes.
// Two threads may write two places of one block at the same time.
#pragma once

#include <cstdint>

namespace kvt {

enum KvType : int32_t { KV_F32 = 0, KV_F16 = 1, KV_Q4_0 = 2, KV_Q8_0 = 8 };  // numbers of ggml

constexpr int32_t kStrip = 16;     // places that are stored together
constexpr int32_t kKvGroup = 32;   // dimensions with one scale

struct CacheLayout {
  int32_t key_type, value_type;  // KvType
  int32_t block_size;            // places, a multiple of 16
  int32_t kv_heads;
  int32_t head_dim;   // even
  int32_t value_dim;  // even
  bool is_latent;     // value_type is key_type then
};

struct Cache {
  CacheLayout layout;
  uint8_t* keys;  // both aligned to 64 bytes
  uint8_t* values;
};

// Bytes of one block, a multiple of 64; -1: the layout is not supported.
inline int64_t key_block_bytes(const CacheLayout& layout);
inline int64_t value_block_bytes(const CacheLayout& layout);

// Store one token at a place of a block. k f32 [kv_heads][head_dim], after rope; v f32
// [kv_heads][value_dim], of a latent cache not read.
inline void cache_write(const Cache& cache, int64_t block, int32_t place, const float* k,
                        const float* v);

// Copy the first num_tokens places of a block to another; what the target's other places hold
// afterwards is not defined.
inline void cache_copy(const Cache& cache, int64_t source, int64_t target, int32_t num_tokens);

}  // namespace kvt

#include "cache_write.hpp"  // the definitions
