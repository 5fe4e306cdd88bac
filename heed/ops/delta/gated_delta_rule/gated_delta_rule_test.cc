// A property of the gated delta rule that comparison with its reference over short sequences cannot show.
#include "heed/ops/delta/gated_delta_rule/gated_delta_rule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "heed/harness/buffer.h"

namespace heed::gated_delta_rule {
namespace {

// A decay of less than a rounding of 1 changes the equilibrium of decay and writes by a hundred times the rounding
// errors of that many steps: each step must round the sum of the decayed state and the new term only once.
TEST(GatedDeltaRuleTest, DecaysBelowARoundingOf1AreNotLostOverManySteps) {
  constexpr double kDecay = -1e-8, kBeta = 1e-4, kValue = 1.25;
  const auto filled = [](std::vector<int64_t> sizes, double value) {
    return Buffer(DType::kF32, sizes).FillConstant(value);
  };
  Buffer k = filled({1, 1, 8}, 0);
  k.Set({0, 0, 3}, 1);
  const Buffer v = filled({1, 1, 8}, kValue), log_decay = filled({1, 1}, kDecay), beta = filled({1, 1}, kBeta);
  const Buffer S = filled({1, 1, 8, 8}, 1), o = filled({1, 1, 8}, 0);
  StepInputs in;
  in.q = in.k = k.view();
  in.v = v.view();
  in.log_decay = log_decay.view();
  in.beta = beta.view();
  Context ctx(1);
  double expected = 1;
  const double stored = GetElement(beta.view(), std::vector<int64_t>{0, 0});
  for (int t = 0; t < 60000; ++t) {
    Step(ctx, in, {}, {S.view()}, o.view());
    expected *= std::exp(kDecay);
    expected += stored * (kValue - expected);
  }
  EXPECT_NEAR(S.Get({0, 0, 3, 5}), expected, 2e-5 * expected);
  EXPECT_GT(std::abs(kValue - expected), 1e-4 * expected);  // otherwise the effect is too small to see
}

}  // namespace
}  // namespace heed::gated_delta_rule
