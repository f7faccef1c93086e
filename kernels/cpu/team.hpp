// The thread pool. All threads run one function together and meet at barriers (SPMD).
//
// 1. The thread that calls run() is worker 0; the others belong to the team.
// 2. Who waits spins for a moment, then sleeps: an idle core is what the system gives to a thread
//    that waits for one, be it this team's or the one that sends answers.
// 3. Work is taken item by item, so a thread that the system holds up delays others by one item
//    at most; no result may depend on who computes an item.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "memory.hpp"

namespace kvt {

class Team;

constexpr size_t kLine = 64;              // bytes that caches move as one
constexpr size_t kMinScratch = 8u << 20;  // bytes per worker
constexpr int kMaxThreads = 1024;

// One thread's view of the team.
struct Worker {
  Team& team;
  int id;
  int num_threads;
  std::byte* scratch;  // this thread's alone, aligned to 64 bytes, at least kMinScratch
  size_t scratch_bytes;

  // Next item of this stage in [0, count), each given to one thread, or -1 when none is left.
  int64_t take(int64_t count);
  // Wait until all threads are here; what they wrote is visible to all. Starts a new count.
  void barrier();
};

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Team {
 public:
  using Stage = void (*)(Worker&, void* argument);

  // Throws std::bad_alloc or std::system_error when memory or threads are not to be had.
  explicit Team(int num_threads) {
    workers_.reserve(static_cast<size_t>(num_threads));
    for (int id = 0; id < num_threads; ++id) {
      workers_.push_back(Worker{*this, id, num_threads, nullptr, 0});
    }
    if (!reserve_scratch(kMinScratch)) throw std::bad_alloc();
    try {
      for (int id = 1; id < num_threads; ++id) threads_.emplace_back(&Team::serve, this, id);
    } catch (...) {
      stop();
      throw;
    }
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  ~Team() { stop(); }

  // Make every worker's scratch at least so large; what was in it is lost. Between runs only.
  // False, with nothing changed, where there is no memory.
  bool reserve_scratch(size_t bytes) {
    if (bytes <= workers_[0].scratch_bytes) return true;
    const size_t each = round_up(bytes, kHugePage);
    Region scratch(each * workers_.size());
    if (!scratch.data()) return false;
    scratch_ = std::move(scratch);
    for (Worker& worker : workers_) {
      worker.scratch = scratch_.data() + each * static_cast<size_t>(worker.id);
      worker.scratch_bytes = each;
    }
    return true;
  }

  int num_threads() const { return static_cast<int>(workers_.size()); }

  // Run `stage` on all threads; returns when all are through. False, with nothing run, when
  // another thread's run() is not finished: that is the caller's fault.
  bool run(Stage stage, void* argument) {
    if (is_busy_.exchange(true, std::memory_order_acquire)) return false;
    stage_ = stage;
    argument_ = argument;
    announce();
    stage(workers_[0], argument);
    barrier();
    is_busy_.store(false, std::memory_order_release);
    return true;
  }

  // Let sleeping threads begin to spin, since a run is about to come.
  void wake() {
    if (num_parked_.load(std::memory_order_seq_cst) == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    ++wakes_;
    condition_.notify_all();
  }

  int64_t take(int64_t count) {
    const int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
    return item < count ? item : -1;
  }

  void barrier() {
    const uint32_t generation = generation_.load(std::memory_order_relaxed);
    const auto size = static_cast<uint32_t>(workers_.size());
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 != size) return await(generation);
    arrived_.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_seq_cst);
    if (num_waiting_.load(std::memory_order_seq_cst) == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    passed_.notify_all();
  }

 private:
  static constexpr int kBarrierSpins = 1500;  // some 20 to 80 microseconds
  static constexpr int kSpinsPerLook = 64;    // between looks at the clock
  static constexpr std::chrono::microseconds kSpinTime{20};  // between runs

  static std::chrono::steady_clock::time_point now() { return std::chrono::steady_clock::now(); }

  // Return when the barrier of `generation` has passed. Who waits for more than an item's time waits
  // for a thread that the system has taken from its core: while this one sleeps, it goes on here.
  // Yielding does not bring it here, and took a third more time beside 16 streams.
  void await(uint32_t generation) {
    const auto is_passed = [&] {
      return generation_.load(std::memory_order_seq_cst) != generation;
    };
    for (int i = 0; i < kBarrierSpins; ++i) {
      if (is_passed()) return;
      pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    num_waiting_.fetch_add(1, std::memory_order_seq_cst);
    passed_.wait(lock, is_passed);
    num_waiting_.fetch_sub(1, std::memory_order_seq_cst);
  }

  // Sequentially consistent with the count of sleepers, so that either the sleeper sees the new
  // number before it sleeps, or it is seen and woken.
  void announce() {
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    if (num_parked_.load(std::memory_order_seq_cst) == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    condition_.notify_all();
  }

  void serve(int id) {
    uint32_t seen = 0;
    while (true) {
      await_epoch(seen);
      ++seen;
      if (is_stopping_.load(std::memory_order_acquire)) return;
      stage_(workers_[static_cast<size_t>(id)], argument_);
      barrier();
    }
  }

  // Return when the epoch is no longer `seen`.
  void await_epoch(uint32_t seen) {
    while (!spin(seen)) {
      std::unique_lock<std::mutex> lock(mutex_);
      const uint64_t wakes = wakes_;
      num_parked_.fetch_add(1, std::memory_order_seq_cst);
      condition_.wait(lock, [&] {
        return wakes_ != wakes || epoch_.load(std::memory_order_seq_cst) != seen;
      });
      num_parked_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  // Whether the epoch changed within the time to spin. To stay longer, even giving way, sends the
  // event loop to the core of the thread that decides the next step: steps began 0.3 ms later.
  bool spin(uint32_t seen) {
    const auto end = now() + kSpinTime;
    do {
      for (int i = 0; i < kSpinsPerLook; ++i) {
        if (epoch_.load(std::memory_order_acquire) != seen) return true;
        pause();
      }
    } while (now() < end);
    return false;
  }

  void stop() {
    is_stopping_.store(true, std::memory_order_release);
    announce();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  // Each on a line of its own: they are written by different threads all the time.
  alignas(kLine) std::atomic<int64_t> next_{0};
  alignas(kLine) std::atomic<uint32_t> arrived_{0};
  alignas(kLine) std::atomic<uint32_t> generation_{0};
  alignas(kLine) std::atomic<uint32_t> epoch_{0};  // number of the newest run
  alignas(kLine) std::atomic<int> num_parked_{0};   // asleep between runs
  std::atomic<int> num_waiting_{0};                 // asleep at a barrier
  std::atomic<bool> is_stopping_{false};
  std::atomic<bool> is_busy_{false};
  std::mutex mutex_;
  std::condition_variable condition_;  // a run comes
  std::condition_variable passed_;     // a barrier has passed
  uint64_t wakes_ = 0;  // guarded by mutex_
  Stage stage_ = nullptr;
  void* argument_ = nullptr;
  Region scratch_;
  std::vector<Worker> workers_;
  std::vector<std::thread> threads_;
};

inline int64_t Worker::take(int64_t count) { return team.take(count); }
inline void Worker::barrier() { team.barrier(); }

}  // namespace kvt
