// The C interface: experts by themselves.

#include "abi.hpp"
#include "experts_stage.hpp"
#include "kvt_single.h"
#include "program_check.hpp"

static const char* check_call(const kvt_experts_call& call) {
  if (!call.stacks) return "experts: a pointer is null";
  for (int i = 0; i < 3; ++i) {
    if (const char* fault = kvt::check_matrix(call.stacks[i])) return fault;
  }
  return nullptr;
}

static kvt::Experts experts_of(const kvt_experts_call& call) {
  kvt::Matrix matrices[3];
  for (int i = 0; i < 3; ++i) {
    const kvt_matrix& stack = call.stacks[i];
    matrices[i] = {stack.type, stack.rows, stack.cols, stack.data, stack.stack};
  }
  return {matrices[0],
          matrices[1],
          matrices[2],
          matrices[0].stack,
          call.num_used,
          call.activation,
          {call.routing, call.selection_bias},
          {call.biases[0], call.biases[1], call.biases[2]}};
}

int32_t kvt_experts(kvt_team* team, const kvt_experts_call* call, const float* logits,
                    const float* x, int64_t n, const float* factors, float* out) {
  if (!team || !call || !logits || !x || !out || n < 1 || n > (1 << 20))
    return kvt::fail(KVT_E_ARGUMENT, "experts: a pointer is null, or no rows");
  if (const char* fault = check_call(*call)) return kvt::fail(KVT_E_ARGUMENT, fault);
  const kvt::Experts experts = experts_of(*call);
  if (const char* fault = kvt::check_stacks(experts, experts.gate.cols))
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
