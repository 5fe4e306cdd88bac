// log_linear_attention beyond random problems: reproducibility, edges, and errors.
#include "heed/ops/gated/log_linear_attention/log_linear_attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/ops/gated/simple_gla/simple_gla.h"
#include "tests/form_checks.h"

namespace heed::log_linear_attention {
namespace {

using form::Integers;
using form::OneToken;
using form::Refuses;
using form::Tokens;

// 2 sequences of T tokens, 2 key and 4 value heads, with results.
struct Fixture {
  int64_t T;
  Buffer q, k, v, scales, g, o, state, dk;

  explicit Fixture(int64_t tokens, DType dtype = DType::kF32)
      : T(tokens), q(dtype, {2, T, 2, 12}), k(dtype, {2, T, 2, 12}), v(dtype, {2, T, 4, 10}),
        scales(dtype, {2, T, 4, 10}), g(dtype, {2, T, 4}), o(dtype, {2, T, 4, 10}),
        state(dtype == DType::kF64 ? DType::kF64 : DType::kF32, {2, 4, 10, 12, 10}), dk(dtype, {2, T, 2, 12}) {
    uint64_t seed = 0;
    for (const Buffer* x : {&q, &k, &v, &scales}) x->FillNormal(++seed);
    g.FillConstant(-0.05);
  }
  template <class Part>
  Inputs inputs(const Part& part) const {
    return {.q = part(q),
            .k = part(k),
            .v = part(v),
            .level_scales = part(scales),
            .log_decay = part(g),
            .initial_state = {}};
  }
  Outputs outputs(const Tokens& part) const { return {part(o), state.view()}; }
  Inputs inputs() const { return inputs(Tokens{0, T}); }
  Outputs outputs() const { return outputs(Tokens{0, T}); }
  BackwardInputs backward() const { return {inputs(), v.view(), {}}; }
  Gradients gradients() const { return {.dk = dk.view()}; }
};

TEST(LogLinearAttentionTest, SplitsAtMultiplesOf64HaveTheSameBits) {
  form::ExpectPartsHaveTheBitsOfTheWhole<Fixture>(200, 128, Options());
}

TEST(LogLinearAttentionTest, BitsDoNotDependOnThreads) {
  form::ExpectBitsDoNotDependOnThreads<Fixture>(150, Options());
}

TEST(LogLinearAttentionTest, StatesAreThoseOfTheBitsOfTheNumberOfTokens) {
  Context ctx(1);
  const Fixture f(150);  // 128 + 16 + 4 + 2
  Forward(ctx, f.inputs(), {}, f.outputs());
  for (int64_t j = 0; j < 10; ++j) {
    double size = 0;
    for (const double x : Elements(f.state.view().Slice(2, j, j + 1))) size += std::abs(x);
    EXPECT_EQ(size > 0, (150 >> j & 1) != 0) << j;
  }
}

TEST(LogLinearAttentionTest, StatesOfBitsThatAreNotSetAreNotRead) {
  Context ctx(1);
  const Fixture f(70), with_nan(70);
  f.state.FillNormal(9);
  const Buffer initial(DType::kF32, f.state.view().sizes()), bad(DType::kF32, f.state.view().sizes());
  initial.FillNormal(9);
  bad.FillNormal(9);
  for (int64_t h = 0; h < 4; ++h) bad.Set({1, h, 1, 3, 3}, std::nan(""));  // 37 = 32 + 4 + 1
  const Buffer positions = Integers({37, 37});
  Options options;
  options.positions = positions.view();
  Inputs in = f.inputs();
  in.initial_state = initial.view();
  Forward(ctx, in, options, f.outputs());
  in.initial_state = bad.view();
  Forward(ctx, in, options, with_nan.outputs());
  EXPECT_TRUE(SameBits(f.o.view(), with_nan.o.view()));
}

TEST(LogLinearAttentionTest, NoTokensLeaveTheStatesAsTheyAre) {
  Context ctx(1);
  const Fixture f(0);
  const Buffer initial(DType::kF32, f.state.view().sizes());
  initial.FillNormal(3);
  const Buffer positions = Integers({5, 5});
  Options options;
  options.positions = positions.view();
  Inputs in = f.inputs();
  in.initial_state = initial.view();
  Forward(ctx, in, options, f.outputs());
  EXPECT_EQ(f.state.Get({1, 2, 2, 4, 4}), initial.Get({1, 2, 2, 4, 4}));
  EXPECT_EQ(f.state.Get({1, 2, 1, 4, 4}), 0);
}

TEST(LogLinearAttentionTest, LevelsThatAllCountAlikeAreSimpleGla) {
  Context ctx(1);
  const Fixture f(140, DType::kF64);
  f.scales.FillConstant(1);
  Forward(ctx, f.inputs(), {}, f.outputs());
  const Buffer o(DType::kF64, f.o.view().sizes());
  recurrent::Options options;
  options.scale = 1;
  simple_gla::Inputs in;
  in.q = f.q.view();
  in.k = f.k.view();
  in.v = f.v.view();
  in.log_decay = f.g.view();
  simple_gla::Forward(ctx, in, options, {o.view()});
  const std::vector<double> got = Elements(f.o.view()), want = Elements(o.view());
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-11) << i;
}

TEST(LogLinearAttentionTest, ALogDecayOfMinusInfinityClearsAndAPositiveOneIsZero) {
  Context ctx(1);
  const Fixture f(100), cut(100), positive(100), zero(100);
  for (int64_t h = 0; h < 4; ++h) cut.g.Set({1, 70, h}, -std::numeric_limits<double>::infinity());
  Forward(ctx, f.inputs(), {}, f.outputs());
  Forward(ctx, cut.inputs(), {}, cut.outputs());
  for (const double x : Elements(cut.o.view())) EXPECT_TRUE(std::isfinite(x));
  EXPECT_EQ(f.o.Get({1, 69, 3, 9}), cut.o.Get({1, 69, 3, 9}));
  double product = 0;
  for (int64_t i = 0; i < 12; ++i) product += cut.q.Get({1, 70, 1, i}) * cut.k.Get({1, 70, 1, i});
  EXPECT_NEAR(cut.o.Get({1, 70, 3, 9}), product * cut.v.Get({1, 70, 3, 9}) * cut.scales.Get({1, 70, 3, 0}), 1e-4);
  positive.g.FillConstant(2);
  zero.g.FillConstant(0);
  Forward(ctx, positive.inputs(), {}, positive.outputs());
  Forward(ctx, zero.inputs(), {}, zero.outputs());
  EXPECT_TRUE(SameBits(positive.o.view(), zero.o.view()));
  Context checks(1);
  checks.set_checks(true);
  EXPECT_THAT([&] { Forward(checks, positive.inputs(), {}, positive.outputs()); }, Refuses("log_decay"));
}

TEST(LogLinearAttentionTest, WorkspaceIsWhatThePassesReserve) {
  const Buffer positions = Integers({5, 5});
  Options options;
  options.positions = positions.view();
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const Fixture f(200, dtype), token(1, dtype);
    const Buffer initial(dtype, f.state.view().sizes());
    initial.FillNormal(1);
    BackwardInputs in = f.backward();
    in.initial_state = initial.view();
    form::ExpectWorkspaceIsReserved(in, options, f.outputs(), f.gradients());
    for (const int threads : {1, 3}) {
      Context step(threads);
      Step(step, token.inputs(OneToken()), options, initial.view(), OneToken()(token.o));
      EXPECT_EQ(ReservedBytes(step), Workspace(step, in, options));
    }
  }
}

TEST(LogLinearAttentionTest, ExplainNeedsShapesAlone) {
  const Context ctx(1);
  Inputs in = form::ShapesOf(Fixture(256).inputs());
  in.level_scales = in.level_scales.Slice(3, 0, 9);
  in.log_decay = {};
  Options options;
  const Explanation e = Explain(ctx, in, options);
  EXPECT_EQ(e.kernel, "log_linear_chunks");
  EXPECT_EQ(e.flops, 2 * 256 * 4 * (64 * (12 + 10) + 2 * 12 * 10 * 2));
  EXPECT_EQ(e.bytes, 4 * 2 * 256 * (2 * 2 * 12 + 2 * 4 * 10 + 4 * 9));
  options.positions = ConstTensorView(nullptr, DType::kI64, {2});  // without numbers, 0
  EXPECT_EQ(Explain(ctx, in, options).flops, e.flops);
  in.level_scales = in.level_scales.Slice(3, 0, 8);
  EXPECT_THAT([&] { Explain(ctx, in, {}); }, Refuses("Explain: level_scales has 8 levels, expected enough for 256"));
}

TEST(LogLinearAttentionTest, ErrorsNameTheArgumentAndWriteNothing) {
  const Fixture f(9);
  const Buffer positions = Integers({5, 5}), far = Integers({510, 510}), narrow(DType::kF32, {2});
  const auto forward = form::ForwardRefuses<Options>(f);
  const Buffer initial(DType::kF32, f.state.view().sizes());
  forward([](auto& in, auto&) { in.q = {}; }, "log_linear_attention::Forward: q is absent");
  forward([](auto& in, auto&) { in.v = in.v.Slice(2, 0, 3); }, "v has 3 heads, expected a multiple of the 2");
  forward([](auto& in, auto&) { in.k = in.k.Slice(1, 0, 8); }, "k has shape [2,8,2,12], expected [2,9,2,12]");
  forward([](auto& in, auto&) { in.level_scales = in.level_scales.Slice(3, 0, 4); },
          "level_scales has 4 levels, expected enough for 9 tokens");
  forward([](auto& in, auto&) { in.level_scales = in.level_scales.Slice(3, 0, 0); }, "expected at least one level");
  forward([](auto& in, auto&) { in.q = in.k = in.q.Slice(3, 0, 0); }, "expected at least one channel");
  forward([](auto& in, auto&) { in.log_decay = in.log_decay.Slice(2, 0, 3); }, "log_decay has shape [2,9,3]");
  forward([](auto&, auto& options) { options.scale = std::nan(""); }, "scale is nan, expected a finite number");
  forward([&](auto& in, auto&) { in.initial_state = initial.view(); }, "positions is absent");
  forward([&](auto&, auto& options) { options.positions = positions.view(); }, "positions[0] is 5, expected 0 without");
  forward([&](auto&, auto& options) { options.positions = narrow.view(); }, "positions has dtype f32");
  forward(
      [&](auto& in, auto& options) {
        in.initial_state = initial.view();
        options.positions = far.view();
      },
      "level_scales has 10 levels, expected enough for 519 tokens");
  const auto backward = form::BackwardRefuses(f);
  backward([&](auto&, auto& gradients) { gradients.dinitial_state = f.state.view(); },
           "dinitial_state is asked for, expected none");
  backward([&](auto&, auto& gradients) { gradients.dv = f.v.view(); }, "dv overlaps v");
  Context ctx(1);
  EXPECT_THAT([&] { Step(ctx, f.inputs(), {}, {}, f.o.view()); }, Refuses("Step"));
  Inputs with_state = f.inputs();
  with_state.initial_state = initial.view();
  EXPECT_THAT([&] { Step(ctx, with_state, {}, f.state.view(), f.o.view()); },
              Refuses("initial_state is given, expected none"));
}

}  // namespace
}  // namespace heed::log_linear_attention
