// Pages: where they lie, who owns them, and that they are used again.
#include "heed/state/page_pool_internal.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <set>
#include <thread>
#include <vector>

namespace heed {
namespace {

TEST(PagePoolTest, PagesAreApartAndAligned) {
  for (const int64_t bytes : {1, 64, 65, 1000, 65535, 65536, 300000, 5000000, 9000000}) {
    PagePool pool(bytes);
    EXPECT_GE(pool.footprint(), bytes + 64);
    const uintptr_t alignment = bytes < 65536 ? 64 : 4096;
    std::vector<uintptr_t> pages;
    for (int i = 0; i < 8; ++i) {
      std::byte* const page = pool.Take();
      const uintptr_t address = reinterpret_cast<uintptr_t>(page);
      EXPECT_EQ(address % alignment, 0u) << bytes;
      page[0] = page[bytes - 1] = std::byte{0xFF};
      EXPECT_FALSE(pool.IsShared(page));
      pages.push_back(address);
    }
    std::sort(pages.begin(), pages.end());
    for (size_t i = 1; i < pages.size(); ++i) {
      EXPECT_GE(pages[i] - pages[i - 1], static_cast<uintptr_t>(pool.footprint()));
    }
  }
}

TEST(PagePoolTest, TheLastOwnerMakesAPageFree) {
  PagePool pool(100);
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
  PagePool pool(1 << 20);
  std::set<std::byte*> seen;
  for (int i = 0; i < 1000; ++i) {
    std::byte* const page = pool.Take();
    seen.insert(page);
    pool.Drop(page);
  }
  EXPECT_EQ(seen.size(), 1u);
}

TEST(PagePoolTest, BeyondTheLimitThereIsNoMemory) {
  PagePool pool(100);
  pool.LimitPages(1);
  std::byte* const page = pool.Take();
  EXPECT_THROW(pool.Take(), std::bad_alloc);
  pool.Drop(page);
  EXPECT_EQ(pool.Take(), page);
}

TEST(PagePoolTest, ThreadsTakeDifferentPages) {
  PagePool pool(256);
  std::byte* const shared = pool.Take();
  const auto work = [&](int mark) {
    for (int i = 0; i < 2000; ++i) {
      std::byte* const page = pool.Take();
      std::memset(page, mark, 256);
      pool.Keep(shared);
      pool.Drop(shared);
      EXPECT_EQ(std::count(page, page + 256, static_cast<std::byte>(mark)), 256);
      pool.Drop(page);
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
