// PagePool: addresses of pages, counts of owners, and reuse.
#include "heed/state/page_pool_internal.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "tests/forks.h"

namespace heed {
namespace {

constexpr PageShape kShapes[] = {{1, 64, 1}, {1, 64, 10}, {2, 128, 3}, {16, 4160, 7}, {1, 5000000, 2}, {6, 1 << 20, 4}};

// Every unit of one page more than three slabs have keeps what is written to it.
TEST(PagePoolTest, UnitsAreApartAndAligned) {
  for (const PageShape& shape : kShapes) {
    PagePool pool(shape);
    EXPECT_EQ(pool.footprint(), shape.lanes * shape.unit_bytes);
    std::vector<std::byte*> units;
    for (int64_t i = 0; i < 3 * shape.slab_pages + 1; ++i) {
      std::byte* const page = pool.Take();
      EXPECT_FALSE(pool.IsShared(page));
      for (int64_t lane = 0; lane < shape.lanes; ++lane) {
        units.push_back(page + lane * shape.lane_bytes());
      }
    }
    const size_t bytes = static_cast<size_t>(shape.unit_bytes);
    for (size_t i = 0; i < units.size(); ++i) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(units[i]) % 64, 0u);
      std::memset(units[i], static_cast<int>(i), bytes);
    }
    for (size_t i = 0; i < units.size(); ++i) {
      const std::byte mark = static_cast<std::byte>(i);
      EXPECT_EQ(units[i][0], mark);
      EXPECT_EQ(std::memcmp(units[i], units[i] + 1, bytes - 1), 0);
    }
  }
}

TEST(PagePoolTest, ConsecutivePagesAreContiguous) {
  for (const PageShape& shape : kShapes) {
    PagePool pool(shape);
    const int64_t n = shape.slab_pages;
    std::vector<std::byte*> pages;
    const auto take = [&](int64_t count) {
      pages.clear();
      for (int64_t i = 0; i < count; ++i) pages.push_back(pool.Take());
    };
    take(n);
    for (size_t i = 1; i < pages.size(); ++i) {
      EXPECT_EQ(pages[i] - pages[i - 1], shape.unit_bytes);
    }
    const std::vector<std::byte*> first = pages;
    take(2 * n);
    // Pages that are released in any order are taken in the order of their addresses.
    std::vector<std::byte*> all = first;
    all.insert(all.end(), pages.begin(), pages.end());
    for (size_t i = 0, j = 0; i < all.size(); ++i, j = (j + 7) % all.size()) {
      while (all[j] == nullptr) j = (j + 1) % all.size();
      pool.Drop(std::exchange(all[j], nullptr));
    }
    EXPECT_EQ(pool.pages_in_use(), 0);
    take(3 * n);
    EXPECT_TRUE(std::is_sorted(pages.begin(), pages.end(), std::less<std::byte*>()));
    for (const std::byte* page : first) {
      EXPECT_EQ(std::count(pages.begin(), pages.end(), page), 1);
    }
  }
}

TEST(PagePoolTest, TheLastOwnerMakesAPageFree) {
  PagePool pool({2, 64, 3});
  std::byte* const page = pool.Take();
  pool.Keep(page);
  EXPECT_TRUE(pool.IsShared(page));
  pool.Drop(page);
  EXPECT_FALSE(pool.IsShared(page));
  EXPECT_EQ(pool.pages_in_use(), 1);
  EXPECT_NE(pool.Take(), page);
  pool.Drop(page);
  EXPECT_EQ(pool.pages_in_use(), 1);
  EXPECT_EQ(pool.Take(), page);
}

TEST(PagePoolTest, PagesThatComeBackAreUsedAgain) {
  PagePool pool({4, 1 << 18, 2});
  std::set<std::byte*> seen;
  for (int i = 0; i < 1000; ++i) {
    std::byte* const page = pool.Take();
    seen.insert(page);
    pool.Drop(page);
  }
  EXPECT_EQ(seen.size(), 1u);
}

TEST(PagePoolTest, MemoryIsLimited) {
  PagePool pool({1, 128, 5});
  pool.LimitPages(1);
  std::byte* const page = pool.Take();
  EXPECT_THROW(pool.Take(), std::bad_alloc);
  pool.Drop(page);
  EXPECT_EQ(pool.Take(), page);
}

TEST(PagePoolTest, AForkWhileAnotherThreadTakesPagesIsHarmless) {
  if (!kCanFork) GTEST_SKIP() << kWhyNoFork;
  PagePool pool({2, 64, 3});
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) pool.Drop(pool.Take());
  });
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(StatusOfFork([&] {
                pool.Drop(pool.Take());
                std::_Exit(pool.pages_in_use() <= 1 ? 7 : 8);
              }),
              7);
  }
  stop = true;
  busy.join();
}

TEST(PagePoolTest, ThreadsTakeDifferentPages) {
  constexpr PageShape kShape = {2, 256, 3};
  PagePool pool(kShape);
  std::byte* const shared = pool.Take();
  const auto work = [&](int mark) {
    for (int i = 0; i < 500; ++i) {
      std::byte* pages[5];  // pages of more than two slabs
      for (std::byte*& page : pages) {
        page = pool.Take();
        std::memset(page, mark, 256);
        std::memset(page + kShape.lane_bytes(), mark, 256);
      }
      pool.Keep(shared);
      pool.Drop(shared);
      for (std::byte* const page : pages) {
        for (const std::byte* unit : {page, page + kShape.lane_bytes()}) {
          EXPECT_EQ(std::count(unit, unit + 256, static_cast<std::byte>(mark)), 256);
        }
        pool.Drop(page);
      }
    }
  };
  std::thread one(work, 1), two(work, 2);
  one.join();
  two.join();
  EXPECT_EQ(pool.pages_in_use(), 1);
  EXPECT_FALSE(pool.IsShared(shared));
}

}  // namespace
}  // namespace heed
