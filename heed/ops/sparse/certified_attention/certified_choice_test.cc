// The selection of blocks is that of a greedy search, block by block, for all masses.
#include "heed/ops/sparse/certified_attention/certified_choice_internal.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "heed/harness/buffer.h"

namespace heed::certified_attention {
namespace {

struct Masses {
  std::vector<float> upper, lower;
  RowMasses view() const { return {upper.data(), lower.data(), static_cast<int64_t>(upper.size())}; }
};

// Drops blocks one by one, the smallest first, ties to the higher index.
std::vector<uint8_t> Greedy(const Masses& m, double epsilon, std::vector<uint8_t> kept) {
  std::vector<size_t> order;
  std::vector<uint8_t> next = kept;
  for (size_t i = 0; i < kept.size(); ++i) {
    if (kept[i] == 0 && std::isfinite(m.upper[i])) order.push_back(i);
    next[i] = 1;
  }
  std::ranges::sort(order,
                    [&](size_t a, size_t b) { return m.upper[a] != m.upper[b] ? m.upper[a] < m.upper[b] : a > b; });
  for (const size_t i : order) {
    next[i] = 0;
    if (static_cast<double>(BoundOf(m.view(), next.data())) <= epsilon * (1 - 1e-6)) continue;
    next[i] = 1;
    break;
  }
  return next;
}

TEST(CertifiedChoice, IsThatOfAGreedySearch) {
  int64_t different = 0, all = 0;
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    Random random(seed);
    const auto n = static_cast<size_t>(random.Integer(1, 200));
    const double spread = random.Pick({0.0, 0.01, 1.0, 5.0, 30.0, 80.0}), width = random.Pick({0.0, 0.1, 2.0});
    Masses m;
    std::vector<uint8_t> kept(n);
    for (size_t i = 0; i < n; ++i) {
      const double x = random.Chance(0.2) ? 0 : -spread * random.Uniform();
      m.upper.push_back(static_cast<float>(std::exp(x)));
      m.lower.push_back(static_cast<float>(std::exp(x - width)));
      if (random.Chance(0.01)) m.upper.back() = std::numeric_limits<float>::infinity(), m.lower.back() = 0;
      kept[i] = random.Chance(0.1) ? 1 : 0;
    }
    const double epsilon = random.Pick({1e-5, 0.02, 0.3, 0.9});
    const std::vector<uint8_t> expected = Greedy(m, epsilon, kept);
    std::vector<char> memory(static_cast<size_t>(Chooser::Bytes(static_cast<int64_t>(n)) + 64));
    void* at = memory.data();
    size_t room = memory.size();
    Chooser chooser(std::align(64, 1, at, room), static_cast<int64_t>(n));
    chooser.Keep(m.view(), epsilon, kept.data());
    EXPECT_LE(static_cast<double>(BoundOf(m.view(), kept.data())), epsilon) << seed;
    // Within a bin the order equals the greedy search's; across bins sums are added in another order, so rounding may
    // differ.
    for (size_t i = 0; i < n; ++i) different += kept[i] != expected[i] ? 1 : 0;
    all += static_cast<int64_t>(n);
    const auto count = [](const std::vector<uint8_t>& x) { return std::ranges::count(x, 1); };
    EXPECT_NEAR(static_cast<double>(count(kept)), static_cast<double>(count(expected)), 1) << seed;
  }
  EXPECT_LE(different, all / 1000) << "of " << all;
}

TEST(CertifiedChoice, OfEqualsTheLowerIndexStays) {
  Masses m = {std::vector<float>(100, 1.0f), std::vector<float>(100, 1.0f)};
  std::vector<uint8_t> kept(100);
  std::vector<char> memory(static_cast<size_t>(Chooser::Bytes(100)));
  Chooser(memory.data(), 100).Keep(m.view(), 0.25, kept.data());
  for (size_t i = 0; i < 100; ++i)
    EXPECT_EQ(kept[i], i < 76 ? 1 : 0) << i;  // 24 of 100: a bound of 25 % would be rounded up
}

}  // namespace
}  // namespace heed::certified_attention
