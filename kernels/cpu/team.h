// Threads that share one operation: the caller, and helpers out of XLA's own pool.
//
// A decode step is some hundred operations of ten to a hundred microseconds each, and to wake a thread that sleeps takes as long. So a
// helper, once woken, stays for kStay after its last work and looks for more. The caller never waits for one to come: it works through the
// whole range itself if none does, so that a pool that is busy elsewhere costs time and never blocks.
//
// Each thread has a part of the range of its own, which it goes through from the front: memory that is read piece after piece is what the
// processor fetches ahead. One that is done takes pieces from the ends of the others' parts.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace diptych {

class Team {
 public:
  // body(first, last, fresh) for pieces of [0, items), each of `piece` items but the last; returns when all are done. `fresh`: it is the first
  // piece that this thread takes. The pool, XLA's, says its `num_threads`, and runs what it is given by `Schedule`.
  template <class Pool, class Body>
  static void Run(Pool& pool, int64_t items, int64_t piece, const Body& body) {
    State& state = Get();
    const int64_t pieces = (items + piece - 1) / piece;
    const int threads = static_cast<int>(std::min<int64_t>({pieces, Cores(), pool.num_threads(), kMost}));
    if (threads <= 1 || pieces > INT32_MAX || state.taken.exchange(true, std::memory_order_acquire)) {  // alone, or the helpers are taken
      if (items > 0) body(int64_t{0}, items, true);
      return;
    }
    Job job;
    job.call = +[](const void* body, int64_t first, int64_t last, bool fresh) { (*static_cast<const Body*>(body))(first, last, fresh); };
    job.body = &body, job.items = items, job.piece = piece, job.threads = threads;
    for (int thread = 0; thread < threads; ++thread) {
      job.parts[thread].left.store(Pack(pieces * thread / threads, pieces * (thread + 1) / threads), std::memory_order_relaxed);
    }
    state.job = &job;
    const uint64_t round = state.round.load(std::memory_order_relaxed);
    state.round.store(round + 1);
    for (int thread = 1; thread < threads; ++thread) {
      const uint64_t bit = uint64_t{1} << thread;
      if (!(state.awake.load() & bit) && !(state.awake.fetch_or(bit) & bit)) pool.Schedule([thread] { Help(thread); });
    }
    Work(job, 0);
    state.round.store(round + 2);
    // A helper that has seen this round is counted. One that takes long lost its processor to somebody: when this one sleeps, it may have ours.
    for (int turn = 0; state.inside.load() != 0; ++turn) {
      turn < kPatience ? _mm_pause() : std::this_thread::sleep_for(kNap);
    }
    state.taken.store(false, std::memory_order_release);
  }

 private:
  static constexpr auto kStay = std::chrono::microseconds(100);
  static constexpr int kPatience = 4000;  // turns of a loop, of some ten nanoseconds each
  static constexpr auto kNap = std::chrono::microseconds(20);
  static constexpr int64_t kMost = 64;     // threads

  struct alignas(64) Part {
    std::atomic<uint64_t> left;  // pieces: the first one that nobody has, and where the part ends
  };

  struct Job {
    void (*call)(const void*, int64_t, int64_t, bool);
    const void* body;
    int64_t items, piece;
    int threads;
    Part parts[kMost];
  };

  struct State {
    std::atomic<bool> taken{false};
    Job* job = nullptr;
    alignas(64) std::atomic<uint64_t> round{0};  // odd while there is a job
    alignas(64) std::atomic<uint64_t> awake{0};  // helpers that are, or are on their way, a bit each
    alignas(64) std::atomic<int> inside{0};      // that may hold a pointer to the job
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

  static uint64_t Pack(int64_t first, int64_t last) { return static_cast<uint64_t>(first) << 32 | static_cast<uint64_t>(last); }

  // A piece of a part: its first one, or where it is another thread's the last one; -1: none is left.
  static int64_t Take(Part& part, bool own) {
    uint64_t seen = part.left.load(std::memory_order_relaxed);
    for (;;) {
      const auto first = static_cast<int64_t>(seen >> 32), last = static_cast<int64_t>(seen & UINT32_MAX);
      if (first >= last) return -1;
      const uint64_t rest = own ? Pack(first + 1, last) : Pack(first, last - 1);
      if (part.left.compare_exchange_weak(seen, rest, std::memory_order_relaxed)) return own ? first : last - 1;
    }
  }

  static void Work(Job& job, int self) {
    bool fresh = true;
    for (int turn = 0; turn < job.threads; ++turn) {
      Part& part = job.parts[(self + turn) % job.threads];
      for (int64_t taken; (taken = Take(part, turn == 0)) >= 0; fresh = false) {
        job.call(job.body, taken * job.piece, std::min((taken + 1) * job.piece, job.items), fresh);
      }
    }
  }

  static void Help(int self) {
    State& state = Get();
    uint64_t done = 0;  // the last round that it was in
    auto until = std::chrono::steady_clock::now() + kStay;
    while (std::chrono::steady_clock::now() < until) {
      for (int turn = 0; turn < 32; ++turn) {
        const uint64_t round = state.round.load(std::memory_order_relaxed);
        if (round % 2 == 0 || round == done) {
          _mm_pause();
          continue;
        }
        state.inside.fetch_add(1);  // before it looks again: the caller ends the round first, and then looks at this count
        if (state.round.load() == round) {
          if (self < state.job->threads) Work(*state.job, self);
          until = std::chrono::steady_clock::now() + kStay;
        }
        state.inside.fetch_sub(1);
        done = round;
      }
    }
    state.awake.fetch_and(~(uint64_t{1} << self));
  }
};

}  // namespace diptych
