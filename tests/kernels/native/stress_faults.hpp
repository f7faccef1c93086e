// Descriptions of models and steps that cannot be: each is refused before anything is touched.
#pragma once

#include "stress_steps.hpp"

namespace stress {

inline void test_step_faults() {
  kvt_team* team = nullptr;
  require(kvt_team_new(1, &team) == KVT_OK, "a team");
  {
    const Model model(team, 3);
    const auto refused = [&](auto change) {
      std::vector<Request> requests = make_requests();
      Batch batch;
      add_chunk(batch, requests[2], 30, true);
      add_tables(batch);
      add_uses(batch, model);
      change(batch);
      kvt_step step = describe(batch);
      require(kvt_step_run(model.get(), &step) == KVT_E_ARGUMENT, "a fault is refused");
    };
    refused([](Batch& batch) { batch.tokens[3] = kVocab; });
    refused([](Batch& batch) { batch.chunks[0].num_rows = 31; });
    refused([](Batch& batch) { batch.chunks[0].start = kContext; });
    refused([](Batch& batch) { batch.chunks[0].is_sampled = 0; });
    refused([](Batch& batch) { batch.blocks[1] = kNumBlocks; });
    refused([](Batch& batch) { batch.tables[1] = 1; });
    refused([](Batch& batch) { batch.samples[0].num_top = 1; });
    refused([](Batch& batch) { batch.segments[0].num_chunks = 2; });
    refused([](Batch& batch) { batch.uses[0].adapter = nullptr; });
  }
  kvt_team_free(team);
}

inline kvt_op& find(Tables& tables, int32_t kind) {
  const auto is_it = [kind](const kvt_op& op) { return op.kind == kind; };
  return *std::find_if(tables.program.begin(), tables.program.end(), is_it);
}

inline void test_model_faults() {
  kvt_team* team = nullptr;
  require(kvt_team_new(1, &team) == KVT_OK, "a team");
  {
    const Model model(team, 3);
    const auto refused = [&](auto change) {
      Tables tables = model.tables();
      change(tables);
      const kvt_model_desc desc = tables.describe();
      kvt_model* made = nullptr;
      require(kvt_model_new(team, &desc, &made) == KVT_E_ARGUMENT, "a model's fault is refused");
    };
    refused([](Tables& t) { t.matrices[1].bytes += 64; });
    refused([](Tables& t) { t.matrices[1].type = 5; });
    refused([](Tables& t) { t.matrices[1].data += 1; });
    refused([](Tables& t) { t.vectors[0].size = 0; });
    refused([](Tables& t) { t.caches[1].block_size = 8; });
    refused([](Tables& t) { t.caches[0].group = kNumGroups; });
    refused([](Tables& t) { t.ropes[1].factors = 2; });
    refused([](Tables& t) { t.attentions[0].num_heads = 3; });
    refused([](Tables& t) { t.attentions[0].rope = 2; });
    refused([](Tables& t) { t.program[1].matrices[2] = 0; });
    refused([](Tables& t) { t.program[1].norm = 1000; });
    refused([](Tables& t) { t.program[2].kind = 99; });
    refused([](Tables& t) { find(t, KVT_OP_LATENT).attention = 0; });
    refused([](Tables& t) { find(t, KVT_OP_LATENT).head_norms[0] = -1; });
    refused([](Tables& t) { find(t, KVT_OP_LATENT).matrices[1] = 1; });
    refused([](Tables& t) { find(t, KVT_OP_HEADS).matrices[0] = 1; });
    refused([](Tables& t) { find(t, KVT_OP_PLAIN).biases[0] = 0; });
    refused([](Tables& t) { find(t, KVT_OP_QKV).attention = 1; });
    refused([](Tables& t) { t.program.erase(t.program.begin()); });
    refused([](Tables& t) { t.program.pop_back(), t.program.push_back(t.program[1]); });
  }
  kvt_team_free(team);
}

}  // namespace stress
