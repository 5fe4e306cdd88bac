// Products of f32 rows with rows of bytes, against exact sums: every number of rows and
// size, between guard pages, and what is not finite.
#define HEED_BYTE_PRODUCTS
#include "heed/core/targets.h"
// After targets.h:
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/harness/buffer.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/simd/byte_tile_test.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#if HWY_TARGET == HWY_AVX3_DL
// After highway.h:
#include "heed/simd/byte_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::byte_tile_test::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;

constexpr size_t kLanes = hn::MaxLanes(hn::ScalableTag<float>());

// out[row][lane] of rows [count][columns] and x[columns][lane].
void Dots(int few, const int8_t* rows, ptrdiff_t stride, size_t count, size_t columns,
          const float* x, const float* factors, float* out) {
  const hn::ScalableTag<float> d;
  const Buffer digits(DType::kI32, {static_cast<int64_t>(hs::DigitRows(columns) * kLanes)});
  hs::ToDigits(d, x, columns, digits.as<int32_t>());
  std::vector<const float*> at(count);
  for (size_t j = 0; j < count; ++j) at[j] = factors + j;
  const hs::StoredRows<int8_t> stored = {{rows, stride, SIZE_MAX}, count, 1000};
  const auto run = [&](auto r) {
    hs::DotByteRows<r.value>(d, stored, columns, digits.as<int32_t>(), at.data(), out);
  };
  if (few == 1) run(std::integral_constant<int, 1>());
  if (few == 2) run(std::integral_constant<int, 2>());
  if (few == 4) run(std::integral_constant<int, 4>());
  if (few == 8) run(std::integral_constant<int, 8>());
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::byte_tile_test::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET == HWY_AVX3_DL

#if HWY_ONCE && (HWY_TARGETS & HWY_AVX3_DL)
namespace heed::byte_tile_test {
namespace {

using N_AVX3_DL::kLanes;

class ByteTileTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!HasByteProducts(kAllTargets)) GTEST_SKIP() << "this CPU multiplies no bytes";
  }
};

// Rows of bytes, without gaps, and their factors.
struct Case {
  Case(int of_few, size_t of_many, size_t of_each, uint64_t seed)
      : few(of_few), count(of_many), columns(of_each), random(seed),
        rows(DType::kBool, {static_cast<int64_t>(count), static_cast<int64_t>(columns)},
             random.Chance(0.5) ? Placement::kAfterGuard : Placement::kBeforeGuard),
        factors(DType::kF32, {static_cast<int64_t>(count)}, Placement::kBeforeGuard),
        x(DType::kF32, {static_cast<int64_t>(columns), static_cast<int64_t>(kLanes)}),
        out(DType::kF32, {static_cast<int64_t>(count), static_cast<int64_t>(kLanes)}) {
    for (size_t i = 0; i < count * columns; ++i) {
      bytes()[i] = static_cast<int8_t>(random.Word() % 256 - 128);
    }
    factors.FillNormal(random.Word());
    x.FillNormal(random.Word());
  }

  int8_t* bytes() const { return reinterpret_cast<int8_t*>(rows.view().data()); }
  float& X(size_t e, size_t r) const { return x.as<float>()[e * kLanes + r]; }

  void Run() const {
    N_AVX3_DL::Dots(few, bytes(), static_cast<ptrdiff_t>(columns), count, columns,
                    x.as<float>(), factors.as<float>(), out.as<float>());
  }
  float Out(size_t j, int r) const {
    return out.as<float>()[j * kLanes + static_cast<size_t>(r)];
  }

  // The sum, and how far from it a result may be: half a unit per element, and a few
  // roundings of the parts that it is put together from.
  void Expect(size_t j, int r, double* sum, double* error) const {
    double most = 0, bytes_sum = 0, products = 0;
    *sum = 0;
    for (size_t e = 0; e < columns; ++e) {
      const double byte = bytes()[j * columns + e];
      const double value = X(e, static_cast<size_t>(r));
      *sum += byte * value;
      products += std::abs(byte * value);
      bytes_sum += std::abs(byte);
      most = std::max(most, std::abs(value));
    }
    const double factor = factors.as<float>()[j];
    *sum *= factor;
    *error = std::abs(factor) *
             (most / 8355711 * bytes_sum * (0.5 + 0x1p-1) + 4 * 0x1p-24 * products) +
             1e-40;
  }

  const int few;
  const size_t count, columns;
  Random random;
  Buffer rows, factors, x, out;
};

TEST_F(ByteTileTest, IsTheSumUpToTheRoundingOfTheFewRows) {
  uint64_t seed = 1;
  for (const int few : {1, 2, 4, 8}) {
    for (const size_t count : {1, 3, 16, 17, 32, 64, 67}) {
      for (const size_t columns : {1, 3, 4, 5, 63, 64, 65, 71, 128, 200}) {
        for (const double size : {1.0, 1e-27, 1e30}) {
          SCOPED_TRACE("few " + std::to_string(few) + " count " + std::to_string(count) +
                       " columns " + std::to_string(columns) + " size " +
                       std::to_string(size));
          const Case c(few, count, columns, seed++);
          for (size_t e = 0; e < columns; ++e) {
            for (int r = 0; r < few; ++r) {
              c.X(e, static_cast<size_t>(r)) *= static_cast<float>(size);
            }
          }
          c.Run();
          for (size_t j = 0; j < count; ++j) {
            for (int r = 0; r < few; ++r) {
              double sum, error;
              c.Expect(j, r, &sum, &error);
              ASSERT_NEAR(c.Out(j, r), sum, error) << "row " << j << " of few " << r;
            }
          }
        }
      }
    }
  }
}

// Sums of the largest digits and bytes, where 32 bits are just enough.
TEST_F(ByteTileTest, LongRowsOfTheLargestDoNotOverflow) {
  const Case c(2, 2, size_t{1} << 16, 7);
  for (size_t e = 0; e < c.columns; ++e) {
    c.bytes()[e] = -128;
    c.bytes()[c.columns + e] = 127;
    c.X(e, 0) = 3;
    c.X(e, 1) = -3;
  }
  c.Run();
  for (size_t j = 0; j < 2; ++j) {
    for (int r = 0; r < 2; ++r) {
      const double sum = (j == 0 ? -128.0 : 127.0) * (r == 0 ? 3 : -3) * 65536 *
                         static_cast<double>(c.factors.as<float>()[j]);
      EXPECT_NEAR(c.Out(j, r) / sum, 1, 1e-6);
    }
  }
}

TEST_F(ByteTileTest, ZerosGiveZeroAndWhatIsNotFiniteItsKind) {
  const float inf = std::numeric_limits<float>::infinity();
  const Case c(4, 17, 20, 9);
  for (size_t e = 0; e < c.columns; ++e) c.X(e, 0) = 0;
  c.X(3, 1) = std::numeric_limits<float>::quiet_NaN();
  c.X(4, 2) = -inf;
  for (size_t j = 0; j < c.count; ++j) c.bytes()[j * c.columns + 4] = j % 2 == 0 ? 5 : -5;
  c.factors.FillConstant(0.5);
  c.Run();
  for (size_t j = 0; j < c.count; ++j) {
    EXPECT_EQ(c.Out(j, 0), 0);
    EXPECT_TRUE(std::isnan(c.Out(j, 1)));
    EXPECT_EQ(c.Out(j, 2), j % 2 == 0 ? -inf : inf);
    EXPECT_TRUE(std::isfinite(c.Out(j, 3)));
  }
}

// Integer sums: the same whatever else is computed beside them.
TEST_F(ByteTileTest, BitsDependOnNoOtherRow) {
  for (const size_t columns : {40, 64, 150}) {
    const Case eight(8, 33, columns, 11);
    eight.Run();
    const std::vector<float> all(eight.out.as<float>(),
                                 eight.out.as<float>() + eight.count * kLanes);
    N_AVX3_DL::Dots(1, eight.bytes() + columns, static_cast<ptrdiff_t>(columns), 5, columns,
                    eight.x.as<float>(), eight.factors.as<float>() + 1,
                    eight.out.as<float>());
    for (size_t j = 0; j < 5; ++j) {
      EXPECT_EQ(std::memcmp(&eight.out.as<float>()[j * kLanes], &all[(j + 1) * kLanes],
                            sizeof(float)),
                0);
    }
  }
}

}  // namespace
}  // namespace heed::byte_tile_test
#endif  // HWY_ONCE && (HWY_TARGETS & HWY_AVX3_DL)
