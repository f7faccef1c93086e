// Recurrent layers behind their products, in random batches on several threads.
//
// A request's chunks are always the same ones, since their borders decide bits; who shares a step
// with whom is random.
#pragma once

#include "kvt_single.h"
#include "stress_steps.hpp"

namespace stress {

// Weights of one layer behind its products, and states of all requests.
class Layer {
 public:
  Layer(const RecurrentSizes& sizes, uint32_t seed) : random_(seed), layer_(bare_recurrent(sizes)) {
    const bool is_delta = sizes.kind == KVT_DELTA_NET;
    const int64_t inner = int64_t{sizes.heads} * sizes.value_dim;
    layer_.conv = vector(int64_t{layer_.width} * sizes.channels, 0.0f);
    if (sizes.heads > 0) {
      layer_.dt_bias = vector(sizes.heads, 0.0f);
      layer_.decay = vector(sizes.heads, -1.5f);
      layer_.norm = vector(is_delta ? sizes.value_dim : inner, 1.0f);
    }
    if (sizes.kind == KVT_STATE_SPACE) {
      layer_.conv_bias = vector(sizes.channels, 0.0f);
      layer_.skip = vector(sizes.heads, 0.0f);
    }
    for (int32_t size : part_sizes(sizes)) row_values_ += size;
    inner_ = sizes.heads ? inner : sizes.channels;
    state_.stride = kvt_state_values(&layer_);
    state_.num_slots = kSlots;
    state_.data = reinterpret_cast<float*>(kvt_alloc(4 * state_.stride * kSlots));
    require(state_.data != nullptr, "states");
  }
  Layer(const Layer&) = delete;
  ~Layer() { kvt_free(reinterpret_cast<uint8_t*>(state_.data), 4 * state_.stride * kSlots); }

  int64_t row_values() const { return row_values_; }
  int64_t inner() const { return inner_; }

  std::vector<float> mix(kvt_team* team, const std::vector<kvt_chunk>& chunks,
                         const std::vector<int32_t>& slots, std::vector<float> rows) const {
    std::vector<float> out(rows.size() / static_cast<size_t>(row_values_) *
                           static_cast<size_t>(inner_));
    const auto count = static_cast<int32_t>(chunks.size());
    require(kvt_mix(team, &layer_, vectors_.data(), static_cast<int32_t>(vectors_.size()), &state_,
                    1e-5f, chunks.data(), slots.data(), count, rows.data(), out.data()) == KVT_OK,
            kvt_error_text());
    return out;
  }

 private:
  int32_t vector(int64_t size, float mean) {
    std::normal_distribution<float> normal(mean, 0.3f);
    values_.emplace_back(static_cast<size_t>(size));
    for (float& value : values_.back()) value = normal(random_);
    vectors_.push_back({values_.back().data(), size});
    return static_cast<int32_t>(vectors_.size()) - 1;
  }

  std::mt19937 random_;
  kvt_recurrent layer_;
  kvt_state state_{};
  std::list<std::vector<float>> values_;
  std::vector<kvt_vector> vectors_;
  int64_t row_values_ = 0, inner_ = 0;
};

// One request: all its rows, and what came of those computed so far.
struct Sequence {
  std::vector<float> rows, out;
  int64_t num_rows = 0, num_computed = 0;

  // Of the next chunk: single rows, short and long ones, by position alone.
  int32_t next() const {
    constexpr int64_t kSizes[] = {70, 1, 1, 5, 64, 2};
    return static_cast<int32_t>(std::min(kSizes[num_computed % 6], num_rows - num_computed));
  }
};

inline std::vector<Sequence> make_sequences(const Layer& layer) {
  std::mt19937 random(13);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<Sequence> sequences(6);
  for (size_t i = 0; i < sequences.size(); ++i) {
    sequences[i].num_rows = 60 + 25 * static_cast<int64_t>(i);
    sequences[i].rows.resize(static_cast<size_t>(sequences[i].num_rows * layer.row_values()));
    for (float& value : sequences[i].rows) value = normal(random);
  }
  return sequences;
}

// One step with the next chunk of each chosen sequence.
inline void step(const Layer& layer, kvt_team* team, std::vector<Sequence>& sequences,
                 const std::vector<int32_t>& chosen) {
  std::vector<kvt_chunk> chunks;
  std::vector<float> rows;
  for (int32_t i : chosen) {
    const Sequence& own = sequences[static_cast<size_t>(i)];
    chunks.push_back({own.num_computed, own.next(), 0});
    const float* first = own.rows.data() + own.num_computed * layer.row_values();
    rows.insert(rows.end(), first, first + own.next() * layer.row_values());
  }
  const std::vector<float> out = layer.mix(team, chunks, chosen, rows);
  const float* first = out.data();
  for (int32_t i : chosen) {
    Sequence& own = sequences[static_cast<size_t>(i)];
    const int64_t count = own.next();
    own.out.insert(own.out.end(), first, first + count * layer.inner());
    first += count * layer.inner();
    own.num_computed += count;
  }
}

inline std::vector<Sequence> mix_all(const Layer& layer, int num_threads, bool one_by_one) {
  kvt_team* team = nullptr;
  require(kvt_team_new(num_threads, &team) == KVT_OK, "a team");
  std::vector<Sequence> sequences = make_sequences(layer);
  std::mt19937 random(static_cast<uint32_t>(num_threads));
  for (bool is_left = true; is_left;) {
    std::vector<int32_t> chosen;
    is_left = false;
    for (int32_t i = 0; i < static_cast<int32_t>(sequences.size()); ++i) {
      if (sequences[static_cast<size_t>(i)].next() == 0) continue;
      is_left = true;
      if (one_by_one ? chosen.empty() : random() % 3 != 0) chosen.push_back(i);
    }
    if (!chosen.empty()) step(layer, team, sequences, chosen);
  }
  kvt_team_free(team);
  return sequences;
}

inline void test_recurrent() {
  for (const RecurrentSizes& sizes : kRecurrents) {
    const Layer layer(sizes, 5);
    const std::vector<Sequence> alone = mix_all(layer, 1, true);
    const std::vector<Sequence> found = mix_all(layer, 3, false);
    for (size_t i = 0; i < alone.size(); ++i)
      require(found[i].out == alone[i].out, "equal bits of a recurrent layer in any batch");
  }
  // As a part of a model, where who shares a step with whom decides no borders here.
  compute(3, 9, false, true);
}

}  // namespace stress
