// A model as the interpreter runs it: the tables of kvt_model_desc, checked, and its memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention.hpp"
#include "cache.hpp"
#include "experts.hpp"
#include "kvt_step.h"
#include "lora.hpp"
#include "matrix.hpp"
#include "memory.hpp"
#include "operations.hpp"
#include "recurrent.hpp"
#include "sample.hpp"
#include "team.hpp"

namespace kvt {

constexpr int kNumBuffers = 5;
// Up to so many values of input, every thread prepares all of it for itself: that costs less than
// meeting the others at one more barrier.
constexpr int64_t kPrivateValues = 4096;
constexpr int64_t kPrivateRows = 6;

constexpr int kMaxProducts = 4;  // of one op

struct LayerCache {
  Cache cache;
  int64_t num_blocks;
  int32_t group;
};

struct LayerState {
  float* data;
  int64_t stride, num_slots;
  int32_t group;
};

// All memory of a step: allocated for the largest one, touched as far as steps use it.
struct Memory {
  Region buffers[kNumBuffers];
  Region keys, values;     // [N, kv_heads * dim]: of one layer, on their way to the cache
  Region gates;            // [N, feed-forward size]: gates that adapters change; of attention,
                           // [N, heads * head_dim]
  Region mixed;            // products on their way into a recurrent layer; q with its gates
  Region normed;           // [N, widest input]: inputs as adapters read them
  Region inputs;           // inputs of products, prepared by all threads
  Region own_inputs;       // per thread: those prepared by itself, and a block of normed rows
  Region rotations;        // per rope cos, then sin: [N, num_pairs] each
  Region attention;
  Region experts;          // see experts.hpp
  Region factors;          // [N]: of a shared expert
  Region logits;           // [M, V]
  Region inner;            // adapters' inner values; grows
  int64_t own_bytes = 0;   // per thread, of own_inputs
  int64_t own_row_bytes = 0;
};

// What all caches of a group have in common; without any, block_size is 0. A group of recurrent
// layers has slots instead.
struct GroupLimits {
  int32_t block_size = 0;
  int64_t num_blocks = 0;  // of the layer with the fewest
  int64_t window = 0;      // the widest of its layers; 0: all positions
  int64_t num_slots = 0;   // of the layer with the fewest; 0: its layers have caches
};

// What an op needs to know about its products.
struct OpPlan {
  int64_t cols = 0;      // inputs
  uint32_t forms = 0;    // of the input
};

}  // namespace kvt

// The type behind the C interface's pointer.
struct kvt_model {
  kvt::Team* team;
  std::vector<kvt_op> program;
  std::vector<kvt::OpPlan> plans;  // one per op
  std::vector<kvt::Matrix> matrices;
  std::vector<kvt_vector> vectors;
  std::vector<kvt::LayerCache> caches;
  std::vector<kvt::Rope> ropes;
  std::vector<kvt_attention> attentions;
  std::vector<kvt::LayerState> states;
  std::vector<kvt::Mixer> mixers;
  std::vector<kvt::GroupLimits> groups;
  int64_t hidden_size, vocab_size, max_sampled, max_rows, max_context;
  kvt::Memory memory;
  kvt::Sampler sampler;

  const float* vector(int32_t index) const {
    return index < 0 ? nullptr : vectors[static_cast<size_t>(index)].data;
  }
  const kvt::Matrix& matrix(int32_t index) const { return matrices[static_cast<size_t>(index)]; }
  const kvt_attention& attention(int32_t index) const {
    return attentions[static_cast<size_t>(index)];
  }
  const kvt::Mixer& mixer(int32_t index) const { return mixers[static_cast<size_t>(index)]; }
  const kvt::LayerState& state(const kvt::Mixer& mixer) const {
    return states[static_cast<size_t>(mixer.state)];
  }
  const kvt::LayerCache& cache(const kvt_attention& attention) const {
    return caches[static_cast<size_t>(attention.cache)];
  }
  float* buffer(int32_t index) const { return memory.buffers[index].as<float>(); }
  // cos of rope `index`; sin follows after max_rows * num_pairs values.
  float* cosines(int32_t index) const {
    float* start = memory.rotations.as<float>();
    for (int32_t i = 0; i < index; ++i) start += 2 * max_rows * ropes[static_cast<size_t>(i)].num_pairs;
    return start;
  }
  float* sines(int32_t index) const {
    return cosines(index) + max_rows * ropes[static_cast<size_t>(index)].num_pairs;
  }
};

// One adapter: its changes by index of the matrix.
struct kvt_adapter {
  const kvt_model* model;
  std::vector<std::unique_ptr<kvt::LowRank>> parts;  // [num_matrices]; null: none
  kvt::Region memory;
  int64_t most_ranks = 0;  // of all matrices of one op together

  const kvt::LowRank* part(int32_t matrix) const {
    return parts[static_cast<size_t>(matrix)].get();
  }
};

namespace kvt {

// Number of matrices of an op that adapters can change: its products.
inline int num_products(const kvt_op& op) {
  switch (op.kind) {
    case KVT_OP_QKV:
      return 3;
    case KVT_OP_RECURRENT: {
      int count = 0;
      while (count < kMaxProducts && op.matrices[count] >= 0) ++count;
      return count;
    }
    case KVT_OP_GATED:
      return 2;
    case KVT_OP_LINEAR:
    case KVT_OP_LOGITS:
    case KVT_OP_EXPERTS:
    case KVT_OP_PLAIN:
    case KVT_OP_LATENT:
      return 1;
    default:
      return 0;
  }
}

inline Experts experts_of(const kvt_model& model, const kvt_op& op) {
  const Matrix& gate = model.matrix(op.matrices[1]);
  return {gate,
          model.matrix(op.matrices[2]),
          model.matrix(op.matrices[3]),
          gate.stack,
          op.num_used,
          op.activation,
          {op.routing, model.vector(op.routing.bias)},
          {model.vector(op.biases[1]), model.vector(op.biases[2]), model.vector(op.biases[3])}};
}

inline int64_t query_width(const kvt_model& model, const kvt_attention& attention) {
  return int64_t{attention.num_heads} * model.cache(attention).cache.layout.head_dim;
}

inline int64_t attended_width(const kvt_model& model, const kvt_attention& attention) {
  return int64_t{attention.num_heads} * model.cache(attention).cache.layout.value_dim;
}

}  // namespace kvt
