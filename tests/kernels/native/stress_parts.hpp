// What a tiny random model is made of: its tables, weights and memory.
#pragma once

#include <cmath>
#include <cstring>
#include <list>

#include "kvt_step.h"
#include "matrix.hpp"
#include "stress_sizes.hpp"

namespace stress {

constexpr int32_t kHeads = 4, kKvHeads = 2, kHeadDim = 16, kFeedForward = 96, kExpertSize = 32;
constexpr int32_t kVocab = 77, kBlockSize = 16, kNumBlocks = 40, kMaxRows = 96, kContext = 128;
constexpr int32_t kNumLayers = 3, kNumGroups = 2, kExperts = 6;
constexpr int32_t kRank = 32, kLatent = 32, kRotated = 8, kPlain = 32;  // of latent attention

// What a model's description points to, without weights and pools.
struct Tables {
  std::vector<kvt_matrix> matrices;
  std::vector<kvt_vector> vectors;
  std::vector<kvt_cache> caches;
  std::vector<kvt_rope> ropes;
  std::vector<kvt_attention> attentions;
  std::vector<kvt_op> program;
  std::vector<kvt_state> states;
  std::vector<kvt_recurrent> recurrents;

  // Recurrent layers have a group of their own, the last.
  int32_t num_groups() const { return kNumGroups + (recurrents.empty() ? 0 : 1); }

  kvt_model_desc describe() const {
    kvt_model_desc desc{};
    desc.matrices = matrices.data();
    desc.vectors = vectors.data();
    desc.caches = caches.data();
    desc.ropes = ropes.data();
    desc.attentions = attentions.data();
    desc.program = program.data();
    desc.num_matrices = static_cast<int32_t>(matrices.size());
    desc.num_vectors = static_cast<int32_t>(vectors.size());
    desc.num_caches = static_cast<int32_t>(caches.size());
    desc.num_ropes = static_cast<int32_t>(ropes.size());
    desc.num_attentions = static_cast<int32_t>(attentions.size());
    desc.num_ops = static_cast<int32_t>(program.size());
    desc.states = states.data();
    desc.recurrents = recurrents.data();
    desc.num_states = static_cast<int32_t>(states.size());
    desc.num_recurrents = static_cast<int32_t>(recurrents.size());
    desc.num_groups = num_groups();
    desc.hidden_size = kHidden;
    desc.vocab_size = kVocab;
    desc.max_sampled = 16;
    desc.max_rows = kMaxRows;
    desc.max_context = kContext;
    return desc;
  }
};

// Owns everything that a model's description points to.
class Parts {
 public:
  Parts(const Parts&) = delete;
  ~Parts() {
    for (auto& [memory, bytes] : memory_) kvt_free(memory, bytes);
  }
  const Tables& tables() const { return tables_; }

 protected:
  Parts(kvt_team* team, uint32_t seed) : random_(seed), team_(team) {}

  uint8_t* memory(int64_t bytes) {
    uint8_t* found = kvt_alloc(bytes);
    require(found != nullptr, "memory");
    memory_.emplace_back(found, bytes);
    return found;
  }

  std::vector<float> floats(int64_t count, float scale) {
    std::normal_distribution<float> normal(0.0f, scale);
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = normal(random_);
    return values;
  }

  int32_t vector(int64_t size, float mean, float scale) {
    floats_.push_back(floats(size, scale));
    for (float& value : floats_.back()) value += mean;
    tables_.vectors.push_back({floats_.back().data(), size});
    return static_cast<int32_t>(tables_.vectors.size()) - 1;
  }

  // Types in turn, F32 where rows are no multiple of 32. Quantised blocks are random bytes behind
  // scales that are small numbers.
  int32_t matrix(int64_t rows, int64_t cols, int32_t stack = 1) {
    constexpr int32_t kTypes[] = {kvt::kQ8_0, kvt::kF32, kvt::kQ4_0, kvt::kQ4_1};
    const int32_t type = cols % 32 ? kvt::kF32 : kTypes[tables_.matrices.size() % 4];
    const int64_t row_bytes = kvt::source_row_bytes(type, cols);
    std::vector<uint8_t> source(static_cast<size_t>(stack * rows * row_bytes));
    if (type == kvt::kF32) {
      const std::vector<float> values = floats(stack * rows * cols, 0.1f);
      std::memcpy(source.data(), values.data(), source.size());
    } else {
      const size_t header = type == kvt::kQ4_1 ? 4 : 2, quants = type == kvt::kQ8_0 ? 32 : 16;
      const uint8_t exponent = type == kvt::kQ8_0 ? 0x14 : 0x24;
      for (size_t i = 0; i < source.size(); ++i) {
        const size_t place = i % (header + quants);
        source[i] = place >= header ? static_cast<uint8_t>(random_()) : place % 2 ? exponent : 0;
      }
    }
    const int64_t bytes = kvt_packed_bytes(type, rows, cols);
    uint8_t* data = memory(stack * bytes);
    for (int32_t i = 0; i < stack; ++i) {
      const uint8_t* first = source.data() + i * rows * row_bytes;
      require(kvt_pack(team_, type, first, rows, cols, data + i * bytes) == KVT_OK, "packing");
    }
    tables_.matrices.push_back({rows, cols, data, stack * bytes, type, stack});
    return static_cast<int32_t>(tables_.matrices.size()) - 1;
  }

  std::mt19937 random_;
  kvt_team* team_;
  std::vector<std::pair<uint8_t*, int64_t>> memory_;
  std::list<std::vector<float>> floats_;
  Tables tables_;
};

}  // namespace stress
