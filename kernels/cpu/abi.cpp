// The C interface: the library itself, threads, memory.

#include "abi.hpp"
#include "features.hpp"
#include "program_run.hpp"

#ifndef KVT_SOURCE_DIGEST
#define KVT_SOURCE_DIGEST ""
#endif

int32_t kvt_abi_version(void) { return KVT_ABI_VERSION; }

const char* kvt_isa(void) {
#if defined(__AVX512VNNI__)
  return "avx512";
#elif defined(__AVX2__)
  return "avx2";
#else
  return "portable";
#endif
}

const char* kvt_digest(void) { return KVT_SOURCE_DIGEST; }

uint32_t kvt_features(void) { return kvt::machine_features(); }

const char* kvt_error_text(void) { return kvt::last_error; }

int64_t kvt_struct_bytes(int32_t which) {
  constexpr size_t sizes[] = {
      sizeof(kvt_matrix),  sizeof(kvt_vector),     sizeof(kvt_cache),    sizeof(kvt_rope),
      sizeof(kvt_attention), sizeof(kvt_op),       sizeof(kvt_model_desc), sizeof(kvt_low_rank),
      sizeof(kvt_chunk),   sizeof(kvt_copy),       sizeof(kvt_segment),  sizeof(kvt_use),
      sizeof(kvt_sample),  sizeof(kvt_step),       sizeof(kvt_state),    sizeof(kvt_recurrent)};
  constexpr auto count = static_cast<int32_t>(sizeof(sizes) / sizeof(sizes[0]));
  static_assert(count == KVT_STRUCT_RECURRENT + 1, "one size per KVT_STRUCT_");
  if (which < 0 || which >= count) return kvt::fail(KVT_E_ARGUMENT, "no such structure");
  return static_cast<int64_t>(sizes[which]);
}

int32_t kvt_team_new(int32_t num_threads, kvt_team** team) {
  if (!team || num_threads < 1 || num_threads > kvt::kMaxThreads)
    return kvt::fail(KVT_E_ARGUMENT, "team: number of threads");
  return kvt::guarded([&] {
    *team = new kvt_team{kvt::Team(num_threads)};
    return KVT_OK;
  });
}

void kvt_team_free(kvt_team* team) { delete team; }

void kvt_team_wake(kvt_team* team) {
  if (team) team->team.wake();
}

uint8_t* kvt_alloc(int64_t bytes) {
  if (bytes < 0) return nullptr;
  return reinterpret_cast<uint8_t*>(kvt::allocate(static_cast<size_t>(bytes)));
}

void kvt_free(uint8_t* memory, int64_t bytes) {
  kvt::release(reinterpret_cast<std::byte*>(memory), static_cast<size_t>(bytes));
}
