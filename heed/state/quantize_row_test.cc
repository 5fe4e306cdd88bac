// Quantisation to int8 on numbers that can be computed by hand.
#include "heed/state/quantize_row_internal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "heed/core/os.h"
#include "heed/harness/buffer.h"

namespace heed {
namespace {

using testing::Each;
using testing::ElementsAre;

struct Quantized {
  bool ok = false;
  std::vector<int> q;
  float scale = -1;
};

Quantized AsInt8(DType dtype, const std::vector<double>& x, int64_t stride = 1) {
  const int64_t n = static_cast<int64_t>(x.size());
  const Buffer buffer(dtype, std::vector{n}, std::vector{stride}, Placement::kBeforeGuard);
  for (int64_t i = 0; i < n; ++i) buffer.Set({i}, x[static_cast<size_t>(i)]);
  std::vector<float> scratch(x.size());
  std::vector<int8_t> q(x.size(), 99);
  Quantized result;
  const os::ScopedFloatControl control;
  result.ok = QuantizeRow(dtype, buffer.as<std::byte>(), stride, n, scratch.data(), q.data(), &result.scale);
  result.q.assign(q.begin(), q.end());
  return result;
}

TEST(QuantizeRowTest, HalvesRoundToEven) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t stride : {1, 3, -2}) {
      const Quantized r = AsInt8(dtype, {127, 0.5, 1.5, -0.5, -1.5, 2.5, -127, 0.25}, stride);
      EXPECT_TRUE(r.ok);
      EXPECT_EQ(r.scale, 1);
      EXPECT_THAT(r.q, ElementsAre(127, 0, 2, 0, -2, 2, -127, 0));
    }
  }
}

TEST(QuantizeRowTest, TheLargestIs127OfEitherSign) {
  EXPECT_THAT(AsInt8(DType::kF32, {-3, 1}).q, ElementsAre(-127, 42));
  EXPECT_EQ(AsInt8(DType::kF32, {-3, 1}).scale, 3.0f / 127);
  const float most = std::numeric_limits<float>::max();
  EXPECT_THAT(AsInt8(DType::kF32, {-most, most}).q, ElementsAre(-127, 127));
}

TEST(QuantizeRowTest, ZerosHaveScaleOne) {
  const Quantized r = AsInt8(DType::kF16, {0, -0.0, 0});
  EXPECT_TRUE(r.ok);
  EXPECT_EQ(r.scale, 1);
  EXPECT_THAT(r.q, Each(0));
}

TEST(QuantizeRowTest, TinyRowsHaveANormalScale) {
  const float least = std::numeric_limits<float>::min();
  const Quantized r = AsInt8(DType::kF32, {100.0 * least, -3.0 * least, 0x1p-149});
  EXPECT_EQ(r.scale, least);
  EXPECT_THAT(r.q, ElementsAre(100, -3, 0));
  EXPECT_EQ(AsInt8(DType::kF32, {0x1p-149}).scale, least);
}

TEST(QuantizeRowTest, WhatIsNotFiniteIsRefused) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const double bad : {infinity, -infinity, nan}) {
      for (size_t at = 0; at < 9; ++at) {
        std::vector<double> x(9, 1.0);
        x[at] = bad;
        const Quantized r = AsInt8(dtype, x);
        EXPECT_FALSE(r.ok);
        EXPECT_THAT(r.q, Each(99));
      }
    }
  }
}

TEST(QuantizeRowTest, ErrorsAreAtMostHalfAScale) {
  Random random(5);
  for (int i = 0; i < 2000; ++i) {
    std::vector<double> x;
    const double size = std::exp2(random.Uniform(-150, 127));
    for (int64_t j = random.Integer(1, 40); j > 0; --j) {
      x.push_back(static_cast<float>(size * random.Uniform(-1, 1)));
    }
    const Quantized r = AsInt8(DType::kF32, x);
    ASSERT_TRUE(r.ok);
    for (size_t j = 0; j < x.size(); ++j) {
      EXPECT_LE(std::abs(x[j] - r.q[j] * static_cast<double>(r.scale)), r.scale * 0.50001);
      EXPECT_LE(std::abs(r.q[j]), 127);
    }
  }
}

}  // namespace
}  // namespace heed
