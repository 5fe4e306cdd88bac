// RingKVCache: the tokens that it keeps, when it releases the others, and the lengths to which it can be trimmed.
#include "heed/state/ring_kv_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/state/cache_model_case.h"

namespace heed {
namespace {

using testing::ElementsAre;

using List = std::vector<int64_t>;

struct Pair {
  explicit Pair(const RingKVCache::Options& options) : cache(options), model(options) {}

  void Append(const List& counts) { AppendRandom(random, cache, model, counts); }
  void Trim(const List& lengths) {
    cache.Trim(lengths);
    model.Trim(lengths);
  }
  std::string Difference() const { return heed::Difference(cache.view(), model); }
  int64_t pages() const { return cache.nbytes() / page_bytes; }

  RingKVCache cache;
  CacheModel model;
  Random random{7};
  int64_t page_bytes = 2 * 64 * 4 * 4;  // dim 4, f32
};

TEST(RingKVCacheTest, OptionsComeBack) {
  const RingKVCache cache(
      {.batch = 2, .heads = 3, .dim = 4, .value_dim = 5, .window = 6, .sink_tokens = 7, .dtype = DType::kBF16});
  const RingKVCache::Options o = cache.options();
  EXPECT_EQ(cache.kind(), CacheKind::kRing);
  EXPECT_EQ(o.batch, 2);
  EXPECT_EQ(o.heads, 3);
  EXPECT_EQ(o.dim, 4);
  EXPECT_EQ(o.value_dim, 5);
  EXPECT_EQ(o.window, 6);
  EXPECT_EQ(o.sink_tokens, 7);
  EXPECT_EQ(o.dtype, DType::kBF16);
  EXPECT_EQ(cache.view().page_tokens, 64);
  EXPECT_THAT(cache.view().first_kept, ElementsAre(0, 0));
}

TEST(RingKVCacheTest, EveryAppendReleasesPagesBeforeItsFirstWindow) {
  Pair pair({.batch = 2, .dim = 4, .window = 10});
  pair.Append({3, 200});
  EXPECT_THAT(pair.cache.view().first_kept, ElementsAre(0, 0));
  EXPECT_EQ(pair.pages(), 1 + 4);
  pair.Append({300, 1});
  EXPECT_THAT(pair.cache.view().first_kept, ElementsAre(0, 191));
  EXPECT_EQ(pair.pages(), 5 + 2);  // [128, 201)
  pair.Append({1, 0});             // nothing new
  EXPECT_THAT(pair.cache.view().first_kept, ElementsAre(294, 192));
  EXPECT_EQ(pair.pages(), 1 + 1);
  EXPECT_EQ(pair.cache.view().pages[0][3], nullptr);
  EXPECT_EQ(pair.cache.view().pages[1][2], nullptr);
  EXPECT_EQ(pair.Difference(), "");
}

TEST(RingKVCacheTest, AWindowOfOneKeepsTheNewRowsAlone) {
  Pair pair({.dim = 4, .window = 1});
  pair.Append({64});
  pair.Append({64});
  EXPECT_THAT(pair.cache.view().first_kept, ElementsAre(64));
  EXPECT_EQ(pair.pages(), 1);
  pair.Trim({64});
  EXPECT_EQ(pair.pages(), 0);
  pair.Append({1});
  EXPECT_EQ(pair.Difference(), "");
}

TEST(RingKVCacheTest, PagesWithSinksStay) {
  for (const int64_t sinks : {1, 64, 65, 128}) {
    Pair pair({.dim = 4, .window = 10, .sink_tokens = sinks});
    for (int i = 0; i < 600; ++i) pair.Append({1});
    const int64_t sink_pages = (sinks + 63) / 64;
    EXPECT_EQ(pair.pages(), sink_pages + 1);  // the sinks, and [576, 600) with the window
    EXPECT_EQ(pair.Difference(), "");
  }
}

TEST(RingKVCacheTest, TheLargestWindowsAndSinksKeepEverything) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  for (const auto& [window, sinks] : {std::pair{kMax, int64_t{0}}, {1, kMax}, {kMax, kMax}}) {
    Pair pair({.dim = 4, .window = window, .sink_tokens = sinks});
    for (int i = 0; i < 3; ++i) pair.Append({100});
    EXPECT_EQ(pair.pages(), 5);
    EXPECT_EQ(pair.Difference(), "");
    pair.Trim({7});
    EXPECT_EQ(pair.Difference(), "");
  }
}

TEST(RingKVCacheTest, ManyTokensTakeNoMoreThanTheWindow) {
  Pair pair({.dim = 4, .window = 100, .sink_tokens = 4});
  for (int i = 0; i < 5000; ++i) {
    pair.Append({i % 3 + 1});
    ASSERT_LE(pair.pages(), 4);
  }
  EXPECT_EQ(pair.Difference(), "");
}

TEST(RingKVCacheTest, TheLastAppendCanBeUndone) {
  Pair pair({.dim = 4, .window = 10});
  pair.Append({100});
  pair.Append({150});
  for (const int64_t length : {200, 120, 100}) {
    pair.Trim({length});
    EXPECT_THAT(pair.cache.appended(), ElementsAre(length - 100));
    EXPECT_THAT(pair.cache.view().first_kept, ElementsAre(91));
    EXPECT_EQ(pair.Difference(), "");
  }
  EXPECT_THROW(pair.cache.Trim(List{99}), InvalidArgument);
  pair.Append({300});
  EXPECT_THAT(pair.cache.view().first_kept, ElementsAre(91));
  EXPECT_EQ(pair.Difference(), "");
}

TEST(RingKVCacheTest, WhileNothingIsGoneEverythingCanBeTrimmed) {
  Pair pair({.dim = 4, .window = 100, .sink_tokens = 4});
  pair.Append({90});
  pair.Append({10});
  EXPECT_THAT(pair.cache.view().first_kept, ElementsAre(0));
  pair.Trim({50});
  EXPECT_THAT(pair.cache.appended(), ElementsAre(0));
  pair.Append({53});
  pair.Append({50});
  EXPECT_THAT(pair.cache.view().first_kept, ElementsAre(4));  // a value within the sinks: no token is released
  pair.Trim({30});
  EXPECT_EQ(pair.Difference(), "");
}

TEST(RingKVCacheTest, TheSinksAreABeginningToReturnTo) {
  for (const int64_t length : {70, 64, 20, 0}) {
    Pair pair({.dim = 4, .window = 10, .sink_tokens = 70});
    pair.Append({500});
    pair.Append({1});
    EXPECT_THAT(pair.cache.view().first_kept, ElementsAre(491));
    pair.Trim({length});
    EXPECT_THAT(pair.cache.view().first_kept, ElementsAre(length));
    pair.Append({300});
    pair.Append({1});
    EXPECT_EQ(pair.Difference(), "");
  }
}

TEST(RingKVCacheTest, AForkKeepsPagesThatItsOriginReleases) {
  Pair pair({.batch = 2, .dim = 4, .window = 10});
  pair.Append({200, 100});
  const RingKVCache fork = pair.cache.Fork();
  const CacheModel before = pair.model;
  const int64_t bytes = fork.nbytes();
  pair.Append({100, 100});
  pair.cache.Reorder(List{1, 1});
  pair.model.Reorder(List{1, 1});
  pair.Append({100, 1});
  EXPECT_EQ(fork.nbytes(), bytes);
  EXPECT_EQ(Difference(fork.view(), before), "");
  EXPECT_EQ(pair.Difference(), "");
}

}  // namespace
}  // namespace heed
