// Random batches: every token's logits are the same whatever it was computed with.
#pragma once

#include <map>

#include "stress_model.hpp"

namespace stress {

// One conversation: its tokens, where its blocks are, what it is computed with.
struct Request {
  std::vector<int32_t> tokens;
  int64_t num_computed = 0;
  std::vector<int32_t> blocks;    // the same ones in both groups
  std::vector<int32_t> adapters;  // in order
  std::map<int64_t, std::vector<float>> logits;  // by position, of what was sampled
};

// A step being put together; arrays as the interface wants them.
struct Batch {
  std::vector<int32_t> tokens, blocks;
  std::vector<kvt_chunk> chunks;
  std::vector<int64_t> tables;
  std::vector<kvt_use> uses;
  std::vector<kvt_segment> segments;
  std::vector<kvt_sample> samples;
  std::vector<Request*> requests;  // of the chunks
};

inline void add_chunk(Batch& batch, Request& request, int32_t count, bool is_sampled) {
  batch.chunks.push_back({request.num_computed, count, is_sampled});
  const auto start = static_cast<size_t>(request.num_computed);
  for (int32_t i = 0; i < count; ++i) batch.tokens.push_back(request.tokens[start + i]);
  if (is_sampled) batch.samples.push_back({5, KVT_WANT_LOG_SUM});
  batch.requests.push_back(&request);
}

inline void add_tables(Batch& batch, bool has_slots = false) {
  for (int32_t group = 0; group < kNumGroups; ++group) {
    for (const Request* request : batch.requests) {
      batch.tables.push_back(static_cast<int64_t>(batch.blocks.size()));
      batch.blocks.insert(batch.blocks.end(), request->blocks.begin(), request->blocks.end());
    }
  }
  for (size_t i = 0; has_slots && i < batch.requests.size(); ++i) {
    batch.tables.push_back(static_cast<int64_t>(batch.blocks.size()));
    batch.blocks.push_back(batch.requests[i]->blocks[0]);  // each request's own, below 8
  }
  batch.tables.push_back(static_cast<int64_t>(batch.blocks.size()));
}

inline void add_uses(Batch& batch, const Model& model) {
  for (int32_t adapter = 0; adapter < 2; ++adapter) {
    const auto first = static_cast<int32_t>(batch.segments.size());
    for (size_t i = 0; i < batch.requests.size(); ++i) {
      for (int32_t used : batch.requests[i]->adapters) {
        if (used == adapter) batch.segments.push_back({static_cast<int32_t>(i), 1});
      }
    }
    const auto count = static_cast<int32_t>(batch.segments.size()) - first;
    batch.uses.push_back({model.adapters()[static_cast<size_t>(adapter)], 0.7f, first, count, 0});
  }
}

inline kvt_step describe(const Batch& batch) {
  kvt_step step{};
  step.token_ids = batch.tokens.data();
  step.chunks = batch.chunks.data();
  step.blocks = batch.blocks.data();
  step.tables = batch.tables.data();
  step.uses = batch.uses.data();
  step.segments = batch.segments.data();
  step.samples = batch.samples.data();
  step.num_chunks = static_cast<int32_t>(batch.chunks.size());
  step.num_uses = static_cast<int32_t>(batch.uses.size());
  step.num_segments = static_cast<int32_t>(batch.segments.size());
  step.num_rows = static_cast<int32_t>(batch.tokens.size());
  step.num_sampled = static_cast<int32_t>(batch.samples.size());
  step.num_blocks = static_cast<int32_t>(batch.blocks.size());
  return step;
}

inline void run(const Model& model, Batch& batch) {
  const bool is_hybrid = !model.tables().recurrents.empty();
  add_tables(batch, is_hybrid);
  add_uses(batch, model);
  kvt_step step = describe(batch);
  // Checkpoints of the first request.
  const int32_t slot = batch.requests[0]->blocks[0];
  const kvt_copy copies[2] = {{kNumGroups, slot, slot + 8, 0}, {kNumGroups, slot + 8, slot, 0}};
  step.copies = copies;
  step.num_copies = is_hybrid ? 2 : 0;
  constexpr int32_t kMost = 16, kTop = 5;
  std::vector<int32_t> best(kMost), finite(kMost), top_ids(kMost * kTop);
  std::vector<float> best_logits(kMost), top_logits(kMost * kTop);
  std::vector<double> log_sums(kMost);
  step.best = best.data();
  step.best_logits = best_logits.data();
  step.log_sums = log_sums.data();
  step.is_finite = finite.data();
  step.top_ids = top_ids.data();
  step.top_logits = top_logits.data();
  step.top_stride = kTop;
  require(kvt_step_run(model.get(), &step) == KVT_OK, kvt_error_text());
  size_t row = 0;
  for (size_t i = 0; i < batch.requests.size(); ++i) {
    Request& request = *batch.requests[i];
    request.num_computed += batch.chunks[i].num_rows;
    if (!batch.chunks[i].is_sampled) continue;
    const float* logits = kvt_model_logits(model.get()) + row * kVocab;
    require(finite[row] && top_ids[row * kTop] == best[row], "results of a row");
    require(log_sums[row] >= best_logits[row], "a log-sum");
    request.logits[request.num_computed].assign(logits, logits + kVocab);
    ++row;
  }
}

inline std::vector<Request> make_requests() {
  std::vector<Request> requests;
  std::mt19937 random(11);
  for (int32_t i = 0; i < 8; ++i) {
    Request request;
    request.tokens.resize(i % 2 ? 40 : 75);
    for (int32_t& token : request.tokens) token = static_cast<int32_t>(random() % kVocab);
    for (int32_t k = 0; k < 5; ++k) request.blocks.push_back(i + 8 * k);
    if (i % 3 == 1) request.adapters = {0};
    if (i % 3 == 2) request.adapters = {0, 1};
    requests.push_back(request);
  }
  return requests;
}

// All tokens of all requests in random chunks; requests that `one_by_one` go alone, whole.
inline std::vector<Request> compute(int num_threads, uint32_t seed, bool one_by_one,
                                    bool is_hybrid = false) {
  kvt_team* team = nullptr;
  require(kvt_team_new(num_threads, &team) == KVT_OK, "a team");
  std::vector<Request> requests = make_requests();
  {
    const Model model(team, 3, is_hybrid);
    std::mt19937 random(seed);
    for (bool is_left = true; is_left;) {
      Batch batch;
      is_left = false;
      for (Request& request : requests) {
        const int64_t left = static_cast<int64_t>(request.tokens.size()) - request.num_computed;
        if (left == 0) continue;
        is_left = true;
        if (one_by_one ? !batch.chunks.empty() : random() % 4 == 0) continue;
        const int64_t room = kMaxRows - static_cast<int64_t>(batch.tokens.size());
        const int64_t wanted = one_by_one ? left : 1 + static_cast<int64_t>(random() % 20);
        const int64_t count = std::min({left, wanted, room});
        if (count > 0) add_chunk(batch, request, static_cast<int32_t>(count), count == left || random() % 2);
      }
      if (!batch.chunks.empty()) run(model, batch);
    }
  }
  kvt_team_free(team);
  return requests;
}

inline void test_batches() {
  const std::vector<Request> alone = compute(1, 1, true);
  for (int num_threads = 1; num_threads <= 3; ++num_threads) {
    const std::vector<Request> found = compute(num_threads, 5 + num_threads, false);
    for (size_t i = 0; i < alone.size(); ++i) {
      for (const auto& [position, logits] : alone[i].logits) {
        require(found[i].logits.count(position) == 1, "a sampled row");
        require(found[i].logits.at(position) == logits, "equal bits in any batch");
      }
    }
  }
}

}  // namespace stress
