// mesa beyond random problems: the error of its solver, reproducibility, edges, and errors.
#include "heed/ops/gated/mesa/mesa.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/ops/gated/mesa/mesa_internal.h"
#include "tests/form_checks.h"

namespace heed::mesa {
namespace {

using form::Refuses;
using form::Tokens;

// 2 sequences of T tokens, 2 heads, with results.
struct Fixture {
  int64_t T;
  Buffer q, k, v, beta, lamb, g, o, state, solution, dk, dlamb;

  explicit Fixture(int64_t tokens, DType dtype = DType::kF32)
      : T(tokens), q(dtype, {2, T, 2, 12}), k(dtype, {2, T, 2, 12}), v(dtype, {2, T, 2, 10}), beta(dtype, {2, T, 2}),
        lamb(dtype, {2, 12}), g(dtype, {2, T, 2}), o(dtype, {2, T, 2, 10}), state(dtype, {2, 2, 12, 22}),
        solution(dtype, {2, T, 2, 12}), dk(dtype, {2, T, 2, 12}), dlamb(dtype, {2, 12}) {
    uint64_t seed = 0;
    for (const Buffer* x : {&q, &k, &v}) x->FillNormal(++seed);
    beta.FillConstant(0.1);
    lamb.FillConstant(0.75);
    g.FillConstant(-0.05);
  }
  template <class Part>
  Inputs inputs(const Part& part) const {
    return {.q = part(q),
            .k = part(k),
            .v = part(v),
            .beta = part(beta),
            .lamb = lamb.view(),
            .log_decay = part(g),
            .initial_state = {}};
  }
  Outputs outputs(const Tokens& part) const { return {part(o), state.view(), part(solution)}; }
  Inputs inputs() const { return inputs(Tokens{0, T}); }
  Outputs outputs() const { return outputs(Tokens{0, T}); }
  BackwardInputs backward() const { return {inputs(), v.view(), {}, {}}; }
  Gradients gradients() const { return {.dk = dk.view(), .dlamb = dlamb.view()}; }
};

// The Euclidean norm of a token's row of one head.
double Norm(const TensorView& t, int64_t b, int64_t token, int64_t h) {
  double sum = 0;
  for (int64_t i = 0; i < t.size(3); ++i) sum += std::pow(GetElement(t, std::vector<int64_t>{b, token, h, i}), 2);
  return std::sqrt(sum);
}

TEST(MesaTest, TheErrorOfTheSolverIsWithinItsBound) {
  Context ctx(1);
  const Fixture f(60, DType::kF64);
  const Buffer o(DType::kF64, f.o.view().sizes()), x(DType::kF64, f.q.view().sizes());
  ReferenceBy(Solver::kCholesky, f.inputs(), {}, {o.view(), {}, x.view()});
  const double root = std::sqrt(ConditionBound(f.inputs(), {})), factor = (root - 1) / (root + 1);
  EXPECT_GT(root, 2);
  double before = std::numeric_limits<double>::infinity();
  for (const int64_t iterations : {1, 2, 4, 8, 16}) {
    Options options;
    options.iterations = iterations;
    Forward(ctx, f.inputs(), options, f.outputs());
    double worst = 0;
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t t = 0; t < 60; ++t) {
        for (int64_t h = 0; h < 2; ++h) {
          const Buffer error(DType::kF64, {1, 1, 1, 12});
          for (int64_t i = 0; i < 12; ++i) {
            error.Set({0, 0, 0, i}, f.solution.Get({b, t, h, i}) - x.Get({b, t, h, i}));
          }
          worst = std::max(worst, Norm(error.view(), 0, 0, 0) / Norm(x.view(), b, t, h));
        }
      }
    }
    EXPECT_LE(worst, 2 * std::pow(factor, static_cast<double>(iterations)) * root + 1e-14) << iterations;
    EXPECT_LT(worst, before) << iterations;
    before = worst;
  }
  EXPECT_LT(before, 1e-13);  // more steps than channels
}

TEST(MesaTest, SplitsAtMultiplesOf16HaveTheSameBits) {
  form::ExpectPartsHaveTheBitsOfTheWhole<Fixture>(100, 48, Options());
}

TEST(MesaTest, BitsDoNotDependOnThreads) { form::ExpectBitsDoNotDependOnThreads<Fixture>(70, Options()); }

TEST(MesaTest, AStepHasTheBitsOfACallOfOneToken) {
  Context ctx(1);
  const Fixture earlier(30);
  Forward(ctx, earlier.inputs(), {}, earlier.outputs());
  form::ExpectStepHasTheBitsOfACall<Fixture>(earlier.state, Options());
}

TEST(MesaTest, EqualKeysOrZerosHaveFiniteResults) {
  for (const double value : {0.0, 1.0}) {
    const Fixture f(40);
    f.k.FillConstant(value);
    f.q.FillConstant(value);
    form::ExpectFinite(f);
  }
}

TEST(MesaTest, NoTokensLeaveTheStateAsItIs) {
  Context ctx(1);
  const Fixture f(0);
  const Buffer initial(DType::kF32, f.state.view().sizes());
  initial.FillNormal(3);
  Inputs in = f.inputs();
  in.initial_state = initial.view();
  Forward(ctx, in, {}, f.outputs());
  EXPECT_TRUE(SameBits(initial.view(), f.state.view()));
}

TEST(MesaTest, APositiveLogDecayIsZeroUnlessValuesAreChecked) {
  Context ctx(1), checks(1);
  checks.set_checks(true);
  const Fixture positive(40), zero(40);
  positive.g.FillConstant(2);
  zero.g.FillConstant(0);
  Forward(ctx, positive.inputs(), {}, positive.outputs());
  Forward(ctx, zero.inputs(), {}, zero.outputs());
  EXPECT_TRUE(SameBits(positive.o.view(), zero.o.view()));
  EXPECT_THAT([&] { Forward(checks, positive.inputs(), {}, positive.outputs()); }, Refuses("log_decay"));
  zero.beta.Set({1, 3, 1}, -0.5);
  EXPECT_THAT([&] { Forward(checks, zero.inputs(), {}, zero.outputs()); },
              Refuses("beta has the value -0.5, expected values >= 0"));
  zero.beta.FillConstant(1);
  zero.lamb.Set({1, 3}, 0);
  EXPECT_THAT([&] { Forward(checks, zero.inputs(), {}, zero.outputs()); },
              Refuses("lamb has the value 0, expected values > 0"));
}

TEST(MesaTest, WorkspaceIsWhatThePassesReserve) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const Fixture f(200, dtype);
    form::ExpectWorkspaceIsReserved(f.backward(), Options(), f.outputs(), f.gradients());
  }
}

TEST(MesaTest, ExplainNeedsShapesAlone) {
  const Context ctx(1);
  const Fixture f(200);
  Inputs in = form::ShapesOf(f.inputs());
  const Explanation planned = Explain(ctx, in, {}), given = Explain(ctx, f.inputs(), {});
  EXPECT_EQ(planned.kernel, "mesa_chunks");
  EXPECT_EQ(planned.target, given.target);
  EXPECT_EQ(planned.flops, 2 * 200 * 2 * (30 * 12 * (2 * 12 + 32) + (4 * 12 + 32) * (12 + 10)));
  EXPECT_EQ(planned.flops, given.flops);
  EXPECT_EQ(planned.bytes, 4 * 2 * (200 * 2 * (2 * 12 + 2 * 10 + 2) + 12));
  EXPECT_EQ(planned.bytes, given.bytes);
  EXPECT_EQ(planned.workspace_bytes, given.workspace_bytes);
  Options options;
  options.lengths = ConstTensorView(nullptr, DType::kI64, {2});  // without numbers, no token is left out
  EXPECT_EQ(Explain(ctx, in, options).flops, planned.flops);
  options.iterations = 0;
  EXPECT_THAT([&] { Explain(ctx, in, options); }, Refuses("mesa::Explain: iterations is 0, expected at least 1"));
  in.beta = ConstTensorView(nullptr, DType::kF32, {2, 200, 3});
  EXPECT_THAT([&] { Workspace(ctx, in, {}); }, Refuses("mesa::Workspace: beta has shape [2,200,3]"));
  in.q = ConstTensorView(nullptr, DType::kI64, {2, 200, 2, 12});
  EXPECT_THAT([&] { BackwardWorkspace(ctx, in, {}); },
              Refuses("mesa::BackwardWorkspace: q has dtype i64, expected f64"));
}

TEST(MesaTest, ErrorsNameTheArgumentAndWriteNothing) {
  const Fixture f(9);
  const auto forward = form::ForwardRefuses<Options>(f);
  forward([](auto& in, auto&) { in.q = {}; }, "mesa::Forward: q is absent");
  forward([](auto& in, auto&) { in.k = in.k.Slice(1, 0, 8); }, "k has shape [2,8,2,12], expected [2,9,2,12]");
  forward([](auto& in, auto&) { in.v = in.v.Slice(2, 0, 1); }, "v has shape [2,9,1,10], expected [2,9,2,10]");
  forward([](auto& in, auto&) { in.q = in.k = in.q.Slice(3, 0, 0); }, "expected at least one channel");
  forward([](auto& in, auto&) { in.beta = {}; }, "beta is absent");
  forward([](auto& in, auto&) { in.lamb = in.lamb.Slice(1, 0, 4); }, "lamb has shape [2,4], expected [2,12]");
  forward([](auto& in, auto&) { in.log_decay = in.log_decay.Slice(2, 0, 1); }, "log_decay has shape [2,9,1]");
  forward([](auto&, auto& options) { options.iterations = 0; }, "iterations is 0, expected at least 1");
  forward([](auto&, auto& options) { options.eps = std::nan(""); }, "eps is nan, expected a finite number >= 0");
  forward([&](auto& in, auto&) { in.initial_state = f.state.view().Slice(3, 0, 12); }, "initial_state has shape");
  forward([&](auto& in, auto&) { in.initial_state = f.state.view(); }, "final_state overlaps initial_state");
  const auto backward = form::BackwardRefuses(f);
  backward([&](auto&, auto& gradients) { gradients.dinitial_state = f.state.view(); },
           "dinitial_state is asked for, expected none");
  backward([&](auto&, auto& gradients) { gradients.dv = f.v.view(); }, "dv overlaps v");
  backward([&](auto& in, auto&) { in.solution = f.o.view(); }, "solution has shape [2,9,2,10], expected [2,9,2,12]");
  Context ctx(1);
  Inputs with_state = f.inputs();
  with_state.initial_state = f.state.view();
  EXPECT_THAT([&] { Step(ctx, with_state, {}, f.state.view(), f.o.view()); },
              Refuses("initial_state is given, expected none"));
}

}  // namespace
}  // namespace heed::mesa
