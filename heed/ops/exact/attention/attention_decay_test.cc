// Properties of forgetting attention that comparison with its reference cannot show.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/ops/exact/attention/cases/attention_variations_case.h"

namespace heed::attention {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// log_decay [B, Tk, Hq] of f(token).
template <class F>
ConstTensorView Decays(Problem& p, const F& f, DType dtype = DType::kF32) {
  const Sizes s = SizesOf(p);
  const Buffer decays(dtype, {s.B, s.Tk, s.Hq});
  for (int64_t b = 0; b < s.B; ++b) {
    for (int64_t t = 0; t < s.Tk; ++t) {
      for (int64_t h = 0; h < s.Hq; ++h) decays.Set({b, t, h}, f(t));
    }
  }
  return Keep(p, decays);
}

Problem Causal(DType dtype, const Sizes& sizes) {
  Problem p = MakeProblem(dtype, sizes);
  p.options.causal = true;
  return p;
}

double LargestDifference(const Buffer& a, const Buffer& b) {
  double largest = 0;
  std::vector<int64_t> at(a.view().sizes().size());
  do {
    const double x = GetElement(a.view(), at), y = GetElement(b.view(), at);
    if (x != y) largest = std::max(largest, std::isnan(x - y) ? kInfinity : std::abs(x - y));
  } while (NextIndex(a.view().sizes(), at));
  return largest;
}

class ForgettingAttention : public testing::TestWithParam<DType> {
 protected:
  Context ctx_{2};
};

TEST_P(ForgettingAttention, AConstantDecayIsASlopeOfTheDistance) {
  Problem p = Causal(GetParam(), {.B = 2, .Tq = 150, .Tk = 200, .Hq = 4, .Hkv = 2});
  Problem slopes = p;
  p.options.log_decay = Decays(p, [](int64_t) { return -0.125; });
  slopes.options.alibi = KeepFloats(slopes, {0.125, 0.125, 0.125, 0.125});
  const Result a = RunForward(ctx_, p), b = RunForward(ctx_, slopes);
  const double tolerance = GetParam() == DType::kF64 ? 1e-14 : GetParam() == DType::kF32 ? 3e-6 : 0x1p-6;
  EXPECT_LE(LargestDifference(a.o, b.o), tolerance);
  EXPECT_LE(LargestDifference(a.lse, b.lse), tolerance);
}

TEST_P(ForgettingAttention, NothingForgottenChangesNoBit) {
  Problem p = Causal(GetParam(), {.B = 1, .Tq = 200, .Tk = 700, .Hq = 4, .Hkv = 2, .D = 40});
  p = WithGradients(p, 3);
  const Result plain = RunForward(ctx_, p);
  const std::vector<Buffer> gradients = RunBackward(ctx_, p);
  p.options.log_decay = Decays(p, [](int64_t) { return 0.0; });
  EXPECT_EQ(Difference(RunForward(ctx_, p), plain), "");
  EXPECT_EQ(Difference(RunBackward(ctx_, p), gradients), "");
}

// A decay of -inf begins a segment, even if the decays before it sum to a large value.
TEST_P(ForgettingAttention, MinusInfinityBeginsASegment) {
  Problem p = Causal(GetParam(), {.B = 2, .Tq = 150, .Tk = 150, .Hq = 4, .Hkv = 2});
  Problem segments = p;
  p.options.log_decay = Decays(p, [](int64_t t) { return t == 70 || t == 128 ? -kInfinity : t < 70 ? -1e4 : 0; });
  segments.options.log_decay = Decays(segments, [](int64_t t) { return t < 70 ? -1e4 : 0.0; });
  const Buffer of_tokens(DType::kI64, {2, 150});
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t t = 0; t < 150; ++t) of_tokens.Set({b, t}, (t >= 70) + (t >= 128));
  }
  segments.options.segments_q = segments.options.segments_k = Keep(segments, of_tokens);
  EXPECT_EQ(Difference(RunForward(ctx_, p), RunForward(ctx_, segments)), "");
  const Buffer dq = RunBackward(ctx_, WithGradients(p, 5))[0],
               in_segments = RunBackward(ctx_, WithGradients(segments, 5))[0];
  EXPECT_EQ(Difference(dq.view(), in_segments.view()), "");
}

TEST_P(ForgettingAttention, WhereAllElseIsForgottenARowIsItsOwnValue) {
  Problem p = Causal(GetParam(), {.B = 1, .Tq = 600, .Tk = 600, .Hq = 2, .Hkv = 1, .D = 16, .Dv = 8});
  p.options.log_decay = Decays(p, [](int64_t) { return -1e4; });
  const Result r = RunForward(ctx_, p);
  for (int64_t t = 0; t < 600; ++t) {
    for (int64_t h = 0; h < 2; ++h) {
      EXPECT_TRUE(std::isfinite(r.lse.Get({0, h, t})));
      for (int64_t e = 0; e < 8; ++e) {
        const double v = p.memory[2].Get({0, t, 0, e});  // on AMX a sum of three bf16 terms
        EXPECT_NEAR(r.o.Get({0, t, h, e}), v, 0x1p-23 * std::abs(v)) << t;
      }
    }
  }
}

// After 3000 steps of -1e4 a running sum in f32 has a resolution of 2, and one in f64 of 4e-9.
TEST_P(ForgettingAttention, WhatWasForgottenLongAgoTakesNoDigits) {
  constexpr int64_t kLong = 3000, kShort = 200;
  Problem p = Causal(GetParam(), {.B = 1, .Tq = kShort, .Tk = kLong + kShort, .Hq = 2, .Hkv = 1});
  Problem tail = p;
  for (ConstTensorView* view : {&tail.in.k, &tail.in.v}) *view = view->Slice(1, kLong, kLong + kShort);
  p.options.log_decay = Decays(p, [](int64_t t) { return t <= kLong ? -1e4 : -0.01 - 1e-3 * t / kLong; }, DType::kF64);
  tail.options.log_decay = p.options.log_decay.Slice(1, kLong, kLong + kShort);
  const Result whole = RunForward(ctx_, p), alone = RunForward(ctx_, tail);
  const double tolerance = GetParam() == DType::kF64 ? 1e-14 : GetParam() == DType::kF32 ? 2e-6 : 0x1p-6;
  EXPECT_LE(LargestDifference(whole.o, alone.o), tolerance);
  EXPECT_LE(LargestDifference(whole.lse, alone.lse), tolerance);
}

TEST_P(ForgettingAttention, ANanReachesThePairsAcrossItAlone) {
  Problem p = Causal(GetParam(), {.B = 1, .Tq = 300, .Tk = 300, .Hq = 2, .Hkv = 1});
  p.options.window = {20, 0};
  const auto usual = [](int64_t) { return -0.02; };
  p.options.log_decay = Decays(p, usual);
  const Result clean = RunForward(ctx_, p);
  for (const int64_t at : {0, 1, 63, 64, 100}) {
    p.options.log_decay = Decays(p, [&](int64_t t) { return t == at ? kNaN : usual(t); });
    const Result r = RunForward(ctx_, p);
    for (int64_t t = 0; t < 300; ++t) {
      const bool across = at > 0 && t >= at && t - 20 < at;
      EXPECT_EQ(std::isnan(r.o.Get({0, t, 1, 0})), across) << at << " " << t;
      if (across) continue;
      EXPECT_EQ(r.o.Get({0, t, 1, 0}), clean.o.Get({0, t, 1, 0})) << at << " " << t;
    }
  }
}

// Under a prefix a row sees later keys, to which no decay applies.
TEST_P(ForgettingAttention, KeysAheadAreNotForgotten) {
  Problem p = Causal(GetParam(), {.B = 1, .Tq = 2, .Tk = 130, .Hq = 1, .Hkv = 1, .D = 1, .Dv = 1});
  p.memory[0].FillConstant(0);
  p.options.prefix = KeepInts(p, {130});
  p.options.query_starts = KeepInts(p, {1});
  p.options.log_decay = Decays(p, [](int64_t) { return -std::log(2.0); }, DType::kF64);
  const Result r = RunForward(ctx_, p);
  EXPECT_NEAR(r.lse.Get({0, 0, 0}), std::log(0.5 + 129), 1e-5);
  EXPECT_NEAR(r.lse.Get({0, 0, 1}), std::log(0.25 + 0.5 + 128), 1e-5);
}

// Only pairs with the step between them contribute to its gradient; without such a pair it is exactly zero.
TEST_P(ForgettingAttention, TheFirstStepHasNoGradient) {
  Problem p = Causal(GetParam(), {.B = 2, .Tq = 100, .Tk = 100, .Hq = 2, .Hkv = 1});
  p.options.key_starts = KeepInts(p, {0, 7});
  p.options.key_lengths = KeepInts(p, {100, 90});
  p.options.log_decay = Decays(p, [](int64_t) { return -0.1; });
  const std::vector<Buffer> all = RunBackward(ctx_, WithGradients(p, 4));
  const Buffer& gradient = all.back();
  for (int64_t h = 0; h < 2; ++h) {
    EXPECT_EQ(gradient.Get({0, 0, h}), 0);
    EXPECT_NE(gradient.Get({0, 1, h}), 0);
    for (const int64_t t : {0, 7, 90, 99}) EXPECT_EQ(gradient.Get({1, t, h}), 0) << t;
    EXPECT_NE(gradient.Get({1, 8, h}), 0);
  }
}

// If steps decay nearly everything, both the remaining terms and their errors are small.
TEST_P(ForgettingAttention, SmallGradientsKeepTheirDigits) {
  Problem p = Causal(GetParam(), {.B = 1, .Tq = 400, .Tk = 400, .Hq = 2, .Hkv = 2});
  p.options.log_decay = Decays(p, [](int64_t t) { return t == 200 ? -20.0 : -0.1; }, DType::kF64);
  p = WithGradients(p, 6);
  const Buffer computed = RunBackward(ctx_, p).back(), expected = RunBackwardReference(p).back();
  const double scale = std::abs(expected.Get({0, 100, 0}));
  const double unit = GetParam() == DType::kF64 ? 1e-12 : GetParam() == DType::kF32 ? 1e-4 : 0.2;
  for (int64_t h = 0; h < 2; ++h) {
    const double right = expected.Get({0, 200, h});
    EXPECT_LE(std::abs(right), 1e-5 * scale);
    EXPECT_NEAR(computed.Get({0, 200, h}), right, unit * 1e-5 * scale);
  }
}

TEST_P(ForgettingAttention, ThreadsChangeNoBitOfTheGradient) {
  Problem p = Causal(GetParam(), {.B = 2, .Tq = 300, .Tk = 700, .Hq = 4, .Hkv = 2});
  p.options.log_decay = Decays(p, [](int64_t t) { return -0.01 * static_cast<double>(t % 7); });
  p = WithGradients(p, 7);
  Context one(1), three(3);
  EXPECT_EQ(Difference(RunBackward(one, p), RunBackward(three, p)), "");
}

INSTANTIATE_TEST_SUITE_P(DTypes, ForgettingAttention,
                         testing::Values(DType::kF64, DType::kF32, DType::kBF16, DType::kF16),
                         [](const auto& dtype) { return std::string(Name(dtype.param)); });

TEST(ForgettingAttentionChecks, PositiveAndNanAreRefusedWhereTheyCount) {
  Context ctx(1);
  Problem p = Causal(DType::kF32, {.B = 1, .Tq = 6, .Tk = 6, .Hq = 2, .Hkv = 1});
  p.options.key_lengths = KeepInts(p, {5});
  for (const double value : {0.5, kNaN}) {
    for (const int64_t at : {0, 3, 5}) {
      p.options.log_decay = Decays(p, [&](int64_t t) { return t == at ? value : -1.0; });
      ctx.set_checks(false);
      EXPECT_NO_THROW(RunForward(ctx, p));
      ctx.set_checks(true);
      if (at == 3) {
        EXPECT_THROW(RunForward(ctx, p), InvalidArgument);
      } else {  // before every key, and padding
        EXPECT_NO_THROW(RunForward(ctx, p));
      }
    }
  }
}

}  // namespace
}  // namespace heed::attention
