// Attention with AMX, of the CPU or emulated, in what no other kernel does: fixed maxima, pipelines, bf16 splits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "heed/core/dispatch.h"
#include "heed/core/os.h"
#include "heed/engines/softmax/kernels.h"
#include "heed/ops/exact/attention/cases/attention_variations_case.h"

namespace heed::attention {
namespace {

// Each test runs with the CPU's AMX, if it has AMX, and emulated.
class Tiles : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    ctx_.set_isa("tiles");  // overrides HEED_ISA
    if (GetParam()) emulate_.emplace();
    if (!GetParam() && !os::HasAmx()) GTEST_SKIP() << "no AMX: " << os::WhyNoAmx();
    if (softmax::kAmx.forward_passes(ctx_).forward == nullptr) GTEST_SKIP() << "built without AMX";
  }
  Context ctx_{1};

 private:
  std::optional<EmulateAmx> emulate_;
};

INSTANTIATE_TEST_SUITE_P(Units, Tiles, testing::Bool(),
                         [](const auto& value) { return std::string(value.param ? "Emulated" : "Matrix"); });

constexpr int64_t kTk = 1500, kD = 64;  // a pipeline and a partial tile

Problem Long(DType dtype) {
  return MakeProblem(dtype, {.B = 1, .Tq = 40, .Tk = kTk, .Hq = 1, .Hkv = 1, .D = kD, .Dv = 48});
}

TEST_P(Tiles, AreTaken) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    Problem p = Long(dtype);
    EXPECT_EQ(Explain(ctx_, p.in, p.options).kernel, "softmax_tiles");
    p.options.invariant = true;
    EXPECT_NE(Explain(ctx_, p.in, p.options).kernel, "softmax_tiles");
  }
}

// A row whose later logits exceed its first ones by far more than the range of P.
TEST_P(Tiles, ALogitFarAboveTheFirstTileChangesNoOtherRow) {
  constexpr int64_t kRow = 5;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t key : {0, 70, 777, 1450}) {
      Problem p = Long(dtype);
      const Result before = RunForward(ctx_, p);
      for (int64_t e = 0; e < kD; ++e) {
        p.memory[0].Set({0, kRow, 0, e}, 20 * p.memory[1].Get({0, key, 0, e}));
      }
      const Result after = RunForward(ctx_, p), expected = RunReference(p);
      for (int64_t i = 0; i < 40; ++i) {
        for (int64_t e = 0; e < 48; ++e) {
          const double x = after.o.Get({0, i, 0, e});
          if (i != kRow) {
            EXPECT_EQ(x, before.o.Get({0, i, 0, e}));
          }
          EXPECT_NEAR(x, expected.o.Get({0, i, 0, e}), dtype == DType::kF32 ? 2e-5 : 2e-2);
        }
        const double lse = expected.lse.Get({0, 0, i});
        EXPECT_NEAR(after.lse.Get({0, 0, i}), lse, 1e-5 * std::max(1.0, lse));
      }
    }
  }
}

// The pipeline adds the same chains in another order in time: a row has the same bits alone and among many.
TEST_P(Tiles, APipelineHasTheBitsOfTileByTile) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    Problem p = Long(dtype);
    const Result piped = RunForward(ctx_, p);
    const Buffer mask(DType::kBool, {1, 1, 40, kTk});
    mask.FillConstant(1);
    for (int64_t j = 0; j < kTk; j += 64) mask.Set({0, 0, 39, j}, 0);  // masks part of every tile
    p.options.mask = Keep(p, mask);
    const Result one_by_one = RunForward(ctx_, p);
    for (int64_t i = 0; i < 39; ++i) {
      for (int64_t e = 0; e < 48; ++e) {
        EXPECT_EQ(piped.o.Get({0, i, 0, e}), one_by_one.o.Get({0, i, 0, e})) << Name(dtype);
      }
    }
  }
}

// A whole tile is computed when the tile after it has begun, which here keeps a part of its pairs.
TEST_P(Tiles, AWholeTileBeforeAPartOfOneKeepsItsKeys) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    Problem p = Long(dtype);
    const Buffer mask(DType::kBool, {1, 1, 40, kTk});
    for (int64_t i = 0; i < 40; ++i) {
      for (int64_t j = 0; j < kTk; ++j) mask.Set({0, 0, i, j}, j <= 140 + i ? 1 : 0);
    }
    p.options.mask = Keep(p, mask);
    const Result result = RunForward(ctx_, p), expected = RunReference(p);
    for (int64_t i = 0; i < 40; ++i) {
      EXPECT_NEAR(result.lse.Get({0, 0, i}), expected.lse.Get({0, 0, i}), 1e-5) << Name(dtype) << " " << i;
    }
  }
}

TEST_P(Tiles, HighPrecisionIsThreeProductsAndOtherwiseNothing) {
  Problem p = Long(DType::kF32);
  const Result expected = RunReference(p), highest = RunForward(ctx_, p);
  p.options.precision = Precision::kHigh;
  const Result high = RunForward(ctx_, p);
  const auto relative = [&](const Result& r) {
    double error = 0, size = 0;
    for (int64_t i = 0; i < 40; ++i) {
      for (int64_t e = 0; e < 48; ++e) {
        const double x = expected.o.Get({0, i, 0, e});
        error += std::pow(r.o.Get({0, i, 0, e}) - x, 2);
        size += x * x;
      }
    }
    return std::sqrt(error / size);
  };
  EXPECT_LT(relative(highest), 1e-6);
  EXPECT_LT(relative(high), 1e-5);
  EXPECT_GT(relative(high), 2e-6) << "or it costs as much";

  ctx_.set_isa(TargetName(kAllTargets));
  const Result high_of_vectors = RunForward(ctx_, p);
  p.options.precision = Precision::kHighest;
  EXPECT_TRUE(SameBits(high_of_vectors.o.view(), RunForward(ctx_, p).o.view()));
}

// The largest f32 numbers would round to infinity in bf16.
TEST_P(Tiles, TheLargestValuesStayFinite) {
  Problem p = Long(DType::kF32);
  p.memory[2].FillConstant(0);
  p.memory[2].Set({0, 3, 0, 7}, 3.4e38);
  const Result r = RunForward(ctx_, p), expected = RunReference(p);
  for (int64_t i = 0; i < 40; ++i) {
    EXPECT_NEAR(r.o.Get({0, i, 0, 7}) / expected.o.Get({0, i, 0, 7}), 1, 1e-5);
  }
}

// A row whose biases are all the most negative number has an lse of that size, which times log2(e) overflows f32.
TEST_P(Tiles, RowsOfTheMostNegativeBiasHaveFiniteGradients) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Problem p = Long(dtype);
    const Buffer bias(DType::kF32, {40, kTk});
    bias.FillNormal(3);
    for (int64_t j = 0; j < kTk; ++j) bias.Set({5, j}, -std::numeric_limits<float>::max());
    p.options.bias = Keep(p, bias);
    const Comparison result = Compare(MakeBackwardCase(WithGradients(p, 7), false), ctx_);
    EXPECT_TRUE(result.ok) << Name(dtype) << ": " << result.message;
  }
}

}  // namespace
}  // namespace heed::attention
