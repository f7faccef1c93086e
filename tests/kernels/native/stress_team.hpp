// The pool under load: work shared out, plain memory handed over at barriers, sleep, wake, end.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "team.hpp"

namespace stress {

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

// Each phase reads what other threads wrote in the one before, without atomics: a barrier that lets
// somebody through early is a race for the thread sanitizer and a wrong sum for everybody else.
struct Relay {
  std::vector<int64_t> cells;
  int num_phases;
};

inline void relay(kvt::Worker& worker, void* argument) {
  auto& relay = *static_cast<Relay*>(argument);
  const auto size = static_cast<int64_t>(relay.cells.size() / 2);
  for (int phase = 0; phase < relay.num_phases; ++phase) {
    const int64_t* from = relay.cells.data() + phase % 2 * size;
    int64_t* to = relay.cells.data() + (phase + 1) % 2 * size;
    for (int64_t i; (i = worker.take(size)) >= 0;) to[i] = from[i] + from[(i + 1) % size];
    worker.scratch[worker.scratch_bytes - 1] = std::byte{1};
    worker.barrier();
  }
}

inline std::vector<int64_t> expected_relay(std::vector<int64_t> cells, int num_phases) {
  for (int phase = 0; phase < num_phases; ++phase) {
    std::vector<int64_t> next(cells.size());
    for (size_t i = 0; i < cells.size(); ++i) next[i] = cells[i] + cells[(i + 1) % cells.size()];
    cells = next;
  }
  return cells;
}

inline void test_runs(int num_threads, std::mt19937& random) {
  kvt::Team team(num_threads);
  for (int run = 0; run < 60; ++run) {
    const size_t size = 1 + random() % 40;
    const int num_phases = 2 * static_cast<int>(random() % 8);
    std::vector<int64_t> start(size);
    std::iota(start.begin(), start.end(), 1);
    Relay work{start, num_phases};
    work.cells.resize(2 * size);
    require(team.run(relay, &work), "a run");
    work.cells.resize(size);
    require(work.cells == expected_relay(start, num_phases), "what a run computes");
    // Sometimes the others have gone to sleep, sometimes they spin, sometimes they are in between.
    if (run % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    if (run % 3 == 0) team.wake();
  }
}

// One thread's run is refused while another's goes on.
inline void test_busy() {
  kvt::Team team(2);
  const kvt::Team::Stage stage = [](kvt::Worker& worker, void* argument) {
    if (worker.id != 0) return;
    const kvt::Team::Stage nothing = [](kvt::Worker&, void*) {};
    require(!static_cast<kvt::Team*>(argument)->run(nothing, nullptr), "a run within a run");
  };
  require(team.run(stage, &team), "the outer run");
}

inline void test_ends() {
  for (int i = 0; i < 30; ++i) {
    kvt::Team team(1 + i % 4);
    if (i % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(i * 20));
    if (i % 2 == 0) team.wake();
  }
}

// One thread comes late to each barrier, so late that the others sleep.
inline void test_late() {
  kvt::Team team(3);
  int64_t count = 0;
  const kvt::Team::Stage stage = [](kvt::Worker& worker, void* argument) {
    for (int phase = 0; phase < 6; ++phase) {
      if (worker.id == phase % 3) {
        std::this_thread::sleep_for(std::chrono::microseconds(1500));
        ++*static_cast<int64_t*>(argument);
      }
      worker.barrier();
    }
  };
  for (int run = 0; run < 5; ++run) require(team.run(stage, &count), "a run with late threads");
  require(count == 30, "what late threads do");
}

inline void test_team() {
  std::mt19937 random(7);
  for (int num_threads = 1; num_threads <= 4; ++num_threads) test_runs(num_threads, random);
  test_busy();
  test_late();
  test_ends();
}

}  // namespace stress
