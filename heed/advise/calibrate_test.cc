// Calibration: fits of artificial measurements, held-out calls, and one real measurement of a mechanism.
#include "heed/advise/calibrate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

namespace heed::advise {
namespace {

using testing::ElementsAre;
using testing::Pair;

const Work kWork = {"gla prefill", DType::kF32, 2}, kOther = {"choice by mean", DType::kF32, 2};

TEST(CalibrateTest, WhatIsHeldOutIsNotFittedButPredicted) {
  const std::vector<Measured> measured = {
      {"a", false, {{kWork, {{"flop", 1e6}}}}, {1e-3}},
      {"b", false, {{kWork, {{"flop", 4e6}}}}, {4e-3}},
      {"far", true, {{kWork, {{"flop", 2e6}}}}, {4e-3}},  // twice the prediction
      {"near", true, {{kWork, {{"flop", 3e6}}}}, {2.5e-3}},
  };
  const Calibration calibration = FitOf(measured);
  EXPECT_EQ(calibration.calls, 4);
  ASSERT_EQ(calibration.model.fits.size(), 1u);
  EXPECT_NEAR(calibration.model.fits.at(kWork).at("flop"), 1e-9, 1e-15);
  ASSERT_EQ(calibration.held_out.size(), 2u);
  EXPECT_EQ(calibration.held_out[0].what, "far");
  EXPECT_NEAR(calibration.held_out[0].predicted, 2e-3, 1e-9);
  EXPECT_EQ(calibration.held_out[0].measured, 4e-3);
  EXPECT_NEAR(calibration.model.errors[0], 0.5, 1e-6);
  EXPECT_NEAR(calibration.model.errors[1], 0.2, 1e-6);
}

TEST(CalibrateTest, PartsAreFittedEachAndAddUp) {
  const std::vector<Measured> measured = {
      {"a", false, {{kOther, {{"choice", 10}}}, {kWork, {{"flop", 100}}}}, {1, 2}},
      {"b", false, {{kOther, {{"choice", 20}}}, {kWork, {{"flop", 300}}}}, {2, 6}},
      {"c", true, {{kOther, {{"choice", 30}}}, {kWork, {{"flop", 50}}}}, {2, 2}},
      {"unknown", true, {{{"other", DType::kF32, 2}, {}}}, {1}},  // without a prediction there is no error
  };
  const Calibration calibration = FitOf(measured);
  EXPECT_NEAR(calibration.model.fits.at(kOther).at("choice"), 0.1, 1e-9);
  EXPECT_NEAR(calibration.model.fits.at(kWork).at("flop"), 0.02, 1e-9);
  ASSERT_EQ(calibration.held_out.size(), 1u);
  EXPECT_NEAR(calibration.held_out[0].predicted, 4, 1e-6);
}

TEST(CalibrateTest, WhereTimeEndsEarlyTheLargeSizesAreMissing) {
  CalibrateOptions options;
  options.mechanisms = {"retention"};
  options.seconds = options.most_seconds = 0.05;
  const Calibration few = Calibrate(options);
  options.most_seconds = 100;
  EXPECT_LT(few.calls, Calibrate(options).calls);
}

TEST(CalibrateTest, OneMechanismIsMeasuredForEveryPurpose) {
  CalibrateOptions options;
  options.mechanisms = {"retention"};
  options.seconds = 0;  // one round
  double before = -1;
  int64_t steps = 0;
  options.progress = [&](double share, const std::string& what) {
    EXPECT_GE(share, before);
    EXPECT_LE(share, 1);
    EXPECT_TRUE(what.starts_with("retention ")) << what;
    before = share;
    ++steps;
  };
  const Calibration calibration = Calibrate(options);
  std::set<std::string> works;
  for (const auto& [work, coefficients] : calibration.model.fits) {
    works.insert(work.name + " " + heed::Name(work.dtype));
    EXPECT_EQ(work.threads, 1);
    double sum = 0;
    for (const auto& [unit, seconds] : coefficients) {
      EXPECT_GT(seconds, 0) << unit;
      sum += seconds;
    }
    EXPECT_GT(sum, 0) << work.name;
  }
  EXPECT_THAT(works, ElementsAre("retention decode bf16", "retention decode f32", "retention prefill bf16",
                                 "retention prefill f32", "retention training bf16", "retention training f32"));
  EXPECT_EQ(calibration.calls, steps);
  EXPECT_GE(calibration.held_out.size(), 6u * 5);
  EXPECT_LT(calibration.held_out.size() * 2, static_cast<size_t>(calibration.calls));
  for (const HeldOut& call : calibration.held_out) {
    EXPECT_GT(call.predicted, 0) << call.what;
    EXPECT_GT(call.measured, 0) << call.what;
  }
  EXPECT_EQ(calibration.model.errors.size(), calibration.held_out.size());
  EXPECT_FALSE(calibration.model.cpu.empty() || calibration.model.target.empty() || calibration.model.version.empty());
  EXPECT_EQ(calibration.model.threads, 1);
}

}  // namespace
}  // namespace heed::advise
