// A hundred thousand tokens: how far errors of a recurrence may grow.
#include <gtest/gtest.h>

#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include "heed/harness/case.h"
#include "heed/harness/drift.h"

namespace heed {
namespace {

struct Problem {
  OpEntry op;
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
// decays of 1 - 1e-6, all rounded alike, as what is rounded is their distance from 1.
TEST_P(RecurrentDrift, ErrorsGrowNoFasterThanRoundingsAddUp) {
  constexpr double kRounding = 0x1p-24;
  Context ctx;
  const int64_t ends[] = {2048, 131072};
  const std::vector<double> errors =
      Drift(ctx, GetParam().op, GetParam().variant, 8, ends);
  ASSERT_EQ(errors.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    const auto T = static_cast<double>(ends[i]);
    EXPECT_LT(errors[i], kRounding * 5 * std::sqrt(T)) << ends[i];
    EXPECT_GT(errors[i], kRounding / 64) << "what was compared with what?";
  }
}

INSTANTIATE_TEST_SUITE_P(AllRecurrences, RecurrentDrift, testing::ValuesIn(Problems()),
                         [](const auto& test) {
                           const std::string& variant = test.param.variant;
                           return test.param.op.name + (variant.empty() ? "" : "_" + variant);
                         });

}  // namespace
}  // namespace heed
