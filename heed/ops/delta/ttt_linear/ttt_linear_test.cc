// ttt_linear beyond random problems: what a mini-batch is, reproducibility, edges, and errors.
#include "heed/ops/delta/ttt_linear/ttt_linear.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "heed/harness/buffer.h"
#include "tests/form_checks.h"
#include "tests/test_time_training_checks.h"

namespace heed::ttt_linear {
namespace {

using form::Refuses;
using form::Tokens;

// 2 sequences of T tokens, 2 heads of 12 channels, with results.
struct Fixture {
  int64_t T;
  Buffer q, k, v, weight, bias, eta, lr, initial, o, state, dk, dweight;

  explicit Fixture(int64_t tokens, DType dtype = DType::kF32)
      : T(tokens), q(dtype, {2, T, 2, 12}), k(dtype, {2, T, 2, 12}), v(dtype, {2, T, 2, 12}), weight(dtype, {2, 12}),
        bias(dtype, {2, 12}), eta(dtype, {2, T, 2}), lr(dtype, {2, T, 2}), initial(dtype, {2, 2, 2, 13, 12}),
        o(dtype, {2, T, 2, 12}), state(dtype, {2, 2, 2, 13, 12}), dk(dtype, {2, T, 2, 12}), dweight(dtype, {2, 12}) {
    uint64_t seed = 0;
    for (const Buffer* x : {&q, &k, &v, &bias, &lr, &initial}) x->FillNormal(++seed);
    weight.FillConstant(0.75);
    eta.FillConstant(0.02);
  }
  template <class Part>
  Inputs inputs(const Part& part) const {
    return {.q = part(q),
            .k = part(k),
            .v = part(v),
            .weight = weight.view(),
            .bias = bias.view(),
            .eta = part(eta),
            .lr = part(lr),
            .initial_state = initial.view()};
  }
  Outputs outputs(const Tokens& part) const { return {part(o), state.view()}; }
  Inputs inputs() const { return inputs(Tokens{0, T}); }
  Outputs outputs() const { return outputs(Tokens{0, T}); }
  BackwardInputs backward() const { return {inputs(), v.view(), {}}; }
  Gradients gradients() const { return {.dk = dk.view(), .dweight = dweight.view()}; }
};

TEST(TttLinearTest, SplitsWhereMiniBatchesBeginAndAtMultiplesOf16HaveTheSameBits) {
  test_time_training::ExpectSplitsAtChunksHaveTheSameBits<Fixture, Options>();
}
TEST(TttLinearTest, AnySplitIsTheWholeUpToRounding) {
  test_time_training::ExpectAnySplitIsTheWhole<Fixture, Options>();
}
TEST(TttLinearTest, BitsDoNotDependOnThreads) { form::ExpectBitsDoNotDependOnThreads<Fixture>(70, Options()); }
TEST(TttLinearTest, AStepHasTheBitsOfACallOfOneToken) {
  test_time_training::ExpectStepsHaveTheBitsOfCalls<Fixture, Options>();
}
TEST(TttLinearTest, ANanOfALaterTokenOrOfAQueryDoesNotSpread) {
  test_time_training::ExpectNansReachTheirOwnAndLaterTokens<Fixture>();
}
TEST(TttLinearTest, NoTokensLeaveTheStateAsItIs) {
  test_time_training::ExpectNoTokensLeaveTheState<Fixture, Options>();
}
TEST(TttLinearTest, EqualTokensAndZerosHaveFiniteResults) {
  test_time_training::ExpectEqualTokensAndZerosAreFinite<Fixture>();
}
TEST(TttLinearTest, WorkspaceIsWhatThePassesReserve) {
  test_time_training::ExpectWorkspaceIsReserved<Fixture, Options>();
}

TEST(TttLinearTest, TheSumOfGradientsIsZeroAndUnreadWhereAMiniBatchBegins) {
  Context ctx(1);
  const Fixture f(32);
  Forward(ctx, f.inputs(Tokens{0, 16}), {}, f.outputs(Tokens{0, 16}));
  for (const double x : Elements(f.state.view().Slice(2, 1, 2))) EXPECT_EQ(x, 0);
  test_time_training::ExpectLastPartIsUnread<Fixture>();
}

TEST(TttLinearTest, ExplainNeedsShapesAlone) {
  const Context ctx(1);
  Inputs in = form::ShapesOf(Fixture(200).inputs());
  in.initial_state = {};
  in.lr = {};
  Options options;
  const Explanation e = Explain(ctx, in, options);
  EXPECT_EQ(e.kernel, "ttt_linear_chunks");
  EXPECT_EQ(e.flops, 2 * 2 * 200 * (6 * 12 * 13 + 32 * 25));
  EXPECT_EQ(e.bytes, 4 * (2 * 200 * 2 * (4 * 12 + 1) + 2 * 2 * 12));
  options.positions = ConstTensorView(nullptr, DType::kI32, {2});  // without numbers, 0
  EXPECT_EQ(Explain(ctx, in, options).workspace_bytes, e.workspace_bytes);
  options.mini_batch = 0;
  EXPECT_THAT([&] { Explain(ctx, in, options); }, Refuses("ttt_linear::Explain: mini_batch is 0, expected at least 1"));
  in.eta = in.eta.Slice(1, 0, 199);
  EXPECT_THAT([&] { BackwardWorkspace(ctx, in, {}); },
              Refuses("ttt_linear::BackwardWorkspace: eta has shape [2,199,2]"));
}

TEST(TttLinearTest, ErrorsNameTheArgumentAndWriteNothing) {
  const Fixture f(9);
  test_time_training::ExpectErrorsOfCommonArguments<Options>("ttt_linear", f);
  const auto forward = form::ForwardRefuses<Options>(f);
  forward([](auto& in, auto&) { in.lr = in.lr.Slice(2, 0, 1); }, "lr has shape [2,9,1]");
  form::BackwardRefuses(f)(
      [&](auto& in, auto& gradients) {
        in.lr = {};
        gradients.dlr = f.lr.view();
      },
      "dlr is asked for, expected none");
}

}  // namespace
}  // namespace heed::ttt_linear
