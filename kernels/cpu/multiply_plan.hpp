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
};

struct Unit {
  const Product* product;
  int64_t panel;
  int64_t first_row, last_row;
};

constexpr int64_t kRowsBytes = 384 << 10;  // activations that stay in a core's second cache
constexpr int64_t kUnitsPerThread = 4;     // at least, where there are rows to share out

inline int64_t divide_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

inline Plan make_plan(const Worker& worker, const Input& input, const Product* products,
                      int num_products) {
  Plan plan{products, 0, 0, 0, worker.num_threads};
  for (int i = 0; i < num_products; ++i) plan.num_panels += num_panels(products[i].matrix->rows);
  const int64_t fitting = kRowsBytes / std::max<int64_t>(1, input.cols * 2);
  const int64_t sharing =
      divide_up(input.n * plan.num_panels, kUnitsPerThread * worker.num_threads);
  plan.rows = std::max<int64_t>(std::min(fitting, sharing), 2 * kInputRows);
  plan.rows = divide_up(plan.rows, kInputRows) * kInputRows;
  plan.num_units = plan.num_panels * divide_up(input.n, plan.rows);
  return plan;
}

inline Unit unit_at(const Plan& plan, int64_t number, int64_t n) {
  Unit unit{plan.products, number % plan.num_panels, number / plan.num_panels * plan.rows, 0};
  unit.last_row = std::min(n, unit.first_row + plan.rows);
  for (int64_t panels; unit.panel >= (panels = num_panels(unit.product->matrix->rows));) {
    unit.panel -= panels;
    ++unit.product;
  }
  return unit;
}

// The items of a stage, as one thread takes them: an item is half of a thread's share of what is
// left, so memory is read in long runs, and yet all threads end together.
class Items {
 public:
  Items(Worker& worker, const Plan& plan) : worker_(worker), plan_(plan) {}

  // The units [first, last) of the next item; false: there is none.
  bool take(int64_t& first, int64_t& last) {
    const int64_t item = worker_.take(plan_.num_units);  // there are no more items than units
    if (item < 0) return false;
    for (; number_ <= item; ++number_) {
      first_ = last_;
      last_ += std::max<int64_t>(1, (plan_.num_units - last_) / (2 * plan_.num_threads));
    }
    first = first_;
    last = last_;
    return first < plan_.num_units;
  }

 private:
  Worker& worker_;
  const Plan& plan_;
  int64_t number_ = 0;  // items cut so far; the last is [first_, last_)
  int64_t first_ = 0, last_ = 0;
};

}  // namespace products
}  // namespace kvt
