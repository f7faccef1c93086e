// The C interface: recurrent layers by themselves.

#include "abi.hpp"
#include "kvt_single.h"
#include "program_check_recurrent.hpp"

int64_t kvt_state_values(const kvt_recurrent* recurrent) {
  if (const char* fault = kvt::check_sizes(*recurrent)) return kvt::fail(KVT_E_ARGUMENT, fault);
  kvt_recurrent bare = *recurrent;
  bare.conv = bare.conv_bias = bare.dt_bias = bare.decay = bare.skip = bare.norm = -1;
  return kvt::mixer_of(bare, nullptr).state_values();
}

int32_t kvt_mix(kvt_team* team, const kvt_recurrent* recurrent, const kvt_vector* vectors,
                int32_t num_vectors, const kvt_state* state, float eps, const kvt_chunk* chunks,
                const int32_t* slots, int32_t num_chunks, float* mixed, float* out) {
  if (!team || !recurrent || !vectors || !state || !chunks || !slots || !mixed || !out)
    return kvt::fail(KVT_E_ARGUMENT, "mix: a pointer is null");
  const char* fault = kvt::check_sizes(*recurrent);
  if (!fault) fault = kvt::check_vectors(*recurrent, vectors, num_vectors);
  if (!fault) fault = kvt::check_state(*state, state->group + 1);
  if (fault) return kvt::fail(KVT_E_ARGUMENT, fault);
  return kvt::guarded([&] {
    const kvt::Mixer mixer = kvt::mixer_of(*recurrent, vectors);
    if (state->stride < mixer.state_values())
      return kvt::fail(KVT_E_ARGUMENT, "mix: a state is too small");
    std::vector<kvt::ChunkView> views;
    int64_t row = 0;
    for (int32_t i = 0; i < num_chunks; ++i) {
      if (chunks[i].num_rows < 1 || chunks[i].start < 0 || slots[i] < 0 ||
          slots[i] >= state->num_slots)
        return kvt::fail(KVT_E_ARGUMENT, "mix: a chunk or its slot");
      views.push_back({row, chunks[i].num_rows, chunks[i].start, slots + i});
      row += chunks[i].num_rows;
    }
    if (!team->team.reserve_scratch(static_cast<size_t>(kvt::mix_scratch(mixer))))
      throw std::bad_alloc();
    const kvt::Mixing mixing{&mixer,     state->data, state->stride, eps, views.data(),
                             num_chunks, row,         mixed,         out};
    auto stage = [&](kvt::Worker& worker) { kvt::mix(worker, mixing); };
    return kvt::run_on(team, stage);
  });
}
