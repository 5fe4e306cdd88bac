// The sinusoidal table against the reference, its layout, and its identities.
#include "heed/ops/positions/sinusoidal.h"

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

constexpr SinusoidalOrder kBoth[] = {SinusoidalOrder::kInterleaved, SinusoidalOrder::kConcatenated};

Buffer Table(int64_t T, int64_t D, SinusoidalOrder order, int threads = 2) {
  Context ctx(threads);
  Buffer table(DType::kF32, {T, D});
  Sinusoidal(ctx, order, table.view());
  return table;
}

TEST(SinusoidalTest, AgreesWithTheReference) {
  for (const int64_t D : {1, 2, 3, 4, 5, 64, 77}) {
    for (const SinusoidalOrder order : kBoth) {
      constexpr int64_t kT = 300;
      const Buffer table = Table(kT, D, order), exact(DType::kF64, {kT, D});
      SinusoidalReference(order, exact.view());
      for (int64_t p = 0; p < kT; ++p) {
        for (int64_t d = 0; d < D; ++d) {
          const double e = exact.Get({p, d});
          ASSERT_NEAR(table.Get({p, d}), e, 0x1p-24 * std::fabs(e) + 0x1p-51 * (4.0 + kT)) << D << " " << p << " " << d;
        }
      }
    }
  }
}

// Frequencies 1, 0.1, 0.01, 0.001 at D = 8 interleaved, and 1, 10^-4/3, 10^-8/3,
// 10^-4 concatenated, whose exponent reaches 1.
TEST(SinusoidalTest, ColumnsStandWhereTheOrderSays) {
  const Buffer a = Table(4, 8, SinusoidalOrder::kInterleaved);
  const Buffer b = Table(4, 8, SinusoidalOrder::kConcatenated);
  for (int64_t i = 0; i < 4; ++i) {
    const double w = 3 * std::pow(10, -static_cast<double>(i));
    EXPECT_FLOAT_EQ(a.as<float>()[24 + 2 * i], static_cast<float>(std::sin(w)));
    EXPECT_FLOAT_EQ(a.as<float>()[24 + 2 * i + 1], static_cast<float>(std::cos(w)));
    const double v = 3 * std::pow(10, -4 * static_cast<double>(i) / 3);
    EXPECT_FLOAT_EQ(b.as<float>()[24 + i], static_cast<float>(std::sin(v)));
    EXPECT_FLOAT_EQ(b.as<float>()[24 + 4 + i], static_cast<float>(std::cos(v)));
  }
}

TEST(SinusoidalTest, AnOddSizeEndsInASine) {
  const Buffer a = Table(3, 5, SinusoidalOrder::kInterleaved);
  const Buffer b = Table(3, 5, SinusoidalOrder::kConcatenated);
  EXPECT_FLOAT_EQ(a.as<float>()[14], static_cast<float>(std::sin(2 * std::pow(10000, -0.8))));
  EXPECT_FLOAT_EQ(b.as<float>()[14], static_cast<float>(std::sin(2 * std::pow(10000, -2.0))));
}

// A shift of position is a rotation, the same for all positions.
TEST(SinusoidalTest, AShiftIsARotation) {
  const Buffer t = Table(200, 6, SinusoidalOrder::kInterleaved);
  for (int64_t p = 0; p + 7 < 200; ++p) {
    for (int64_t i = 0; i < 6; i += 2) {
      const double s = t.Get({7, i}), c = t.Get({7, i + 1});
      EXPECT_NEAR(t.Get({p + 7, i}), t.Get({p, i}) * c + t.Get({p, i + 1}) * s, 3e-7);
    }
  }
}

TEST(SinusoidalTest, BitsDependOnNeitherThreadsNorRowsNorStrides) {
  for (const SinusoidalOrder order : kBoth) {
    const Buffer table = Table(100, 9, order, 1);
    EXPECT_TRUE(SameBits(Table(100, 9, order, 3).view(), table.view()));
    EXPECT_TRUE(SameBits(Table(33, 9, order).view(), table.view().Slice(0, 0, 33)));
    const Buffer gaps(DType::kF32, {9, 250});
    gaps.FillConstant(42);
    const TensorView transposed(gaps.as<float>(), DType::kF32, {100, 9}, {2, 250});
    Context ctx(2);
    Sinusoidal(ctx, order, transposed);
    EXPECT_TRUE(SameBits(transposed, table.view()));
    EXPECT_EQ(gaps.Get({4, 51}), 42);
    EXPECT_EQ(gaps.Get({4, 200}), 42);
  }
}

TEST(SinusoidalTest, NoRowsAreLegal) { EXPECT_NO_THROW(Table(0, 4, SinusoidalOrder::kInterleaved)); }

void ExpectMistake(const TensorView& table, const std::string& what) {
  Context ctx(1);
  EXPECT_THAT([&] { Sinusoidal(ctx, SinusoidalOrder::kInterleaved, table); },
              ThrowsMessage<InvalidArgument>(HasSubstr("sinusoidal: " + what)));
}

TEST(SinusoidalTest, MistakesAreNamed) {
  const Buffer buffer(DType::kF32, {4, 8});
  ExpectMistake({}, "table is absent");
  ExpectMistake({buffer.as<float>(), DType::kF32, {32}}, "table has shape [32], expected [T, D] with D >= 1");
  ExpectMistake({buffer.as<float>(), DType::kF32, {4, 0}}, "table has shape [4,0], expected [T, D] with D >= 1");
  ExpectMistake({buffer.as<float>(), DType::kF64, {2, 8}}, "table has dtype f64, expected f32");
  ExpectMistake({buffer.as<float>(), DType::kF32, {4, 8}, {0, 1}}, "table has strides [0,1] for shape [4,8]");
}

}  // namespace
}  // namespace heed
