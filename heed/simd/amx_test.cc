// AMX, emulated and of the CPU, computes the two chains that amx.h describes, and the softmax between its products has
// the bits of its definition.
#define HEED_AMX
#include "heed/core/targets.h"
// After targets.h:
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/os.h"
#include "heed/harness/buffer.h"
#include "heed/simd/amx.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/simd/amx_test.cc"  // this file
#include "hwy/foreach_target.h"                     // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/simd/emulated_amx-inl.h"
#include "heed/simd/amx_products-inl.h"
#include "heed/simd/amx_softmax-inl.h"

namespace heed::tiles_test {
#ifndef HEED_SIMD_TILES_TEST_ONCE
#define HEED_SIMD_TILES_TEST_ONCE
// A product of tiles, sum += a b.
struct Operands {
  uint16_t a[kTileRows][kTileDepth];
  uint16_t b[kTileRows][2 * kTileWords];  // as pairs of k
  float sum[kTileRows][kTileWords];
};

// A matrix of tile rows by tile columns, of several steps and terms, all contiguous.
struct Matrices {
  int products;
  int64_t rows, columns, steps;
  const uint16_t *a, *b;  // a[row][step][term], b[step][term][pair][lane]
  bool add;
  float* out;
};

// powers[i] = 2^exponents[i], and words of (first[i], second[i]).
struct Softmax {
  std::vector<float> exponents, first, second, powers;
  std::vector<uint32_t> pairs;
};
#endif
}  // namespace heed::tiles_test

HWY_BEFORE_NAMESPACE();
namespace heed::tiles_test::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;

template <class Tiles>
void Multiply(Operands& x) {
  const typename Tiles::Session session;
  Tiles::template Load<0>(x.sum, 64);
  Tiles::template Load<4>(x.a, 64);
  Tiles::template Load<7>(x.b, 64);
  Tiles::template AddProducts<0, 4, 7>();
  Tiles::template Store<0>(x.sum, 64);
}

template <class Tiles, int kProducts>
void MultiplyAll(const Matrices& m) {
  constexpr int kA = hs::TermPairs<kProducts>::kA, kB = hs::TermPairs<kProducts>::kB;
  const typename Tiles::Session session;
  const ptrdiff_t row = m.columns * 64, steps = m.steps, step = kA * kTileBytes;
  const hs::TileFactor a = {reinterpret_cast<const char*>(m.a), steps * step, step, kTileBytes, 64};
  const hs::TileFactor b = {reinterpret_cast<const char*>(m.b), 64, kB * kTileRows * row, kTileRows * row, row};
  const auto multiply =
      m.add ? &hs::MultiplyTiles<Tiles, kProducts, true> : &hs::MultiplyTiles<Tiles, kProducts, false>;
  multiply(a, m.rows, b, m.columns, m.steps, m.out, m.columns * kTileWords);
}

template <class Tiles>
void MultiplyMatrices(const Matrices& m) {
  if (m.products == 1) return MultiplyAll<Tiles, 1>(m);
  if (m.products == 3) return MultiplyAll<Tiles, 3>(m);
  if (m.products == 4) return MultiplyAll<Tiles, 4>(m);
  if (m.products == 5) return MultiplyAll<Tiles, 5>(m);
  MultiplyAll<Tiles, 6>(m);
}

void Exponentiate(Softmax& x) {
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> words;
  const hs::Probabilities<decltype(d)> probabilities;
  x.powers.resize(x.exponents.size());
  x.pairs.resize(x.first.size());
  for (size_t i = 0; i + hn::Lanes(d) <= x.exponents.size(); i += hn::Lanes(d)) {
    hn::StoreU(probabilities.Exp2(hn::LoadU(d, &x.exponents[i])), d, &x.powers[i]);
  }
  for (size_t i = 0; i + hn::Lanes(d) <= x.first.size(); i += hn::Lanes(d)) {
    hn::StoreU(probabilities.ToPairs(hn::LoadU(d, &x.first[i]), hn::LoadU(d, &x.second[i])), words, &x.pairs[i]);
  }
}

void Emulate(Operands& x) { Multiply<hs::EmulatedAmxTiles>(x); }
void EmulateMatrices(const Matrices& m) { MultiplyMatrices<hs::EmulatedAmxTiles>(m); }

#if HEED_HAVE_AMX
void Compute(Operands& x) { Multiply<AmxTiles>(x); }
void ComputeMatrices(const Matrices& m) { MultiplyMatrices<AmxTiles>(m); }
#else
void Compute(Operands&) {}
void ComputeMatrices(const Matrices&) {}
#endif

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::tiles_test::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::tiles_test {
namespace {

HWY_EXPORT(Emulate);
HWY_EXPORT(EmulateMatrices);
HWY_EXPORT(Compute);
HWY_EXPORT(ComputeMatrices);
HWY_EXPORT(Exponentiate);

float Widen(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &word, sizeof(x));
  return x;
}

float Flushed(double x) {
  const auto f = static_cast<float>(x);
  return std::fpclassify(f) == FP_SUBNORMAL ? std::copysign(0.0f, f) : f;
}

// In f64 a product is exact, and one addition rounds once more than in f32, which these operands are chosen not to
// show.
void Reference(Operands& x) {
  for (int m = 0; m < kTileRows; ++m) {
    for (int n = 0; n < kTileWords; ++n) {
      float chain[2] = {0, 0};
      for (int k = 0; k < kTileDepth; ++k) {
        const double product = static_cast<double>(Flushed(Widen(x.a[m][k]))) *
                               static_cast<double>(Flushed(Widen(x.b[k / 2][2 * n + k % 2])));
        chain[k % 2] = Flushed(product + static_cast<double>(chain[k % 2]));
      }
      x.sum[m][n] = Flushed(static_cast<double>(x.sum[m][n]) + static_cast<double>(Flushed(chain[0] + chain[1])));
    }
  }
}

Operands Random(uint64_t seed, int exponents) {
  heed::Random random(seed);
  Operands x;
  const auto bits = [&] {
    const auto exponent = random.Integer(127 - exponents / 2, 127 + exponents / 2);
    return static_cast<uint16_t>((random.Word() & 0x807F) | static_cast<uint32_t>(exponent) << 7);
  };
  for (auto& row : x.a)
    for (uint16_t& e : row) e = bits();
  for (auto& row : x.b)
    for (uint16_t& e : row) e = bits();
  for (auto& row : x.sum)
    for (float& e : row) e = Widen(bits());
  return x;
}

bool Same(const Operands& a, const Operands& b) { return std::memcmp(a.sum, b.sum, sizeof(a.sum)) == 0; }

TEST(TilesTest, AProductIsTwoChains) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    Operands expected = Random(seed, 8), emulated = expected, computed = expected;
    Reference(expected);
    HWY_DYNAMIC_DISPATCH(Emulate)(emulated);
    EXPECT_TRUE(Same(emulated, expected)) << seed;
    if (!os::HasAmx()) continue;
    HWY_DYNAMIC_DISPATCH(Compute)(computed);
    EXPECT_TRUE(Same(computed, expected)) << seed;
  }
}

TEST(TilesTest, SubnormalNumbersAreZerosAndOthersAsIEEEHasThem) {
  const uint16_t special[] = {0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x7F7F,
                              0x3F80, 0x7F80, 0xFF80, 0x7FC0, 0x1F80, 0xA000};
  Operands x = {};
  x.b[0][0] = 0x3F80;  // 1 in the first column
  for (int m = 0; m < 12; ++m) x.a[m][0] = special[m];
  for (int n = 1; n < 12; ++n) x.b[0][2 * n] = special[n];
  Operands emulated = x, computed = x;
  HWY_DYNAMIC_DISPATCH(Emulate)(emulated);
  EXPECT_EQ(emulated.sum[2][0], 0) << "a subnormal factor";
  EXPECT_EQ(emulated.sum[2][5], 0) << "a subnormal factor of a normal product";
  EXPECT_EQ(emulated.sum[4][0], std::numeric_limits<float>::min());
  EXPECT_EQ(emulated.sum[7][0], std::numeric_limits<float>::infinity());
  EXPECT_EQ(emulated.sum[4][10], 0) << "a subnormal sum";
  EXPECT_TRUE(std::isnan(emulated.sum[7][1])) << "infinity times 0";
  EXPECT_TRUE(std::isnan(emulated.sum[9][0]));
  if (!os::HasAmx()) return;
  HWY_DYNAMIC_DISPATCH(Compute)(computed);
  for (int m = 0; m < kTileRows; ++m) {
    for (int n = 0; n < kTileWords; ++n) {
      if (std::isnan(emulated.sum[m][n])) {
        EXPECT_TRUE(std::isnan(computed.sum[m][n])) << m << " " << n;
      } else {
        EXPECT_EQ(computed.sum[m][n], emulated.sum[m][n]) << m << " " << n;
      }
    }
  }
}

// Small integers, whose sums are exact in any order.
TEST(TilesTest, MatricesOfManyTilesAndTermsAreSumsOfTheirProducts) {
  const auto bf16 = [](int x) {
    const auto f = static_cast<float>(x);
    uint32_t word;
    std::memcpy(&word, &f, sizeof(word));
    return static_cast<uint16_t>(word >> 16);
  };
  for (const int products : {1, 3, 4, 5, 6}) {
    const int a_terms = products == 1 ? 1 : products == 6 ? 3 : 2;
    const int b_terms = products == 5 ? 3 : a_terms;
    for (const int64_t rows : {0, 2, 6}) {
      for (const int64_t columns : {2, 4}) {
        for (const int64_t steps : {1, 2, 3}) {
          for (const bool add : {false, true}) {
            heed::Random random(static_cast<uint64_t>(products * 1000 + rows * 100 + columns * 10 + steps));
            const auto draw = [&] { return static_cast<int>(random.Integer(-4, 4)); };
            std::vector<uint16_t> a(static_cast<size_t>(rows * steps * a_terms * 512));
            std::vector<uint16_t> b(static_cast<size_t>(steps * b_terms * columns * 512));
            for (uint16_t& e : a) e = bf16(draw());
            for (uint16_t& e : b) e = bf16(draw());
            std::vector<float> out(static_cast<size_t>(rows * columns * 256), 7.0f);
            std::vector<float> expected(out.size(), add ? 7.0f : 0.0f);
            const auto pair_counts = [&](int p, int q) {
              if (products == 3) return p + q < 2;
              if (products >= 5) return p + q < 3;
              return true;
            };
            for (int64_t i = 0; i < rows * 16; ++i) {
              for (int64_t n = 0; n < columns * 16; ++n) {
                float& sum = expected[static_cast<size_t>(i * columns * 16 + n)];
                for (int64_t s = 0; s < steps; ++s) {
                  for (int p = 0; p < a_terms; ++p) {
                    for (int q = 0; q < b_terms; ++q) {
                      if (!pair_counts(p, q)) continue;
                      for (int64_t k = 0; k < 32; ++k) {
                        const auto at_a = ((i / 16 * steps + s) * a_terms + p) * 512 + i % 16 * 32 + k;
                        const auto at_b = ((s * b_terms + q) * 16 + k / 2) * columns * 32 + 2 * n + k % 2;
                        sum += Widen(a[static_cast<size_t>(at_a)]) * Widen(b[static_cast<size_t>(at_b)]);
                      }
                    }
                  }
                }
              }
            }
            const std::vector<float> before = out;
            SCOPED_TRACE(testing::Message() << products << " " << rows << " " << columns << " " << steps);
            const Matrices m = {products, rows, columns, steps, a.data(), b.data(), add, out.data()};
            HWY_DYNAMIC_DISPATCH(EmulateMatrices)(m);
            EXPECT_EQ(out, expected);
            if (!os::HasAmx()) continue;
            out = before;
            HWY_DYNAMIC_DISPATCH(ComputeMatrices)(m);
            EXPECT_EQ(out, expected);
          }
        }
      }
    }
  }
}

// The result of this CPU's target, after comparing it with the emulation's.
Softmax Exponentiated(Softmax x) {
  HWY_DYNAMIC_DISPATCH(Exponentiate)(x);
  if ((hwy::SupportedTargets() & HWY_AVX2) == 0) return x;
  Softmax emulated = x;
  hwy::SetSupportedTargetsForTest(HWY_AVX2);
  HWY_DYNAMIC_DISPATCH(Exponentiate)(emulated);
  hwy::SetSupportedTargetsForTest(0);
  for (size_t i = 0; i < x.powers.size(); ++i) {
    EXPECT_TRUE(x.powers[i] == emulated.powers[i] || std::isnan(emulated.powers[i])) << x.exponents[i];
  }
  EXPECT_EQ(x.pairs, emulated.pairs);
  return x;
}

TEST(TilesTest, PowersOfTwoAreWithinTheirBound) {
  heed::Random random(1);
  Softmax x;
  for (int i = 0; i < 1 << 20; ++i) x.exponents.push_back(static_cast<float>(random.Uniform(-125, 100)));
  for (int i = -126 * 32; i <= 100 * 32; ++i) {  // the table's entries, and what is just below
    x.exponents.push_back(static_cast<float>(i) / 32);
    x.exponents.push_back(std::nextafter(static_cast<float>(i + 1) / 32, -1000.0f));
  }
  x.exponents.resize(x.exponents.size() / 16 * 16);
  const Softmax y = Exponentiated(x);
  for (size_t i = 0; i < x.exponents.size(); ++i) {
    const double expected = std::exp2(static_cast<double>(x.exponents[i]));
    ASSERT_NEAR(static_cast<double>(y.powers[i]) / expected, 1, 3e-7) << x.exponents[i];
  }
}

TEST(TilesTest, PowersOfTwoBeyondTheRangeAreZeroInfiniteOrNaN) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity(), kMax = std::numeric_limits<float>::max();
  Softmax x;
  x.exponents = {-kInfinity, -kMax, -1e6f, -151,  129,    1e6f,   kMax, kInfinity,
                 NAN,        -NAN,  0,     -0.0f, 1e-30f, 1e-40f, 1,    -1};
  const Softmax y = Exponentiated(x);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(y.powers[static_cast<size_t>(i)], 0) << x.exponents[static_cast<size_t>(i)];
  for (int i = 4; i < 8; ++i) EXPECT_EQ(y.powers[static_cast<size_t>(i)], kInfinity);
  EXPECT_TRUE(std::isnan(y.powers[8]) && std::isnan(y.powers[9]));
  for (int i = 10; i < 14; ++i) EXPECT_EQ(y.powers[static_cast<size_t>(i)], 1);
  EXPECT_EQ(y.powers[14], 2);
  EXPECT_EQ(y.powers[15], 0.5f);
}

TEST(TilesTest, PairsAreRoundedToTheNearestAndTiesUp) {
  heed::Random random(2);
  Softmax x;
  const auto bits = [](float f) {
    uint32_t word;
    std::memcpy(&word, &f, sizeof(word));
    return word;
  };
  for (int i = 0; i < 1 << 16; ++i) {
    for (std::vector<float>* to : {&x.first, &x.second}) {
      const uint32_t low = i % 4 == 0 ? 0x8000 : static_cast<uint32_t>(random.Word() & 0xFFFF);
      const uint32_t word = static_cast<uint32_t>(random.Integer(0, 0x7F7F)) << 16 | low;
      float f;
      std::memcpy(&f, &word, sizeof(f));
      to->push_back(f);
    }
  }
  x.first[0] = std::numeric_limits<float>::infinity();
  x.second[1] = std::numeric_limits<float>::quiet_NaN();
  const Softmax y = Exponentiated(x);
  const auto rounded = [&](float f) {
    const auto below = static_cast<double>(Widen(static_cast<uint16_t>(bits(f) >> 16)));
    const auto above = static_cast<double>(Widen(static_cast<uint16_t>((bits(f) >> 16) + 1)));
    const double half = std::isinf(above) ? 0x1.FFp127 : (below + above) / 2;
    return static_cast<uint16_t>((bits(f) >> 16) + (static_cast<double>(f) >= half ? 1 : 0));
  };
  for (size_t i = 2; i < x.first.size(); ++i) {
    ASSERT_EQ(y.pairs[i] & 0xFFFF, rounded(x.first[i])) << x.first[i];
    ASSERT_EQ(y.pairs[i] >> 16, rounded(x.second[i])) << x.second[i];
  }
  EXPECT_EQ(y.pairs[0] & 0xFFFF, 0x7F80u);
  EXPECT_TRUE(std::isnan(Widen(static_cast<uint16_t>(y.pairs[1] >> 16))));
}

}  // namespace
}  // namespace heed::tiles_test
#endif  // HWY_ONCE
