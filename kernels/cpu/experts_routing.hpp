// Which experts a row uses, and how much each of them counts. Definitions: kernels/cpu/kvt_op.h,
// kernels/reference_experts.py.
#pragma once

#include <cmath>
#include <limits>

#include "kvt_op.h"
#include "operations_vector.hpp"

namespace kvt {

struct Routing {
  kvt_routing rules;
  const float* bias;  // [experts] or null
};

// A row on its way from the router's logits, which are overwritten, to its experts, ascending.
struct RowChoice {
  float* logits;    // [count]
  int64_t count, used;
  int32_t* chosen;  // [used]
  float* weights;   // [used]
  float* scratch;   // [3 * count]
};

// Places of the `used` largest of values [count], of equal ones the first; the largest first.
inline void find_largest(const float* values, int64_t count, int64_t used, int32_t* found) {
  for (int64_t e = 0; e < count; ++e) {
    int64_t place = std::min(e, used);
    while (place > 0 && values[e] > values[found[place - 1]]) --place;
    if (place == used) continue;
    for (int64_t k = std::min(e, used - 1); k > place; --k) found[k] = found[k - 1];
    found[place] = static_cast<int32_t>(e);
  }
}

// Logits [count] to scores, in place.
inline void score_row(int32_t scoring, float* values, int64_t count) {
  if (scoring == KVT_SCORE_SIGMOID) {
    for (int64_t e = 0; e < count; ++e) values[e] = 1.0f / (1.0f + std::exp(-values[e]));
    return;
  }
  const float largest = *std::max_element(values, values + count);
  float sum = 0.0f;
  for (int64_t e = 0; e < count; ++e) sum += values[e] = std::exp(values[e] - largest);
  for (int64_t e = 0; e < count; ++e) values[e] /= sum;
}

// Hide the experts of all groups but the best from the choice. `scratch` [2 * num_groups].
inline void hide_groups(const kvt_routing& rules, float* ranked, int64_t count, float* scratch) {
  const int64_t size = count / rules.num_groups;
  float* const sums = scratch;
  auto* const best = reinterpret_cast<int32_t*>(scratch + rules.num_groups);
  for (int64_t group = 0; group < rules.num_groups; ++group) {
    const float* own = ranked + group * size;
    int32_t two[2] = {};
    find_largest(own, size, 2, two);
    sums[group] = own[two[0]] + own[two[1]];
  }
  find_largest(sums, rules.num_groups, rules.num_groups_used, best);
  std::sort(best, best + rules.num_groups_used);
  for (int32_t group = 0; group < rules.num_groups; ++group) {
    if (std::binary_search(best, best + rules.num_groups_used, group)) continue;
    std::fill_n(ranked + group * size, size, -std::numeric_limits<float>::infinity());
  }
}

// The softmax over the largest logits.
inline void choose_logits(const RowChoice& row) {
  find_largest(row.logits, row.count, row.used, row.chosen);
  const float largest = row.logits[row.chosen[0]];
  float sum = 0.0f;
  for (int64_t k = 0; k < row.used; ++k) sum += std::exp(row.logits[row.chosen[k]] - largest);
  std::sort(row.chosen, row.chosen + row.used);
  for (int64_t k = 0; k < row.used; ++k)
    row.weights[k] = std::exp(row.logits[row.chosen[k]] - largest) / sum;
}

inline void choose_row(const Routing& routing, const RowChoice& row) {
  const kvt_routing& rules = routing.rules;
  if (rules.scoring == KVT_SCORE_CHOSEN) return choose_logits(row);
  score_row(rules.scoring, row.logits, row.count);
  float* const ranked = row.scratch;
  for (int64_t e = 0; e < row.count; ++e)
    ranked[e] = row.logits[e] + (routing.bias ? routing.bias[e] : 0.0f);
  if (rules.num_groups > 1) hide_groups(rules, ranked, row.count, row.scratch + row.count);
  find_largest(ranked, row.count, row.used, row.chosen);
  std::sort(row.chosen, row.chosen + row.used);
  float sum = 0.0f;
  for (int64_t k = 0; k < row.used; ++k) sum += row.weights[k] = row.logits[row.chosen[k]];
  // 1e-20 as the models' own code has it: no weight at all is no reason to divide by zero.
  const float factor = rules.scale / (rules.is_normalised ? sum + 1e-20f : 1.0f);
  for (int64_t k = 0; k < row.used; ++k) row.weights[k] *= factor;
}

}  // namespace kvt
