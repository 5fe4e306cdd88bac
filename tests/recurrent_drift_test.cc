// The growth of a recurrence's errors over a hundred thousand tokens.
#include <gtest/gtest.h>

#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include "heed/harness/case.h"
#include "heed/harness/drift.h"
#include "heed/ops/gated/gla/gla.h"

namespace heed {
namespace {

struct Problem {
  const OpEntry& op;
  std::string variant;
};

void PrintTo(const Problem& p, std::ostream* os) { *os << p.op.name << " " << p.variant; }

std::vector<Problem> Problems() {
  std::vector<Problem> problems;
  for (const OpEntry& op : AllOps()) {
    for (const std::string& variant : DriftVariants(op)) problems.push_back({op, variant});
  }
  return problems;
}

class RecurrentDrift : public testing::TestWithParam<Problem> {};

// The state is rounded every few tokens, with random signs: sqrt(T) roundings. This also holds for decays of 1 - 1e-6
// or 1 - 1e-8, which are all rounded in the same direction, because only their distance from 1 and the written values
// are rounded.
TEST_P(RecurrentDrift, ErrorsGrowNoFasterThanRoundingsAddUp) {
  constexpr double kRounding = 0x1p-24;
  Context ctx;
  const int64_t ends[] = {2048, 131072};
  const std::vector<double> errors = Drift(ctx, GetParam().op, GetParam().variant, 8, ends);
  ASSERT_EQ(errors.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    const auto T = static_cast<double>(ends[i]);
    EXPECT_LT(errors[i], kRounding * 5 * std::sqrt(T)) << ends[i];
    EXPECT_GT(errors[i], kRounding / 64) << "what was compared with what?";
  }
}

// Here the signs are not random: equal writes have equal roundings. A tile of four tokens is rounded once, which leaves
// a quarter of the roundings.
TEST(RecurrentDriftOfConstants, IsWithinTheBoundOfOrdinaryInputs) {
  constexpr int64_t T = 4096, kSize = 8;
  const auto last = [](auto zero, double log_decay) {
    using Element = decltype(zero);
    std::vector<Element> x(T * kSize, static_cast<Element>(0.3f)), o(x.size());
    std::vector<Element> g(x.size(), static_cast<Element>(static_cast<float>(log_decay)));
    const auto view = [](std::vector<Element>& rows) {
      return TensorView(rows.data(), DTypeOf<Element>::value, {1, T, 1, kSize});
    };
    Context ctx;
    gla::Forward(ctx, {{view(x), view(x), view(x), view(g)}, {}}, {}, {view(o), {}});
    return static_cast<double>(o.back());
  };
  for (const double log_decay : {-1e-4, -1e-3, -1e-2}) {
    const double want = last(double{}, log_decay);
    EXPECT_NEAR(last(float{}, log_decay), want, 2e-6 * want) << log_decay;
  }
}

INSTANTIATE_TEST_SUITE_P(AllRecurrences, RecurrentDrift, testing::ValuesIn(Problems()), [](const auto& test) {
  const std::string& variant = test.param.variant;
  return test.param.op.name + (variant.empty() ? "" : "_" + variant);
});

}  // namespace
}  // namespace heed
