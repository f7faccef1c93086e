// The C interface: single operations, for tests and measurements.

#include "kvt_single.h"

#include "abi.hpp"
#include "lora_run.hpp"
#include "program_memory.hpp"
#include "program_ops.hpp"

using kvt::fail;

int32_t kvt_rms_norm(const float* x, const float* weight, float eps, int64_t rows, int64_t size,
                     float* out) {
  if (!x || !weight || !out || size < 1) return fail(KVT_E_ARGUMENT, "rms_norm");
  for (int64_t i = 0; i < rows; ++i)
    kvt::rms_norm_row(x + i * size, weight, eps, size, out + i * size);
  return KVT_OK;
}

int32_t kvt_rope_angles(const kvt_rope* rope, const float* factors, const int64_t* positions,
                        int64_t rows, float* cos, float* sin) {
  if (!rope || !positions || !cos || !sin || rope->num_rotated < 2 || rope->num_rotated % 2)
    return fail(KVT_E_ARGUMENT, "rope_angles");
  return kvt::guarded([&] {
    const kvt::Rope kind = kvt::make_rope(*rope, factors);
    for (int64_t i = 0; i < rows; ++i)
      kvt::rope_row(kind, positions[i], cos + i * kind.num_pairs, sin + i * kind.num_pairs);
    return KVT_OK;
  });
}

int32_t kvt_rope_rotate(float* x, int64_t rows, int64_t heads, int64_t head_dim, const float* cos,
                        const float* sin, int32_t num_rotated, int32_t style) {
  if (!x || !cos || !sin || num_rotated < 2 || num_rotated % 2 || num_rotated > head_dim)
    return fail(KVT_E_ARGUMENT, "rope_rotate");
  const int64_t num_pairs = num_rotated / 2;
  for (int64_t i = 0; i < rows * heads; ++i) {
    const int64_t first = i / heads * num_pairs;
    kvt::rotate_head(x + i * head_dim, cos + first, sin + first, num_pairs, style);
  }
  return KVT_OK;
}

int32_t kvt_gated(const float* gate, const float* up, int64_t count, int32_t activation,
                  float* out) {
  if (!gate || !up || !out || !kvt::is_gating(activation))
    return fail(KVT_E_ARGUMENT, "gated");
  std::copy(up, up + count, out);
  kvt::gate_values(out, gate, count, activation);
  return KVT_OK;
}

int32_t kvt_softcap(float* x, int64_t count, float cap) {
  if (!x || !(cap > 0.0f)) return fail(KVT_E_ARGUMENT, "softcap");
  kvt::softcap_values(x, count, cap);
  return KVT_OK;
}

static kvt::Matrix matrix_of(const kvt_matrix& matrix) {
  return kvt::Matrix{matrix.type, matrix.rows, matrix.cols, matrix.data};
}

int32_t kvt_dequantise_row(const kvt_matrix* matrix, int64_t row, float* out) {
  if (!matrix || !out) return fail(KVT_E_ARGUMENT, "dequantise_row");
  if (const char* fault = kvt::check_matrix(*matrix)) return fail(KVT_E_ARGUMENT, fault);
  if (row < 0 || row >= matrix->rows) return fail(KVT_E_ARGUMENT, "dequantise_row: no such row");
  kvt::dequantise_row(matrix_of(*matrix), row, out);
  return KVT_OK;
}

// Convert x [n, cols], then multiply: what an op without a norm does.
static int32_t run_products(kvt_team* team, const kvt::Product* products, int count, const float* x,
                            int64_t n) {
  uint32_t forms = 0;
  const int64_t cols = products[0].matrix->cols;
  for (int i = 0; i < count; ++i) {
    forms |= kvt::input_form(products[i].matrix->type);
    if (products[i].gate) forms |= kvt::input_form(products[i].gate->type);
  }
  const kvt::Region memory(static_cast<size_t>(kvt::input_bytes(n, cols, forms)));
  if (!memory.data()) throw std::bad_alloc();
  kvt::Input input;
  kvt::input_bind(input, memory.data(), n, cols, forms);
  auto stage = [&](kvt::Worker& worker) {
    for (int64_t i; (i = worker.take(n)) >= 0;) kvt::input_prepare(input, x, cols, i, 1);
    worker.barrier();
    kvt::multiply(worker, input, products, count);
  };
  return kvt::run_on(team, stage);
}

int32_t kvt_multiply(kvt_team* team, const kvt_matrix* matrix, const kvt_matrix* gate,
                     int32_t activation, const float* bias, const float* x, int64_t n,
                     int32_t accumulate, float* out) {
  if (!team || !matrix || !x || !out || n < 1) return fail(KVT_E_ARGUMENT, "multiply");
  if (const char* fault = kvt::check_matrix(*matrix)) return fail(KVT_E_ARGUMENT, fault);
  if (gate) {
    if (const char* fault = kvt::check_matrix(*gate)) return fail(KVT_E_ARGUMENT, fault);
    const bool fits = gate->rows == matrix->rows && gate->cols == matrix->cols &&
                      !accumulate && kvt::is_gating(activation);
    if (!fits) return fail(KVT_E_ARGUMENT, "multiply: a gate of another shape, or accumulated");
  }
  const kvt::Matrix up = matrix_of(*matrix);
  const kvt::Matrix gating = gate ? matrix_of(*gate) : up;
  const kvt::Product product{&up,  gate ? &gating : nullptr, out,       up.rows,
                             bias, accumulate != 0,          activation};
  return kvt::guarded([&] { return run_products(team, &product, 1, x, n); });
}

int32_t kvt_multiply_many(kvt_team* team, const kvt_matrix* matrices, int32_t num_matrices,
                          const float* x, int64_t n, float* const* out) {
  if (!team || !matrices || !x || !out || n < 1 || num_matrices < 1 || num_matrices > 3)
    return fail(KVT_E_ARGUMENT, "multiply_many");
  kvt::Matrix packed[3];
  kvt::Product products[3];
  for (int32_t i = 0; i < num_matrices; ++i) {
    if (const char* fault = kvt::check_matrix(matrices[i])) return fail(KVT_E_ARGUMENT, fault);
    if (matrices[i].cols != matrices[0].cols)
      return fail(KVT_E_ARGUMENT, "multiply_many: matrices with different inputs");
    packed[i] = matrix_of(matrices[i]);
    products[i] = kvt::plain_product(packed[i], nullptr, out[i]);
  }
  return kvt::guarded([&] { return run_products(team, products, num_matrices, x, n); });
}

static const char* check_place(const kvt_cache& cache, int64_t block, int64_t place) {
  if (const char* fault = kvt::check_cache(cache, 1)) return fault;
  if (block < 0 || block >= cache.num_blocks) return "cache: no such block";
  return place < 0 || place >= cache.block_size ? "cache: no such place" : nullptr;
}

static kvt::Cache cache_of(const kvt_cache& cache) {
  return kvt::Cache{kvt::layout_of(cache), cache.keys, cache.values};
}

int32_t kvt_cache_write(const kvt_cache* cache, int64_t block, int32_t place, const float* k,
                        const float* v) {
  if (!cache || !k || !v) return fail(KVT_E_ARGUMENT, "cache_write");
  if (const char* fault = check_place(*cache, block, place)) return fail(KVT_E_ARGUMENT, fault);
  kvt::cache_write(cache_of(*cache), block, place, k, v);
  return KVT_OK;
}

int32_t kvt_cache_copy(const kvt_cache* cache, int64_t source, int64_t target,
                       int32_t num_tokens) {
  if (!cache) return fail(KVT_E_ARGUMENT, "cache_copy");
  const char* fault = check_place(*cache, source, int64_t{num_tokens} - 1);
  if (!fault) fault = check_place(*cache, target, 0);
  if (fault) return fail(KVT_E_ARGUMENT, fault);
  if (source != target) kvt::cache_copy(cache_of(*cache), source, target, num_tokens);
  return KVT_OK;
}

static const char* check_views(const kvt_cache& cache, const kvt_chunk* chunks, int32_t num_chunks,
                               const int32_t* blocks, const int64_t* tables, int32_t window) {
  kvt_step step{};
  step.blocks = blocks;
  step.tables = tables;
  step.num_blocks = static_cast<int32_t>(tables[num_chunks]);
  const kvt::GroupLimits limit{cache.block_size, cache.num_blocks, window};
  for (int32_t i = 0; i < num_chunks; ++i) {
    if (chunks[i].num_rows < 1 || chunks[i].start < 0) return "attend: an empty chunk";
    if (const char* fault = kvt::check_table(step, limit, i, chunks[i])) return fault;
  }
  return nullptr;
}

int32_t kvt_attend(kvt_team* team, const kvt_cache* cache, const kvt_attention* attention,
                   const float* sinks, const kvt_chunk* chunks, int32_t num_chunks,
                   const int32_t* blocks, const int64_t* tables, const float* q, float* out) {
  if (!team || !cache || !attention || !chunks || num_chunks < 1 || !blocks || !tables || !q || !out)
    return fail(KVT_E_ARGUMENT, "attend: a pointer is null");
  const char* fault = kvt::check_cache(*cache, 1);
  if (!fault) fault = check_views(*cache, chunks, num_chunks, blocks, tables, attention->window);
  if (!fault && (attention->num_heads < 1 || attention->num_heads % cache->kv_heads))
    fault = "attend: heads are no multiple of kv heads";
  if (fault) return fail(KVT_E_ARGUMENT, fault);
  return kvt::guarded([&] {
    const kvt::Cache layer = cache_of(*cache);
    std::vector<kvt::ChunkView> views;
    int64_t row = 0, most = 0;
    for (int32_t i = 0; i < num_chunks; ++i) {
      views.push_back({row, chunks[i].num_rows, chunks[i].start, blocks + tables[i]});
      row += chunks[i].num_rows;
      most = std::max(most, chunks[i].start + chunks[i].num_rows);
    }
    const int64_t shared_bytes =
        kvt::attention_shared_bytes(layer.layout, attention->num_heads, row, most);
    const kvt::Region shared(static_cast<size_t>(shared_bytes));
    const int64_t worker_bytes = kvt::attention_worker_bytes(layer.layout, attention->num_heads);
    if (!shared.data() || !team->team.reserve_scratch(static_cast<size_t>(worker_bytes)))
      throw std::bad_alloc();
    const kvt::Attention spec{&layer,           q,     out,           views.data(), num_chunks,
                              attention->num_heads, attention->scale, attention->softcap,
                              attention->window, sinks, shared.data(), shared_bytes};
    auto stage = [&](kvt::Worker& worker) { kvt::attend(worker, spec); };
    return kvt::run_on(team, stage);
  });
}

int32_t kvt_low_rank_add(kvt_team* team, const kvt_low_rank* parts, const float* scales,
                         int32_t num_parts, const float* x, int64_t n, int64_t cols, int64_t rows,
                         float* out) {
  if (!team || !parts || !scales || num_parts < 1 || !x || !out || n < 1)
    return fail(KVT_E_ARGUMENT, "low_rank_add");
  return kvt::guarded([&] {
    std::vector<kvt::LowRank> changes;
    std::vector<kvt::LowRank*> places;
    changes.reserve(static_cast<size_t>(num_parts));
    for (int32_t i = 0; i < num_parts; ++i) {
      changes.push_back({parts[i].rank, rows, cols, parts[i].scaling, nullptr});
      places.push_back(&changes.back());
    }
    const kvt::Region memory = kvt::place_low_rank(places);
    if (!memory.data()) throw std::bad_alloc();
    std::vector<kvt::UseRows> uses;
    std::vector<std::vector<float>> inner;
    std::vector<kvt::Change> list;
    uses.reserve(changes.size());
    for (size_t i = 0; i < changes.size(); ++i) {
      kvt::fill_low_rank(changes[i], parts[i].a, parts[i].b);
      uses.push_back({nullptr, scales[i], {{0, n}}});
      inner.emplace_back(static_cast<size_t>(n * parts[i].rank));
      list.push_back({&changes[i], &uses[i], 0, inner[i].data()});
    }
    const kvt::Output output{0, out, rows};
    auto stage = [&](kvt::Worker& worker) { kvt::add_low_rank(worker, list, x, n, &output, 1); };
    return kvt::run_on(team, stage);
  });
}

int32_t kvt_sample_rows(kvt_team* team, const float* logits, int64_t vocab_size,
                        const kvt_step* step) {
  if (!team || !logits || !step || vocab_size < 1 || step->num_sampled < 1)
    return fail(KVT_E_ARGUMENT, "sample_rows");
  if (const char* fault = kvt::check_samples(*step, vocab_size)) return fail(KVT_E_ARGUMENT, fault);
  return kvt::guarded([&] {
    kvt::Sampler sampler;
    if (!kvt::make_sampler(sampler, vocab_size, step->num_sampled)) throw std::bad_alloc();
    auto stage = [&](kvt::Worker& worker) { kvt::sample_rows(worker, sampler, logits, *step); };
    return kvt::run_on(team, stage);
  });
}

double kvt_barrier_nanoseconds(kvt_team* team) {
  constexpr int kBarriers = 500;
  double best = 1e9;
  auto stage = [](kvt::Worker& worker) {
    for (int i = 0; i < kBarriers; ++i) worker.barrier();
  };
  for (int run = 0; run < 10; ++run) {
    const auto start = std::chrono::steady_clock::now();
    kvt::run_on(team, stage);
    const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
    best = std::min(best, time.count() / kBarriers);
  }
  return best;
}
