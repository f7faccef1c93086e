// The stage that adds adapters' changes to the products of an op.
#pragma once

#include "program_run.hpp"

namespace kvt {

// One adapter's change of one product of the op.
struct Change {
  const LowRank* part;
  const UseRows* use;
  int product;   // index among the op's
  float* inner;  // [n, rank]: x A^T times the factors; rows without the adapter are not set
};

constexpr int64_t kChangeRows = 32;   // rows of one item
constexpr int64_t kChangePanels = 8;  // panels of one item

inline std::vector<Change> find_changes(const RowSet& rows, const Output* outputs, int num_outputs,
                                        float* inner) {
  std::vector<Change> changes;
  for (int product = 0; product < num_outputs; ++product) {
    for (const UseRows& use : rows.uses) {
      const LowRank* part = use.adapter->part(outputs[product].matrix);
      if (!part || use.ranges.empty()) continue;
      changes.push_back(Change{part, &use, product, inner});
      inner += rows.num_rows * part->rank;
    }
  }
  return changes;
}

// Item `index` of those of all changes: a few ranks of a few rows.
inline void shrink_item(const std::vector<Change>& changes, const float* x, int64_t index) {
  for (const Change& change : changes) {
    const LowRank& part = *change.part;
    const int64_t across = num_tiles(part.rank, kShrinkRanks);
    for (const RowRange& range : change.use->ranges) {
      const int64_t count = num_tiles(range.count, kChangeRows) * across;
      if (index >= count) {
        index -= count;
        continue;
      }
      const int64_t first = range.first + index / across * kChangeRows;
      const int64_t end = std::min(first + kChangeRows, range.first + range.count);
      shrink(part, index % across * kShrinkRanks, x + first * part.cols, end - first,
             part.scaling * change.use->scale, change.inner + first * part.rank);
      return;
    }
  }
}

inline int64_t num_shrink_items(const std::vector<Change>& changes) {
  int64_t count = 0;
  for (const Change& change : changes) {
    for (const RowRange& range : change.use->ranges)
      count += num_tiles(range.count, kChangeRows) * num_tiles(change.part->rank, kShrinkRanks);
  }
  return count;
}

// All changes, in order, of some rows and some panels of outputs of one product.
inline void expand_item(const std::vector<Change>& changes, const Output& output, int product,
                        RowRange rows, int64_t first_panel) {
  for (const Change& change : changes) {
    if (change.product != product) continue;
    const LowRank& part = *change.part;
    const int64_t end_panel = std::min(first_panel + kChangePanels, part.num_panels());
    for (const RowRange& range : change.use->ranges) {
      const int64_t first = std::max(range.first, rows.first);
      const int64_t end = std::min(range.first + range.count, rows.first + rows.count);
      if (first >= end) continue;
      for (int64_t panel = first_panel; panel < end_panel; ++panel) {
        expand(part, panel, change.inner + first * part.rank, end - first,
               output.out + first * output.stride, output.stride);
      }
    }
  }
}

// A stage: out += changes; x [num_rows, cols] of the products. Behind it lies no barrier.
inline void add_low_rank(Worker& worker, const std::vector<Change>& changes, const float* x,
                         int64_t num_rows, const Output* outputs, int num_outputs) {
  const int64_t num_items = num_shrink_items(changes);
  for (int64_t i; (i = worker.take(num_items)) >= 0;) shrink_item(changes, x, i);
  worker.barrier();
  const int64_t down = num_tiles(num_rows, kChangeRows);
  int64_t across[kMaxProducts] = {}, total = 0;
  for (const Change& change : changes)
    across[change.product] = num_tiles(change.part->num_panels(), kChangePanels);
  for (int k = 0; k < num_outputs; ++k) total += down * across[k];
  for (int64_t i; (i = worker.take(total)) >= 0;) {
    int product = 0;
    for (; i >= down * across[product]; ++product) i -= down * across[product];
    const int64_t first = i / across[product] * kChangeRows;
    const RowRange rows{first, std::min(kChangeRows, num_rows - first)};
    expand_item(changes, outputs[product], product, rows, i % across[product] * kChangePanels);
  }
}

inline bool Runner::has_changes(const kvt_op& op) const {
  for (const UseRows& use : rows_->uses) {
    if (use.ranges.empty()) continue;
    for (int i = 0; i < num_products(op); ++i) {
      if (use.adapter->part(op.matrices[i])) return true;
    }
  }
  return false;
}

inline void Runner::add_changes(const float* x, const Output* outputs, int num_outputs) {
  const std::vector<Change> changes =
      find_changes(*rows_, outputs, num_outputs, model_.memory.inner.as<float>());
  add_low_rank(worker_, changes, x, num_rows(), outputs, num_outputs);
  barrier(KVT_PROFILE_AFTER);
}

}  // namespace kvt
