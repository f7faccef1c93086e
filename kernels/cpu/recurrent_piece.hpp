// Rows of one request together: the recurrence, unrolled to products of small matrices.
//
// With d_t what is left at row t of the state S before the piece, and D_ti what is left there of what
// row i <= t added, y_t = d_t q_t S + sum over i <= t of D_ti (q_t k_i) u_i. The delta net's u solve a
// triangular system: u_t = beta_t (v_t - d_t k_t S - sum over i < t of D_ti (k_t k_i) u_i).
#pragma once

#include "operations.hpp"
#include "recurrent.hpp"
#include "recurrent_product.hpp"

namespace kvt {

constexpr int64_t kSolveRows = 16;  // of the system that are solved one by one

// One thread's place for a piece.
struct Desk {
  float *queries, *keys;              // [kPiece, key_dim]
  float *keys_across, *kept_across;   // [key_dim, kPiece]; kept: times what is left at the end
  float *key_scores, *query_scores;   // [kPiece, kPiece]: k_t k_i and q_t k_i
  float *system, *reads;              // the same times D_ti; system: times -beta_t, i < t alone
  float *changes, *results;           // [kPiece, padded values]: u, y
  float *total, *left, *beta;         // [kPiece]: sum of log decays, its exp, RowGates::beta

  // Of a desk, in floats.
  static int64_t size(const Mixer& mixer) {
    return 2 * kPiece * whole_vectors(mixer.key_dim) + 2 * kPiece * mixer.key_dim +
           4 * kPiece * kPiece + 2 * kPiece * mixer.padded_values() + 3 * kPiece;
  }
};

inline Desk desk_at(float* memory, const Mixer& mixer) {
  const auto next = [&memory](int64_t count) {
    float* part = memory;
    memory += count;
    return part;
  };
  const int64_t keys = kPiece * whole_vectors(mixer.key_dim), across = kPiece * mixer.key_dim;
  const int64_t square = kPiece * kPiece, values = kPiece * mixer.padded_values();
  Desk desk;
  for (float** part : {&desk.queries, &desk.keys}) *part = next(keys);
  for (float** part : {&desk.keys_across, &desk.kept_across}) *part = next(across);
  for (float** part : {&desk.key_scores, &desk.query_scores, &desk.system, &desk.reads})
    *part = next(square);
  for (float** part : {&desk.changes, &desk.results}) *part = next(values);
  for (float** part : {&desk.total, &desk.left, &desk.beta}) *part = next(kPiece);
  return desk;
}

// A group's query and key of one row: the delta net's are divided by their lengths, and its query by
// the root of their size.
inline void read_keys(const Mixing& mixing, int64_t row, int64_t group, float* query, float* key) {
  const Mixer& mixer = *mixing.mixer;
  const int64_t size = mixer.key_dim, offset = group * size;
  const float* queries = mixing.row(row) + mixer.queries_at() + offset;
  const float* keys = mixing.row(row) + mixer.keys_at() + offset;
  float query_factor = 1.0f, key_factor = 1.0f;
  if (mixer.is_delta()) {
    const float root = std::sqrt(static_cast<float>(size));
    query_factor = 1.0f / (std::sqrt(sum_of_squares(queries, size) + mixing.eps) * root);
    key_factor = 1.0f / std::sqrt(sum_of_squares(keys, size) + mixing.eps);
  }
  for (int64_t i = 0; i < size; ++i) query[i] = queries[i] * query_factor;
  for (int64_t i = 0; i < size; ++i) key[i] = keys[i] * key_factor;
}

// Rows [first, first + count) of the step, at most kPiece, of one request within one piece.
class Piece {
 public:
  Piece(const Mixing& mixing, const Desk& desk, int64_t first, int64_t count)
      : mixing_(mixing),
        mixer_(*mixing.mixer),
        desk_(desk),
        first_(first),
        count_(count),
        columns_(whole_vectors(count)) {}

  // What all heads of a group have in common.
  void begin_group(int64_t group) const {
    const int64_t size = mixer_.key_dim;
    for (int64_t t = 0; t < count_; ++t)
      read_keys(mixing_, first_ + t, group, desk_.queries + t * size, desk_.keys + t * size);
    if (count_ == 1) {
      desk_.query_scores[0] = dot(desk_.queries, desk_.keys, size);
      return;
    }
    for (int64_t c = 0; c < size; ++c) {
      float* across = desk_.keys_across + c * kPiece;
      for (int64_t t = 0; t < count_; ++t) across[t] = desk_.keys[t * size + c];
      for (int64_t t = count_; t < columns_; ++t) across[t] = 0.0f;
    }
    score(desk_.queries, desk_.query_scores);
    if (mixer_.is_delta()) score(desk_.keys, desk_.key_scores);
  }

  // Outputs of a head, and its state behind the piece in place of the one before.
  void compute_head(int64_t head, float* state) const {
    weigh(head);
    if (mixer_.is_delta()) correct(head, state);
    else scale_values(head);
    read(state);
    write(head);
    advance(state);
  }

 private:
  void score(const float* rows, float* scores) const {
    small_product({rows, mixer_.key_dim, desk_.keys_across, kPiece, scores, kPiece, count_,
                   columns_, mixer_.key_dim, 0.0f, Part::kLowerOutput});
  }

  // Gates, and the scores times what is left of what row i added when row t reads it.
  void weigh(int64_t head) const {
    float sum = 0.0f;
    for (int64_t t = 0; t < columns_; ++t) {
      const RowGates gates = t < count_ ? gates_of(mixer_, mixing_.row(first_ + t), head)
                                        : RowGates{0.0f, 0.0f};
      sum += gates.log_decay;
      desk_.total[t] = sum;
      desk_.beta[t] = gates.beta;
    }
    for (int64_t t = 0; t < columns_; t += kWidth)
      exp(Floats::load(desk_.total + t)).store(desk_.left + t);
    for (int64_t t = 0; t < count_; ++t) weigh_row(t);
  }

  void weigh_row(int64_t t) const {
    const Floats total = Floats::all(desk_.total[t]), zero = Floats::zero();
    const Floats factor = Floats::all(-desk_.beta[t]);
    for (int64_t i = 0; i <= t; i += kWidth) {
      const auto behind = static_cast<int>(std::clamp<int64_t>(t - i, 0, kWidth));  // of i < t
      const auto until = static_cast<int>(std::clamp<int64_t>(t + 1 - i, 0, kWidth));
      const Floats between = exp(min(zero, total - Floats::load(desk_.total + i)));
      const int64_t place = t * kPiece + i;
      select(mask(until), Floats::load(desk_.query_scores + place) * between, zero)
          .store(desk_.reads + place);
      if (!mixer_.is_delta()) continue;
      select(mask(behind), Floats::load(desk_.key_scores + place) * between * factor, zero)
          .store(desk_.system + place);
    }
  }

  static uint16_t mask(int count) { return static_cast<uint16_t>((1u << count) - 1u); }

  // changes = solution of the delta net's system.
  void correct(int64_t head, const float* state) const {
    const int64_t width = mixer_.padded_values(), size = mixer_.value_dim;
    small_product({desk_.keys, mixer_.key_dim, state, width, desk_.changes, width, count_, width,
                   mixer_.key_dim, 0.0f, Part::kAll});
    for (int64_t t = 0; t < count_; ++t) {
      const float* values = values_of(head, t);
      const Floats left = Floats::all(desk_.left[t]), beta = Floats::all(desk_.beta[t]);
      for (int64_t i = 0; i < width; i += kWidth) {
        float* change = desk_.changes + t * width + i;
        ((load_some(values + i, size - i) - Floats::load(change) * left) * beta).store(change);
      }
    }
    solve();
  }

  // Rows before a block come in by a product, those within one by one.
  void solve() const {
    const int64_t width = mixer_.padded_values();
    for (int64_t first = 0; first < count_; first += kSolveRows) {
      const int64_t end = std::min(count_, first + kSolveRows);
      float* rows = desk_.changes + first * width;
      if (first > 0) {
        small_product({desk_.system + first * kPiece, kPiece, desk_.changes, width, rows, width,
                       end - first, width, first, 1.0f, Part::kAll});
      }
      for (int64_t t = first + 1; t < end; ++t) {
        small_product({desk_.system + t * kPiece + first, kPiece, rows, width,
                       desk_.changes + t * width, width, 1, width, t - first, 1.0f, Part::kAll});
      }
    }
  }

  void scale_values(int64_t head) const {
    const int64_t width = mixer_.padded_values(), size = mixer_.value_dim;
    for (int64_t t = 0; t < count_; ++t) {
      const float* values = values_of(head, t);
      const Floats dt = Floats::all(desk_.beta[t]);
      for (int64_t i = 0; i < width; i += kWidth)
        (load_some(values + i, size - i) * dt).store(desk_.changes + t * width + i);
    }
  }

  void read(const float* state) const {
    const int64_t width = mixer_.padded_values();
    small_product({desk_.queries, mixer_.key_dim, state, width, desk_.results, width, count_, width,
                   mixer_.key_dim, 0.0f, Part::kAll});
    for (int64_t t = 0; t < count_; ++t) {
      const Floats left = Floats::all(desk_.left[t]);
      for (int64_t i = t * width; i < (t + 1) * width; i += kWidth)
        (Floats::load(desk_.results + i) * left).store(desk_.results + i);
    }
    small_product({desk_.reads, kPiece, desk_.changes, width, desk_.results, width, count_, width,
                   count_, 1.0f, Part::kLowerInput});
  }

  void write(int64_t head) const {
    const int64_t width = mixer_.padded_values(), size = mixer_.value_dim;
    const Floats skip = Floats::all(mixer_.skip ? mixer_.skip[head] : 0.0f);
    for (int64_t t = 0; t < count_; ++t) {
      float* out = mixing_.out + (first_ + t) * mixer_.inner() + head * size;
      const float* values = values_of(head, t);
      for (int64_t i = 0; i < size; i += kWidth) {
        Floats result = Floats::load(desk_.results + t * width + i);
        if (mixer_.skip) result = fma(load_some(values + i, size - i), skip, result);
        store_some(out + i, result, size - i);
      }
    }
  }

  void advance(float* state) const {
    const int64_t width = mixer_.padded_values();
    const Floats last = Floats::all(desk_.total[count_ - 1]);
    for (int64_t i = 0; i < columns_; i += kWidth) {
      const Floats left = exp(min(Floats::zero(), last - Floats::load(desk_.total + i)));
      for (int64_t c = 0; c < mixer_.key_dim; ++c) {
        const int64_t place = c * kPiece + i;
        (Floats::load(desk_.keys_across + place) * left).store(desk_.kept_across + place);
      }
    }
    small_product({desk_.kept_across, kPiece, desk_.changes, width, state, width, mixer_.key_dim,
                   width, count_, desk_.left[count_ - 1], Part::kAll});
  }

  const float* values_of(int64_t head, int64_t t) const {
    return mixing_.row(first_ + t) + mixer_.values_at() + head * mixer_.value_dim;
  }

  const Mixing& mixing_;
  const Mixer& mixer_;
  const Desk& desk_;
  const int64_t first_, count_, columns_;
};

}  // namespace kvt
