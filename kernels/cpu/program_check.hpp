// Whether a model's description fits together. Each check returns null or what is wrong.
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
  return CacheLayout{cache.key_type, cache.value_type, cache.block_size,
                     cache.kv_heads, cache.head_dim,   cache.value_dim};
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
  if (!cache.keys || !cache.values) return "cache: no memory";
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
  if (attention.is_gated && cache.head_dim != cache.value_dim)
    return "attention: gates of another size than the output";
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

// ---- the program -------------------------------------------------------------------------------

// A vector that an op names has the size; -1 is allowed if `may_miss`.
inline bool has_size(const kvt_model& model, int32_t vector, int64_t size, bool may_miss) {
  if (vector == -1) return may_miss;
  return is_index(vector, model.vectors.size()) &&
         model.vectors[static_cast<size_t>(vector)].size == size;
}

inline bool has_shape(const kvt_model& model, int32_t matrix, int64_t rows, int64_t cols,
                      int64_t stack = 1) {
  return is_index(matrix, model.matrices.size()) && model.matrix(matrix).rows == rows &&
         model.matrix(matrix).cols == cols && model.matrix(matrix).stack == stack;
}

// Widths of ATTENDED and HIDDEN as the ops before wrote them, and what has been computed.
struct Progress {
  int64_t attended = 0, hidden = 0;
  bool has_query = false, has_branch = false, is_narrow = false, has_logits = false;
  bool is_mixed = false;  // ATTENDED is a recurrent layer's, and nothing has read it
};

inline const char* check_qkv(const kvt_model& model, const kvt_op& op, Progress& now) {
  if (!is_index(op.attention, model.attentions.size())) return "qkv: no such attention";
  if (now.is_narrow) return "qkv: after the rows were narrowed";
  const kvt_attention& attention = model.attention(op.attention);
  const CacheLayout& layout = model.cache(attention).cache.layout;
  const int64_t num_parts = attention.is_gated ? 2 : 1;
  const int64_t sizes[3] = {num_parts * query_width(model, attention),
                            int64_t{layout.kv_heads} * layout.head_dim,
                            int64_t{layout.kv_heads} * layout.value_dim};
  for (int i = 0; i < 3; ++i) {
    if (!has_shape(model, op.matrices[i], sizes[i], model.hidden_size)) return "qkv: a matrix";
    if (!has_size(model, op.biases[i], sizes[i], true)) return "qkv: a bias";
  }
  for (int32_t norm : op.head_norms) {
    if (!has_size(model, norm, layout.head_dim, true)) return "qkv: a norm of heads";
  }
  now.has_query = true;
  return has_size(model, op.norm, model.hidden_size, true) ? nullptr : "qkv: norm";
}

inline const char* check_mixing(const kvt_model& model, const kvt_op& op, Progress& now) {
  if (const char* fault = check_recurrent_op(model, op)) return fault;
  if (now.is_narrow) return "recurrent: after the rows were narrowed";
  now.attended = model.mixer(op.recurrent).inner();
  now.is_mixed = true;
  return has_size(model, op.norm, model.hidden_size, true) ? nullptr : "recurrent: norm";
}

inline const char* check_attention_op(const kvt_model& model, const kvt_op& op, Progress& now) {
  if (!is_index(op.attention, model.attentions.size())) return "attention: none such";
  if (!now.has_query) return "attention: before q";
  now.attended = attended_width(model, model.attention(op.attention));
  now.has_query = now.is_mixed = false;
  return nullptr;
}

inline const char* check_linear(const kvt_model& model, const kvt_op& op, Progress& now) {
  if (op.input != KVT_ATTENDED && op.input != KVT_HIDDEN) return "linear: input";
  if (op.output != KVT_RESIDUAL && op.output != KVT_BRANCH) return "linear: output";
  const int64_t width = op.input == KVT_ATTENDED ? now.attended : now.hidden;
  if (!has_shape(model, op.matrices[0], model.hidden_size, width)) return "linear: matrix";
  if (!has_size(model, op.biases[0], model.hidden_size, true)) return "linear: bias";
  if (op.output == KVT_BRANCH) now.has_branch = true;
  if (op.input == KVT_ATTENDED) now.is_mixed = false;
  return has_size(model, op.norm, width, true) ? nullptr : "linear: norm";
}

inline const char* check_gated(const kvt_model& model, const kvt_op& op, Progress& now) {
  if (!is_index(op.matrices[0], model.matrices.size())) return "gated: no such matrix";
  now.hidden = model.matrix(op.matrices[0]).rows;
  for (int i = 0; i < 2; ++i) {
    if (!has_shape(model, op.matrices[i], now.hidden, model.hidden_size)) return "gated: a matrix";
  }
  if (op.activation != KVT_SILU && op.activation != KVT_GELU_TANH) return "gated: activation";
  return has_size(model, op.norm, model.hidden_size, true) ? nullptr : "gated: norm";
}

// Whether the stacks fit together, for inputs and outputs of `width` values.
inline const char* check_stacks(const Experts& experts, int64_t width) {
  const auto fits = [&](const Matrix& matrix, int64_t rows, int64_t cols) {
    return matrix.rows == rows && matrix.cols == cols && matrix.stack == experts.num_experts;
  };
  const int64_t size = experts.up.rows;
  if (!fits(experts.gate, size, width) || !fits(experts.up, size, width) ||
      !fits(experts.down, width, size))
    return "experts: a stack";
  if (experts.num_used < 1 || experts.num_used > experts.num_experts) return "experts: num_used";
  if (experts.activation != KVT_SILU && experts.activation != KVT_GELU_TANH)
    return "experts: activation";
  return nullptr;
}

inline const char* check_experts(const kvt_model& model, const kvt_op& op, Progress& now) {
  for (int32_t matrix : op.matrices) {
    if (!is_index(matrix, model.matrices.size())) return "experts: no such matrix";
  }
  const Experts experts = experts_of(model, op);
  if (const char* fault = check_stacks(experts, model.hidden_size)) return fault;
  if (!has_shape(model, op.matrices[0], experts.num_experts, model.hidden_size))
    return "experts: router";
  // Places are counted in 32 bits.
  if (experts.num_places(model.max_rows) >= INT32_MAX) return "experts: too many rows";
  if (op.is_shared && !now.has_branch) return "experts: no shared expert";
  now.has_branch = true;
  if (!has_size(model, op.shared_gate, model.hidden_size, true)) return "experts: gate";
  return has_size(model, op.norm, model.hidden_size, true) ? nullptr : "experts: norm";
}

inline const char* check_op(const kvt_model& model, const kvt_op& op, Progress& now) {
  switch (op.kind) {
    case KVT_OP_EMBED:
      return has_shape(model, op.matrices[0], model.vocab_size, model.hidden_size)
                 ? nullptr
                 : "embed: matrix";
    case KVT_OP_QKV:
      return check_qkv(model, op, now);
    case KVT_OP_ATTENTION:
      return check_attention_op(model, op, now);
    case KVT_OP_LINEAR:
      return check_linear(model, op, now);
    case KVT_OP_GATED:
      return check_gated(model, op, now);
    case KVT_OP_RECURRENT:
      return check_mixing(model, op, now);
    case KVT_OP_EXPERTS:
      return check_experts(model, op, now);
    case KVT_OP_ADD:
      if (!now.has_branch) return "add: no branch";
      return has_size(model, op.norm, model.hidden_size, true) ? nullptr : "add: norm";
    case KVT_OP_SAMPLED:
      if (now.is_narrow) return "sampled: twice";
      now.is_narrow = true;
      if (!now.is_mixed) now.attended = 0;  // of all rows
      now.hidden = 0;
      now.has_branch = false;
      return nullptr;
    case KVT_OP_LOGITS:
      if (!now.is_narrow) return "logits: of all rows";
      if (!has_shape(model, op.matrices[0], model.vocab_size, model.hidden_size))
        return "logits: matrix";
      now.has_logits = true;
      return has_size(model, op.norm, model.hidden_size, true) ? nullptr : "logits: norm";
    case KVT_OP_SAMPLE:
      return now.has_logits ? nullptr : "sample: no logits";
    default:
      return "program: unknown op";
  }
}

inline const char* check_program(const kvt_model& model) {
  Progress now;
  if (model.program[0].kind != KVT_OP_EMBED) return "program: it does not begin with EMBED";
  for (const kvt_op& op : model.program) {
    if (const char* fault = check_op(model, op, now)) return fault;
  }
  return nullptr;
}

}  // namespace kvt
