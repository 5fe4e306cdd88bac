// mesa beyond random problems: the error of its solver, reproducibility, edges, and errors.
#include "heed/ops/gated/mesa/mesa.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/harness/reserved_bytes.h"
#include "heed/ops/gated/mesa/mesa_internal.h"

namespace heed::mesa {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

// 2 sequences of T tokens, 2 heads, with results.
struct Fixture {
  int64_t T;
  Buffer q, k, v, beta, lamb, g, o, state, solution;

  explicit Fixture(int64_t tokens, DType dtype = DType::kF32)
      : T(tokens), q(dtype, {2, T, 2, 12}), k(dtype, {2, T, 2, 12}), v(dtype, {2, T, 2, 10}), beta(dtype, {2, T, 2}),
        lamb(dtype, {2, 12}), g(dtype, {2, T, 2}), o(dtype, {2, T, 2, 10}), state(dtype, {2, 2, 12, 22}),
        solution(dtype, {2, T, 2, 12}) {
    uint64_t seed = 0;
    for (const Buffer* x : {&q, &k, &v}) x->FillNormal(++seed);
    beta.FillConstant(0.1);
    lamb.FillConstant(0.75);
    g.FillConstant(-0.05);
    for (const Buffer* x : {&o, &state, &solution}) x->Poison();
  }
  Inputs inputs(int64_t begin, int64_t end) const {
    return {.q = q.view().Slice(1, begin, end),
            .k = k.view().Slice(1, begin, end),
            .v = v.view().Slice(1, begin, end),
            .beta = beta.view().Slice(1, begin, end),
            .lamb = lamb.view(),
            .log_decay = g.view().Slice(1, begin, end)};
  }
  Inputs inputs() const { return inputs(0, T); }
  Outputs outputs() const { return {o.view(), state.view(), solution.view()}; }
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
  Context ctx(1);
  const Fixture whole(100), split(100);
  Forward(ctx, whole.inputs(), {}, whole.outputs());
  const Buffer middle(DType::kF32, split.state.view().sizes());
  Forward(ctx, split.inputs(0, 48), {},
          {split.o.view().Slice(1, 0, 48), middle.view(), split.solution.view().Slice(1, 0, 48)});
  Inputs rest = split.inputs(48, 100);
  rest.initial_state = middle.view();
  Forward(ctx, rest, {}, {split.o.view().Slice(1, 48, 100), split.state.view(), {}});
  EXPECT_TRUE(SameBits(whole.o.view(), split.o.view()));
  EXPECT_TRUE(SameBits(whole.state.view(), split.state.view()));
}

TEST(MesaTest, BitsDoNotDependOnThreads) {
  Context one(1), three(3);
  const Fixture a(70), b(70);
  Forward(one, a.inputs(), {}, a.outputs());
  Forward(three, b.inputs(), {}, b.outputs());
  EXPECT_TRUE(SameBits(a.o.view(), b.o.view()));
  EXPECT_TRUE(SameBits(a.state.view(), b.state.view()));
  BackwardInputs in;
  static_cast<Inputs&>(in) = a.inputs();
  in.d_o = a.v.view();
  const Buffer da(DType::kF32, {2, 12}), db(DType::kF32, {2, 12});
  Backward(one, in, {}, {.dk = a.solution.view(), .dlamb = da.view()});
  Backward(three, in, {}, {.dk = b.solution.view(), .dlamb = db.view()});
  EXPECT_TRUE(SameBits(a.solution.view(), b.solution.view()));
  EXPECT_TRUE(SameBits(da.view(), db.view()));
}

TEST(MesaTest, AStepHasTheBitsOfACallOfOneToken) {
  Context ctx(1);
  const Fixture f(1);
  const Buffer initial(DType::kF32, {2, 2, 12, 22}), o(DType::kF32, {2, 2, 10});
  const Fixture earlier(30);
  Forward(ctx, earlier.inputs(), {}, {earlier.o.view(), initial.view(), {}});
  Inputs in = f.inputs();
  in.initial_state = initial.view();
  Forward(ctx, in, {}, f.outputs());
  const auto row = [](const Buffer& x) {
    const TensorView& t = x.view();
    std::vector<int64_t> sizes(t.sizes().begin(), t.sizes().end()), strides(t.strides().begin(), t.strides().end());
    sizes.erase(sizes.begin() + 1);
    strides.erase(strides.begin() + 1);
    return ConstTensorView(t.data(), t.dtype(), sizes, strides);
  };
  const StepInputs token = {
      .q = row(f.q), .k = row(f.k), .v = row(f.v), .beta = row(f.beta), .lamb = f.lamb.view(), .log_decay = row(f.g)};
  Step(ctx, token, {}, initial.view(), o.view());
  EXPECT_TRUE(SameBits(initial.view(), f.state.view()));
  EXPECT_EQ(Elements(o.view()), Elements(f.o.view()));
}

TEST(MesaTest, EqualKeysOrZerosHaveFiniteResults) {
  Context ctx(1);
  for (const double value : {0.0, 1.0}) {
    const Fixture f(40);
    f.k.FillConstant(value);
    f.q.FillConstant(value);
    Forward(ctx, f.inputs(), {}, f.outputs());
    for (const double x : Elements(f.o.view())) EXPECT_TRUE(std::isfinite(x));
    BackwardInputs in;
    static_cast<Inputs&>(in) = f.inputs();
    in.d_o = f.v.view();
    Backward(ctx, in, {}, {.dk = f.solution.view()});
    for (const double x : Elements(f.solution.view())) EXPECT_TRUE(std::isfinite(x));
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
  EXPECT_THAT([&] { Forward(checks, positive.inputs(), {}, positive.outputs()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("log_decay")));
  zero.beta.Set({1, 3, 1}, -0.5);
  EXPECT_THAT([&] { Forward(checks, zero.inputs(), {}, zero.outputs()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("beta has the value -0.5, expected values >= 0")));
  zero.beta.FillConstant(1);
  zero.lamb.Set({1, 3}, 0);
  EXPECT_THAT([&] { Forward(checks, zero.inputs(), {}, zero.outputs()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("lamb has the value 0, expected values > 0")));
}

TEST(MesaTest, WorkspaceIsWhatThePassesReserve) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const Fixture f(200, dtype);
    const Buffer lamb(dtype, {2, 12});
    BackwardInputs in;
    static_cast<Inputs&>(in) = f.inputs();
    in.d_o = f.v.view();
    for (const int threads : {1, 3}) {
      Context forward(threads), backward(threads);
      Forward(forward, f.inputs(), {}, f.outputs());
      EXPECT_EQ(ReservedBytes(forward), Workspace(forward, f.inputs(), {}));
      EXPECT_EQ(ReservedBytes(forward), Explain(forward, f.inputs(), {}).workspace_bytes);
      Backward(backward, in, {}, {.dk = f.solution.view(), .dlamb = lamb.view()});
      EXPECT_EQ(ReservedBytes(backward), BackwardWorkspace(backward, f.inputs(), {}));
    }
  }
}

TEST(MesaTest, ExplainNeedsShapesAlone) {
  const Context ctx(1);
  const Fixture f(200);
  const auto shape = [](std::initializer_list<int64_t> sizes, DType dtype = DType::kF32) {
    return ConstTensorView(nullptr, dtype, sizes);
  };
  Inputs in = {.q = shape({2, 200, 2, 12}),
               .k = shape({2, 200, 2, 12}),
               .v = shape({2, 200, 2, 10}),
               .beta = shape({2, 200, 2}),
               .lamb = shape({2, 12}),
               .log_decay = shape({2, 200, 2})};
  const Explanation planned = Explain(ctx, in, {}), given = Explain(ctx, f.inputs(), {});
  EXPECT_EQ(planned.kernel, "mesa_chunks");
  EXPECT_EQ(planned.target, given.target);
  EXPECT_EQ(planned.flops, 2 * 200 * 2 * (30 * 12 * (2 * 12 + 32) + (4 * 12 + 32) * (12 + 10)));
  EXPECT_EQ(planned.flops, given.flops);
  EXPECT_EQ(planned.bytes, 4 * 2 * (200 * 2 * (2 * 12 + 2 * 10 + 2) + 12));
  EXPECT_EQ(planned.bytes, given.bytes);
  EXPECT_EQ(planned.workspace_bytes, given.workspace_bytes);
  Options options;
  options.lengths = shape({2}, DType::kI64);  // without numbers, no token is left out
  EXPECT_EQ(Explain(ctx, in, options).flops, planned.flops);
  options.iterations = 0;
  EXPECT_THAT([&] { Explain(ctx, in, options); },
              ThrowsMessage<InvalidArgument>(HasSubstr("mesa::Explain: iterations is 0, expected at least 1")));
  in.beta = shape({2, 200, 3});
  EXPECT_THAT([&] { Workspace(ctx, in, {}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("mesa::Workspace: beta has shape [2,200,3]")));
  in.q = shape({2, 200, 2, 12}, DType::kI64);
  EXPECT_THAT([&] { BackwardWorkspace(ctx, in, {}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("mesa::BackwardWorkspace: q has dtype i64, expected f64")));
}

TEST(MesaTest, ErrorsNameTheArgumentAndWriteNothing) {
  const Fixture f(9);
  Context ctx(1);
  const auto forward = [&](const std::function<void(Inputs&, Options&)>& change, const std::string& message) {
    Inputs in = f.inputs();
    Options options;
    change(in, options);
    EXPECT_THAT([&] { Forward(ctx, in, options, f.outputs()); }, ThrowsMessage<InvalidArgument>(HasSubstr(message)));
    EXPECT_TRUE(std::isnan(f.o.Get({0, 0, 0, 0})));
  };
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
  BackwardInputs in;
  static_cast<Inputs&>(in) = f.inputs();
  in.d_o = f.v.view();
  EXPECT_THAT([&] { Backward(ctx, in, {}, {.dinitial_state = f.state.view()}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("dinitial_state is asked for, expected none")));
  EXPECT_THAT([&] { Backward(ctx, in, {}, {.dv = f.v.view()}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("dv overlaps v")));
  in.solution = f.o.view();
  EXPECT_THAT([&] { Backward(ctx, in, {}, {.dk = f.solution.view()}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("solution has shape [2,9,2,10], expected [2,9,2,12]")));
  Inputs with_state = {.q = f.q.view().Slice(1, 0, 1)};
  with_state.initial_state = f.state.view();
  EXPECT_THAT([&] { Step(ctx, with_state, {}, f.state.view(), f.o.view()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("initial_state is given, expected none")));
}

}  // namespace
}  // namespace heed::mesa
