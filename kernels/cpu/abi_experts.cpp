// The C interface: experts by themselves.

#include "abi.hpp"
#include "experts_stage.hpp"
#include "kvt_single.h"
#include "program_check.hpp"

int32_t kvt_experts(kvt_team* team, const kvt_matrix* stacks, int32_t num_used, int32_t activation,
                    const float* logits, const float* x, int64_t n, const float* factors,
                    float* out) {
  if (!team || !stacks || !logits || !x || !out || n < 1 || n > (1 << 20))
    return kvt::fail(KVT_E_ARGUMENT, "experts: a pointer is null, or no rows");
  kvt::Matrix matrices[3];
  for (int i = 0; i < 3; ++i) {
    if (const char* fault = kvt::check_matrix(stacks[i])) return kvt::fail(KVT_E_ARGUMENT, fault);
    matrices[i] = {stacks[i].type, stacks[i].rows, stacks[i].cols, stacks[i].data, stacks[i].stack};
  }
  const kvt::Experts experts{matrices[0],       matrices[1], matrices[2],
                             matrices[0].stack, num_used,    activation};
  if (const char* fault = kvt::check_stacks(experts, matrices[0].cols))
    return kvt::fail(KVT_E_ARGUMENT, fault);
  return kvt::guarded([&] {
    const kvt::Region memory(static_cast<size_t>(kvt::experts_bytes(experts, n)));
    const auto scratch = static_cast<size_t>(kvt::experts_worker_bytes(experts, n));
    if (!memory.data() || !team->team.reserve_scratch(scratch)) throw std::bad_alloc();
    kvt::ExpertsRun run{&experts, {}, x, n, out, factors};
    kvt::experts_bind(experts, n, memory.data(), &run.memory);
    std::copy(logits, logits + n * experts.num_experts, run.memory.logits);
    auto stage = [&](kvt::Worker& worker) { kvt::apply_experts(worker, run); };
    return kvt::run_on(team, stage);
  });
}
