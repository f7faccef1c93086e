// What all functions of the C interface share: errors, and teams behind pointers.
#pragma once

#include <new>
#include <system_error>

#include "kvt_step.h"
#include "team.hpp"

struct kvt_team {
  kvt::Team team;
};

namespace kvt {

inline thread_local const char* last_error = "";

inline int32_t fail(int32_t code, const char* text) {
  last_error = text;
  return code;
}

// Run `body`, which returns a code; what it throws becomes one.
template <class Body>
int32_t guarded(Body body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return fail(KVT_E_MEMORY, "no memory");
  } catch (const std::system_error&) {
    return fail(KVT_E_MEMORY, "no more threads can be started");
  } catch (...) {
    return fail(KVT_E_ARGUMENT, "unexpected error");
  }
}

// Run `stage(worker)` on all threads of the team.
template <class Body>
int32_t run_on(kvt_team* team, Body& stage) {
  const Team::Stage call = [](Worker& worker, void* argument) {
    (*static_cast<Body*>(argument))(worker);
  };
  if (!team->team.run(call, &stage)) return fail(KVT_E_BUSY, "the team is running already");
  return KVT_OK;
}

}  // namespace kvt
