// How the work of a stage is cut into items.
#pragma once

#include "multiply_tile.hpp"

namespace kvt {
namespace products {

// A unit of work is one panel of a product for some rows. Units are numbered rows by rows, and
// there product by product.
struct Plan {
  const Product* products;
  int64_t num_panels;  // of all products
  int64_t rows;        // of a unit, a multiple of six
  int64_t num_units;
  int64_t num_threads;
  int64_t min_units;   // of a run
};

struct Unit {
  const Product* product;
  int64_t panel;
  int64_t end_panel;  // panels of the product before this one belong to the same run
  int64_t first_row, last_row;
};

// Units [first, last) that one thread works on in order.
struct Run {
  int64_t first, last;

  bool is_empty() const { return first >= last; }
};

constexpr int64_t kRowsBytes = 384 << 10;  // activations that stay in a core's second cache
constexpr int64_t kUnitsPerThread = 4;     // at least, where there are rows to share out

// Work of a run, in multiply-accumulates or bytes times 8: some 50 microseconds. Where a run
// begins, memory is slow: less is not worth it.
constexpr int64_t kMinRun = 16 << 20;

inline int64_t divide_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

inline Plan make_plan(const Worker& worker, const Input& input, const Product* products,
                      int num_products) {
  Plan plan{products, 0, 0, 0, worker.num_threads, 0};
  for (int i = 0; i < num_products; ++i) plan.num_panels += num_panels(products[i].matrix->rows);
  const int64_t fitting = kRowsBytes / std::max<int64_t>(1, input.cols * 2);
  const int64_t sharing =
      divide_up(input.n * plan.num_panels, kUnitsPerThread * worker.num_threads);
  plan.rows = std::max<int64_t>(std::min(fitting, sharing), 2 * kInputRows);
  plan.rows = divide_up(plan.rows, kInputRows) * kInputRows;
  plan.num_units = plan.num_panels * divide_up(input.n, plan.rows);
  const int64_t rows = std::max<int64_t>(std::min(input.n, plan.rows), 8);
  plan.min_units = divide_up(kMinRun, kPanelRows * input.cols * rows);
  return plan;
}

// The first unit of a run.
inline Unit unit_at(const Plan& plan, const Run& run, int64_t n) {
  Unit unit{plan.products, run.first % plan.num_panels, 0, 0, 0};
  unit.first_row = run.first / plan.num_panels * plan.rows;
  unit.last_row = std::min(n, unit.first_row + plan.rows);
  int64_t panels = num_panels(unit.product->matrix->rows);
  for (; unit.panel >= panels; panels = num_panels(unit.product->matrix->rows)) {
    unit.panel -= panels;
    ++unit.product;
  }
  unit.end_panel = std::min(panels, unit.panel + (run.last - run.first));
  return unit;
}

// The runs of a stage, as one thread takes them. Most of the work is shared out evenly, in long
// pieces of memory; what is left of a long stage goes to who comes first, so that a thread that is
// held up delays the others less.
class Runs {
 public:
  Runs(Worker& worker, const Plan& plan) : worker_(worker), plan_(plan) {}

  // Each thread's first run is its own without asking; then they take what comes. Empty: none left.
  Run take() {
    int64_t wanted = worker_.id;
    if (number_ > 0) {
      const int64_t taken = worker_.take(plan_.num_units);  // there are no more runs than units
      if (taken < 0) return {0, 0};
      wanted = taken + plan_.num_threads;
    }
    for (; number_ <= wanted; ++number_) cut();
    return {std::min(first_, plan_.num_units), std::min(first_ + size_, plan_.num_units)};
  }

 private:
  // Go on to the next run; as many as there are threads have one size.
  void cut() {
    first_ += size_;
    if (number_ % plan_.num_threads > 0) return;
    const int64_t left = plan_.num_units - first_;
    size_ = left * 3 / (4 * plan_.num_threads);
    if (size_ < plan_.min_units) size_ = divide_up(left, plan_.num_threads);
  }

  Worker& worker_;
  const Plan& plan_;
  int64_t number_ = 0;  // runs cut so far
  int64_t first_ = 0, size_ = 0;  // the last one
};

}  // namespace products
}  // namespace kvt
