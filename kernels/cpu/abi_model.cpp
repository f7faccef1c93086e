// The C interface: weights, models, adapters, steps.

#include "abi.hpp"
#include "lora_run.hpp"
#include "program_memory.hpp"
#include "program_ops.hpp"

int64_t kvt_packed_bytes(int32_t type, int64_t rows, int64_t cols) {
  const int64_t bytes = kvt::packed_bytes(type, rows, cols);
  return bytes < 0 ? kvt::fail(KVT_E_TYPE, "matrix: a type or shape that is not supported") : bytes;
}

int32_t kvt_pack(kvt_team* team, int32_t type, const uint8_t* source, int64_t rows, int64_t cols,
                 uint8_t* target) {
  if (!team || !source || !target || reinterpret_cast<uintptr_t>(target) % 64)
    return kvt::fail(KVT_E_ARGUMENT, "pack: no memory, or not aligned to 64 bytes");
  if (kvt::packed_bytes(type, rows, cols) < 0)
    return kvt::fail(KVT_E_TYPE, "matrix: a type or shape that is not supported");
  const int64_t num_panels = kvt::num_panels(rows);
  auto stage = [&](kvt::Worker& worker) {
    for (int64_t i; (i = worker.take(num_panels)) >= 0;)
      kvt::pack_rows(type, source, rows, cols, target, i, 1);
  };
  return kvt::run_on(team, stage);
}

int64_t kvt_key_block_bytes(const kvt_cache* cache) {
  if (const char* fault = kvt::check_layout(*cache)) return kvt::fail(KVT_E_TYPE, fault);
  return kvt::key_block_bytes(kvt::layout_of(*cache));
}

int64_t kvt_value_block_bytes(const kvt_cache* cache) {
  if (const char* fault = kvt::check_layout(*cache)) return kvt::fail(KVT_E_TYPE, fault);
  return kvt::value_block_bytes(kvt::layout_of(*cache));
}

int32_t kvt_model_new(kvt_team* team, const kvt_model_desc* desc, kvt_model** model) {
  if (!team || !desc || !model) return kvt::fail(KVT_E_ARGUMENT, "model: a pointer is null");
  if (const char* fault = kvt::check_tables(*desc)) return kvt::fail(KVT_E_ARGUMENT, fault);
  return kvt::guarded([&] {
    auto made = std::make_unique<kvt_model>();
    made->team = &team->team;
    kvt::copy_tables(*made, *desc);
    if (const char* fault = kvt::check_program(*made)) return kvt::fail(KVT_E_ARGUMENT, fault);
    if (const char* fault = kvt::check_groups(*made)) return kvt::fail(KVT_E_ARGUMENT, fault);
    kvt::plan_ops(*made);
    if (!kvt::allocate_memory(*made)) return kvt::fail(KVT_E_MEMORY, "no memory for activations");
    *model = made.release();
    return int32_t{KVT_OK};
  });
}

void kvt_model_free(kvt_model* model) { delete model; }

const float* kvt_model_logits(const kvt_model* model) { return model->memory.logits.as<float>(); }

int64_t kvt_model_buffer_bytes(const kvt_model* model) { return kvt::memory_bytes(*model); }

static const char* check_part(const kvt_model& model, const kvt_low_rank& part) {
  if (part.matrix < 0 || static_cast<size_t>(part.matrix) >= model.matrices.size())
    return "adapter: no such matrix";
  if (model.matrix(part.matrix).stack > 1) return "adapter: experts";
  if (!part.a || !part.b || part.rank < 1 || part.rank > (1 << 20)) return "adapter: a, b or rank";
  return nullptr;
}

static std::unique_ptr<kvt_adapter> make_adapter(const kvt_model& model, const kvt_low_rank* parts,
                                                 int32_t num_parts) {
  auto adapter = std::make_unique<kvt_adapter>();
  adapter->model = &model;
  adapter->parts.resize(model.matrices.size());
  std::vector<kvt::LowRank*> made;
  for (int32_t i = 0; i < num_parts; ++i) {
    const kvt::Matrix& matrix = model.matrix(parts[i].matrix);
    auto part = std::make_unique<kvt::LowRank>(
        kvt::LowRank{parts[i].rank, matrix.rows, matrix.cols, parts[i].scaling, nullptr});
    made.push_back(part.get());
    adapter->parts[static_cast<size_t>(parts[i].matrix)] = std::move(part);
  }
  adapter->memory = kvt::place_low_rank(made);
  if (!adapter->memory.data()) throw std::bad_alloc();
  for (size_t i = 0; i < made.size(); ++i) kvt::fill_low_rank(*made[i], parts[i].a, parts[i].b);
  for (const kvt_op& op : model.program) {
    int64_t ranks = 0;
    for (int i = 0; i < kvt::num_products(op); ++i) {
      if (const kvt::LowRank* part = adapter->part(op.matrices[i])) ranks += part->rank;
    }
    adapter->most_ranks = std::max(adapter->most_ranks, ranks);
  }
  return adapter;
}

int32_t kvt_adapter_new(kvt_model* model, const kvt_low_rank* parts, int32_t num_parts,
                        kvt_adapter** adapter) {
  if (!model || !adapter || num_parts < 0 || (num_parts && !parts))
    return kvt::fail(KVT_E_ARGUMENT, "adapter: a pointer is null");
  for (int32_t i = 0; i < num_parts; ++i) {
    if (const char* fault = check_part(*model, parts[i])) return kvt::fail(KVT_E_ARGUMENT, fault);
    for (int32_t k = 0; k < i; ++k) {
      if (parts[k].matrix == parts[i].matrix)
        return kvt::fail(KVT_E_ARGUMENT, "adapter: two changes of one matrix");
    }
  }
  return kvt::guarded([&] {
    *adapter = make_adapter(*model, parts, num_parts).release();
    return KVT_OK;
  });
}

void kvt_adapter_free(kvt_adapter* adapter) { delete adapter; }

int64_t kvt_adapter_bytes(const kvt_adapter* adapter) {
  return static_cast<int64_t>(adapter->memory.bytes());
}

int32_t kvt_step_run(kvt_model* model, const kvt_step* step) {
  if (!model || !step) return kvt::fail(KVT_E_ARGUMENT, "step: a pointer is null");
  if (const char* fault = kvt::check_step(*model, *step)) return kvt::fail(KVT_E_ARGUMENT, fault);
  return kvt::guarded([&] {
    const kvt::StepPlan plan = kvt::make_plan(*model, *step);
    if (!kvt::reserve_inner(*model, *step)) return kvt::fail(KVT_E_MEMORY, "no memory for adapters");
    kvt::StepContext context{*model, *step, plan};
    if (!model->team->run(kvt::run_program, &context))
      return kvt::fail(KVT_E_BUSY, "the team is running already");
    return int32_t{KVT_OK};
  });
}
