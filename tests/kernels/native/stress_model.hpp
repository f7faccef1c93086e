// A tiny random model with all kinds of ops, run in random batches on several threads.
#pragma once

#include "stress_parts.hpp"

namespace stress {

class Model : public Parts {
 public:
  // `is_hybrid`: with recurrent layers before those with attention, whose outputs have gates.
  Model(kvt_team* team, uint32_t seed, bool is_hybrid = false)
      : Parts(team, seed), is_hybrid_(is_hybrid) {
    build();
    const kvt_model_desc desc = tables_.describe();
    require(kvt_model_new(team, &desc, &model_) == KVT_OK, kvt_error_text());
    make_adapters();
  }
  ~Model() {
    for (kvt_adapter* adapter : adapters_) kvt_adapter_free(adapter);
    kvt_model_free(model_);
  }

  kvt_model* get() const { return model_; }
  const std::vector<kvt_adapter*>& adapters() const { return adapters_; }

 private:
  // Returns the index of an attention with a cache of its own.
  int32_t cache(int32_t layer) {
    const auto index = static_cast<int32_t>(tables_.caches.size());
    constexpr int32_t kTypes[] = {1, 8, 2};
    kvt_cache cache{};
    cache.num_blocks = kNumBlocks;
    cache.key_type = cache.value_type = kTypes[layer % 3];
    cache.block_size = kBlockSize;
    cache.kv_heads = kKvHeads;
    cache.head_dim = cache.value_dim = kHeadDim;
    cache.group = layer % kNumGroups;
    cache.keys = memory(kNumBlocks * kvt_key_block_bytes(&cache));
    cache.values = memory(kNumBlocks * kvt_value_block_bytes(&cache));
    tables_.caches.push_back(cache);
    kvt_attention attention{};
    attention.cache = index;
    attention.rope = layer % 2;
    attention.num_heads = kHeads;
    attention.window = cache.group == 1 ? 20 : 0;
    attention.scale = 0.25f;
    attention.softcap = layer == 2 ? 20.0f : 0.0f;
    attention.sinks = layer == 0 ? vector(kHeads, 0.0f, 1.0f) : -1;
    attention.is_gated = is_hybrid_;
    attention.has_joint_norms = !is_hybrid_;
    attention.temperature_length = layer == 2 ? 16 : 0;
    attention.temperature = 0.2f;
    tables_.attentions.push_back(attention);
    return index;
  }

  // One row of kLatent + kRotated numbers per token; keys of each type in turn.
  int32_t latent_cache(int32_t layer) {
    const int32_t index = cache(layer);
    kvt_cache& cache = tables_.caches.back();
    cache.kv_heads = cache.is_latent = 1;
    cache.head_dim = kLatent + kRotated;
    cache.value_dim = kLatent;
    cache.values = nullptr;
    cache.keys = memory(kNumBlocks * kvt_key_block_bytes(&cache));
    kvt_attention& attention = tables_.attentions.back();
    attention.sinks = -1;
    attention.has_joint_norms = attention.temperature_length = 0;
    return index;
  }

  kvt_op op(int32_t kind) {
    kvt_op op{};
    op.kind = kind;
    op.input = op.output = op.norm = op.norm_bias = op.attention = op.recurrent = -1;
    op.shared_gate = op.routing.bias = -1;
    op.routing.num_groups = op.routing.num_groups_used = 1;
    op.eps = 1e-5f;
    op.scale = 1.0f;
    for (int32_t& matrix : op.matrices) matrix = -1;
    for (int32_t& bias : op.biases) bias = -1;
    op.head_norms[0] = op.head_norms[1] = -1;
    return op;
  }

  void linear(int32_t input, int64_t cols, bool has_post_norm) {
    kvt_op product = op(KVT_OP_LINEAR);
    product.input = input;
    product.output = has_post_norm ? KVT_BRANCH : KVT_RESIDUAL;
    product.matrices[0] = matrix(kHidden, cols);
    product.biases[0] = has_post_norm ? vector(kHidden, 0.0f, 0.1f) : -1;
    tables_.program.push_back(product);
    if (!has_post_norm) return;
    kvt_op norm = op(KVT_OP_ADD);
    norm.norm = is_hybrid_ ? -1 : vector(kHidden, 1.0f, 0.1f);
    norm.scale = is_hybrid_ ? 0.5f : 1.0f;
    tables_.program.push_back(norm);
  }

  // A layer of each kind in turn: delta net, state space, short convolution.
  void recurrent_layer(int32_t index) {
    const RecurrentSizes& sizes = kRecurrents[index % 3];
    kvt_recurrent made = bare_recurrent(sizes);
    const int32_t inner = sizes.heads ? sizes.heads * sizes.value_dim : sizes.channels;
    made.state = index;
    made.conv = vector(int64_t{made.width} * sizes.channels, 0.0f, 0.4f);
    if (sizes.heads) {
      made.dt_bias = vector(sizes.heads, 0.0f, 0.5f);
      made.decay = vector(sizes.heads, -1.0f, 0.1f);
      made.norm = vector(sizes.kind == KVT_DELTA_NET ? sizes.value_dim : inner, 1.0f, 0.1f);
    }
    kvt_state state{};
    state.stride = kvt_state_values(&made);
    state.num_slots = kSlots;
    state.group = kNumGroups;
    state.data = reinterpret_cast<float*>(memory(4 * state.stride * kSlots));
    tables_.states.push_back(state);
    tables_.recurrents.push_back(made);
    kvt_op mixing = op(KVT_OP_RECURRENT);
    mixing.norm = vector(kHidden, 1.0f, 0.1f);
    mixing.recurrent = index;
    const std::vector<int32_t> parts = part_sizes(sizes);
    for (size_t i = 0; i < parts.size(); ++i) mixing.matrices[i] = matrix(parts[i], kHidden);
    tables_.program.push_back(mixing);
    linear(KVT_ATTENDED, inner, false);
  }

  // Latent attention, with q by two matrices.
  void latent_layer(int32_t index) {
    const int32_t attention = latent_cache(index);
    kvt_op rank = op(KVT_OP_LINEAR), queries = rank, latent = op(KVT_OP_LATENT);
    rank.input = KVT_RESIDUAL;
    rank.output = queries.input = KVT_HIDDEN;
    queries.output = KVT_ATTENDED;
    rank.norm = vector(kHidden, 1.0f, 0.1f);
    rank.matrices[0] = matrix(kRank, kHidden);
    queries.norm = vector(kRank, 1.0f, 0.1f);
    queries.matrices[0] = matrix(kHeads * (kPlain + kRotated), kRank);
    latent.norm = rank.norm;
    latent.attention = attention;
    latent.matrices[0] = matrix(kLatent + kRotated, kHidden);
    latent.matrices[1] = matrix(kLatent, kPlain, kHeads);
    latent.head_norms[0] = vector(kLatent, 1.0f, 0.1f);
    kvt_op attended = op(KVT_OP_ATTENTION), heads = op(KVT_OP_HEADS);
    attended.attention = attention;
    heads.matrices[0] = matrix(kHeadDim, kLatent, kHeads);
    for (const kvt_op& each : {rank, queries, latent, attended, heads})
      tables_.program.push_back(each);
    linear(KVT_HIDDEN, kHeads * kHeadDim, false);
  }

  // A row's experts by each kind of score in turn; the last in groups, with biases.
  void route(kvt_op& experts, int32_t index) {
    experts.routing.scoring = index;
    experts.routing.scale = 1.5f;
    experts.routing.is_normalised = index == 2;
    if (index < 2) return;
    experts.routing.num_groups = 3;
    experts.routing.num_groups_used = 2;
    experts.routing.bias = vector(kExperts, 0.0f, 0.1f);
    experts.activation = KVT_CLAMPED;
    const int64_t sizes[4] = {1, kExpertSize, kExpertSize, kHidden};
    for (int i = 0; i < 4; ++i) experts.biases[i] = vector(kExperts * sizes[i], 0.0f, 0.1f);
  }

  // What a shared expert left in BRANCH, and two of the experts; after the first, without it.
  void experts_layer(int32_t index) {
    kvt_op experts = op(KVT_OP_EXPERTS);
    experts.norm = vector(kHidden, 1.0f, 0.1f);
    experts.activation = KVT_SILU;
    experts.num_used = 2;
    experts.is_shared = index == 0;
    if (index == 0) experts.shared_gate = vector(kHidden, 0.0f, 0.1f);
    experts.matrices[0] = matrix(kExperts, kHidden);
    for (int i = 1; i < 3; ++i) experts.matrices[i] = matrix(kExpertSize, kHidden, kExperts);
    experts.matrices[3] = matrix(kHidden, kExpertSize, kExperts);
    route(experts, index);
    tables_.program.push_back(experts);
    tables_.program.push_back(op(KVT_OP_ADD));
  }

  void layer(int32_t index) {
    if (is_hybrid_) recurrent_layer(index);
    const bool is_odd = index % 2 != 0;
    const int32_t own = cache(index);
    kvt_op qkv = op(KVT_OP_QKV);
    qkv.norm = vector(kHidden, 1.0f, 0.1f);
    qkv.is_centred = is_odd;
    if (is_odd) qkv.norm_bias = vector(kHidden, 0.0f, 0.1f);
    qkv.attention = own;
    for (int i = 0; i < 3; ++i) {
      const int32_t num_heads = i > 0 ? kKvHeads : is_hybrid_ ? 2 * kHeads : kHeads;
      const int32_t rows = num_heads * kHeadDim;
      qkv.matrices[i] = matrix(rows, kHidden);
      if (is_odd) qkv.biases[i] = vector(rows, 0.0f, 0.1f);
      const int32_t num_normed = is_hybrid_ ? 1 : num_heads;
      if (is_odd && i < 2) qkv.head_norms[i] = vector(num_normed * kHeadDim, 1.0f, 0.1f);
    }
    tables_.program.push_back(qkv);
    if (index == kNumLayers - 1) tables_.program.push_back(op(KVT_OP_SAMPLED));
    kvt_op attention = op(KVT_OP_ATTENTION);
    attention.attention = own;
    tables_.program.push_back(attention);
    linear(KVT_ATTENDED, kHeads * kHeadDim, is_odd);
    const bool is_plain = index == 0;
    kvt_op gated = op(is_plain ? KVT_OP_PLAIN : KVT_OP_GATED);
    gated.norm = vector(kHidden, 1.0f, 0.1f);
    gated.activation = is_odd ? KVT_GELU_TANH : KVT_SILU;
    for (int i = 0; i < (is_plain ? 1 : 2); ++i) gated.matrices[i] = matrix(kFeedForward, kHidden);
    if (is_plain) gated.biases[0] = vector(kFeedForward, 0.0f, 0.1f);
    tables_.program.push_back(gated);
    linear(KVT_HIDDEN, kFeedForward, is_odd || is_hybrid_);
    if (is_hybrid_) experts_layer(index);
  }

  void build() {
    tables_.ropes.push_back({10000.0, 1.0, 1.0, KVT_ROPE_NORM, kHeadDim, -1, 0});
    tables_.ropes.push_back({1e6, 0.5, 1.1, KVT_ROPE_NEOX, kHeadDim / 2, vector(kHeadDim / 4, 2, 0.1f), 0});
    kvt_op embed = op(KVT_OP_EMBED);
    embed.matrices[0] = matrix(kVocab, kHidden);
    embed.scale = 2.0f;
    tables_.program.push_back(embed);
    for (int32_t i = 0; i < kNumLayers; ++i) {
      layer(i);
      if (i > 0 || is_hybrid_) continue;
      for (int32_t k = 0; k < 3; ++k) latent_layer(2 * k + 1);
    }
    kvt_op logits = op(KVT_OP_LOGITS);
    logits.norm = vector(kHidden, 1.0f, 0.1f);
    logits.matrices[0] = embed.matrices[0];
    logits.softcap = is_hybrid_ ? 0.0f : 30.0f;
    logits.scale = is_hybrid_ ? 0.5f : 1.0f;
    tables_.program.push_back(logits);
    tables_.program.push_back(op(KVT_OP_SAMPLE));
  }

  // One changes every matrix, one a few.
  void make_adapters() {
    for (int32_t step : {1, 3}) {
      std::vector<kvt_low_rank> parts;
      std::list<std::vector<float>> values;
      for (int32_t i = 0; i < static_cast<int32_t>(tables_.matrices.size()); i += step) {
        const kvt_matrix& matrix = tables_.matrices[static_cast<size_t>(i)];
        if (matrix.stack > 1) continue;
        const int32_t rank = 1 + i % 9;
        const float* a = values.emplace_back(floats(rank * matrix.cols, 0.1f)).data();
        const float* b = values.emplace_back(floats(rank * matrix.rows, 0.1f)).data();
        parts.push_back({a, b, i, rank, 0.5f, 0});
      }
      kvt_adapter* adapter = nullptr;
      const auto count = static_cast<int32_t>(parts.size());
      require(kvt_adapter_new(model_, parts.data(), count, &adapter) == KVT_OK, "an adapter");
      adapters_.push_back(adapter);
    }
  }

  const bool is_hybrid_;
  kvt_model* model_ = nullptr;
  std::vector<kvt_adapter*> adapters_;
};

}  // namespace stress
