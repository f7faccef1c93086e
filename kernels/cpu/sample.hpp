// Choosing among logits: the best token of each row, its best k in order, the log-sum-exp.
//
// 1. Equal logits rank by id, lowest first.
// 2. A row is cut into parts at fixed places, and the parts' results are joined in ascending order,
//    so that the answer is the same for any number of threads.
// 3. Logits are grouped into runs of 32, and the k-th largest of all runs' maxima bounds the k-th
//    largest logit from below: only runs that reach it are looked at again. Nothing is sorted but
//    the few that are left. Run j of a block of 512 has its logits j, j + 16, j + 32, ..., so that
//    maxima need no work across lanes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kvt_step.h"
#include "memory.hpp"
#include "operations_vector.hpp"
#include "team.hpp"

namespace kvt {

constexpr int64_t kPart = 8192;  // logits that are looked through at once
constexpr int64_t kRun = 32;     // logits of a run
constexpr int64_t kBlock = kRun * kWidth;

struct PartResult {
  float largest;
  int32_t id;  // of the first largest
  int32_t is_finite;
  float exponentials;  // sum of e^(x - largest)
};

// What rows of V logits need to be sampled; made once.
struct Sampler {
  int64_t vocab_size = 0;
  Region memory;

  int64_t num_parts() const { return (vocab_size + kPart - 1) / kPart; }
  int64_t num_runs() const { return (vocab_size + kBlock - 1) / kBlock * kWidth; }
  int64_t row_bytes() const {
    const int64_t bytes = num_parts() * static_cast<int64_t>(sizeof(PartResult)) + num_runs() * 4;
    return static_cast<int64_t>(round_up(static_cast<size_t>(bytes), kLine));
  }
  PartResult* parts(int64_t row) const {
    return reinterpret_cast<PartResult*>(memory.data() + row * row_bytes());
  }
  float* run_maxima(int64_t row) const { return reinterpret_cast<float*>(parts(row) + num_parts()); }
};

// False where there is no memory.
inline bool make_sampler(Sampler& sampler, int64_t vocab_size, int64_t max_rows) {
  sampler.vocab_size = vocab_size;
  sampler.memory = Region(static_cast<size_t>(sampler.row_bytes() * max_rows));
  return sampler.memory.data() != nullptr;
}

static_assert(kPart % kBlock == 0, "parts are whole blocks");

constexpr float kBelowAll = -std::numeric_limits<float>::infinity();

// What a scan of logits finds; x - x is 0 where x is finite, else NaN.
struct Scan {
  Floats largest = Floats::all(kBelowAll);
  Floats differences = Floats::zero();
};

inline void scan_block(const float* x, int64_t count, float* maxima, Scan& scan) {
  Floats runs = Floats::all(kBelowAll);
  for (int64_t i = 0; i < std::min(count, kBlock); i += kWidth) {
    const Floats value = load_some(x + i, count - i, kBelowAll);
    const Floats finite = count - i >= kWidth ? value : load_some(x + i, count - i);
    runs = max(runs, value);
    scan.differences = scan.differences + (finite - finite);
  }
  runs.store(maxima);
  scan.largest = max(scan.largest, runs);
}

// Where `value` is first; `maxima` of the same part.
inline int64_t find_first(const float* x, int64_t count, const float* maxima, float value) {
  int64_t block = 0;
  while ((block + 1) * kBlock < count &&
         std::find(maxima, maxima + kWidth, value) == maxima + kWidth) {
    ++block;
    maxima += kWidth;
  }
  return std::find(x + block * kBlock, x + count, value) - x;
}

inline float sum_exponentials(const float* x, int64_t count, float largest) {
  const Floats shift = Floats::all(largest);
  Floats sums = Floats::zero();
  for (int64_t i = 0; i < count; i += kWidth) {
    sums = sums + exp(load_some(x + i, count - i, kBelowAll) - shift);
  }
  return sum(sums);
}

inline void scan_part(const Sampler& sampler, const float* logits, int64_t row, int64_t part,
                      bool wants_sum) {
  const int64_t first = part * kPart;
  const int64_t count = std::min(kPart, sampler.vocab_size - first);
  const float* x = logits + row * sampler.vocab_size + first;
  float* maxima = sampler.run_maxima(row) + first / kRun;
  Scan scan;
  for (int64_t i = 0; i < count; i += kBlock) scan_block(x + i, count - i, maxima + i / kRun, scan);
  PartResult result{};
  result.is_finite = sum(scan.differences) == 0.0f;
  result.largest = largest(scan.largest);
  result.id = static_cast<int32_t>(first + find_first(x, count, maxima, result.largest));
  if (wants_sum) result.exponentials = sum_exponentials(x, count, result.largest);
  sampler.parts(row)[part] = result;
}

// A lower bound of the k-th largest logit, from the runs' maxima.
inline float threshold(const Sampler& sampler, int64_t row, int64_t k, std::vector<float>& room) {
  const float* maxima = sampler.run_maxima(row);
  if (k > sampler.num_runs()) return kBelowAll;
  room.assign(maxima, maxima + sampler.num_runs());
  std::nth_element(room.begin(), room.begin() + (k - 1), room.end(), std::greater<float>());
  return room[static_cast<size_t>(k - 1)];
}

struct Candidate {
  float logit;
  int32_t id;
  bool operator<(const Candidate& other) const {
    return logit != other.logit ? logit > other.logit : id < other.id;
  }
};

// The k best of a finite row, best first.
inline void choose_top(const Sampler& sampler, const float* x, int64_t row, int64_t k, int32_t* ids,
                       float* values) {
  thread_local std::vector<float> room;
  thread_local std::vector<Candidate> found;
  const float bound = threshold(sampler, row, k, room);
  const float* maxima = sampler.run_maxima(row);
  found.clear();
  for (int64_t run = 0; run < sampler.num_runs(); ++run) {
    if (maxima[run] < bound) continue;
    const int64_t first = run / kWidth * kBlock;
    const int64_t end = std::min(sampler.vocab_size, first + kBlock);
    for (int64_t i = first + run % kWidth; i < end; i += kWidth) {
      if (x[i] >= bound) found.push_back(Candidate{x[i], static_cast<int32_t>(i)});
    }
  }
  std::partial_sort(found.begin(), found.begin() + k, found.end());
  for (int64_t i = 0; i < k; ++i) {
    ids[i] = found[static_cast<size_t>(i)].id;
    values[i] = found[static_cast<size_t>(i)].logit;
  }
}

inline void finish_row(const Sampler& sampler, const float* logits, int64_t row,
                       const kvt_step& step) {
  const PartResult* parts = sampler.parts(row);
  PartResult best = parts[0];
  bool is_finite = best.is_finite;
  for (int64_t i = 1; i < sampler.num_parts(); ++i) {
    is_finite = is_finite && parts[i].is_finite;
    if (parts[i].largest > best.largest) best = parts[i];
  }
  const kvt_sample& wanted = step.samples[row];
  if (step.best) step.best[row] = best.id;
  if (step.best_logits) step.best_logits[row] = best.largest;
  if (step.is_finite) step.is_finite[row] = is_finite;
  if (!is_finite) return;
  if (wanted.wants & KVT_WANT_LOG_SUM && step.log_sums) {
    double total = 0;
    for (int64_t i = 0; i < sampler.num_parts(); ++i) {
      const double below = static_cast<double>(parts[i].largest) - best.largest;
      total += static_cast<double>(parts[i].exponentials) * std::exp(below);
    }
    step.log_sums[row] = std::log(total) + best.largest;
  }
  if (wanted.num_top > 0) {
    const int64_t place = row * step.top_stride;
    choose_top(sampler, logits + row * sampler.vocab_size, row, wanted.num_top,
               step.top_ids + place, step.top_logits + place);
  }
}

// A stage: the results that the step asks for. A barrier follows.
inline void sample_rows(Worker& worker, const Sampler& sampler, const float* logits,
                        const kvt_step& step) {
  const int64_t num_parts = sampler.num_parts();
  for (int64_t i; (i = worker.take(step.num_sampled * num_parts)) >= 0;) {
    const int64_t row = i / num_parts;
    const bool wants_sum = step.samples[row].wants & KVT_WANT_LOG_SUM;
    scan_part(sampler, logits, row, i % num_parts, wants_sum);
  }
  worker.barrier();
  for (int64_t row; (row = worker.take(step.num_sampled)) >= 0;) {
    finish_row(sampler, logits, row, step);
  }
}

}  // namespace kvt
