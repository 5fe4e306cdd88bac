// A hundred thousand tokens: how far errors of a recurrence may grow.
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

// The state is rounded every few tokens, with random signs: sqrt(T) roundings. So it is with
// decays of 1 - 1e-6 or 1 - 1e-8, all rounded alike, as what is rounded is their distance
// from 1 and what is written with it.
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

// Without random signs: where all that is written is alike, so are its roundings. A tile of
// four tokens is rounded once, so that a quarter of them is left.
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
    gla::Forward(ctx, {.q = view(x), .k = view(x), .v = view(x), .log_decay = view(g), .initial = {}}, {},
                 {.o = view(o), .final = {}});
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
