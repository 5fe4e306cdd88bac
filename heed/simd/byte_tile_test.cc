// Products of f32 rows with int8 rows against exact sums: every number of rows and size, between guard pages, and
// non-finite elements.
#define HWY_WANT_AVX3_DL
#ifdef __aarch64__
#define HEED_BYTE_PRODUCTS
#endif
#include "heed/core/targets.h"
// After targets.h: the targets that multiply bytes, and the baseline.
#if !defined(HEED_ONE_TARGET) && !defined(__aarch64__)
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3 | HWY_AVX3_ZEN4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/os.h"
#include "heed/harness/buffer.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/simd/byte_tile_test.cc"  // this file
#include "hwy/foreach_target.h"                           // IWYU pragma: keep
#include "hwy/highway.h"

namespace heed::byte_tile_test {
#ifndef HEED_SIMD_BYTE_TILE_TEST_ONCE
#define HEED_SIMD_BYTE_TILE_TEST_ONCE
// x[column][lane] of the f32 rows, rows[j][column], factors of rows or of outputs.
struct Operands {
  int few;
  const int8_t* rows;
  ptrdiff_t stride;
  size_t count, columns;
  const float *x, *factors;
  float* out;
};
#endif
}  // namespace heed::byte_tile_test

// After highway.h, and before others that are compiled per target:
#include "heed/simd/dot_products-inl.h"
// After dot_products-inl.h:
#include "heed/simd/byte_tile-inl.h"
#if HWY_ARCH_X86
#include "heed/simd/byte_products-inl.h"
#include "heed/simd/emulated_amx-inl.h"
#endif
#if HWY_TARGET == HWY_AVX3_DL || HWY_TARGET == HWY_AVX3_SPR || HWY_TARGET == HWY_AVX2 || HWY_ARCH_ARM_A64

HWY_BEFORE_NAMESPACE();
namespace heed::byte_tile_test::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;

constexpr size_t kLanes = hn::MaxLanes(hn::ScalableTag<float>());

hs::StoredRows<int8_t> Stored(const Operands& x, size_t ahead) {
  return {{x.rows, x.stride, SIZE_MAX}, x.count, ahead};
}

// Calls f(digits, pointers to the factor of each row).
template <class F>
void WithDigits(const Operands& x, const hs::DigitLayout& layout, const F& f) {
  const Buffer digits(DType::kI32, {static_cast<int64_t>(layout.Tail() + layout.kTailVectors * kLanes)});
  hs::ToDigits(hn::ScalableTag<float>(), x.x, x.columns, layout, digits.as<int32_t>());
  std::vector<const float*> at(x.count);
  for (size_t j = 0; j < x.count; ++j) at[j] = x.factors + j;
  f(digits.as<int32_t>(), at.data());
}

#if HWY_TARGET == HWY_AVX3_DL || HWY_ARCH_ARM_A64
// out[row][lane].
void Dots(const Operands& x) {
  const hn::ScalableTag<float> d;
  WithDigits(x, hs::ByteLayout(d, x.columns), [&](const int32_t* digits, const float* const* at) {
    const auto run = [&](auto r) { hs::DotByteRows<r.value>(d, Stored(x, 1000), x.columns, digits, at, x.out); };
    if (x.few == 1) run(std::integral_constant<int, 1>());
    if (x.few == 2) run(std::integral_constant<int, 2>());
    if (x.few == 4) run(std::integral_constant<int, 4>());
    if (x.few == 8) run(std::integral_constant<int, std::min<int>(8, kLanes)>());
  });
}
#else
using Tiles = hs::AmxTilesOfTarget;

void Dots(const Operands& x) {
  const Tiles::Session session;
  const auto few = static_cast<size_t>(x.few);
  WithDigits(x, hs::TileLayout(x.columns, few), [&](const int32_t* digits, const float* const* at) {
    hs::AmxDotRows<Tiles>(hn::ScalableTag<float>(), Stored(x, 1000), x.columns, few, digits, at, x.out);
  });
}

// out[lane][column] += x[row][lane] rows[row][column], or = with `clear`.
void Sums(const Operands& x, bool clear, ptrdiff_t out_row) {
  const Tiles::Session session;
  hs::AmxSumRows<Tiles>(hn::ScalableTag<float>(), Stored(x, 0), x.columns, x.x, clear, x.factors,
                        static_cast<size_t>(x.few), x.out, out_row);
}
#endif

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::byte_tile_test::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET

#if HWY_ONCE && \
    (HWY_ARCH_ARM_A64 || ((HWY_TARGETS & HWY_AVX2) && (HWY_TARGETS & HWY_AVX3_DL) && (HWY_TARGETS & HWY_AVX3_SPR)))
namespace heed::byte_tile_test {
namespace {

// A unit with int8 dot products.
struct Unit {
  const char* name;
  size_t lanes;
  void (*dots)(const Operands&);
  void (*sums)(const Operands&, bool, ptrdiff_t);
  bool (*present)();
};
constexpr Unit kUnits[] = {
#if HWY_ARCH_ARM_A64
    {"vectors", N_NEON::kLanes, &N_NEON::Dots, nullptr, [] { return HasByteProducts(kAllTargets); }},
    {"emulated vectors", N_NEON_WITHOUT_AES::kLanes, &N_NEON_WITHOUT_AES::Dots, nullptr, [] { return true; }},
#else
    {"vectors", N_AVX3_DL::kLanes, &N_AVX3_DL::Dots, nullptr, [] { return HasByteProducts(kAllTargets); }},
    {"tiles", N_AVX3_SPR::kLanes, &N_AVX3_SPR::Dots, &N_AVX3_SPR::Sums, &os::HasAmx},
    {"emulated tiles", N_AVX2::kLanes, &N_AVX2::Dots, &N_AVX2::Sums,
     [] { return (hwy::SupportedTargets() & HWY_AVX2) != 0; }},
#endif
};

class ByteTileTest : public testing::TestWithParam<Unit> {
 protected:
  void SetUp() override {
    if (!unit.present()) GTEST_SKIP() << "this CPU has no " << unit.name << " of bytes";
  }
  const Unit& unit = GetParam();
};

std::string NameOf(const testing::TestParamInfo<Unit>& value) {
  std::string name = value.param.name;
  std::erase(name, ' ');
  return name;
}
INSTANTIATE_TEST_SUITE_P(Units, ByteTileTest, testing::ValuesIn(kUnits), NameOf);

// Contiguous int8 rows and their factors.
struct Case {
  Case(const Unit& by, int num_few, size_t num_rows, size_t num_columns, uint64_t seed)
      : unit(by), few(num_few), count(num_rows), columns(num_columns), random(seed),
        rows(DType::kBool, {static_cast<int64_t>(count), static_cast<int64_t>(columns)},
             random.Chance(0.5) ? Placement::kAfterGuard : Placement::kBeforeGuard),
        factors(DType::kF32, {static_cast<int64_t>(count)}, Placement::kBeforeGuard),
        x(DType::kF32, {static_cast<int64_t>(columns), static_cast<int64_t>(unit.lanes)}),
        out(DType::kF32, {static_cast<int64_t>(count), static_cast<int64_t>(unit.lanes)}) {
    for (size_t i = 0; i < count * columns; ++i) {
      bytes()[i] = static_cast<int8_t>(random.Word() % 256 - 128);
    }
    factors.FillNormal(random.Word());
    x.FillNormal(random.Word());
  }

  int8_t* bytes() const { return reinterpret_cast<int8_t*>(rows.view().data()); }
  float& X(size_t e, size_t r) const { return x.as<float>()[e * unit.lanes + r]; }

  void Run() const {
    unit.dots({few, bytes(), static_cast<ptrdiff_t>(columns), count, columns, x.as<float>(), factors.as<float>(),
               out.as<float>()});
  }
  float Out(size_t j, int r) const { return out.as<float>()[j * unit.lanes + static_cast<size_t>(r)]; }

  // The exact sum and the tolerance of a result: half a unit per element, and a few roundings of its partial sums.
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
    *error = std::abs(factor) * (most / 8355710 * bytes_sum * (0.5 + 0x1p-1) + 4 * 0x1p-24 * products) +
             bytes_sum * 0x1p-126;
  }

  const Unit& unit;
  const int few;
  const size_t count, columns;
  Random random;
  Buffer rows, factors, x, out;
};

TEST_P(ByteTileTest, IsTheSumUpToTheRoundingOfTheFewRows) {
  uint64_t seed = 1;
  for (const int few : {1, 2, 4, 8}) {
    if (static_cast<size_t>(few) > unit.lanes) continue;
    for (const size_t count : {1, 3, 16, 17, 32, 64, 67}) {
      for (const size_t columns : {1, 3, 4, 5, 63, 64, 65, 71, 128, 200}) {
        for (const double size : {1.0, 1e-27, 1e-33, 1e30}) {
          SCOPED_TRACE("few " + std::to_string(few) + " count " + std::to_string(count) + " columns " +
                       std::to_string(columns) + " size " + std::to_string(size));
          const Case c(unit, few, count, columns, seed++);
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

// Sums of the largest digits and bytes, which just fit 32 bits.
TEST_P(ByteTileTest, LongRowsOfTheLargestDoNotOverflow) {
  const Case c(unit, 2, 2, size_t{1} << 16, 7);
  for (size_t e = 0; e < c.columns; ++e) {
    c.bytes()[e] = -128;
    c.bytes()[c.columns + e] = 127;
    c.X(e, 0) = 3;
    c.X(e, 1) = -3;
  }
  c.Run();
  for (size_t j = 0; j < 2; ++j) {
    for (int r = 0; r < 2; ++r) {
      const double sum =
          (j == 0 ? -128.0 : 127.0) * (r == 0 ? 3 : -3) * 65536 * static_cast<double>(c.factors.as<float>()[j]);
      EXPECT_NEAR(c.Out(j, r) / sum, 1, 1e-6);
    }
  }
}

TEST_P(ByteTileTest, ZerosGiveZeroAndWhatIsNotFiniteItsKind) {
  const float inf = std::numeric_limits<float>::infinity();
  const Case c(unit, 4, 17, 20, 9);
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

// Integer sums do not depend on the other rows.
TEST_P(ByteTileTest, BitsDependOnNoOtherRow) {
  for (const size_t columns : {40, 64, 150}) {
    const Case most(unit, static_cast<int>(std::min<size_t>(8, unit.lanes)), 33, columns, 11);
    most.Run();
    const std::vector<float> all(most.out.as<float>(), most.out.as<float>() + most.count * unit.lanes);
    unit.dots({1, most.bytes() + columns, static_cast<ptrdiff_t>(columns), 5, columns, most.x.as<float>(),
               most.factors.as<float>() + 1, most.out.as<float>()});
    for (size_t j = 0; j < 5; ++j) {
      EXPECT_EQ(std::memcmp(&most.out.as<float>()[j * unit.lanes], &all[(j + 1) * unit.lanes], sizeof(float)), 0);
    }
  }
}

#if HWY_ARCH_ARM_A64
// The instruction's sums are those of the baseline's products and additions.
TEST_P(ByteTileTest, BitsAreThoseOfTheBaseline) {
  for (const int few : {1, 2, 4}) {
    for (const size_t columns : {1, 40, 64, 150}) {
      const Case c(unit, few, 67, columns, 11);
      c.Run();
      const std::vector<float> expected(c.out.as<float>(), c.out.as<float>() + c.count * unit.lanes);
      N_NEON_WITHOUT_AES::Dots({few, c.bytes(), static_cast<ptrdiff_t>(columns), c.count, columns, c.x.as<float>(),
                                c.factors.as<float>(), c.out.as<float>()});
      EXPECT_EQ(std::memcmp(c.out.as<float>(), expected.data(), expected.size() * sizeof(float)), 0);
    }
  }
}
#else
// Only AMX has these: vectors multiply int8 by f32 weights (row_tile_test.cc).
class ByteTileSumsTest : public ByteTileTest {};
INSTANTIATE_TEST_SUITE_P(Units, ByteTileSumsTest, testing::ValuesIn(kUnits + 1, std::end(kUnits)), NameOf);

// Sums over rows weighted by fixed-point weights, against exact sums. A weight has an error of half a unit, 2^-24 of
// the row's largest.
TEST_P(ByteTileSumsTest, WeightedRowsAreTheSumUpToTheRoundingOfWeights) {
  uint64_t seed = 1;
  for (const size_t few : {1, 3, 5, 6, 8, 11, 16}) {
    if (few > unit.lanes) continue;
    for (const size_t count : {1, 4, 15, 63, 64}) {
      for (const size_t columns : {1, 16, 40, 64, 72, 128, 200}) {
        for (const float size : {1.0F, 1e-33F, 1e30F}) {
          SCOPED_TRACE("few " + std::to_string(few) + " count " + std::to_string(count) + " columns " +
                       std::to_string(columns) + " size " + std::to_string(size));
          const Case c(unit, static_cast<int>(few), count, columns, seed++);
          const size_t row = (columns + unit.lanes - 1) / unit.lanes * unit.lanes;
          const Buffer weights(DType::kF32, {static_cast<int64_t>(count * unit.lanes)}),
              factors(DType::kF32, {static_cast<int64_t>(few)}, Placement::kBeforeGuard),
              out(DType::kF32, {static_cast<int64_t>(few * row)});
          weights.FillNormal(seed);
          factors.FillNormal(seed + 1);
          out.FillNormal(seed + 2);
          for (size_t i = 0; i < count * unit.lanes; ++i) {
            weights.as<float>()[i] *= i % unit.lanes < few ? size : 0;
          }
          const std::vector<float> before(out.as<float>(), out.as<float>() + few * row);
          const bool clear = seed % 2 == 0;
          unit.sums({c.few, c.bytes(), static_cast<ptrdiff_t>(columns), count, columns, weights.as<float>(),
                     factors.as<float>(), out.as<float>()},
                    clear, static_cast<ptrdiff_t>(row));
          for (size_t r = 0; r < few; ++r) {
            for (size_t e = 0; e < columns; ++e) {
              const double was = clear ? 0 : double{before[r * row + e]} * factors.as<float>()[r];
              double sum = was, most = 0, bytes = 0, products = std::abs(was);
              for (size_t j = 0; j < count; ++j) {
                const double weight = weights.as<float>()[j * unit.lanes + r];
                const double byte = c.bytes()[j * columns + e];
                sum += weight * byte;
                products += std::abs(weight * byte);
                bytes += std::abs(byte);
                most = std::max(most, std::abs(weight));
              }
              ASSERT_NEAR(out.as<float>()[r * row + e], sum, most / 8355710 * bytes + 4 * 0x1p-24 * products + 0x1p-126)
                  << r << " " << e;
            }
          }
        }
      }
    }
  }
}

TEST_P(ByteTileSumsTest, AWeightThatIsNotFiniteStaysInItsRow) {
  const Case c(unit, 4, 20, 24, 5);
  const size_t row = (c.columns + unit.lanes - 1) / unit.lanes * unit.lanes;
  const Buffer weights(DType::kF32, {static_cast<int64_t>(c.count * unit.lanes)});
  const Buffer out(DType::kF32, {static_cast<int64_t>(4 * row)});
  weights.FillConstant(1);
  for (size_t j = 0; j < c.count; ++j) {
    for (size_t lane = 4; lane < unit.lanes; ++lane) weights.as<float>()[j * unit.lanes + lane] = 0;
  }
  weights.as<float>()[3 * unit.lanes + 1] = std::numeric_limits<float>::quiet_NaN();
  weights.as<float>()[4 * unit.lanes + 2] = std::numeric_limits<float>::infinity();
  for (size_t e = 0; e < c.columns; ++e) c.bytes()[4 * c.columns + e] = e % 2 == 0 ? 3 : -3;
  const float ones[] = {1, 1, 1, 1};
  unit.sums(
      {4, c.bytes(), static_cast<ptrdiff_t>(c.columns), c.count, c.columns, weights.as<float>(), ones, out.as<float>()},
      true, static_cast<ptrdiff_t>(row));
  for (size_t e = 0; e < c.columns; ++e) {
    EXPECT_TRUE(std::isfinite(out.as<float>()[e]));
    EXPECT_TRUE(std::isnan(out.as<float>()[row + e]));
    EXPECT_EQ(out.as<float>()[2 * row + e], (e % 2 == 0 ? 1 : -1) * HUGE_VALF);
    EXPECT_TRUE(std::isfinite(out.as<float>()[3 * row + e]));
  }
}

#endif  // HWY_ARCH_ARM_A64

}  // namespace
}  // namespace heed::byte_tile_test
#endif  // HWY_ONCE
