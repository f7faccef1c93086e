// From a description to a model: tables, what each op needs, memory.
#pragma once

#include "program_check.hpp"
#include "program_latent.hpp"

namespace kvt {

inline std::vector<GroupLimits> group_limits(const kvt_model& model, int32_t num_groups) {
  std::vector<GroupLimits> limits(static_cast<size_t>(num_groups));
  for (const kvt_attention& attention : model.attentions) {
    const LayerCache& cache = model.cache(attention);
    GroupLimits& limit = limits[static_cast<size_t>(cache.group)];
    const bool is_first = limit.block_size == 0;
    const bool sees_all = attention.window == 0 || (!is_first && limit.window == 0);
    limit.window = sees_all ? 0 : std::max<int64_t>(limit.window, attention.window);
    limit.num_blocks = is_first ? cache.num_blocks : std::min(limit.num_blocks, cache.num_blocks);
    limit.block_size = cache.cache.layout.block_size;
  }
  for (const LayerState& state : model.states) {
    int64_t& num_slots = limits[static_cast<size_t>(state.group)].num_slots;
    num_slots = num_slots ? std::min(num_slots, state.num_slots) : state.num_slots;
  }
  return limits;
}

inline void copy_tables(kvt_model& model, const kvt_model_desc& desc) {
  for (int32_t i = 0; i < desc.num_matrices; ++i) {
    const kvt_matrix& matrix = desc.matrices[i];
    model.matrices.push_back(
        Matrix{matrix.type, matrix.rows, matrix.cols, matrix.data, matrix.stack});
  }
  model.vectors.assign(desc.vectors, desc.vectors + desc.num_vectors);
  for (int32_t i = 0; i < desc.num_caches; ++i) {
    const kvt_cache& cache = desc.caches[i];
    model.caches.push_back(LayerCache{Cache{layout_of(cache), cache.keys, cache.values},
                                      cache.num_blocks, cache.group});
  }
  for (int32_t i = 0; i < desc.num_ropes; ++i) {
    model.ropes.push_back(make_rope(desc.ropes[i], model.vector(desc.ropes[i].factors)));
  }
  model.attentions.assign(desc.attentions, desc.attentions + desc.num_attentions);
  for (int32_t i = 0; i < desc.num_states; ++i) {
    const kvt_state& state = desc.states[i];
    model.states.push_back({state.data, state.stride, state.num_slots, state.group});
  }
  for (int32_t i = 0; i < desc.num_recurrents; ++i)
    model.mixers.push_back(mixer_of(desc.recurrents[i], desc.vectors));
  model.program.assign(desc.program, desc.program + desc.num_ops);
  model.hidden_size = desc.hidden_size;
  model.vocab_size = desc.vocab_size;
  model.max_sampled = desc.max_sampled;
  model.max_rows = desc.max_rows;
  model.max_context = desc.max_context;
  model.groups = group_limits(model, desc.num_groups);
}

inline const char* check_groups(const kvt_model& model) {
  for (const GroupLimits& limit : model.groups) {
    if (limit.num_slots && limit.block_size) return "model: a group with caches and states";
  }
  for (const LayerCache& cache : model.caches) {
    if (cache.cache.layout.block_size != model.groups[static_cast<size_t>(cache.group)].block_size)
      return "model: caches of one group differ in their block size, or a cache has no attention";
  }
  return nullptr;
}

inline void plan_ops(kvt_model& model) {
  for (const kvt_op& op : model.program) {
    OpPlan plan;
    for (int i = 0; i < num_products(op); ++i) {
      const Matrix& matrix = model.matrix(op.matrices[i]);
      plan.cols = matrix.cols;
      plan.forms |= input_form(matrix.type);
    }
    model.plans.push_back(plan);
  }
}

// Largest sizes over the whole program, in floats per row unless said otherwise.
struct Needs {
  int64_t query = 1, attended = 1, keys = 1, values = 1, hidden = 1, cols = 1, mixed = 1;
  int64_t input = 64, own_input = 64;           // bytes
  int64_t attention_worker = 0, attention_shared = 0, mixing = 0;  // bytes
  int64_t experts = 0, experts_worker = 0, heads = 0;              // bytes
};

inline void grow(int64_t& size, int64_t other) { size = std::max(size, other); }

// By what an op has besides its inputs.
inline void grow_for(Needs& needs, const kvt_model& model, const kvt_op& op) {
  switch (op.kind) {
    case KVT_OP_LINEAR:
      if (op.output == KVT_ATTENDED) grow(needs.attended, model.matrix(op.matrices[0]).rows);
      if (op.output == KVT_HIDDEN) grow(needs.hidden, model.matrix(op.matrices[0]).rows);
      break;
    case KVT_OP_GATED:
    case KVT_OP_PLAIN:
      grow(needs.hidden, model.matrix(op.matrices[0]).rows);
      break;
    case KVT_OP_LATENT:
      grow(needs.heads, head_bytes(model.matrix(op.matrices[1])));
      break;
    case KVT_OP_HEADS: {
      const Matrix& stack = model.matrix(op.matrices[0]);
      grow(needs.hidden, stack.stack * stack.rows);
      grow(needs.heads, head_bytes(stack));
      break;
    }
    case KVT_OP_EXPERTS: {
      const Experts experts = experts_of(model, op);
      grow(needs.experts, experts_bytes(experts, model.max_rows));
      grow(needs.experts_worker, experts_worker_bytes(experts, model.max_rows));
      break;
    }
  }
}

inline Needs needs_of(const kvt_model& model) {
  Needs needs;
  for (const kvt_attention& attention : model.attentions) {
    const CacheLayout& layout = model.cache(attention).cache.layout;
    grow(needs.query, query_width(model, attention));
    if (attention.is_gated) {
      grow(needs.hidden, query_width(model, attention));
      grow(needs.mixed, 2 * query_width(model, attention));
    }
    grow(needs.attended, attended_width(model, attention));
    grow(needs.keys, int64_t{layout.kv_heads} * layout.head_dim);
    grow(needs.values, int64_t{layout.kv_heads} * layout.value_dim);
    grow(needs.attention_worker, attention_worker_bytes(layout, attention.num_heads));
    grow(needs.attention_shared, attention_shared_bytes(layout, attention.num_heads,
                                                        model.max_rows, model.max_context));
  }
  for (const Mixer& mixer : model.mixers) {
    grow(needs.mixed, mixer.row_values());
    grow(needs.attended, mixer.inner());
    grow(needs.mixing, mix_scratch(mixer));
  }
  for (size_t i = 0; i < model.program.size(); ++i) {
    const OpPlan& plan = model.plans[i];
    grow_for(needs, model, model.program[i]);
    if (plan.cols == 0) continue;
    grow(needs.cols, plan.cols);
    grow(needs.input, input_bytes(model.max_rows, plan.cols, plan.forms));
    grow(needs.own_input, input_bytes(kPrivateRows, plan.cols, plan.forms));
  }
  return needs;
}

// False where there is no memory.
inline bool reserve(Region& region, int64_t bytes) {
  region = Region(static_cast<size_t>(std::max<int64_t>(bytes, 64)));
  return region.data() != nullptr;
}

inline bool allocate_buffers(kvt_model& model, const Needs& needs) {
  Memory& memory = model.memory;
  const int64_t widths[kNumBuffers] = {model.hidden_size, needs.query, needs.attended, needs.hidden,
                                       model.hidden_size};
  bool is_done = true;
  for (int i = 0; i < kNumBuffers; ++i)
    is_done = is_done && reserve(memory.buffers[i], 4 * model.max_rows * widths[i]);
  return is_done && reserve(memory.keys, 4 * model.max_rows * needs.keys) &&
         reserve(memory.values, 4 * model.max_rows * needs.values) &&
         reserve(memory.gates, 4 * model.max_rows * needs.hidden) &&
         reserve(memory.mixed, 4 * model.max_rows * needs.mixed) &&
         reserve(memory.normed, 4 * model.max_rows * needs.cols) &&
         reserve(memory.logits, 4 * model.max_sampled * model.vocab_size);
}

inline bool allocate_memory(kvt_model& model) {
  const Needs needs = needs_of(model);
  Memory& memory = model.memory;
  int64_t num_pairs = 0;
  for (const Rope& rope : model.ropes) num_pairs += rope.num_pairs;
  memory.own_row_bytes = static_cast<int64_t>(round_up(static_cast<size_t>(4 * needs.cols), kLine));
  const int64_t own = kPrivateRows * memory.own_row_bytes + needs.own_input;
  memory.own_bytes = static_cast<int64_t>(round_up(static_cast<size_t>(own), 4096));
  const int64_t worker =
      std::max({needs.attention_worker, needs.mixing, needs.experts_worker, needs.heads});
  return allocate_buffers(model, needs) && reserve(memory.inputs, needs.input) &&
         reserve(memory.own_inputs, memory.own_bytes * model.team->num_threads()) &&
         reserve(memory.rotations, 4 * 2 * model.max_rows * num_pairs) &&
         reserve(memory.attention, needs.attention_shared) &&
         reserve(memory.experts, needs.experts) && reserve(memory.factors, 4 * model.max_rows) &&
         make_sampler(model.sampler, model.vocab_size, model.max_sampled) &&
         model.team->reserve_scratch(static_cast<size_t>(worker));
}

inline int64_t memory_bytes(const kvt_model& model) {
  const Memory& memory = model.memory;
  size_t bytes = memory.keys.bytes() + memory.values.bytes() + memory.gates.bytes() +
                 memory.mixed.bytes() + memory.normed.bytes() + memory.inputs.bytes() + memory.own_inputs.bytes() +
                 memory.rotations.bytes() + memory.attention.bytes() + memory.experts.bytes() +
                 memory.factors.bytes() + memory.logits.bytes() + memory.inner.bytes() + model.sampler.memory.bytes();
  for (const Region& region : memory.buffers) bytes += region.bytes();
  return static_cast<int64_t>(bytes);
}

}  // namespace kvt
