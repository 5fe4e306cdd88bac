// Fits of synthetic costs, predictions, and statistics of errors.
#include "heed/advise/cost_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace heed::advise {
namespace {

using testing::ElementsAre;
using testing::Key;

// A call of attention, with its time for a fixed cost per call, row, pair and flop.
Observation CallOf(double tokens, double channels) {
  const double pairs = tokens * tokens, flops = 4 * pairs * channels;
  return {{{"row", tokens}, {"pair", pairs}, {"flop", flops}}, 2e-6 + 3e-8 * tokens + 1.2e-10 * pairs + 9e-12 * flops};
}

TEST(CostModelTest, CostsAreRecovered) {
  std::vector<Observation> calls;
  for (const double tokens : {16, 64, 200, 512, 1024, 4096}) {
    for (const double channels : {32, 64, 128}) calls.push_back(CallOf(tokens, channels));
  }
  const Coefficients each = Fit(calls);
  EXPECT_NEAR(each.at("call"), 2e-6, 1e-12);
  EXPECT_NEAR(each.at("row"), 3e-8, 1e-13);
  EXPECT_NEAR(each.at("pair"), 1.2e-10, 1e-15);
  EXPECT_NEAR(each.at("flop"), 9e-12, 1e-17);
  const Observation other = CallOf(3000, 80);
  EXPECT_NEAR(Predict(each, other.load), other.seconds, 1e-9 * other.seconds);
}

TEST(CostModelTest, NoUnitCostsLessThanNothing) {
  // Time decreases with rows: the coefficient of rows is 0, and that of the call fits all three best.
  const std::vector<Observation> calls = {{{{"row", 1}}, 4}, {{{"row", 2}}, 2}, {{{"row", 4}}, 1}};
  const Coefficients each = Fit(calls);
  EXPECT_THAT(each, ElementsAre(Key("call")));
  // For 1 / 4, 1 / 2 and 1: sum / sum of squares.
  EXPECT_NEAR(each.at("call"), 1.75 / (1 / 16.0 + 1 / 4.0 + 1), 1e-12);
}

TEST(CostModelTest, ErrorsCountAsSharesOfTheTime) {
  // One call takes a thousand times as long as the other: the fit has the same relative error for both.
  const Coefficients each = Fit({{{}, 1e-6}, {{}, 1e-6}, {{{"flop", 1e6}}, 1e-3}, {{{"flop", 1e6}}, 1.2e-3}});
  const double brief = Predict(each, {}) / 1e-6, lengthy = Predict(each, {{"flop", 1e6}}) / 1.1e-3;
  EXPECT_NEAR(brief, 1, 1e-3);
  EXPECT_NEAR(lengthy, 1, 0.02);
}

TEST(CostModelTest, UnitsThatWereNotFittedCostNothing) {
  EXPECT_EQ(Predict({{"call", 1}, {"flop", 2}}, {{"flop", 3}, {"byte", 100}}), 7);
  EXPECT_EQ(Predict({}, {{"flop", 3}}), 0);
  EXPECT_EQ(Predict({{"call", 1}, {"flop", 2}}, {}), 1);
}

TEST(CostModelTest, AModelPredictsWorkThatItHasFitsFor) {
  CostModel model;
  model.fits[{"gla prefill", DType::kF32, 2}] = {{"call", 1e-6}, {"flop", 1e-9}};
  EXPECT_DOUBLE_EQ(*model.Predict({"gla prefill", DType::kF32, 2}, {{"flop", 1000}}), 2e-6);
  EXPECT_FALSE(model.Predict({"gla prefill", DType::kBF16, 2}, {}));
  EXPECT_FALSE(model.Predict({"gla prefill", DType::kF32, 1}, {}));
  EXPECT_FALSE(model.Predict({"gla decode", DType::kF32, 2}, {}));
}

TEST(CostModelTest, NineOfTenErrorsAreNoLarger) {
  std::vector<double> errors;
  for (int i = 10; i >= 1; --i) errors.push_back(0.05 * i);  // 0.05 to 0.5
  const PredictionErrors summary = Summarized(errors);
  EXPECT_EQ(summary.count, 10);
  EXPECT_DOUBLE_EQ(summary.median, 0.25);
  EXPECT_DOUBLE_EQ(summary.nine_of_ten, 0.45);
  EXPECT_DOUBLE_EQ(summary.share_within_goal, 0.4);
  EXPECT_DOUBLE_EQ(Summarized({0.3}).nine_of_ten, 0.3);
  EXPECT_TRUE(std::isnan(Summarized({}).median));
}

}  // namespace
}  // namespace heed::advise
