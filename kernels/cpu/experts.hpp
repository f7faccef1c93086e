// Feed-forwards of which each row uses a few: sizes, memory, and the order of rows.
//
// 1. A row's experts (experts_routing.hpp) are added in the order of their numbers, so a row gets
//    the same bits whoever shares the step.
// 2. Rows are sorted by expert, and each expert's matrices are multiplied with all of its rows at
//    once. A place is a row in that order; an expert's first place is a multiple of six, because
//    inputs of products come in blocks of six (input.hpp). Places between have no row.
#pragma once

#include "experts_routing.hpp"
#include "multiply.hpp"

namespace kvt {

// gate and up [size, cols], down [out, size] are those of expert 0; the others' follow, like their
// biases.
struct Experts {
  Matrix gate, up, down;
  int64_t num_experts, num_used;
  int32_t activation;
  Routing routing;
  const float* biases[3];  // of gate, up, down, or null

  uint32_t forms() const { return input_form(gate.type) | input_form(up.type); }
  // Most places of n rows.
  int64_t num_places(int64_t n) const {
    return n * num_used + (kInputRows - 1) * std::min(num_experts, n * num_used);
  }
  int64_t num_blocks(int64_t n) const { return input_blocks(num_places(n)); }
};

// What all threads share, for n rows.
struct ExpertsMemory {
  float* logits;    // [n, num_experts]
  int32_t* chosen;  // [n, num_used], ascending
  float* weights;   // [n, num_used]
  float* hidden;    // [places, size]: act(gate) * up
  std::byte* inputs;
  std::byte* hidden_inputs;
};

inline int64_t experts_size(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Places the parts from `memory` on, if it is not null; returns the bytes of all.
inline int64_t experts_bind(const Experts& experts, int64_t n, std::byte* memory,
                            ExpertsMemory* parts) {
  const int64_t places = kInputRows * experts.num_blocks(n);
  const int64_t sizes[] = {4 * n * experts.num_experts,
                           4 * n * experts.num_used,
                           4 * n * experts.num_used,
                           4 * places * experts.up.rows,
                           input_bytes(places, experts.up.cols, experts.forms()),
                           input_bytes(places, experts.down.cols, input_form(experts.down.type))};
  std::byte* starts[6];
  int64_t total = 0;
  for (int i = 0; i < 6; ++i) {
    starts[i] = memory ? memory + total : nullptr;
    total += experts_size(sizes[i]);
  }
  if (parts) {
    *parts = {reinterpret_cast<float*>(starts[0]), reinterpret_cast<int32_t*>(starts[1]),
              reinterpret_cast<float*>(starts[2]), reinterpret_cast<float*>(starts[3]),
              starts[4], starts[5]};
  }
  return total;
}

inline int64_t experts_bytes(const Experts& experts, int64_t n) {
  return experts_bind(experts, n, nullptr, nullptr);
}

// The order of rows, as each thread finds it for itself in its scratch.
struct Places {
  int32_t* firsts;   // [num_experts]: of an expert
  int32_t* counts;   // [num_experts]
  int32_t* active;   // experts that have rows, ascending
  int64_t num_active;
  int64_t count;     // a multiple of six
  int32_t* rows;     // [count], -1: none
  float* weights;    // [count]
};

inline int64_t experts_worker_bytes(const Experts& experts, int64_t n) {
  return 4 * (3 * experts.num_experts + 2 * kInputRows * experts.num_blocks(n));
}

inline Places sort_rows(const Experts& experts, const ExpertsMemory& memory, int64_t n,
                        std::byte* scratch) {
  Places places{};
  places.firsts = reinterpret_cast<int32_t*>(scratch);
  places.counts = places.firsts + experts.num_experts;
  places.active = places.counts + experts.num_experts;
  places.rows = places.active + experts.num_experts;
  places.weights = reinterpret_cast<float*>(places.rows + kInputRows * experts.num_blocks(n));
  std::fill(places.counts, places.active, 0);
  const int64_t num_chosen = n * experts.num_used;
  for (int64_t i = 0; i < num_chosen; ++i) ++places.counts[memory.chosen[i]];
  for (int32_t e = 0; e < experts.num_experts; ++e) {
    if (places.counts[e] == 0) continue;
    places.firsts[e] = static_cast<int32_t>(places.count);
    places.active[places.num_active++] = e;
    places.count += input_blocks(places.counts[e]) * kInputRows;
    places.counts[e] = 0;
  }
  std::fill(places.rows, places.rows + places.count, -1);
  for (int64_t i = 0; i < num_chosen; ++i) {
    const int32_t e = memory.chosen[i];
    const int32_t place = places.firsts[e] + places.counts[e]++;
    places.rows[place] = static_cast<int32_t>(i / experts.num_used);
    places.weights[place] = memory.weights[i];
  }
  return places;
}

}  // namespace kvt
