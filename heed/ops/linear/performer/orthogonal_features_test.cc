// Orthogonal random features against the reference, their geometry, and the kernel estimate.
#include "heed/ops/linear/performer/orthogonal_features.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"

namespace heed {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr OrthogonalFeaturesOptions kAll[] = {
    {FeatureNorms::kChi, true}, {FeatureNorms::kChi, false}, {FeatureNorms::kRoot, true}, {FeatureNorms::kRoot, false}};

Buffer Draw(int64_t m, int64_t d, uint64_t seed, const OrthogonalFeaturesOptions& options = {}, int threads = 2) {
  Context ctx(threads);
  Buffer w(DType::kF64, {m, d});
  OrthogonalFeatures(ctx, seed, options, w.view());
  return w;
}

double Dot(const Buffer& w, int64_t i, int64_t j) {
  double sum = 0;
  for (int64_t c = 0; c < w.view().size(1); ++c) sum += w.Get({i, c}) * w.Get({j, c});
  return sum;
}

// Q's error is that of G times G's condition number, here below 10^4, times sqrt(d) for the row.
TEST(OrthogonalFeaturesTest, AgreesWithTheReference) {
  for (const int64_t d : {1, 2, 3, 8, 13}) {
    for (const OrthogonalFeaturesOptions& options : kAll) {
      for (const uint64_t seed : {uint64_t{0}, uint64_t{7}, ~uint64_t{0}}) {
        const int64_t m = 2 * d + 1;
        const Buffer w = Draw(m, d, seed, options), expected(DType::kF64, {m, d});
        OrthogonalFeaturesReference(seed, options, expected.view());
        for (int64_t i = 0; i < m; ++i) {
          for (int64_t j = 0; j < d; ++j) {
            ASSERT_NEAR(w.Get({i, j}), expected.Get({i, j}), 1e4 * 0x1p-52 * 16)
                << d << " " << seed << " " << i << " " << j;
          }
        }
      }
    }
  }
}

// Values computed with another program from the header's text.
TEST(OrthogonalFeaturesTest, ValuesArePinned) {
  const Buffer w = Draw(5, 4, 42);
  EXPECT_NEAR(w.Get({0, 0}), -1.7894982025518407, 1e-12);
  EXPECT_NEAR(w.Get({3, 2}), 0.8089479419014799, 1e-12);
  EXPECT_NEAR(w.Get({4, 3}), 0.751360808952007, 1e-12);
}

TEST(OrthogonalFeaturesTest, RowsOfABlockAreOrthogonalAndHaveTheirNorms) {
  for (const int64_t d : {2, 5, 64}) {
    for (const OrthogonalFeaturesOptions& options : kAll) {
      const Buffer w = Draw(2 * d + d / 2, d, 3, options);
      for (int64_t i = 0; i < w.view().size(0); ++i) {
        if (options.norms == FeatureNorms::kRoot) {
          EXPECT_NEAR(Dot(w, i, i), static_cast<double>(d), 1e-13 * static_cast<double>(d * d));
        }
        for (int64_t j = i / d * d; j < i; ++j) {
          EXPECT_NEAR(Dot(w, i, j) / std::sqrt(Dot(w, i, i) * Dot(w, j, j)), 0, 1e-13);
        }
      }
    }
  }
}

// The mean of chi^2_d is d, its variance 2 d; six deviations of the mean of 4096.
TEST(OrthogonalFeaturesTest, SquaredNormsAreChiSquared) {
  constexpr int64_t kM = 4096, kD = 6;
  const Buffer w = Draw(kM, kD, 11);
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < kM; ++i) {
    const double n = Dot(w, i, i);
    sum += n;
    squares += (n - kD) * (n - kD);
  }
  EXPECT_NEAR(sum / kM, kD, 6 * std::sqrt(2.0 * kD / kM));
  // The variance of (x - d)^2 is 8 d (d + 6) - ... < 12 d^2 + 48 d.
  EXPECT_NEAR(squares / kM, 2 * kD, 6 * std::sqrt((12.0 * kD * kD + 48 * kD) / kM));
}

// The estimate of exp(<x, y>) over many blocks, in standard deviations of its mean.
struct Estimate {
  double mean, deviation;
};
Estimate RelativeEstimate(bool haar_fix) {
  constexpr int64_t kD = 8, kBlocks = 20000;
  const Buffer w = Draw(kBlocks * kD, kD, 5, {FeatureNorms::kChi, haar_fix});
  double sum = 0, squares = 0;
  for (int64_t b = 0; b < kBlocks; ++b) {
    double of_block = 0;
    for (int64_t j = 0; j < kD; ++j) {
      // x = y along (1, ..., 1), |x|^2 = 1/2: exp(<w, 2 x> - 1/2 - 1/2) is exactly unbiased.
      double along = 0;
      for (int64_t i = 0; i < kD; ++i) along += w.Get({b * kD + j, i}) * 0.25;
      of_block += std::exp(2 * along - 0.5) / std::exp(0.5) / kD;
    }
    sum += of_block;
    squares += of_block * of_block;
  }
  const double mean = sum / kBlocks;
  return {mean, std::sqrt((squares / kBlocks - mean * mean) / kBlocks)};
}

TEST(OrthogonalFeaturesTest, TheEstimateOfTheKernelIsUnbiasedWithTheSignAndNotWithout) {
  const Estimate fixed = RelativeEstimate(true), plain = RelativeEstimate(false);
  EXPECT_NEAR(fixed.mean, 1, 5 * fixed.deviation);
  EXPECT_LT(fixed.deviation, 0.01);
  EXPECT_LT(plain.mean, 1 - 20 * plain.deviation);
}

TEST(OrthogonalFeaturesTest, WithoutTheSignTheFirstEntryOfABlockIsNeverPositive) {
  const Buffer plain = Draw(4000, 4, 9, {FeatureNorms::kChi, false}), fixed = Draw(4000, 4, 9);
  int64_t positive = 0;
  for (int64_t i = 0; i < 4000; i += 4) {
    EXPECT_LE(plain.Get({i, 0}), 0);
    positive += fixed.Get({i, 0}) > 0;
    for (int64_t j = 0; j < 4; ++j) {
      EXPECT_EQ(std::abs(plain.Get({i, j})), std::abs(fixed.Get({i, j})));
    }
  }
  EXPECT_NEAR(static_cast<double>(positive), 500, 6 * std::sqrt(250.0));
}

TEST(OrthogonalFeaturesTest, BitsDependOnNeitherThreadsNorRowsNorStrides) {
  for (const OrthogonalFeaturesOptions& options : kAll) {
    const Buffer w = Draw(100, 9, 4, options, 1);
    EXPECT_TRUE(SameBits(Draw(100, 9, 4, options, 3).view(), w.view()));
    for (const int64_t m : {0, 1, 9, 33}) {
      EXPECT_TRUE(SameBits(Draw(m, 9, 4, options).view(), w.view().Slice(0, 0, m)));
    }
    EXPECT_FALSE(SameBits(Draw(100, 9, 5, options).view(), w.view()));
    const Buffer gaps(DType::kF64, {9, 250});
    gaps.FillConstant(42);
    const TensorView transposed(gaps.as<double>(), DType::kF64, {100, 9}, {2, 250});
    Context ctx(2);
    OrthogonalFeatures(ctx, 4, options, transposed);
    EXPECT_TRUE(SameBits(transposed, w.view()));
    EXPECT_EQ(gaps.Get({4, 51}), 42);
  }
}

TEST(OrthogonalFeaturesTest, BothHalvesOfTheSeedCount) {
  EXPECT_FALSE(SameBits(Draw(4, 4, 1).view(), Draw(4, 4, uint64_t{1} << 32 | 1).view()));
}

void ExpectMistake(const TensorView& w, const std::string& what) {
  Context ctx(1);
  EXPECT_THAT([&] { OrthogonalFeatures(ctx, 1, {}, w); },
              ThrowsMessage<InvalidArgument>(HasSubstr("orthogonal_features: " + what)));
}

TEST(OrthogonalFeaturesTest, MistakesAreNamed) {
  const Buffer buffer(DType::kF64, {4, 8});
  ExpectMistake({}, "w is absent");
  ExpectMistake({buffer.as<double>(), DType::kF64, {32}}, "w has shape [32], expected [m, d] with 1 <= d <= 4096");
  ExpectMistake({buffer.as<double>(), DType::kF64, {4, 0}}, "w has shape [4,0]");
  ExpectMistake({buffer.as<double>(), DType::kF64, {0, 4097}}, "w has shape [0,4097]");
  ExpectMistake({buffer.as<double>(), DType::kF32, {4, 8}}, "w has dtype f32, expected f64");
  ExpectMistake({buffer.as<double>(), DType::kF64, {4, 8}, {0, 1}}, "w has strides [0,1]");
}

}  // namespace
}  // namespace heed
