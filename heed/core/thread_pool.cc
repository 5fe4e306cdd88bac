// The default executor: one small pool for the whole process.
//
// A job is published under a mutex. Threads wait for the next one by spinning for at most 50 us (jobs of one model step
// follow each other closely) and then by sleeping. The caller is worker 0. It waits for workers that have begun, not
// for late ones, and a thread that no job needs for a while ends.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/os.h"

namespace heed {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kSpin = std::chrono::microseconds(50);
constexpr auto kIdle = std::chrono::seconds(5);

// The maximal number of workers of a job: more than the CPUs would only share them. A few are allowed on every machine,
// so that errors between threads can show on small machines too. WASI starts no threads.
int MostWorkers() {
#if defined(__wasi__)
  constexpr int kFew = 1;
#else
  constexpr int kFew = 8;
#endif
  return std::max(kFew, os::NumUsableCpus());
}

class Pool {
 public:
  // Joins the threads unless a job still runs. At exit such a job belongs to a thread that nobody waits for, which must
  // neither hang nor lose its pool. Later jobs run on their callers alone.
  void Stop() {
    if (busy_.exchange(true, std::memory_order_acquire)) return;
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (Member& member : members_) {
      if (member.thread.joinable()) member.thread.join();
    }
    members_.clear();
  }

  // Returns false if another thread's job is running.
  bool TryRun(int num_workers, void (*body)(void*, int), void* argument) {
    if (busy_.exchange(true, std::memory_order_acquire)) return false;
    {
      std::lock_guard lock(mutex_);
      Grow(num_workers - 1);
      body_ = body;
      argument_ = argument;
      num_workers_ = num_workers;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    body(argument, 0);
    std::unique_lock lock(mutex_);
    num_workers_ = 0;  // a worker that comes now finds nothing to do
    // A wait without an end would require the libstdc++ of g++ 12 (GLIBCXX_3.4.30) and keep the wheel from
    // manylinux_2_34.
    while (!done_.wait_for(lock, kIdle, [&] { return running_ == 0; })) {
    }
    busy_.store(false, std::memory_order_release);
    return true;
  }

 private:
  // Member i is worker i + 1.
  struct Member {
    std::thread thread;
    bool here = false;
  };

  void Grow(int size) {
    if (size > static_cast<int>(members_.size())) size = std::min(size, MostWorkers() - 1);
    try {
      if (size > static_cast<int>(members_.size())) members_.resize(static_cast<size_t>(size));
      const uint64_t seen = generation_.load(std::memory_order_relaxed);
      for (int i = 0; i < size; ++i) {
        Member& member = members_[static_cast<size_t>(i)];
        if (member.here) continue;
        if (member.thread.joinable()) member.thread.join();  // its thread has ended
        member.thread = std::thread([this, i, seen] { Work(i, seen); });
        member.here = true;
      }
    } catch (const std::exception&) {
      // The system has no more threads: fewer workers give the same result.
    }
  }

  void Work(int i, uint64_t seen) {
    const int worker = i + 1;
    auto last_job = Clock::now();
    for (;;) {
      const auto give_up = Clock::now() + kSpin;
      while (generation_.load(std::memory_order_acquire) == seen && Clock::now() < give_up) {
        std::this_thread::yield();
      }
      std::unique_lock lock(mutex_);
      const bool called =
          wake_.wait_until(lock, last_job + kIdle, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
      if (stop_) return;
      seen = generation_.load(std::memory_order_relaxed);
      if (called && worker < num_workers_) {
        ++running_;
        const auto body = body_;
        void* const argument = argument_;
        lock.unlock();
        body(argument, worker);
        lock.lock();
        if (--running_ == 0) done_.notify_one();
        last_job = Clock::now();
      } else if (Clock::now() - last_job >= kIdle) {
        members_[static_cast<size_t>(i)].here = false;
        return;
      }
    }
  }

  std::atomic<bool> busy_{false};  // a job runs, maybe on this very thread
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::atomic<uint64_t> generation_{0};
  void (*body_)(void*, int) = nullptr;
  void* argument_ = nullptr;
  int num_workers_ = 0;  // workers of the job, 0 between jobs
  int running_ = 0;      // workers of the job that have begun and not ended
  bool stop_ = false;
  std::vector<Member> members_;
};

// The pool of this process. A forked child has none of its parent's threads: it abandons the inherited object, whose
// locks may be held for ever. For that reason this class has no lock either. A pool that was used is never freed, since
// a thread that outlives main may still use it.
class ProcessPool {
 public:
  ~ProcessPool() {
    Owned* const owned = owned_.load(std::memory_order_acquire);
    if (owned != nullptr && owned->process == os::ProcessId()) owned->pool.Stop();
  }

  Pool& Get() {
    const int64_t self = os::ProcessId();
    Owned* owned = owned_.load(std::memory_order_acquire);
    while (owned == nullptr || owned->process != self) {
      Owned* const mine = new Owned(self);
      if (owned_.compare_exchange_strong(owned, mine, std::memory_order_acq_rel)) {
        return mine->pool;
      }
      delete mine;  // another thread was faster
    }
    return owned->pool;
  }

 private:
  struct Owned {
    explicit Owned(int64_t id) : process(id) {}
    const int64_t process;
    Pool pool;
  };
  std::atomic<Owned*> owned_{nullptr};
};

constinit ProcessPool process_pool;

void RunOnPool(void*, int num_workers, void (*body)(void*, int), void* argument) {
  if (!process_pool.Get().TryRun(num_workers, body, argument)) body(argument, 0);
}

int PoolThreads(void*) { return os::NumUsableCpus(); }

}  // namespace

Executor DefaultExecutor() { return {nullptr, &PoolThreads, &RunOnPool}; }

}  // namespace heed
