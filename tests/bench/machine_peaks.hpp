// What the machine can do at most, for measurements to be compared with: reading memory, and the
// multiplication that integer kernels are made of.
#pragma once

#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <chrono>
#include <vector>

#include "../../kernels/cpu/lanes.hpp"
#include "../../kernels/cpu/team.hpp"

namespace bench {

using namespace kvt;

constexpr int64_t kMemory = int64_t{256} << 20;
constexpr double kTurn = 0.01;  // seconds of passes of one case before the next has its turn

inline double now() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

// The best time of one call in a turn.
template <class Pass>
double best(Pass pass) {
  double result = 1e9;
  const double end = now() + kTurn;
  for (int i = 0; i < 2 || now() < end; ++i) {
    const double start = now();
    pass();
    result = std::min(result, now() - start);
  }
  return result;
}

template <class Work>
void run(Team& team, Work& work) {
  team.run([](Worker& worker, void* argument) { (*static_cast<Work*>(argument))(worker); }, &work);
}

// One processor for each thread: the system is slow to notice that two share one.
inline void pin(Team& team) {
#if defined(__linux__)
  auto work = [](Worker& worker) {
    cpu_set_t processors;
    CPU_ZERO(&processors);
    CPU_SET(worker.id, &processors);
    sched_setaffinity(0, sizeof processors, &processors);
  };
  run(team, work);
#else
  (void)team;
#endif
}

// Bytes that are ordinary numbers as weights and as scales of all types.
inline void fill(const Region& memory) {
  uint32_t state = 1;
  for (size_t i = 0; i < memory.bytes(); i += 4) {
    state = state * 1664525u + 1013904223u;
    store(memory.as<uint8_t>() + i, 0x28282828u | ((state >> 7) & 0x07070707u));
  }
}

// Bytes per second that all threads read.
inline double read_peak(Team& team, const Region& memory) {
  constexpr int64_t kPass = 32 << 20, kPiece = 256 << 10, kBytes = sizeof(ByteLanes);
  static int64_t offset = 0;
  std::vector<int> results(static_cast<size_t>(64 * team.num_threads()));
  auto work = [&](Worker& worker) {
    ByteLanes sums[4] = {};
    for (int64_t i; (i = worker.take(kPass / kPiece)) >= 0;) {
      const auto* piece = memory.as<uint8_t>() + offset + i * kPiece;
      for (int64_t at = 0; at < kPiece; at += 4 * kBytes) {
        for (int64_t k = 0; k < 4; ++k) {
          __builtin_prefetch(piece + at + kBytes * k + 6144);
          sums[k] += load<ByteLanes>(piece + at + kBytes * k);
        }
      }
    }
    results[static_cast<size_t>(64 * worker.id)] = (sums[0] + sums[1] + sums[2] + sums[3])[0];
  };
  return kPass / best([&] {
    offset = (offset + kPass) % kMemory;
    run(team, work);
  });
}

// Multiply-accumulates of one call of multiply_only().
constexpr int64_t kTurns = 20000, kChains = 16;
constexpr int64_t kMacs = 64 * kTurns * kChains;

#if defined(__AVX512VNNI__)
// Not inlined where it would be called once: there the compiler keeps the sums in memory.
__attribute__((noinline)) inline int multiply_only() {
  const __m512i a = _mm512_set1_epi8(3);
  __m512i sums[kChains];
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) sums[i] = _mm512_setzero_si512();
  for (int64_t turn = 0; turn < kTurns; ++turn) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) {
      sums[i] = _mm512_dpbusd_epi32(sums[i], a, a);
      asm volatile("" : "+v"(sums[i]));
    }
  }
#pragma GCC unroll 16
  for (int i = 1; i < kChains; ++i) sums[0] = _mm512_add_epi32(sums[0], sums[i]);
  return _mm512_reduce_add_epi32(sums[0]);
}
#else
inline int multiply_only() { return 0; }  // no such instruction: a peak of no meaning
#endif

// Multiply-accumulates per second of the instruction that integer kernels are made of.
inline double multiply_peak(Team& team) {
  std::vector<int> results(static_cast<size_t>(64 * team.num_threads()));
  auto work = [&](Worker& worker) {
    results[static_cast<size_t>(64 * worker.id)] = multiply_only();
  };
  return static_cast<double>(kMacs * team.num_threads()) / best([&] { run(team, work); });
}

}  // namespace bench
