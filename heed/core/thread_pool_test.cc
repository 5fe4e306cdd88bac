// The default executor through ParallelFor: every task runs once, whatever other threads run, also in a forked child
// and at exit.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <set>
#include <system_error>
#include <thread>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/os.h"
#include "tests/forks.h"

namespace heed {
namespace {

// Runs `num_tasks` tasks that each count themselves. True if each ran exactly once, by workers in range, none of which
// ran two tasks at once.
bool EveryTaskOnce(Context& ctx, int64_t num_tasks) {
  const size_t n = static_cast<size_t>(num_tasks);
  const auto counts = std::make_unique<std::atomic<int>[]>(n);
  const size_t workers = static_cast<size_t>(ctx.num_threads());
  const auto inside = std::make_unique<std::atomic<int>[]>(workers);
  std::atomic<bool> good{true};
  ctx.ParallelFor(num_tasks, [&](int64_t task, int worker) {
    if (worker < 0 || worker >= ctx.num_threads()) {
      good = false;
      return;
    }
    std::atomic<int>& mine = inside[static_cast<size_t>(worker)];
    if (mine.fetch_add(1) != 0) good = false;
    counts[static_cast<size_t>(task)].fetch_add(1);
    mine.fetch_sub(1);
  });
  for (size_t i = 0; i < n; ++i) good = good && counts[i] == 1;
  return good;
}

class ThreadPoolTest : public testing::TestWithParam<int> {};

TEST_P(ThreadPoolTest, EveryTaskRunsOnce) {
  Context ctx(GetParam());
  for (const int64_t num_tasks : {0, 1, 2, 3, 7, 8, 9, 1000}) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      ASSERT_TRUE(EveryTaskOnce(ctx, num_tasks)) << num_tasks;
    }
  }
}

TEST_P(ThreadPoolTest, WritesOfTasksAreSeenAfterwards) {
  Context ctx(GetParam());
  std::vector<int64_t> values(500);
  for (int64_t round = 0; round < 200; ++round) {
    ctx.ParallelFor(500, [&](int64_t task, int) { values[static_cast<size_t>(task)] += task + round; });
  }
  for (int64_t task = 0; task < 500; ++task) {
    ASSERT_EQ(values[static_cast<size_t>(task)], 200 * task + 199 * 100);
  }
}

TEST_P(ThreadPoolTest, NestedLoopsRunOnTheirCaller) {
  Context outer(GetParam());
  std::atomic<int> count{0};
  std::atomic<bool> same_thread{true};
  outer.ParallelFor(6, [&](int64_t, int) {
    Context inner(4);
    const auto self = std::this_thread::get_id();
    inner.ParallelFor(5, [&](int64_t, int) {
      if (GetParam() > 1 && std::this_thread::get_id() != self) {
        same_thread = false;
      }
      count.fetch_add(1);
    });
  });
  EXPECT_EQ(count, 30);
  EXPECT_TRUE(same_thread);
  EXPECT_TRUE(EveryTaskOnce(outer, 50)) << "the pool is free again";
}

TEST_P(ThreadPoolTest, SeveralCallersAtOnceEachGetTheirTasksDone) {
  std::vector<std::thread> callers;
  std::atomic<int> good{0};
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&] {
      Context ctx(GetParam());
      bool mine = true;
      for (int repeat = 0; repeat < 100; ++repeat) {
        mine = EveryTaskOnce(ctx, 20) && mine;
      }
      good += mine ? 1 : 0;
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(good, 3);
}

TEST_P(ThreadPoolTest, SleepsAndWakes) {
  Context ctx(GetParam());
  for (int repeat = 0; repeat < 5; ++repeat) {
    ASSERT_TRUE(EveryTaskOnce(ctx, 16));
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolTest, testing::Values(1, 2, 3, 8), testing::PrintToStringParamName());

TEST(ThreadPoolTest, WorkersReallyRunAtTheSameTime) {
  Context ctx(3);
  std::atomic<int> arrived{0};
  std::atomic<bool> all{true};
  ctx.ParallelFor(3, [&](int64_t, int) {  // each waits for the other two
    arrived.fetch_add(1);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (arrived < 3) {
      if (std::chrono::steady_clock::now() > end) {
        all = false;
        return;
      }
      std::this_thread::yield();
    }
  });
  EXPECT_TRUE(all);
}

// The number of threads of this process; 0 where the system does not say.
int NumThreads() {
  std::error_code error;
  int count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", error)) {
    count += task.path().empty() ? 0 : 1;
  }
  return count;
}

TEST(ThreadPoolTest, ManyWorkersAreNoMoreThreadsThanTheMachineRuns) {
  if (NumThreads() == 0) GTEST_SKIP() << "no /proc";
  Context ctx(1000);
  ASSERT_EQ(ctx.num_threads(), 1000);
  const int before = NumThreads();
  EXPECT_TRUE(EveryTaskOnce(ctx, 5000));
  EXPECT_LE(NumThreads(), before + std::max(8, os::NumUsableCpus()));
}

TEST(ThreadPoolTest, UnusedThreadsExitAndAreStartedAgain) {
  if (NumThreads() == 0) GTEST_SKIP() << "no /proc";
  Context few(2), many(8);
  EXPECT_TRUE(EveryTaskOnce(many, 100));
  const int at_most = NumThreads();
  EXPECT_GE(at_most, 8);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (NumThreads() > at_most - 6 && std::chrono::steady_clock::now() < end) {
    // The two threads that are needed all the time stay.
    few.ParallelFor(2, [](int64_t, int) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); });
  }
  EXPECT_EQ(NumThreads(), at_most - 6);
  EXPECT_TRUE(EveryTaskOnce(many, 100));
  EXPECT_EQ(NumThreads(), at_most);
}

TEST(ThreadPoolTest, AContextOfOneThreadStaysOnItsThread) {
  Context ctx(1);
  const auto self = std::this_thread::get_id();
  std::vector<int64_t> order;
  ctx.ParallelFor(10, [&](int64_t task, int worker) {
    EXPECT_EQ(worker, 0);
    EXPECT_EQ(std::this_thread::get_id(), self);
    order.push_back(task);
  });
  EXPECT_EQ(order, (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
}

// An executor that a host might bring: it runs its workers one after the other, in descending order.
struct Host {
  int calls = 0;
  std::set<int> workers;

  Executor executor() {
    return {this, [](void*) { return 5; },
            [](void* self, int num_workers, void (*body)(void*, int), void* argument) {
              Host& host = *static_cast<Host*>(self);
              ++host.calls;
              for (int w = num_workers; w-- > 0;) {
                host.workers.insert(w);
                body(argument, w);
              }
            }};
  }
};

TEST(ExecutorTest, AHostsOwnThreadsAreUsed) {
  Host host;
  Context ctx(host.executor());
  EXPECT_EQ(ctx.num_threads(), 5);
  EXPECT_TRUE(EveryTaskOnce(ctx, 100));
  EXPECT_EQ(host.calls, 1);
  EXPECT_EQ(host.workers, (std::set<int>{0, 1, 2, 3, 4}));
  EXPECT_TRUE(EveryTaskOnce(ctx, 2));
  EXPECT_EQ(host.calls, 2);
  EXPECT_TRUE(EveryTaskOnce(ctx, 1)) << "one task needs no host";
  EXPECT_EQ(host.calls, 2);
}

TEST(ExecutorTest, AHostThatRunsWorkerZeroAloneIsEnough) {
  Executor executor{nullptr, [](void*) { return 8; },
                    [](void*, int, void (*body)(void*, int), void* argument) { body(argument, 0); }};
  Context ctx(executor);
  EXPECT_TRUE(EveryTaskOnce(ctx, 100));
}

TEST(ForkTest, AChildHasAPoolOfItsOwnAndExitsCleanly) {
  if (!kCanFork) GTEST_SKIP() << kWhyNoFork;
  Context ctx(3);
  ASSERT_TRUE(EveryTaskOnce(ctx, 100));
  EXPECT_EQ(StatusOfFork([&] {
              bool good = EveryTaskOnce(ctx, 100);  // the parent's Context
              Context fresh(4);
              for (int i = 0; i < 50; ++i) good = EveryTaskOnce(fresh, 9) && good;
              const int64_t again = StatusOfFork([&] { std::exit(EveryTaskOnce(fresh, 50) ? 11 : 12); });
              std::exit(good && again == 11 ? 21 : 22);
            }),
            21);
  EXPECT_TRUE(EveryTaskOnce(ctx, 100)) << "the parent's pool still works";
}

TEST(ForkTest, AChildThatRunsNothingExitsCleanly) {
  if (!kCanFork) GTEST_SKIP() << kWhyNoFork;
  Context ctx(3);
  ASSERT_TRUE(EveryTaskOnce(ctx, 100));
  EXPECT_EQ(StatusOfFork([] { std::exit(7); }), 7);
}

TEST(ForkTest, AForkWhileAnotherThreadRunsAJobIsHarmless) {
  if (!kCanFork) GTEST_SKIP() << kWhyNoFork;
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    Context ctx(3);
    while (!stop) EveryTaskOnce(ctx, 50);
  });
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(StatusOfFork([] {
                Context ctx(3);
                std::_Exit(EveryTaskOnce(ctx, 100) ? 5 : 6);
              }),
              5);
  }
  stop = true;
  busy.join();
}

TEST(ForkTest, ExitWhileADetachedThreadRunsJobsDoesNotHang) {
  if (!kCanFork) GTEST_SKIP() << kWhyNoFork;
  for (int i = 0; i < 10; ++i) {
    ASSERT_EQ(StatusOfFork([] {
                static std::atomic<int> rounds{0};
                std::thread([] {
                  Context ctx(3);
                  for (;;) {
                    ctx.ParallelFor(20, [](int64_t, int) {});
                    rounds.fetch_add(1);
                  }
                }).detach();
                while (rounds < 100) std::this_thread::yield();
                std::exit(9);
              }),
              9);
  }
}

}  // namespace
}  // namespace heed
