// Selection of a row's best blocks against sorting, on every SIMD target.
#include "heed/patterns/top_blocks_internal.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "heed/core/dispatch.h"

namespace heed::patterns {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

int64_t Choose(const TopBlocks& top, std::vector<float>& scores, int64_t n, int64_t count,
               const std::vector<int64_t>& always, int32_t* chosen) {
  return top.f32(scores.data(), n, count, always, chosen);
}
int64_t Choose(const TopBlocks& top, std::vector<double>& scores, int64_t n, int64_t count,
               const std::vector<int64_t>& always, int32_t* chosen) {
  return top.f64(scores.data(), n, count, always, chosen);
}

template <class T>
std::vector<int32_t> Sorted(const std::vector<T>& scores, int64_t count, const std::vector<int64_t>& always) {
  std::set<int64_t> kept(always.begin(), always.end());
  std::vector<int64_t> others;
  for (int64_t i = 0; i < std::ssize(scores); ++i) {
    if (!kept.contains(i)) others.push_back(i);
  }
  const auto score = [&](int64_t i) {
    const T x = scores[static_cast<size_t>(i)];
    return std::isnan(x) ? -std::numeric_limits<T>::infinity() : x;
  };
  std::ranges::stable_sort(others, [&](int64_t a, int64_t b) { return score(a) > score(b); });
  for (int64_t i = 0; i < count && i < std::ssize(others); ++i) kept.insert(others[static_cast<size_t>(i)]);
  return {kept.begin(), kept.end()};
}

// Scores of several kinds: spread, equal, both zeros, infinite, NaN, subnormal.
template <class T>
T RandomScore(std::mt19937_64& random, int kind) {
  const double x = std::normal_distribution<double>()(random);
  switch (kind) {
    case 0: return static_cast<T>(x);
    case 1: return static_cast<T>(std::round(2 * x));
    case 2: return static_cast<T>(std::round(x) * 0.0);
    case 3: {
      const double all[] = {kInfinity, -kInfinity, std::nan(""), x, 1e30 * x, -0.0, 0.0};
      return static_cast<T>(all[random() % 7]);
    }
    case 4: return static_cast<T>(x) * std::numeric_limits<T>::denorm_min();
    default: return static_cast<T>(x * std::exp2(static_cast<double>(random() % 100)));
  }
}

template <class T>
void ComparesWithSorting() {
  for (const std::string& target : AvailableTargets()) {
    SCOPED_TRACE(target);
    Context ctx(1);
    ctx.set_isa(target);
    const TopBlocks top = TopBlocksFor(ctx);
    std::mt19937_64 random(17);
    for (int trial = 0; trial < 4000; ++trial) {
      const auto n = static_cast<int64_t>(random() % 150),
                 count = static_cast<int64_t>(random() % 20) * (1 + trial % 9 / 8 * 10);
      std::vector<T> scores;
      for (int64_t i = 0; i < n; ++i) scores.push_back(RandomScore<T>(random, trial % 6));
      std::vector<int64_t> always;
      for (size_t i = random() % 4; i > 0 && n > 0; --i)
        always.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(n)));
      std::vector<T> room(scores);
      room.resize(static_cast<size_t>(ScoreRoom(n)), T{7});
      std::vector<int32_t> chosen(static_cast<size_t>(ScoreRoom(n)));
      chosen.resize(static_cast<size_t>(Choose(top, room, n, count, always, chosen.data())));
      ASSERT_EQ(chosen, Sorted(scores, count, always)) << "trial " << trial << ", " << count << " of " << n;
    }
  }
}

TEST(TopBlocksTest, TheChoiceIsThatOfASortOfF32) { ComparesWithSorting<float>(); }
TEST(TopBlocksTest, TheChoiceIsThatOfASortOfF64) { ComparesWithSorting<double>(); }

TEST(TopBlocksTest, EqualScoresGoToTheLowerBlocks) {
  Context ctx(1);
  std::vector<float> scores(64, 1.0f);
  scores[40] = 2;
  std::vector<int32_t> chosen(64);
  chosen.resize(
      static_cast<size_t>(TopBlocksFor(ctx).f32(scores.data(), 64, 4, std::vector<int64_t>{1, 50, 1}, chosen.data())));
  EXPECT_EQ(chosen, (std::vector<int32_t>{0, 1, 2, 3, 40, 50}));
}

}  // namespace
}  // namespace heed::patterns
