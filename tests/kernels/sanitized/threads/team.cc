// Operations of several callers on one team: every item is done once, by one thread, and each thread's first piece is told from the others.
// For ThreadSanitizer: items are plain numbers, so that two threads on one of them, or a caller that reads before all is done, are races.
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "team.h"

namespace {

class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Serve(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    for (std::thread& each : threads_) each.join();
  }
  int64_t num_threads() const { return static_cast<int64_t>(threads_.size()); }
  void Schedule(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_one();
  }

 private:
  void Serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return closed_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// How often this thread took pieces of which operation: `fresh` is told once.
thread_local const void* last_operation = nullptr;
thread_local int64_t last_number = -1;

int64_t Call(Pool& pool, int64_t number, std::mt19937& random) {
  const int64_t items = random() % 200, piece = 1 + random() % 9, pause = random() % 4 == 0;
  std::vector<int> done(items, 0);
  std::atomic<int64_t> threads{0};
  diptych::Team::Run(pool, items, piece, [&](int64_t first, int64_t last, bool fresh) {
    Require(first < last && last <= items, "a piece is not within the items");
    Require(fresh == !(last_operation == &done && last_number == number), "a thread's first piece is not told");
    last_operation = &done, last_number = number;
    threads += fresh;
    for (int64_t item = first; item < last; ++item) ++done[item];
    if (pause) std::this_thread::yield();
  });
  for (int each : done) Require(each == 1, "an item was done more than once, or not at all");
  return threads;
}

}  // namespace

int main(int, char** arguments) {
  const int64_t calls = std::atoll(arguments[1]);
  int64_t most = 0;
  {
    Pool pool(3);
    std::vector<std::thread> callers;
    std::vector<int64_t> threads(2, 0);
    for (int caller = 0; caller < 2; ++caller) {
      callers.emplace_back([&, caller] {
        std::mt19937 random(caller);
        for (int64_t number = 0; number < calls; ++number) {
          threads[caller] = std::max(threads[caller], Call(pool, 2 * number + caller, random));
          if (number % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));  // helpers leave
        }
      });
    }
    for (std::thread& each : callers) each.join();
    most = std::max(threads[0], threads[1]);
  }
  std::printf("%lld calls, %lld threads\n", static_cast<long long>(2 * calls), static_cast<long long>(most));
}
