// Whether ops of special layers fit to their model: experts, and latent attention.
#pragma once

#include "program_check_tables.hpp"

namespace kvt {

// ---- the program -------------------------------------------------------------------------------

inline bool has_vector(const kvt_model& model, int32_t vector) {
  return vector == -1 || is_index(vector, model.vectors.size());
}

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

// The same of an op's norm, which may miss, for inputs of `size` values; 0: the residual's.
inline bool has_norm(const kvt_model& model, const kvt_op& op, int64_t size = 0) {
  const int64_t wanted = size ? size : model.hidden_size;
  return has_size(model, op.norm, wanted, true) && has_size(model, op.norm_bias, wanted, true);
}

// Widths of ATTENDED and HIDDEN as the ops before wrote them, and what has been computed.
struct Progress {
  int64_t attended = 0, hidden = 0;
  bool has_query = false, has_branch = false, is_narrow = false, has_logits = false;
  bool is_mixed = false;  // ATTENDED is a recurrent layer's, and nothing has read it
};

// Activations of gate and up.
inline bool is_gating(int32_t activation) {
  return activation == KVT_SILU || activation == KVT_GELU_TANH || activation == KVT_CLAMPED;
}

inline const char* check_routing(const Experts& experts) {
  const kvt_routing& rules = experts.routing.rules;
  if (rules.scoring == KVT_SCORE_CHOSEN) return nullptr;
  if (rules.scoring != KVT_SCORE_SOFTMAX && rules.scoring != KVT_SCORE_SIGMOID)
    return "experts: scoring";
  if (rules.num_groups == 1) return nullptr;
  const bool is_even = rules.num_groups > 0 && experts.num_experts % rules.num_groups == 0 &&
                       experts.num_experts >= 2 * rules.num_groups;
  if (!is_even || rules.num_groups_used < 1 || rules.num_groups_used > rules.num_groups)
    return "experts: groups";
  const int64_t num_left = experts.num_experts / rules.num_groups * rules.num_groups_used;
  return experts.num_used > num_left ? "experts: too few in the groups" : nullptr;
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
  if (!is_gating(experts.activation)) return "experts: activation";
  return check_routing(experts);
}

inline const char* check_experts(const kvt_model& model, const kvt_op& op, Progress& now) {
  for (int32_t matrix : op.matrices) {
    if (!is_index(matrix, model.matrices.size())) return "experts: no such matrix";
  }
  bool exist = has_vector(model, op.routing.bias);
  for (int32_t bias : op.biases) exist = exist && has_vector(model, bias);
  if (!exist) return "experts: no such bias";
  const Experts experts = experts_of(model, op);
  if (const char* fault = check_stacks(experts, model.hidden_size)) return fault;
  if (!has_shape(model, op.matrices[0], experts.num_experts, model.hidden_size))
    return "experts: router";
  // Places are counted in 32 bits.
  if (experts.num_places(model.max_rows) >= INT32_MAX) return "experts: too many rows";
  if (op.is_shared && !now.has_branch) return "experts: no shared expert";
  now.has_branch = true;
  if (!has_size(model, op.shared_gate, model.hidden_size, true)) return "experts: gate";
  const int64_t count = experts.num_experts, size = count * experts.up.rows;
  if (!has_size(model, op.routing.bias, count, true)) return "experts: bias of the choice";
  const int64_t sizes[4] = {count, size, size, count * model.hidden_size};
  for (int i = 0; i < 4; ++i) {
    if (!has_size(model, op.biases[i], sizes[i], true)) return "experts: a bias";
  }
  return has_norm(model, op) ? nullptr : "experts: norm";
}

inline const char* check_latent(const kvt_model& model, const kvt_op& op, Progress& now) {
  if (!is_index(op.attention, model.attentions.size())) return "latent: no such attention";
  if (now.is_narrow) return "latent: after the rows were narrowed";
  const kvt_attention& attention = model.attention(op.attention);
  const CacheLayout& layout = model.cache(attention).cache.layout;
  if (!layout.is_latent || layout.kv_heads != 1) return "latent: another kind of cache";
  const int64_t num_rotated = layout.head_dim - layout.value_dim;
  const bool is_rotated = attention.rope >= 0 &&
                          2 * model.ropes[static_cast<size_t>(attention.rope)].num_pairs == num_rotated;
  if (!is_rotated) return "latent: rope";
  if (!has_shape(model, op.matrices[0], layout.head_dim, model.hidden_size)) return "latent: matrix";
  if (!is_index(op.matrices[1], model.matrices.size())) return "latent: no such stack";
  const int64_t plain = model.matrix(op.matrices[1]).cols, heads = attention.num_heads;
  if (!has_shape(model, op.matrices[1], layout.value_dim, plain, heads)) return "latent: stack";
  if (now.attended != heads * (plain + num_rotated)) return "latent: q";
  if (!has_size(model, op.head_norms[0], layout.value_dim, false)) return "latent: norm of rows";
  now.has_query = true;
  return has_norm(model, op) ? nullptr : "latent: norm";
}

inline const char* check_heads(const kvt_model& model, const kvt_op& op, Progress& now) {
  if (!is_index(op.matrices[0], model.matrices.size())) return "heads: no such stack";
  const Matrix& stack = model.matrix(op.matrices[0]);
  if (now.attended != stack.stack * stack.cols) return "heads: stack";
  now.hidden = stack.stack * stack.rows;
  return nullptr;
}

}  // namespace kvt
