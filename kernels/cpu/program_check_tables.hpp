// Whether a model's tables fit together. Each check returns null or what is wrong.
#pragma once

#include "program_check_recurrent.hpp"

namespace kvt {

constexpr int32_t kMaxStack = 1 << 16;

inline bool is_index(int32_t index, size_t size) {
  return index >= 0 && static_cast<size_t>(index) < size;
}

inline const char* check_sizes(const kvt_model_desc& desc) {
  const bool are_counts = desc.num_matrices >= 0 && desc.num_vectors >= 0 && desc.num_caches >= 0 &&
                          desc.num_ropes >= 0 && desc.num_attentions >= 0 && desc.num_ops > 0 &&
                          desc.num_states >= 0 && desc.num_recurrents >= 0;
  if (!are_counts) return "model: a table has a negative size, or there is no program";
  if (desc.num_groups < 1 || desc.hidden_size < 1 || desc.vocab_size < 1)
    return "model: no groups, hidden size or vocabulary";
  if (desc.max_rows < 1 || desc.max_rows > (1 << 20)) return "model: max_rows";
  if (desc.max_sampled < 1 || desc.max_sampled > desc.max_rows) return "model: max_sampled";
  if (desc.max_context < 1 || desc.max_context > int64_t{1} << 31) return "model: max_context";
  return nullptr;
}

inline const char* check_matrix(const kvt_matrix& matrix) {
  if (matrix.stack < 1 || matrix.stack > kMaxStack) return "model: a stack of matrices";
  const int64_t bytes = packed_bytes(matrix.type, matrix.rows, matrix.cols);
  if (bytes < 0) return "model: a matrix has a type or shape that is not supported";
  if (bytes > INT64_MAX / kMaxStack || bytes * matrix.stack != matrix.bytes)
    return "model: a matrix has another number of bytes than its shape";
  if (!matrix.data || reinterpret_cast<uintptr_t>(matrix.data) % 64)
    return "model: a matrix is missing or not aligned to 64 bytes";
  return nullptr;
}

inline CacheLayout layout_of(const kvt_cache& cache) {
  const int32_t value_type = cache.is_latent ? cache.key_type : cache.value_type;
  return CacheLayout{cache.key_type, value_type,      cache.block_size,    cache.kv_heads,
                     cache.head_dim, cache.value_dim, cache.is_latent != 0};
}

inline const char* check_layout(const kvt_cache& cache) {
  if (cache.block_size < 1 || cache.kv_heads < 1 || cache.head_dim < 1 || cache.value_dim < 1)
    return "cache: a size below 1";
  const CacheLayout layout = layout_of(cache);
  if (key_block_bytes(layout) < 0 || value_block_bytes(layout) < 0)
    return "cache: a type or shape that is not supported";
  return nullptr;
}

inline const char* check_cache(const kvt_cache& cache, int32_t num_groups) {
  if (const char* fault = check_layout(cache)) return fault;
  if (!cache.keys || (!cache.values && !cache.is_latent)) return "cache: no memory";
  if (reinterpret_cast<uintptr_t>(cache.keys) % 64 || reinterpret_cast<uintptr_t>(cache.values) % 64)
    return "cache: not aligned to 64 bytes";
  if (cache.num_blocks < 1) return "cache: no blocks";
  if (cache.group < 0 || cache.group >= num_groups) return "cache: no such group";
  return nullptr;
}

inline const char* check_rope(const kvt_model_desc& desc, const kvt_rope& rope) {
  if (rope.num_rotated < 2 || rope.num_rotated % 2) return "rope: num_rotated";
  if (rope.style != KVT_ROPE_NORM && rope.style != KVT_ROPE_NEOX) return "rope: style";
  if (rope.factors < 0) return nullptr;
  if (rope.factors >= desc.num_vectors) return "rope: no such vector";
  if (desc.vectors[rope.factors].size != rope.num_rotated / 2) return "rope: size of the factors";
  return nullptr;
}

inline const char* check_attention(const kvt_model_desc& desc, const kvt_attention& attention) {
  if (attention.cache < 0 || attention.cache >= desc.num_caches) return "attention: no such cache";
  const kvt_cache& cache = desc.caches[attention.cache];
  if (attention.num_heads < 1 || attention.num_heads % cache.kv_heads)
    return "attention: heads are no multiple of kv heads";
  if (attention.window < 0) return "attention: window";
  if (attention.rope >= desc.num_ropes) return "attention: no such rope";
  if (attention.rope >= 0 && desc.ropes[attention.rope].num_rotated > cache.head_dim)
    return "attention: rope is wider than a head";
  if (attention.is_gated && (cache.head_dim != cache.value_dim || attention.has_joint_norms))
    return "attention: gates of another size than the output, or with joint norms";
  if (attention.temperature_length < 0) return "attention: temperature";
  if (attention.sinks < 0) return nullptr;
  if (attention.sinks >= desc.num_vectors) return "attention: no such vector";
  if (desc.vectors[attention.sinks].size != attention.num_heads)
    return "attention: number of sinks";
  return nullptr;
}

// All tables but the program.
inline const char* check_tables(const kvt_model_desc& desc) {
  const char* fault = check_sizes(desc);
  for (int32_t i = 0; !fault && i < desc.num_matrices; ++i) fault = check_matrix(desc.matrices[i]);
  for (int32_t i = 0; !fault && i < desc.num_vectors; ++i) {
    if (!desc.vectors[i].data || desc.vectors[i].size < 1) fault = "model: an empty vector";
  }
  for (int32_t i = 0; !fault && i < desc.num_caches; ++i)
    fault = check_cache(desc.caches[i], desc.num_groups);
  for (int32_t i = 0; !fault && i < desc.num_ropes; ++i) fault = check_rope(desc, desc.ropes[i]);
  for (int32_t i = 0; !fault && i < desc.num_attentions; ++i)
    fault = check_attention(desc, desc.attentions[i]);
  for (int32_t i = 0; !fault && i < desc.num_states; ++i)
    fault = check_state(desc.states[i], desc.num_groups);
  for (int32_t i = 0; !fault && i < desc.num_recurrents; ++i)
    fault = check_recurrent(desc, desc.recurrents[i]);
  return fault;
}

}  // namespace kvt
