// One step as the interpreter runs it: the caller's description, checked and spread out over rows.
#pragma once

#include "program.hpp"

namespace kvt {

struct RowRange {
  int64_t first, count;
};

// One adapter of a step and its rows, ascending.
struct UseRows {
  const kvt_adapter* adapter;
  float scale;
  std::vector<RowRange> ranges;
};

// Rows of a step, all of them or the sampled ones.
struct RowSet {
  int64_t num_rows = 0;
  std::vector<std::vector<ChunkView>> views;  // per group
  std::vector<UseRows> uses;                  // in the order of their changes
};

struct StepPlan {
  std::vector<int64_t> positions;     // [N]
  std::vector<int32_t> chunks;        // [N]: the chunk of each row
  std::vector<int64_t> sampled_rows;  // [M], ascending
  RowSet all, sampled;
};

// ---- checks: null, or what is wrong ------------------------------------------------------------

inline const char* check_rows(const kvt_model& model, const kvt_step& step) {
  if (step.num_rows < 1 || step.num_rows > model.max_rows) return "step: number of rows";
  if (!step.token_ids || !step.chunks || !step.tables || step.num_chunks < 1 || step.num_blocks < 0)
    return "step: token ids, chunks or tables are missing";
  for (int32_t i = 0; i < step.num_rows; ++i) {
    const int64_t token = step.token_ids[i];
    if (token < 0 || token >= model.vocab_size) return "step: a token that does not exist";
  }
  int64_t num_rows = 0, num_sampled = 0;
  for (int32_t i = 0; i < step.num_chunks; ++i) {
    const kvt_chunk& chunk = step.chunks[i];
    if (chunk.num_rows < 1 || chunk.start < 0 || chunk.start + chunk.num_rows > model.max_context)
      return "step: a chunk is empty or beyond the context";
    num_rows += chunk.num_rows;
    num_sampled += chunk.is_sampled != 0;
  }
  if (num_rows != step.num_rows) return "step: chunks do not cover the rows";
  if (num_sampled != step.num_sampled || num_sampled > model.max_sampled)
    return "step: number of sampled rows";
  return nullptr;
}

inline const char* check_table(const kvt_step& step, const GroupLimits& limit, int64_t index,
                               const kvt_chunk& chunk) {
  const int64_t first = step.tables[index], last = step.tables[index + 1];
  if (first < 0 || last < first || last > step.num_blocks) return "step: borders of block tables";
  if (limit.num_slots) {
    const bool exists = last > first && step.blocks[first] >= 0 &&
                        step.blocks[first] < limit.num_slots;
    return exists ? nullptr : "step: a slot that does not exist";
  }
  if (limit.block_size == 0) return nullptr;
  const int64_t end = chunk.start + chunk.num_rows;
  const int64_t oldest = limit.window ? std::max<int64_t>(0, chunk.start - limit.window + 1) : 0;
  const int64_t num_needed = (end + limit.block_size - 1) / limit.block_size;
  if (last - first < num_needed) return "step: a block table does not cover its chunk";
  for (int64_t i = oldest / limit.block_size; i < num_needed; ++i) {
    const int64_t block = step.blocks[first + i];
    if (block < 0 || block >= limit.num_blocks) return "step: a block that does not exist";
  }
  return nullptr;
}

inline const char* check_blocks(const kvt_step& step, const std::vector<GroupLimits>& limits) {
  if (!step.blocks && step.num_blocks) return "step: block tables are missing";
  for (size_t group = 0; group < limits.size(); ++group) {
    for (int32_t i = 0; i < step.num_chunks; ++i) {
      const int64_t index = static_cast<int64_t>(group) * step.num_chunks + i;
      if (const char* fault = check_table(step, limits[group], index, step.chunks[i])) return fault;
    }
  }
  return nullptr;
}

inline const char* check_copies(const kvt_step& step, const std::vector<GroupLimits>& limits) {
  if (step.num_copies < 0 || (step.num_copies && !step.copies)) return "step: copies are missing";
  for (int32_t i = 0; i < step.num_copies; ++i) {
    const kvt_copy& copy = step.copies[i];
    if (copy.group < 0 || static_cast<size_t>(copy.group) >= limits.size())
      return "step: a copy in a group that does not exist";
    const GroupLimits& limit = limits[static_cast<size_t>(copy.group)];
    const int64_t count = std::max(limit.num_blocks, limit.num_slots);
    const bool exist =
        copy.source >= 0 && copy.source < count && copy.target >= 0 && copy.target < count;
    if (!exist) return "step: a copy of a block or slot that does not exist";
    if (limit.num_slots) continue;
    if (copy.num_tokens < 1 || copy.num_tokens > limit.block_size)
      return "step: a copy of too many tokens";
  }
  return nullptr;
}

inline const char* check_use(const kvt_model& model, const kvt_step& step, const kvt_use& use) {
  if (!use.adapter || use.adapter->model != &model) return "step: an adapter of another model";
  if (use.first_segment < 0 || use.num_segments < 0 ||
      use.num_segments > step.num_segments - use.first_segment)
    return "step: segments of an adapter";
  int64_t end = 0;
  for (int32_t i = 0; i < use.num_segments; ++i) {
    const kvt_segment& segment = step.segments[use.first_segment + i];
    if (segment.first_chunk < end || segment.num_chunks < 1 ||
        segment.num_chunks > step.num_chunks - segment.first_chunk)
      return "step: a segment is out of order or beyond the chunks";
    end = segment.first_chunk + segment.num_chunks;
  }
  return nullptr;
}

inline const char* check_uses(const kvt_model& model, const kvt_step& step) {
  if (step.num_uses < 0 || step.num_segments < 0) return "step: number of adapters";
  if ((step.num_uses && !step.uses) || (step.num_segments && !step.segments))
    return "step: adapters are missing";
  for (int32_t i = 0; i < step.num_uses; ++i) {
    if (const char* fault = check_use(model, step, step.uses[i])) return fault;
  }
  return nullptr;
}

inline const char* check_samples(const kvt_step& step, int64_t vocab_size) {
  if (step.num_sampled < 0 || (step.num_sampled && !step.samples)) return "step: samples are missing";
  for (int32_t i = 0; i < step.num_sampled; ++i) {
    const int32_t num_top = step.samples[i].num_top;
    if (num_top < 0 || num_top > vocab_size) return "step: num_top";
    if (num_top && (!step.top_ids || !step.top_logits || num_top > step.top_stride))
      return "step: no room for the best tokens";
  }
  return nullptr;
}

inline const char* check_step(const kvt_model& model, const kvt_step& step) {
  const char* fault = check_rows(model, step);
  if (!fault) fault = check_blocks(step, model.groups);
  if (!fault) fault = check_copies(step, model.groups);
  if (!fault) fault = check_uses(model, step);
  return fault ? fault : check_samples(step, model.vocab_size);
}

// ---- the plan ----------------------------------------------------------------------------------

inline void plan_rows(const kvt_model& model, const kvt_step& step, StepPlan& plan) {
  const size_t num_groups = model.groups.size();
  plan.all.views.resize(num_groups);
  plan.sampled.views.resize(num_groups);
  int64_t row = 0;
  for (int32_t i = 0; i < step.num_chunks; ++i) {
    const kvt_chunk& chunk = step.chunks[i];
    const int64_t last = chunk.start + chunk.num_rows - 1;
    const auto place = static_cast<int64_t>(plan.sampled_rows.size());
    for (size_t group = 0; group < num_groups; ++group) {
      const auto index = static_cast<int64_t>(group) * step.num_chunks + i;
      const int32_t* blocks = step.blocks + step.tables[index];
      plan.all.views[group].push_back(ChunkView{row, chunk.num_rows, chunk.start, blocks});
      if (chunk.is_sampled) plan.sampled.views[group].push_back(ChunkView{place, 1, last, blocks});
    }
    for (int64_t k = 0; k < chunk.num_rows; ++k) {
      plan.positions.push_back(chunk.start + k);
      plan.chunks.push_back(i);
    }
    row += chunk.num_rows;
    if (chunk.is_sampled) plan.sampled_rows.push_back(row - 1);
  }
  plan.all.num_rows = step.num_rows;
  plan.sampled.num_rows = step.num_sampled;
}

inline void add_range(UseRows& use, int64_t first, int64_t count) {
  if (count > 0) use.ranges.push_back(RowRange{first, count});
}

inline void plan_uses(const kvt_step& step, StepPlan& plan) {
  for (int32_t i = 0; i < step.num_uses; ++i) {
    const kvt_use& use = step.uses[i];
    UseRows all{use.adapter, use.scale, {}}, sampled{use.adapter, use.scale, {}};
    for (int32_t k = 0; k < use.num_segments; ++k) {
      const kvt_segment& segment = step.segments[use.first_segment + k];
      const auto first = static_cast<size_t>(segment.first_chunk);
      const auto last = first + static_cast<size_t>(segment.num_chunks) - 1;
      const std::vector<ChunkView>& views = plan.all.views[0];
      const int64_t start = views[first].first_row;
      const int64_t end = views[last].first_row + views[last].num_rows;
      add_range(all, start, end - start);
      const auto begin = plan.sampled_rows.begin();
      const int64_t before = std::lower_bound(begin, plan.sampled_rows.end(), start) - begin;
      const int64_t behind = std::lower_bound(begin, plan.sampled_rows.end(), end) - begin;
      add_range(sampled, before, behind - before);
    }
    plan.all.uses.push_back(std::move(all));
    plan.sampled.uses.push_back(std::move(sampled));
  }
}

inline StepPlan make_plan(const kvt_model& model, const kvt_step& step) {
  StepPlan plan;
  plan.positions.reserve(static_cast<size_t>(step.num_rows));
  plan.chunks.reserve(static_cast<size_t>(step.num_rows));
  plan_rows(model, step, plan);
  plan_uses(step, plan);
  return plan;
}

// Room for the inner values of all adapters of one op; false where there is no memory.
inline bool reserve_inner(kvt_model& model, const kvt_step& step) {
  int64_t ranks = 0;
  for (int32_t i = 0; i < step.num_uses; ++i) ranks += step.uses[i].adapter->most_ranks;
  const auto bytes = static_cast<size_t>(4 * ranks * step.num_rows);
  if (bytes > model.memory.inner.bytes()) model.memory.inner = Region(bytes);
  return bytes == 0 || model.memory.inner.data();
}

}  // namespace kvt
