// titans beyond random problems: what a mini-batch is, reproducibility, edges, and errors.
#include "heed/ops/delta/titans/titans.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "heed/harness/buffer.h"
#include "tests/form_checks.h"
#include "tests/test_time_training_checks.h"

namespace heed::titans {
namespace {

using form::Refuses;
using form::Tokens;

// 2 sequences of T tokens, 2 heads of 12 channels, with results.
struct Fixture {
  int64_t T;
  Buffer q, k, v, weight, bias, theta, alpha, eta, initial, o, state, dk, dweight;

  explicit Fixture(int64_t tokens, DType dtype = DType::kF32)
      : T(tokens), q(dtype, {2, T, 2, 12}), k(dtype, {2, T, 2, 12}), v(dtype, {2, T, 2, 12}), weight(dtype, {2, 12}),
        bias(dtype, {2, 12}), theta(dtype, {2, T, 2}), alpha(dtype, {2, T, 2}), eta(dtype, {2, T, 2}),
        initial(dtype, {2, 2, 3, 12, 12}), o(dtype, {2, T, 2, 12}), state(dtype, {2, 2, 3, 12, 12}),
        dk(dtype, {2, T, 2, 12}), dweight(dtype, {2, 12}) {
    uint64_t seed = 0;
    for (const Buffer* x : {&q, &k, &v, &bias, &initial}) x->FillNormal(++seed);
    weight.FillConstant(0.75);
    theta.FillConstant(0.004);
    alpha.FillConstant(0.01);
    eta.FillConstant(0.6);
  }
  template <class Part>
  Inputs inputs(const Part& part) const {
    return {.q = part(q),
            .k = part(k),
            .v = part(v),
            .weight = weight.view(),
            .bias = bias.view(),
            .theta = part(theta),
            .alpha = part(alpha),
            .eta = part(eta),
            .initial_state = initial.view()};
  }
  Outputs outputs(const Tokens& part) const { return {part(o), state.view()}; }
  Inputs inputs() const { return inputs(Tokens{0, T}); }
  Outputs outputs() const { return outputs(Tokens{0, T}); }
  BackwardInputs backward() const { return {inputs(), v.view(), {}}; }
  Gradients gradients() const { return {.dk = dk.view(), .dweight = dweight.view()}; }
};

TEST(TitansTest, SplitsWhereMiniBatchesBeginAndAtMultiplesOf16HaveTheSameBits) {
  test_time_training::ExpectSplitsAtChunksHaveTheSameBits<Fixture, Options>();
}
TEST(TitansTest, AnySplitIsTheWholeUpToRounding) { test_time_training::ExpectAnySplitIsTheWhole<Fixture, Options>(); }
TEST(TitansTest, BitsDoNotDependOnThreads) { form::ExpectBitsDoNotDependOnThreads<Fixture>(70, Options()); }
TEST(TitansTest, AStepHasTheBitsOfACallOfOneToken) {
  test_time_training::ExpectStepsHaveTheBitsOfCalls<Fixture, Options>();
}
TEST(TitansTest, ANanOfALaterTokenOrOfAQueryDoesNotSpread) {
  test_time_training::ExpectNansReachTheirOwnAndLaterTokens<Fixture>();
}
TEST(TitansTest, NoTokensLeaveTheStateAsItIs) { test_time_training::ExpectNoTokensLeaveTheState<Fixture, Options>(); }
TEST(TitansTest, EqualTokensAndZerosHaveFiniteResults) {
  test_time_training::ExpectEqualTokensAndZerosAreFinite<Fixture>();
}
TEST(TitansTest, WorkspaceIsWhatThePassesReserve) { test_time_training::ExpectWorkspaceIsReserved<Fixture, Options>(); }

TEST(TitansTest, TheThirdPartIsTheMemoryBeforeTheMiniBatchAndUnreadWhereOneBegins) {
  Context ctx(1);
  const Fixture f(32), other(32);
  const auto part = [](const Buffer& x, int64_t i) { return Elements(x.view().Slice(2, i, i + 1)); };
  Forward(ctx, f.inputs(Tokens{0, 16}), {}, f.outputs(Tokens{0, 16}));
  for (const double x : part(f.state, 2)) EXPECT_EQ(x, 0);
  Forward(ctx, other.inputs(Tokens{0, 20}), {}, other.outputs(Tokens{0, 20}));
  EXPECT_EQ(part(other.state, 2), part(f.state, 0));
  test_time_training::ExpectLastPartIsUnread<Fixture>();
}

TEST(TitansTest, TheGatesOfOneToken) {
  Context ctx(1);
  const Fixture f(1, DType::kF64), momentum(1, DType::kF64);
  f.eta.FillConstant(0);
  f.alpha.FillConstant(0);
  Forward(ctx, f.inputs(), {}, f.outputs());
  momentum.alpha.FillConstant(1);
  Forward(ctx, momentum.inputs(), {}, momentum.outputs());
  for (int64_t i = 0; i < 12; ++i) {
    for (int64_t j = 0; j < 12; ++j) {
      const double M = f.initial.Get({1, 1, 0, i, j}), S = f.initial.Get({1, 1, 1, i, j});
      const double step = f.state.Get({1, 1, 1, i, j});
      EXPECT_NEAR(f.state.Get({1, 1, 0, i, j}), M + step, 1e-14);
      EXPECT_NEAR(momentum.state.Get({1, 1, 1, i, j}), 0.6 * S + step, 1e-14);
      EXPECT_NEAR(momentum.state.Get({1, 1, 0, i, j}), 0.6 * S + step, 1e-14);
    }
  }
}

TEST(TitansTest, ExplainNeedsShapesAlone) {
  const Context ctx(1);
  Inputs in = form::ShapesOf(Fixture(200).inputs());
  in.initial_state = {};
  Options options;
  const Explanation e = Explain(ctx, in, options);
  EXPECT_EQ(e.kernel, "titans_chunks");
  EXPECT_EQ(e.flops, 2 * 2 * 200 * (10 * 12 * 12 + 32 * 24));
  EXPECT_EQ(e.bytes, 4 * (2 * 200 * 2 * (4 * 12 + 3) + 2 * 2 * 12));
  options.positions = ConstTensorView(nullptr, DType::kI32, {2});  // without numbers, 0
  EXPECT_EQ(Explain(ctx, in, options).workspace_bytes, e.workspace_bytes);
  options.mini_batch = 0;
  EXPECT_THAT([&] { Explain(ctx, in, options); }, Refuses("titans::Explain: mini_batch is 0, expected at least 1"));
  in.eta = in.eta.Slice(1, 0, 199);
  EXPECT_THAT([&] { BackwardWorkspace(ctx, in, {}); }, Refuses("titans::BackwardWorkspace: eta has shape [2,199,2]"));
}

TEST(TitansTest, ErrorsNameTheArgumentAndWriteNothing) {
  const Fixture f(9);
  test_time_training::ExpectErrorsOfCommonArguments<Options>("titans", f);
  const auto forward = form::ForwardRefuses<Options>(f);
  forward([](auto& in, auto&) { in.theta = {}; }, "theta is absent");
  forward([](auto& in, auto&) { in.alpha = in.alpha.Slice(2, 0, 1); }, "alpha has shape [2,9,1]");
  form::BackwardRefuses(f)(
      [&](auto& in, auto& gradients) {
        in.initial_state = {};
        gradients.dinitial_state = f.state.view();
      },
      "dinitial_state is asked for, expected none");
}

}  // namespace
}  // namespace heed::titans
