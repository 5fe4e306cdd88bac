// Rotary encoding against the reference, and properties of rotations.
#include "heed/ops/positions/rotary.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/harness/buffer.h"

namespace heed {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr RotaryPairs kBoth[] = {RotaryPairs::kHalfSplit, RotaryPairs::kInterleaved};

Buffer Positions(DType dtype, std::initializer_list<int64_t> sizes, const std::vector<int64_t>& values) {
  Buffer buffer(dtype, sizes);
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kI32) {
      buffer.as<int32_t>()[i] = static_cast<int32_t>(values[i]);
    } else {
      buffer.as<int64_t>()[i] = values[i];
    }
  }
  return buffer;
}

Buffer Rotated(const Buffer& x, const Buffer& positions, RotaryPairs pairs, const RotaryOptions& options = {},
               int threads = 2) {
  Context ctx(threads);
  Buffer y(x.view().dtype(), x.view().sizes());
  Rotary(ctx, x.view(), positions.view(), pairs, options, y.view());
  return y;
}

double Unit(DType dtype) {
  switch (dtype) {
    case DType::kF64: return 0x1p-53;
    case DType::kF32: return 0x1p-24;
    case DType::kBF16: return 0x1p-8;
    default: return 0x1p-11;
  }
}

// The rounding before the last one: for 16-bit dtypes cosines and sines are rounded to f32, and so are two products and
// their sum.
double ComputingUnit(DType dtype) { return dtype == DType::kF64 || dtype == DType::kF32 ? 0 : 0x1p-22; }

// One rounding of the exact value, and the error of an angle: `angle_error`
// per position and unit of x. Frequencies are at most 1 in these tests.
void ExpectNear(const Buffer& x, const Buffer& positions, RotaryPairs pairs, const RotaryOptions& options,
                double angle_error) {
  const Buffer y = Rotated(x, positions, pairs, options);
  const Buffer exact(DType::kF64, x.view().sizes());
  RotaryReference(x.view(), positions.view(), pairs, options, exact.view());
  double largest_x = 0, largest_position = 4;  // 4: products and sums
  std::vector<int64_t> index(static_cast<size_t>(x.view().rank()));
  do {
    largest_x = std::max(largest_x, std::fabs(GetElement(x.view(), index)));
  } while (NextIndex(x.view().sizes(), index));
  index.assign(static_cast<size_t>(positions.view().rank()), 0);
  do {
    largest_position = std::max(largest_position, std::fabs(GetElement(positions.view(), index)));
  } while (NextIndex(positions.view().sizes(), index));
  const double tiny = x.view().dtype() == DType::kF16 ? 0x1p-25 : 0;
  index.assign(static_cast<size_t>(x.view().rank()), 0);
  do {
    const double e = GetElement(exact.view(), index);
    ASSERT_NEAR(GetElement(y.view(), index), e,
                Unit(x.view().dtype()) * std::fabs(e) + tiny + largest_x * ComputingUnit(x.view().dtype()) +
                    4 * largest_x * largest_position * angle_error)
        << testing::PrintToString(index);
  } while (NextIndex(x.view().sizes(), index));
}

constexpr double kAngleError = 0x1p-51;        // for an unscaled frequency
constexpr double kScaledAngleError = 0x1p-47;  // includes logarithms and ramps

TEST(RotaryTest, AgreesWithTheReferenceForEveryDTypePairingAndSize) {
  struct Size {
    int64_t B, T, H, D, dim;
  };
  for (const Size& n : {Size{1, 1, 1, 2, 2}, Size{2, 67, 3, 20, 20}, Size{1, 33, 2, 7, 6}, Size{3, 5, 1, 64, 16}}) {
    for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
      for (const RotaryPairs pairs : kBoth) {
        for (const bool inverse : {false, true}) {
          const Buffer x(dtype, {n.B, n.T, n.H, n.D});
          x.FillNormal(1);
          Random random(2);
          std::vector<int64_t> p(static_cast<size_t>(n.B * n.T));
          for (int64_t& value : p) value = random.Integer(-100, 5000);
          RotaryOptions options{.dim = n.dim, .inverse = inverse};
          ExpectNear(x, Positions(DType::kI64, {n.B, n.T}, p), pairs, options, kAngleError);
          p.resize(static_cast<size_t>(n.T));
          ExpectNear(x, Positions(DType::kI32, {n.T}, p), pairs, options, kAngleError);
        }
      }
    }
  }
}

TEST(RotaryTest, AgreesWithTheReferenceUnderEveryScaling) {
  const std::vector<RotaryScaling> scalings = {
      {.rope_type = RopeType::kLinear, .factor = 3},
      {.rope_type = RopeType::kNtk, .factor = 3},
      {.rope_type = RopeType::kDynamic, .factor = 3, .original_max_position_embeddings = 100},
      {.rope_type = RopeType::kDynamic, .factor = 3, .max_position_embeddings = 9000},
      {.rope_type = RopeType::kYarn, .factor = 16, .original_max_position_embeddings = 512},
      {.rope_type = RopeType::kYarn,
       .factor = 16,
       .original_max_position_embeddings = 512,
       .beta_fast = 20,
       .beta_slow = 2,
       .mscale = 0.7,
       .mscale_all_dim = 0.9,
       .truncate = false},
      {.rope_type = RopeType::kYarn,
       .original_max_position_embeddings = 512,
       .max_position_embeddings = 2048,
       .attention_factor = 1.5},
      {.rope_type = RopeType::kLlama3,
       .factor = 8,
       .original_max_position_embeddings = 512,
       .low_freq_factor = 1,
       .high_freq_factor = 4},
      {.rope_type = RopeType::kLongrope,
       .factor = 4,
       .original_max_position_embeddings = 600,
       .short_factor = {1, 1, 1, 1, 1.5, 2, 2, 2, 3, 3},
       .long_factor = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}},
  };
  const Buffer x(DType::kF64, {2, 3, 2, 24});
  x.FillNormal(3);
  // One sequence is longer than any original length, one shorter.
  const Buffer p = Positions(DType::kI64, {2, 3}, {5, 4001, 77, 0, 99, 3});
  for (const RotaryScaling& scaling : scalings) {
    for (const RotaryPairs pairs : kBoth) {
      for (const bool inverse : {false, true}) {
        SCOPED_TRACE(static_cast<int>(scaling.rope_type));
        ExpectNear(x, p, pairs, {.base = 5000, .dim = 20, .scaling = scaling, .inverse = inverse}, kScaledAngleError);
      }
    }
  }
}

TEST(RotaryTest, FarPositionsAreAsExactAsAnF64AngleAllows) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    const Buffer x(dtype, {5, 1, 64});
    x.FillNormal(4);
    const int64_t far = int64_t{1} << 31;
    ExpectNear(x, Positions(DType::kI64, {5}, {1000000, 999999, -1000000, far, -far}), RotaryPairs::kHalfSplit, {},
               kAngleError);
  }
}

TEST(RotaryTest, APairIsRotatedByPositionTimesFrequency) {
  const Buffer x(DType::kF64, {1, 1, 4});
  for (int64_t d = 0; d < 4; ++d) x.Set({0, 0, d}, d == 0 || d == 3 ? 1 : 0);
  const Buffer p = Positions(DType::kI64, {1}, {3});
  // Elements 0 and 2, 1 and 3: angles 3 and 0.03.
  const Buffer half = Rotated(x, p, RotaryPairs::kHalfSplit);
  EXPECT_NEAR(half.Get({0, 0, 0}), std::cos(3.0), 1e-15);
  EXPECT_NEAR(half.Get({0, 0, 2}), std::sin(3.0), 1e-15);
  EXPECT_NEAR(half.Get({0, 0, 1}), -std::sin(0.03), 1e-15);
  EXPECT_NEAR(half.Get({0, 0, 3}), std::cos(0.03), 1e-15);
  // Elements 0 and 1, 2 and 3.
  const Buffer next = Rotated(x, p, RotaryPairs::kInterleaved);
  EXPECT_NEAR(next.Get({0, 0, 0}), std::cos(3.0), 1e-15);
  EXPECT_NEAR(next.Get({0, 0, 1}), std::sin(3.0), 1e-15);
  EXPECT_NEAR(next.Get({0, 0, 2}), -std::sin(0.03), 1e-15);
  EXPECT_NEAR(next.Get({0, 0, 3}), std::cos(0.03), 1e-15);
  // The inverse, and another base.
  const Buffer back = Rotated(x, p, RotaryPairs::kInterleaved, {.base = 100, .inverse = true});
  EXPECT_NEAR(back.Get({0, 0, 1}), -std::sin(3.0), 1e-15);
  EXPECT_NEAR(back.Get({0, 0, 2}), std::sin(0.3), 1e-15);
}

TEST(RotaryTest, PositionZeroChangesNothing) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    const Buffer x(dtype, {1, 2, 16});
    x.FillNormal(5);
    for (const RotaryPairs pairs : kBoth) {
      EXPECT_TRUE(SameBits(Rotated(x, Positions(DType::kI32, {1}, {0}), pairs).view(), x.view()));
    }
  }
}

TEST(RotaryTest, ThePairingsAreEqualButForThePermutation) {
  constexpr int64_t kT = 40, kD = 18, kDim = 14;
  const Buffer x(DType::kF32, {kT, 1, kD}), permuted(DType::kF32, {kT, 1, kD});
  x.FillNormal(6);
  std::vector<int64_t> p;
  for (int64_t t = 0; t < kT; ++t) p.push_back(7 * t - 50);
  // 0, 2, 4, ..., 1, 3, 5, ...
  const auto from = [](int64_t d) { return d >= kDim ? d : d < kDim / 2 ? 2 * d : 2 * (d - kDim / 2) + 1; };
  for (int64_t t = 0; t < kT; ++t) {
    for (int64_t d = 0; d < kD; ++d) permuted.Set({t, 0, d}, x.Get({t, 0, from(d)}));
  }
  const Buffer positions = Positions(DType::kI64, {kT}, p);
  const Buffer a = Rotated(x, positions, RotaryPairs::kInterleaved, {.dim = kDim});
  const Buffer b = Rotated(permuted, positions, RotaryPairs::kHalfSplit, {.dim = kDim});
  for (int64_t t = 0; t < kT; ++t) {
    for (int64_t d = 0; d < kD; ++d) EXPECT_EQ(b.Get({t, 0, d}), a.Get({t, 0, from(d)}));
  }
}

TEST(RotaryTest, TheInverseUndoesAndIsTheTranspose) {
  const Buffer x(DType::kF64, {9, 2, 12}), g(DType::kF64, {9, 2, 12});
  x.FillNormal(7);
  g.FillNormal(8);
  const Buffer p = Positions(DType::kI64, {9}, {0, 1, 31, 32, 33, 1000, -1, -32, -33});
  for (const RotaryPairs pairs : kBoth) {
    const Buffer there = Rotated(x, p, pairs);
    const Buffer back = Rotated(there, p, pairs, {.inverse = true});
    // With an attention factor only the transpose relation holds.
    const RotaryScaling scaling = {.rope_type = RopeType::kYarn, .factor = 4, .original_max_position_embeddings = 256};
    const Buffer y = Rotated(x, p, pairs, {.scaling = scaling});
    const Buffer dx = Rotated(g, p, pairs, {.scaling = scaling, .inverse = true});
    double left = 0, right = 0;
    std::vector<int64_t> index(3);
    do {
      EXPECT_NEAR(GetElement(back.view(), index), GetElement(x.view(), index), 1e-14);
      left += GetElement(y.view(), index) * GetElement(g.view(), index);
      right += GetElement(x.view(), index) * GetElement(dx.view(), index);
    } while (NextIndex(x.view().sizes(), index));
    EXPECT_NEAR(left, right, 1e-12);
    EXPECT_GT(std::fabs(left), 0.1);
  }
}

TEST(RotaryTest, ProductsDependOnTheDifferenceOfPositionsAlone) {
  const Buffer q(DType::kF64, {4, 1, 32}), k(DType::kF64, {4, 1, 32});
  for (int64_t d = 0; d < 32; ++d) {
    for (int64_t t = 0; t < 4; ++t) {
      q.Set({t, 0, d}, std::sin(static_cast<double>(d)));
      k.Set({t, 0, d}, std::cos(static_cast<double>(3 * d)));
    }
  }
  for (const RotaryPairs pairs : kBoth) {
    const Buffer rq = Rotated(q, Positions(DType::kI64, {4}, {17, 1017, 5, -90}), pairs);
    const Buffer rk = Rotated(k, Positions(DType::kI64, {4}, {12, 1012, 0, -96}), pairs);
    double product[4] = {};
    for (int64_t t = 0; t < 4; ++t) {
      for (int64_t d = 0; d < 32; ++d) product[t] += rq.Get({t, 0, d}) * rk.Get({t, 0, d});
    }
    EXPECT_NEAR(product[1], product[0], 1e-11);
    EXPECT_NEAR(product[2], product[0], 1e-11);
    EXPECT_GT(std::fabs(product[3] - product[0]), 1e-3);  // 6 apart, not 5
  }
}

TEST(RotaryTest, WhatIsNotRotatedKeepsItsBits) {
  const Buffer x(DType::kF32, {1, 1, 6});
  x.FillNormal(9);
  x.as<uint32_t>()[4] = 0x7FC12345;  // a NaN with a payload
  const Buffer y = Rotated(x, Positions(DType::kI64, {1}, {5}), RotaryPairs::kHalfSplit, {.dim = 4});
  EXPECT_EQ(y.as<uint32_t>()[4], 0x7FC12345u);
  EXPECT_EQ(y.as<uint32_t>()[5], x.as<uint32_t>()[5]);
  EXPECT_NE(y.as<uint32_t>()[1], x.as<uint32_t>()[1]);
}

TEST(RotaryTest, StridesAreRespectedAndChangeNoBit) {
  constexpr int64_t kB = 2, kT = 37, kH = 3, kD = 10;
  std::vector<int64_t> p;
  for (int64_t i = 0; i < 2 * kB * kT; ++i) p.push_back(i % 100 * 11);
  // x is a head-major slice of a fused buffer, reversed in time; y has gaps; every second position is used.
  const Buffer fused(DType::kF32, {kB, kH, kT, 3 * kD});
  fused.FillNormal(10);
  const Buffer x = fused.As(TensorView(fused.as<float>() + kD + (kT - 1) * 3 * kD, DType::kF32, {kB, kT, kH, kD},
                                       {kH * kT * 3 * kD, -3 * kD, kT * 3 * kD, 1}));
  const Buffer positions = Positions(DType::kI32, {kB, 2 * kT}, p);
  const ConstTensorView strided(positions.as<int32_t>(), DType::kI32, {kB, kT}, {2 * kT, 2});
  const Buffer gaps(DType::kF32, {kB, kT, kH, kD + 3});
  gaps.FillConstant(42);
  const TensorView y(gaps.as<float>(), DType::kF32, {kB, kT, kH, kD}, {kT * kH * (kD + 3), kH * (kD + 3), kD + 3, 1});

  const Buffer plain(DType::kF32, {kB, kT, kH, kD});
  const Buffer plain_positions(DType::kI64, {kB, kT});
  for (int64_t b = 0; b < kB; ++b) {
    for (int64_t t = 0; t < kT; ++t) {
      plain_positions.as<int64_t>()[b * kT + t] = p[static_cast<size_t>(b * 2 * kT + 2 * t)];
      for (int64_t h = 0; h < kH; ++h) {
        for (int64_t d = 0; d < kD; ++d) plain.Set({b, t, h, d}, x.Get({b, t, h, d}));
      }
    }
  }
  for (const RotaryPairs pairs : kBoth) {
    Context ctx(2);
    Rotary(ctx, x.view(), strided, pairs, {.dim = 8}, y);
    EXPECT_TRUE(SameBits(y, Rotated(plain, plain_positions, pairs, {.dim = 8}).view()));
    for (int64_t d = kD; d < kD + 3; ++d) EXPECT_EQ(gaps.Get({1, 5, 1, d}), 42);
  }
}

TEST(RotaryTest, BitsDependOnNeitherThreadsNorNeighbours) {
  constexpr int64_t kT = 100;
  const Buffer x(DType::kF32, {2, kT, 2, 16});
  x.FillNormal(11);
  std::vector<int64_t> p;
  for (int64_t i = 0; i < 2 * kT; ++i) p.push_back(i < kT ? i : 3 * i);
  const Buffer positions = Positions(DType::kI64, {2, kT}, p);
  for (const RotaryScaling& scaling :
       {RotaryScaling{}, RotaryScaling{.rope_type = RopeType::kDynamic, .factor = 2, .max_position_embeddings = 64}}) {
    const RotaryOptions options{.scaling = scaling};
    const Buffer all = Rotated(x, positions, RotaryPairs::kHalfSplit, options, 1);
    EXPECT_TRUE(SameBits(Rotated(x, positions, RotaryPairs::kHalfSplit, options, 4).view(), all.view()));
    for (const int64_t b : {0, 1}) {
      const Buffer alone = Rotated(x.As(x.view().Slice(0, b, b + 1)), positions.As(positions.view().Slice(0, b, b + 1)),
                                   RotaryPairs::kHalfSplit, options);
      EXPECT_TRUE(SameBits(alone.view(), all.view().Slice(0, b, b + 1)));
    }
    // The last token alone; its sequence has the same length.
    const Buffer token = Rotated(x.As(x.view().Slice(1, kT - 1, kT)),
                                 positions.As(positions.view().Slice(1, kT - 1, kT)), RotaryPairs::kHalfSplit, options);
    EXPECT_TRUE(SameBits(token.view(), all.view().Slice(1, kT - 1, kT)));
  }
}

TEST(RotaryTest, BitsDoNotDependOnTheSimdTarget) {
  const Buffer positions = Positions(DType::kI64, {3}, {0, 77, 100000});
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    // Pairs 32 to 35 of 37 are in a vector on one target, in the tail on another.
    const Buffer x(dtype, {3, 2, 74}), y(dtype, {3, 2, 74});
    x.FillNormal(12);
    for (const int64_t d : {0, 7, 32, 36, 64, 67, 70, 73}) {
      x.Set({0, 0, d}, 3e-6);   // subnormal in f16
      x.Set({1, 0, d}, 60000);  // sums overflow f16
      x.Set({1, 0, (d + 37) % 74}, 60000);
      x.Set({1, 1, d}, d % 2 == 0 ? std::nan("") : HUGE_VAL);
    }
    for (const RotaryPairs pairs : kBoth) {
      const Buffer best = Rotated(x, positions, pairs);
      for (const std::string& target : AvailableTargets()) {
        Context ctx(1);
        ctx.set_isa(target);
        Rotary(ctx, x.view(), positions.view(), pairs, {}, y.view());
        EXPECT_TRUE(SameBits(y.view(), best.view())) << target << Name(dtype);
      }
    }
  }
}

// At position 0 an attention factor of 1.5 gives 1.5 x: half of the results are between two 16-bit numbers, many of
// them in the middle.
TEST(RotaryTest, EverySixteenBitNumberIsRoundedToEven) {
  constexpr int64_t kH = 65536 / 16;
  const Buffer positions = Positions(DType::kI64, {1}, {0});
  const RotaryScaling scaling = {
      .rope_type = RopeType::kYarn, .factor = 2, .original_max_position_embeddings = 64, .attention_factor = 1.5};
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const Buffer x(dtype, {1, kH, 32}), y(dtype, {1, kH, 32});
    for (int64_t h = 0; h < kH; ++h) {
      for (int64_t d = 0; d < 32; ++d) {
        x.as<uint16_t>()[32 * h + d] = d < 16 ? static_cast<uint16_t>(16 * h + d) : 0;
      }
    }
    for (const std::string& target : AvailableTargets()) {
      Context ctx(1);
      ctx.set_isa(target);
      Rotary(ctx, x.view(), positions.view(), RotaryPairs::kHalfSplit, {.scaling = scaling}, y.view());
      for (int64_t h = 0; h < kH; ++h) {
        for (int64_t d = 0; d < 16; ++d) {
          const double expected = 1.5 * x.Get({0, h, d});
          // Such bf16 results are subnormal in f32 and may become 0.
          if (dtype == DType::kBF16 && std::fabs(expected) < 0x1p-126) continue;
          if (std::isnan(expected)) {
            ASSERT_TRUE(std::isnan(y.Get({0, h, d}))) << target << Name(dtype);
            continue;
          }
          uint16_t bits;
          StoreDouble(dtype, &bits, 0, expected);
          ASSERT_EQ(y.as<uint16_t>()[32 * h + d], bits) << target << Name(dtype) << expected;
        }
      }
    }
  }
}

TEST(RotaryTest, TheCallersRoundingModeDoesNotShow) {
  const Buffer positions = Positions(DType::kI64, {64}, [] {
    std::vector<int64_t> p(64);
    for (int64_t i = 0; i < 64; ++i) p[static_cast<size_t>(i)] = 1000 * i;
    return p;
  }());
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    const Buffer x(dtype, {64, 1, 16});
    x.FillNormal(13);
    const Buffer nearest = Rotated(x, positions, RotaryPairs::kHalfSplit);
    for (const int mode : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
      std::fesetround(mode);
      const Buffer y = Rotated(x, positions, RotaryPairs::kHalfSplit);
      EXPECT_EQ(std::fegetround(), mode);
      std::fesetround(FE_TONEAREST);
      EXPECT_TRUE(SameBits(y.view(), nearest.view())) << Name(dtype);
    }
  }
}

TEST(RotaryTest, EmptySizesAreLegal) {
  for (const auto& [B, T, H] : {std::tuple<int64_t, int64_t, int64_t>{0, 3, 2}, {2, 0, 2}, {2, 3, 0}}) {
    const Buffer x(DType::kF32, {B, T, H, 8});
    const std::vector<int64_t> p(static_cast<size_t>(B * T), 1);
    EXPECT_NO_THROW(Rotated(x, Positions(DType::kI64, {B, T}, p), RotaryPairs::kHalfSplit));
  }
  // A size of 0 makes the other sizes irrelevant.
  const TensorView huge(nullptr, DType::kF32, {0, 3, 2, int64_t{1} << 60});
  Context ctx(1);
  Rotary(ctx, huge, Positions(DType::kI64, {3}, {1, 2, 3}).view(), RotaryPairs::kHalfSplit, {}, huge);
}

struct Mistake {
  std::string what;
  Buffer x{DType::kF32, {2, 3, 2, 8}};
  Buffer positions{DType::kI64, {3}};
  RotaryOptions options;
  Buffer y{DType::kF32, {2, 3, 2, 8}};
};

void ExpectMistake(const Mistake& m) {
  m.y.FillConstant(42);
  Context ctx(1);
  EXPECT_THAT([&] { Rotary(ctx, m.x.view(), m.positions.view(), RotaryPairs::kHalfSplit, m.options, m.y.view()); },
              ThrowsMessage<InvalidArgument>(HasSubstr(m.what)));
  if (m.y.present() && m.y.view().rank() == 4) {
    EXPECT_EQ(m.y.Get({0, 0, 0, 0}), 42);
  }
}

TEST(RotaryMistakeTest, EveryArgumentIsCheckedBeforeAnythingIsWritten) {
  const Buffer zeros = Positions(DType::kI64, {3}, {0, 1, 2});
  const auto with = [&](std::string what) {
    Mistake m;
    m.what = std::move(what);
    m.positions = zeros;
    return m;
  };
  Mistake m = with("rotary: x has shape [3,8], expected [B, T, H, D] or");
  m.x = Buffer(DType::kF32, {3, 8});
  ExpectMistake(m);
  m = with("rotary: x has shape [2,3,2,0], expected [B, T, H, D] or");
  m.x = Buffer(DType::kF32, {2, 3, 2, 0});
  ExpectMistake(m);
  m = with("rotary: x has dtype i64, expected f64, f32, bf16 or f16");
  m.x = Buffer(DType::kI64, {2, 3, 2, 8});
  ExpectMistake(m);
  m = with("rotary: x has stride 2 on its last axis, expected 1");
  m.x = m.x.As(TensorView(m.x.as<float>(), DType::kF32, {2, 3, 2, 4}, {48, 16, 8, 2}));
  ExpectMistake(m);
  m = with("rotary: x has no data");
  m.x = m.x.As(TensorView(nullptr, DType::kF32, {2, 3, 2, 8}));
  ExpectMistake(m);
  m = with("rotary: x is on cuda:0, expected the CPU");
  m.x = m.x.As(TensorView(m.x.as<float>(), DType::kF32, {2, 3, 2, 8}, {DeviceType::kCuda, 0}));
  ExpectMistake(m);
  m = with("rotary: x has a misaligned address, expected a multiple of 4 bytes");
  m.x = m.x.As(TensorView(m.x.as<char>() + 1, DType::kF32, {2, 3, 2, 4}));
  ExpectMistake(m);

  m = with("rotary: positions has dtype f32, expected i32 or i64");
  m.positions = Buffer(DType::kF32, {3});
  ExpectMistake(m);
  m = with("rotary: positions has shape [2], expected [3] or [2,3]");
  m.positions = Positions(DType::kI64, {2}, {0, 1});
  ExpectMistake(m);
  m = with("rotary: positions has shape [1,3], expected [3] or [2,3]");
  m.positions = Positions(DType::kI64, {1, 3}, {0, 1, 2});
  ExpectMistake(m);
  m = with("rotary: positions has shape [2,3], expected [2]");
  m.x = m.x.As(TensorView(m.x.as<float>(), DType::kF32, {2, 3, 8}));
  m.positions = Buffer(DType::kI64, {2, 3});
  ExpectMistake(m);
  m = with("rotary: positions is absent");
  m.positions = Buffer();
  ExpectMistake(m);
  for (const int64_t p : {(int64_t{1} << 31) + 1, -(int64_t{1} << 31) - 1}) {
    m = with("rotary: positions contains " + std::to_string(p) + ", expected -2^31 to 2^31");
    m.positions = Positions(DType::kI64, {3}, {0, p, 0});
    ExpectMistake(m);
  }

  for (const int64_t dim : {-2, 0, 3, 10}) {
    m = with("rotary: dim is " + std::to_string(dim) + ", expected an even number from 2 to D, 8");
    m.options.dim = dim;
    ExpectMistake(m);
  }
  m = with("rotary: dim is 7, expected an even number from 2 to D, 7");
  m.x = m.x.As(m.x.view().Slice(3, 0, 7));
  ExpectMistake(m);
  for (const double base : {1.0, 0.0, -3.0, HUGE_VAL, std::nan("")}) {
    m = with("rotary: base is ");
    m.options.base = base;
    ExpectMistake(m);
  }

  m = with("rotary: y has shape [2,3,2,6], expected [2,3,2,8]");
  m.y = Buffer(DType::kF32, {2, 3, 2, 6});
  ExpectMistake(m);
  m = with("rotary: y has dtype f64, expected f32 as x");
  m.y = Buffer(DType::kF64, {2, 3, 2, 8});
  ExpectMistake(m);
  m = with("rotary: y overlaps x, expected memory of its own");
  m.y = m.x;
  ExpectMistake(m);
  m = with("rotary: y has strides [0,16,8,1] for shape [2,3,2,8]");
  m.y = m.y.As(TensorView(m.y.as<float>(), DType::kF32, {2, 3, 2, 8}, {0, 16, 8, 1}));
  ExpectMistake(m);
  m = with("rotary: y has stride 2 on its last axis, expected 1");
  m.y = Buffer(DType::kF32, {2, 3, 2, 16});
  m.y = m.y.As(TensorView(m.y.as<float>(), DType::kF32, {2, 3, 2, 8}, {96, 32, 16, 2}));
  ExpectMistake(m);
  m = with("rotary: y is absent");
  m.y = Buffer();
  Context ctx(1);
  EXPECT_THAT([&] { Rotary(ctx, m.x.view(), zeros.view(), RotaryPairs::kHalfSplit, {}, {}); },
              ThrowsMessage<InvalidArgument>(HasSubstr(m.what)));
}

}  // namespace
}  // namespace heed
