// ForkSafeMutex: the state of locks in a forked child that other threads held in the parent.
#include "heed/core/fork_safe_mutex.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <thread>

#include "tests/forks.h"

namespace heed {
namespace {

using std::chrono::milliseconds;

TEST(ForkSafeMutexTest, AChildHasNoReadersOfItsParent) {
  if (!kCanFork) GTEST_SKIP() << kWhyNoFork;
  ForkSafeMutex mutex;
  std::atomic<bool> reads{false}, stop{false};
  std::thread reader([&] {
    const std::shared_lock lock(mutex);
    reads = true;
    while (!stop) std::this_thread::sleep_for(milliseconds(1));
  });
  while (!reads) std::this_thread::yield();
  EXPECT_EQ(StatusOfFork([&] {
              const std::lock_guard lock(mutex);
              std::_Exit(3);
            }),
            3);
  stop = true;
  reader.join();
  const std::lock_guard lock(mutex);  // also in the parent
}

TEST(ForkSafeMutexTest, WhatItProtectsIsWholeInAChild) {
  if (!kCanFork) GTEST_SKIP() << kWhyNoFork;
  ForkSafeMutex inner, outer;
  int64_t a = 0, b = 0, c = 0;
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    while (!stop) {
      const std::lock_guard lock(outer);
      ++a;
      std::this_thread::sleep_for(milliseconds(1));
      const std::lock_guard also(inner);
      ++b;
      std::this_thread::sleep_for(milliseconds(1));
      ++c;
    }
  });
  for (int i = 0; i < 30; ++i) {
    EXPECT_EQ(StatusOfFork([&] {
                const std::lock_guard lock(outer);
                const std::lock_guard also(inner);
                std::_Exit(a == b && b == c ? 4 : 5);
              }),
              4);
  }
  stop = true;
  writer.join();
}

TEST(ForkSafeMutexTest, OthersMayComeAndGo) {
  if (!kCanFork) GTEST_SKIP() << kWhyNoFork;
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) {
      auto first = std::make_unique<ForkSafeMutex>();
      const auto second = std::make_unique<ForkSafeMutex>();
      first.reset();
    }
  });
  for (int i = 0; i < 30; ++i) {
    EXPECT_EQ(StatusOfFork([] {
                ForkSafeMutex mine;
                const std::lock_guard lock(mine);
                std::_Exit(6);
              }),
              6);
  }
  stop = true;
  busy.join();
}

}  // namespace
}  // namespace heed
