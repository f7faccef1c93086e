// Whether a model's program fits to its tables. Each check returns null or what is wrong.
#pragma once

#include "program_check_layers.hpp"

namespace kvt {

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
  if (layout.is_latent) return "qkv: a latent cache";
  const int64_t joint[2] = {attention.num_heads, layout.kv_heads};
  for (int i = 0; i < 2; ++i) {
    const int64_t size = layout.head_dim * (attention.has_joint_norms ? joint[i] : 1);
    if (!has_size(model, op.head_norms[i], size, true)) return "qkv: a norm of heads";
  }
  now.has_query = true;
  return has_norm(model, op) ? nullptr : "qkv: norm";
}

inline const char* check_mixing(const kvt_model& model, const kvt_op& op, Progress& now) {
  if (const char* fault = check_recurrent_op(model, op)) return fault;
  if (now.is_narrow) return "recurrent: after the rows were narrowed";
  now.attended = model.mixer(op.recurrent).inner();
  now.is_mixed = true;
  return has_norm(model, op) ? nullptr : "recurrent: norm";
}

inline const char* check_attention_op(const kvt_model& model, const kvt_op& op, Progress& now) {
  if (!is_index(op.attention, model.attentions.size())) return "attention: none such";
  if (!now.has_query) return "attention: before q";
  now.attended = attended_width(model, model.attention(op.attention));
  now.has_query = now.is_mixed = false;
  return nullptr;
}

inline const char* check_linear(const kvt_model& model, const kvt_op& op, Progress& now) {
  int64_t* const own[] = {nullptr, nullptr, &now.attended, &now.hidden, nullptr};
  if (op.input < 0 || op.input >= kNumBuffers || op.output < 0 || op.output >= kNumBuffers)
    return "linear: no such buffer";
  if (op.input == op.output || op.input == KVT_QUERY || op.input == KVT_BRANCH ||
      op.output == KVT_QUERY)
    return "linear: a buffer that it does not read or write";
  const int64_t cols = own[op.input] ? *own[op.input] : model.hidden_size;
  if (!is_index(op.matrices[0], model.matrices.size())) return "linear: no such matrix";
  const int64_t rows = own[op.output] ? model.matrix(op.matrices[0]).rows : model.hidden_size;
  if (!has_shape(model, op.matrices[0], rows, cols)) return "linear: matrix";
  if (!has_size(model, op.biases[0], rows, true)) return "linear: bias";
  if (op.output == KVT_BRANCH) now.has_branch = true;
  if (op.input == KVT_ATTENDED) now.is_mixed = false;
  if (own[op.output]) *own[op.output] = rows;
  return has_norm(model, op, cols) ? nullptr : "linear: norm";
}

inline const char* check_plain(const kvt_model& model, const kvt_op& op, Progress& now) {
  if (!is_index(op.matrices[0], model.matrices.size())) return "plain: no such matrix";
  now.hidden = model.matrix(op.matrices[0]).rows;
  if (!has_shape(model, op.matrices[0], now.hidden, model.hidden_size)) return "plain: matrix";
  if (!has_size(model, op.biases[0], now.hidden, true)) return "plain: bias";
  if (op.activation != KVT_SILU && op.activation != KVT_GELU_TANH) return "plain: activation";
  return has_norm(model, op) ? nullptr : "plain: norm";
}

inline const char* check_gated(const kvt_model& model, const kvt_op& op, Progress& now) {
  if (!is_index(op.matrices[0], model.matrices.size())) return "gated: no such matrix";
  now.hidden = model.matrix(op.matrices[0]).rows;
  for (int i = 0; i < 2; ++i) {
    if (!has_shape(model, op.matrices[i], now.hidden, model.hidden_size)) return "gated: a matrix";
  }
  if (!is_gating(op.activation)) return "gated: activation";
  return has_norm(model, op) ? nullptr : "gated: norm";
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
    case KVT_OP_PLAIN:
      return check_plain(model, op, now);
    case KVT_OP_LATENT:
      return check_latent(model, op, now);
    case KVT_OP_HEADS:
      return check_heads(model, op, now);
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
      return has_norm(model, op) ? nullptr : "logits: norm";
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
