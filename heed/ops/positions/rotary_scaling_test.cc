// Scalings of rotary encoding: values from papers and configs, and errors.
#include "heed/ops/positions/rotary_scaling.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <string>
#include <vector>

#include "heed/core/error.h"

namespace heed {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr double kTwoPi = 2 * std::numbers::pi;

std::vector<double> Unscaled(int64_t dim, double base) { return ScaledRotaryFrequencies(dim, base, {}, 1).frequencies; }

TEST(RotaryScalingTest, UnscaledFrequenciesArePowersOfTheBase) {
  const std::vector<double> w = Unscaled(8, 10000);
  ASSERT_EQ(w.size(), 4u);
  for (size_t i = 0; i < 4; ++i) EXPECT_DOUBLE_EQ(w[i], std::pow(10, -static_cast<double>(i)));
}

TEST(RotaryScalingTest, LinearDividesPositions) {
  const RotaryFrequencies f = ScaledRotaryFrequencies(64, 10000, {.rope_type = RopeType::kLinear, .factor = 4}, 1);
  const std::vector<double> w = Unscaled(64, 10000);
  for (size_t i = 0; i < w.size(); ++i) EXPECT_EQ(f.frequencies[i], w[i] / 4);
  EXPECT_EQ(f.attention_factor, 1);
}

// The idea of NTK-aware scaling: the fastest pair is unchanged, the slowest is interpolated by the whole factor.
TEST(RotaryScalingTest, NtkKeepsTheFirstPairAndInterpolatesTheLast) {
  const RotaryFrequencies f = ScaledRotaryFrequencies(128, 10000, {.rope_type = RopeType::kNtk, .factor = 8}, 1);
  EXPECT_EQ(f.frequencies[0], 1);
  EXPECT_NEAR(f.frequencies[63] * 8 / Unscaled(128, 10000)[63], 1, 1e-14);
  // d = 2 has one pair, whatever the base.
  EXPECT_EQ(ScaledRotaryFrequencies(2, 10000, {.rope_type = RopeType::kNtk, .factor = 8}, 1).frequencies[0], 1);
}

TEST(RotaryScalingTest, DynamicGrowsBeyondTheOriginalLength) {
  const RotaryScaling dynamic = {.rope_type = RopeType::kDynamic, .factor = 3, .max_position_embeddings = 2048};
  const std::vector<double> w = Unscaled(64, 10000);
  for (const int64_t length : {1, 2048}) {
    EXPECT_EQ(ScaledRotaryFrequencies(64, 10000, dynamic, length).frequencies, w);
  }
  // s L/L0 - (s - 1) = 3 * 2 - 2 = 4: as ntk by 4.
  const auto twice = ScaledRotaryFrequencies(64, 10000, dynamic, 4096);
  const auto ntk = ScaledRotaryFrequencies(64, 10000, {.rope_type = RopeType::kNtk, .factor = 4}, 1);
  for (size_t i = 0; i < w.size(); ++i) EXPECT_DOUBLE_EQ(twice.frequencies[i], ntk.frequencies[i]);
  // The original length takes precedence over the other one.
  RotaryScaling both = dynamic;
  both.original_max_position_embeddings = 4096;
  EXPECT_EQ(ScaledRotaryFrequencies(64, 10000, both, 4096).frequencies, w);
}

// Llama 2 at s = 16: 128 ln(4096 / (2 pi 32)) / (2 ln 10000) = 20.9 and
// 128 ln(4096 / 2 pi) / (2 ln 10000) = 45.03.
TEST(RotaryScalingTest, YarnInterpolatesSlowPairsAndLeavesFastOnes) {
  const RotaryScaling yarn = {.rope_type = RopeType::kYarn, .factor = 16, .original_max_position_embeddings = 4096};
  const RotaryFrequencies f = ScaledRotaryFrequencies(128, 10000, yarn, 1);
  const std::vector<double> w = Unscaled(128, 10000);
  for (size_t i = 0; i < 64; ++i) {
    const double ramp = std::min(1.0, std::max(0.0, (static_cast<double>(i) - 20) / (46 - 20)));
    EXPECT_DOUBLE_EQ(f.frequencies[i], w[i] / 16 * ramp + w[i] * (1 - ramp));
  }
  EXPECT_DOUBLE_EQ(f.attention_factor, 0.1 * std::log(16) + 1);

  RotaryScaling exact = yarn;
  exact.truncate = false;
  const RotaryFrequencies g = ScaledRotaryFrequencies(128, 10000, exact, 1);
  EXPECT_EQ(g.frequencies[20], w[20]);
  EXPECT_LT(g.frequencies[21], w[21]);
  EXPECT_GT(g.frequencies[45], w[45] / 16);  // 45 < 45.03
  EXPECT_LT(g.frequencies[45], w[45] / 16 * 1.1);
  EXPECT_DOUBLE_EQ(g.frequencies[46], w[46] / 16);
}

TEST(RotaryScalingTest, YarnWithEqualBoundsIsAStep) {
  // Both bounds are 0, because the original length is so short that no pair completes a turn.
  const RotaryFrequencies f = ScaledRotaryFrequencies(
      8, 10000, {.rope_type = RopeType::kYarn, .factor = 2, .original_max_position_embeddings = 4}, 1);
  const std::vector<double> w = Unscaled(8, 10000);
  EXPECT_EQ(f.frequencies[0], w[0]);
  for (size_t i = 1; i < 4; ++i) EXPECT_EQ(f.frequencies[i], w[i] / 2);
}

TEST(RotaryScalingTest, YarnsAttentionFactor) {
  RotaryScaling yarn = {.rope_type = RopeType::kYarn, .factor = 40, .original_max_position_embeddings = 4096};
  const auto factor = [&] { return ScaledRotaryFrequencies(64, 10000, yarn, 1).attention_factor; };
  const double m = 0.1 * std::log(40.0);
  EXPECT_DOUBLE_EQ(factor(), m + 1);
  yarn.mscale = 0.5;  // without mscale_all_dim it has no effect
  EXPECT_DOUBLE_EQ(factor(), m + 1);
  yarn.mscale_all_dim = 0;
  EXPECT_DOUBLE_EQ(factor(), m + 1);
  yarn.mscale_all_dim = 2;
  EXPECT_DOUBLE_EQ(factor(), (0.5 * m + 1) / (2 * m + 1));
  yarn.mscale = yarn.mscale_all_dim = 1;  // DeepSeek-V3, which scales the softmax instead
  EXPECT_EQ(factor(), 1);
  yarn.attention_factor = 1.25;
  EXPECT_EQ(factor(), 1.25);
  yarn = {.rope_type = RopeType::kYarn, .factor = 0.5, .original_max_position_embeddings = 4096};
  EXPECT_EQ(factor(), 1);  // the context is not extended
  yarn = {.rope_type = RopeType::kYarn, .original_max_position_embeddings = 4096, .max_position_embeddings = 8192};
  EXPECT_DOUBLE_EQ(factor(), 0.1 * std::log(2.0) + 1);
}

// Llama 3.1: wavelengths below 2048 are unchanged, those above 8192 are divided by 8.
TEST(RotaryScalingTest, Llama3HasThreeBands) {
  const RotaryFrequencies f = ScaledRotaryFrequencies(128, 500000,
                                                      {.rope_type = RopeType::kLlama3,
                                                       .factor = 8,
                                                       .original_max_position_embeddings = 8192,
                                                       .low_freq_factor = 1,
                                                       .high_freq_factor = 4},
                                                      1);
  const std::vector<double> w = Unscaled(128, 500000);
  EXPECT_EQ(f.attention_factor, 1);
  for (size_t i = 0; i < 64; ++i) {
    const double wavelength = kTwoPi / w[i];
    EXPECT_EQ(wavelength < 2048, i <= 28);
    EXPECT_EQ(wavelength > 8192, i >= 35);
    if (i <= 28) {
      EXPECT_EQ(f.frequencies[i], w[i]);
    } else if (i >= 35) {
      EXPECT_EQ(f.frequencies[i], w[i] / 8);
    } else {
      const double t = (8192 / wavelength - 1) / 3;
      EXPECT_NEAR(f.frequencies[i] / w[i], (1 - t) / 8 + t, 1e-14);
    }
  }
}

// Phi-3 with 128 Ki: sqrt(1 + ln 32 / ln 4096) = sqrt(1 + 5/12).
TEST(RotaryScalingTest, LongropeChoosesItsFactorsByLength) {
  RotaryScaling s = {.rope_type = RopeType::kLongrope,
                     .original_max_position_embeddings = 4096,
                     .max_position_embeddings = 131072,
                     .short_factor = {1, 2},
                     .long_factor = {3, 4}};
  const std::vector<double> w = Unscaled(4, 10000);
  const auto short_one = ScaledRotaryFrequencies(4, 10000, s, 4096);
  EXPECT_THAT(short_one.frequencies, testing::ElementsAre(w[0], w[1] / 2));
  const auto long_one = ScaledRotaryFrequencies(4, 10000, s, 4097);
  EXPECT_THAT(long_one.frequencies, testing::ElementsAre(w[0] / 3, w[1] / 4));
  EXPECT_NEAR(short_one.attention_factor, 1.1902380714238083, 1e-15);
  EXPECT_NEAR(long_one.attention_factor, 1.1902380714238083, 1e-15);
  const auto factor = [&] { return ScaledRotaryFrequencies(4, 10000, s, 1).attention_factor; };
  s.factor = 4;  // takes precedence over the ratio of the lengths
  EXPECT_DOUBLE_EQ(factor(), std::sqrt(1 + std::log(4) / std::log(4096)));
  s.factor = 1;
  EXPECT_EQ(factor(), 1);
  s.attention_factor = 0.75;
  EXPECT_EQ(factor(), 0.75);
}

TEST(RotaryScalingTest, EveryTypeHasItsName) {
  EXPECT_EQ(RopeTypeFromName("default"), RopeType::kDefault);
  EXPECT_EQ(RopeTypeFromName("linear"), RopeType::kLinear);
  EXPECT_EQ(RopeTypeFromName("ntk"), RopeType::kNtk);
  EXPECT_EQ(RopeTypeFromName("dynamic"), RopeType::kDynamic);
  EXPECT_EQ(RopeTypeFromName("yarn"), RopeType::kYarn);
  EXPECT_EQ(RopeTypeFromName("llama3"), RopeType::kLlama3);
  EXPECT_EQ(RopeTypeFromName("longrope"), RopeType::kLongrope);
  EXPECT_THAT([] { RopeTypeFromName("mrope"); },
              ThrowsMessage<InvalidArgument>(HasSubstr("rotary: scaling.rope_type is 'mrope', expected 'default', ")));
}

void ExpectMistake(const RotaryScaling& scaling, const std::string& what) {
  EXPECT_THAT([&] { ScaledRotaryFrequencies(8, 10000, scaling, 1); },
              ThrowsMessage<InvalidArgument>(HasSubstr("rotary: " + what)));
}

TEST(RotaryScalingTest, WhatIsMissingIsNamed) {
  for (const RopeType type : {RopeType::kLinear, RopeType::kNtk, RopeType::kDynamic, RopeType::kLlama3}) {
    ExpectMistake({.rope_type = type}, "scaling.factor is missing, expected a number for rope_type '");
  }
  const std::vector<double> ones(4, 1.0);
  ExpectMistake({.rope_type = RopeType::kYarn, .original_max_position_embeddings = 64},
                "scaling.factor is missing, expected it or max_position");
  ExpectMistake({.rope_type = RopeType::kLongrope,
                 .original_max_position_embeddings = 64,
                 .short_factor = ones,
                 .long_factor = ones},
                "scaling.factor is missing, expected it or max_position");
  constexpr char kNoLength[] =
      "scaling.original_max_position_embeddings is missing, expected a number "
      "for rope_type '";
  ExpectMistake({.rope_type = RopeType::kDynamic, .factor = 2}, kNoLength);
  ExpectMistake({.rope_type = RopeType::kYarn, .factor = 2}, kNoLength);
  ExpectMistake({.rope_type = RopeType::kLlama3, .factor = 2, .low_freq_factor = 1, .high_freq_factor = 4}, kNoLength);
  ExpectMistake({.rope_type = RopeType::kLongrope, .short_factor = ones, .long_factor = ones}, kNoLength);
  ExpectMistake({.rope_type = RopeType::kLlama3, .factor = 2, .high_freq_factor = 4},
                "scaling.low_freq_factor is missing");
  ExpectMistake({.rope_type = RopeType::kLlama3, .factor = 2, .low_freq_factor = 4},
                "scaling.high_freq_factor is missing");
  ExpectMistake({.rope_type = RopeType::kLongrope, .short_factor = {1, 1, 1}, .long_factor = ones},
                "scaling.short_factor has 3 numbers, expected 4, half of dim");
  ExpectMistake({.rope_type = RopeType::kLongrope, .short_factor = ones},
                "scaling.long_factor has 0 numbers, expected 4, half of dim");
}

TEST(RotaryScalingTest, WhatATypeDoesNotUseIsRefused) {
  const std::string end = " is given, expected none for rope_type 'linear'";
  const RotaryScaling linear = {.rope_type = RopeType::kLinear, .factor = 2};
  RotaryScaling s = linear;
  s.beta_fast = 32;
  ExpectMistake(s, "scaling.beta_fast" + end);
  s = linear;
  s.attention_factor = 1;
  ExpectMistake(s, "scaling.attention_factor" + end);
  s = linear;
  s.truncate = true;
  ExpectMistake(s, "scaling.truncate" + end);
  s = linear;
  s.short_factor = {1};
  ExpectMistake(s, "scaling.short_factor" + end);
  s = linear;
  s.long_factor = {1};
  ExpectMistake(s, "scaling.long_factor" + end);
  s = linear;
  s.low_freq_factor = 1;
  ExpectMistake(s, "scaling.low_freq_factor" + end);
  ExpectMistake({.factor = 2}, "scaling.factor is given, expected none for rope_type 'default'");
  s = linear;  // the lengths belong to the model, not to the type of scaling
  s.max_position_embeddings = s.original_max_position_embeddings = 8;
  EXPECT_NO_THROW(ScaledRotaryFrequencies(8, 10000, s, 1));
}

TEST(RotaryScalingTest, ValuesOutOfRangeAreRefused) {
  for (const double bad : {0.0, -1.0, HUGE_VAL, std::nan("")}) {
    ExpectMistake({.rope_type = RopeType::kLinear, .factor = bad}, "scaling.factor is ");
  }
  ExpectMistake({.rope_type = RopeType::kYarn, .factor = 2, .original_max_position_embeddings = 64, .mscale = -1},
                "scaling.mscale is -1, expected a finite number of at least 0");
  ExpectMistake({.rope_type = RopeType::kYarn,
                 .factor = 2,
                 .original_max_position_embeddings = 64,
                 .beta_fast = 1,
                 .beta_slow = 2},
                "scaling.beta_fast is 1, expected at least beta_slow, 2");
  ExpectMistake({.rope_type = RopeType::kLlama3,
                 .factor = 2,
                 .original_max_position_embeddings = 64,
                 .low_freq_factor = 4,
                 .high_freq_factor = 4},
                "scaling.high_freq_factor is 4, expected more than "
                "low_freq_factor, 4");
  ExpectMistake({.rope_type = RopeType::kLongrope,
                 .original_max_position_embeddings = 64,
                 .short_factor = {1, 1, 0, 1},
                 .long_factor = {1, 1, 1, 1}},
                "scaling.short_factor contains 0, expected finite numbers above 0");
  ExpectMistake({.rope_type = RopeType::kLongrope,
                 .original_max_position_embeddings = 1,
                 .short_factor = {1, 1, 1, 1},
                 .long_factor = {1, 1, 1, 1}},
                "scaling.original_max_position_embeddings is 1, expected a "
                "number above 1");
  ExpectMistake({.rope_type = static_cast<RopeType>(7)}, "scaling.rope_type is unknown");
  EXPECT_THAT([] { ScaledRotaryFrequencies(7, 10000, {}, 1); },
              ThrowsMessage<InvalidArgument>(HasSubstr("rotary: dim is 7, expected an even number")));
}

}  // namespace
}  // namespace heed
