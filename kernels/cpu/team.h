// Threads that share one operation: the caller, and helpers out of XLA's own pool.
//
// A decode step is some hundred operations of ten to a hundred microseconds each, and to wake a thread that sleeps takes as long. So a
// helper, once woken, stays for kStay after its last work and looks for more. The caller never waits for one to come: it works through the
// whole range itself if none does, so that a pool that is busy elsewhere costs time and never blocks.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace diptych {

class Team {
 public:
  // body(first, last) for pieces of [0, items), each of `piece` items but the last; returns when all are done.
  template <class Body>
  static void Run(xla::ffi::ThreadPool& pool, int64_t items, int64_t piece, const Body& body) {
    State& state = Get();
    const int64_t pieces = (items + piece - 1) / piece;
    const int threads = static_cast<int>(std::min<int64_t>({pieces, Cores(), pool.num_threads()}));
    if (threads <= 1 || state.taken.exchange(true, std::memory_order_acquire)) {  // alone, or another operation has the helpers
      if (items > 0) body(int64_t{0}, items);
      return;
    }
    Job job{+[](const void* body, int64_t first, int64_t last) { (*static_cast<const Body*>(body))(first, last); }, &body, items, piece};
    state.job.store(&job);
    for (int here = state.helpers.load(); here < threads - 1; here = state.helpers.load()) {
      if (state.helpers.compare_exchange_strong(here, here + 1)) pool.Schedule([] { Help(); });
    }
    Work(job);
    state.job.store(nullptr);
    for (int turn = 0; state.inside.load() != 0; ++turn) {  // a helper that has read `job` is counted
      _mm_pause();
      if (turn > kPatience) sched_yield();
    }
    state.taken.store(false, std::memory_order_release);
  }

 private:
  static constexpr auto kStay = std::chrono::microseconds(100);
  static constexpr int kPatience = 20000;  // turns of a loop, a few hundred microseconds

  struct Job {
    void (*call)(const void*, int64_t, int64_t);
    const void* body;
    int64_t items, piece;
    std::atomic<int64_t> next{0};
  };

  struct State {
    std::atomic<bool> taken{false};
    alignas(64) std::atomic<Job*> job{nullptr};
    alignas(64) std::atomic<int> helpers{0};  // that are awake, or on their way
    alignas(64) std::atomic<int> inside{0};   // that may hold a pointer to `job`
  };

  static State& Get() {
    static State state;
    return state;
  }

  static int Cores() {
    static const int cores = [] {
      cpu_set_t set;
      return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : static_cast<int>(std::thread::hardware_concurrency());
    }();
    return cores;
  }

  static void Work(Job& job) {
    for (int64_t first; (first = job.next.fetch_add(job.piece, std::memory_order_relaxed)) < job.items;) {
      job.call(job.body, first, std::min(first + job.piece, job.items));
    }
  }

  static void Help() {
    State& state = Get();
    auto until = std::chrono::steady_clock::now() + kStay;
    while (std::chrono::steady_clock::now() < until) {
      for (int turn = 0; turn < 32; ++turn) {
        if (state.job.load(std::memory_order_relaxed) == nullptr) {
          _mm_pause();
          continue;
        }
        state.inside.fetch_add(1);  // before the pointer is read again: the caller takes it away first, and then looks at this count
        Job* job = state.job.load();
        const bool worked = job != nullptr && job->next.load(std::memory_order_relaxed) < job->items;
        if (worked) Work(*job);
        state.inside.fetch_sub(1);
        if (worked) until = std::chrono::steady_clock::now() + kStay;
      }
    }
    state.helpers.fetch_sub(1);
  }
};

}  // namespace diptych
