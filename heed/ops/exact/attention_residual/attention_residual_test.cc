// attention_residual beyond random problems: edges, reproducibility, and errors.
#include "heed/ops/exact/attention_residual/attention_residual.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/harness/reserved_bytes.h"
#include "heed/harness/case.h"

namespace heed::attention_residual {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

// A call of 4 layers and 2 x 9 tokens, with its results and gradients.
struct Fixture {
  Buffer query, residuals, weight, d_o, o, weights, dquery, dresiduals, dweight;

  explicit Fixture(int64_t D, DType dtype = DType::kF32)
      : query(dtype, {D}), residuals(dtype, {4, 2, 9, D}), weight(dtype, {D}), d_o(dtype, {2, 9, D}),
        o(dtype, {2, 9, D}), weights(dtype == DType::kF64 ? DType::kF64 : DType::kF32, {4, 2, 9}), dquery(dtype, {D}),
        dresiduals(dtype, {4, 2, 9, D}), dweight(dtype, {D}) {
    uint64_t seed = 0;
    for (const Buffer* x : {&query, &residuals, &weight, &d_o}) x->FillNormal(++seed);
    for (const Buffer* x : {&o, &weights, &dquery, &dresiduals, &dweight}) x->Poison();
  }

  BackwardInputs inputs() const {
    BackwardInputs in;
    static_cast<Inputs&>(in) = {query.view(), residuals.view(), weight.view()};
    in.d_o = d_o.view();
    return in;
  }
  Outputs outputs() const { return {o.view(), weights.view()}; }
  Gradients gradients() const { return {dquery.view(), dresiduals.view(), dweight.view()}; }
  std::vector<Buffer> results() const { return {o, weights, dquery, dresiduals, dweight}; }
  void Run(Context& ctx, const Options& options = {}) const {
    Forward(ctx, inputs(), options, outputs());
    Backward(ctx, inputs(), options, gradients());
  }
};

TEST(AttentionResidualTest, OneLayerIsItsOutput) {
  const Fixture f(37);
  Context ctx(1);
  const BackwardInputs in = f.inputs();
  Forward(ctx, {in.query, in.residuals.Slice(0, 1, 2), in.weight}, {}, {f.o.view(), {}});
  for (int64_t t = 0; t < 9; ++t) EXPECT_EQ(f.o.Get({1, t, 36}), f.residuals.Get({1, 1, t, 36}));
}

TEST(AttentionResidualTest, AQueryOfZerosGivesTheMean) {
  const Fixture f(5, DType::kF64);
  f.query.FillConstant(0);
  Context ctx(1);
  f.Run(ctx);
  double sum = 0;
  for (int64_t l = 0; l < 4; ++l) sum += f.residuals.Get({l, 1, 3, 2});
  EXPECT_NEAR(f.o.Get({1, 3, 2}), sum / 4, 1e-15);
  EXPECT_EQ(f.weights.Get({2, 0, 1}), 0.25);
  EXPECT_NEAR(f.dresiduals.Get({3, 1, 3, 2}), f.d_o.Get({1, 3, 2}) / 4, 1e-15);
}

TEST(AttentionResidualTest, RowsOfZerosHaveTheLogitZeroAndFiniteGradients) {
  const Fixture f(6);
  f.residuals.FillConstant(0);
  Context ctx(1);
  f.Run(ctx, {.eps = 0});
  for (const Buffer& result : f.results()) {
    for (const double x : Elements(result.view())) EXPECT_TRUE(std::isfinite(x));
  }
  EXPECT_EQ(f.weights.Get({3, 1, 8}), 0.25);
}

TEST(AttentionResidualTest, ANaNOrAnInfinityStaysInItsToken) {
  for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    for (const int64_t layer : {0, 2}) {
      const Fixture f(20), clean(20);
      f.residuals.Set({layer, 1, 4, 7}, bad);
      Context ctx(1);
      f.Run(ctx);
      clean.Run(ctx);
      for (int64_t c = 0; c < 20; ++c) {
        EXPECT_TRUE(std::isnan(f.o.Get({1, 4, c})));
        EXPECT_EQ(f.o.Get({1, 5, c}), clean.o.Get({1, 5, c}));
        EXPECT_EQ(f.dresiduals.Get({3, 1, 3, c}), clean.dresiduals.Get({3, 1, 3, c}));
      }
    }
  }
}

TEST(AttentionResidualTest, LargeAndSmallRowsOfF32AgreeWithTheReference) {
  for (const double size : {1e30, 1e-30}) {
    const Fixture f(33);
    f.residuals.FillNormal(7, size);
    f.query.FillNormal(8, 0.1);
    const Buffer expected(DType::kF64, {2, 9, 33});
    Context ctx(1);
    f.Run(ctx, {.eps = 0});
    Reference(f.inputs(), {.eps = 0}, {expected.view(), {}});
    for (int64_t c = 0; c < 33; ++c) EXPECT_NEAR(f.o.Get({1, 8, c}) / size, expected.Get({1, 8, c}) / size, 3e-6);
  }
}

TEST(AttentionResidualTest, BitsDoNotDependOnThreadsOrOtherTokens) {
  const Fixture one(70), three(70);
  Context single(1), several(3);
  one.Run(single);
  three.Run(several);
  for (size_t i = 0; i < 5; ++i) EXPECT_TRUE(SameBits(one.results()[i].view(), three.results()[i].view())) << i;
  const Buffer o(DType::kF32, {1, 2, 70});
  const BackwardInputs in = one.inputs();
  Forward(single, {in.query, in.residuals.Slice(1, 1, 2).Slice(2, 5, 7), in.weight}, {}, {o.view(), {}});
  for (int64_t c = 0; c < 70; ++c) EXPECT_EQ(o.Get({0, 1, c}), one.o.Get({1, 6, c}));
}

TEST(AttentionResidualTest, GradientsMayBeRequestedOneByOne) {
  const Fixture f(11), part(11);
  Context ctx(1);
  f.Run(ctx);
  Backward(ctx, part.inputs(), {}, {.dweight = part.dweight.view()});
  Backward(ctx, part.inputs(), {}, {.dresiduals = part.dresiduals.view()});
  EXPECT_TRUE(SameBits(f.dweight.view(), part.dweight.view()));
  EXPECT_TRUE(SameBits(f.dresiduals.view(), part.dresiduals.view()));
  EXPECT_TRUE(std::isnan(part.dquery.Get({0})));
}

TEST(AttentionResidualTest, WorkspaceIsWhatThePassesReserve) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const Fixture f(37, dtype);
    for (const int threads : {1, 3}) {
      Context forward(threads), backward(threads);
      Forward(forward, f.inputs(), {}, f.outputs());
      EXPECT_EQ(ReservedBytes(forward), Workspace(forward, f.inputs(), {}));
      EXPECT_EQ(ReservedBytes(forward), Explain(forward, f.inputs(), {}).workspace_bytes);
      Backward(backward, f.inputs(), {}, f.gradients());
      EXPECT_EQ(ReservedBytes(backward), BackwardWorkspace(backward, f.inputs(), {}));
    }
  }
}

TEST(AttentionResidualTest, ExplainNeedsShapesAlone) {
  const Context ctx(1);
  const auto shape = [](std::initializer_list<int64_t> sizes, DType dtype = DType::kF32) {
    return ConstTensorView(nullptr, dtype, sizes);
  };
  Inputs in = {.query = shape({37}), .residuals = shape({4, 2, 9, 37}, DType::kBF16)};
  const Explanation e = Explain(ctx, in, {});
  EXPECT_EQ(e.kernel, "attention_residual_rows");
  EXPECT_EQ(e.flops, 6 * 4 * 2 * 9 * 37);
  EXPECT_EQ(e.bytes, 2 * 5 * 2 * 9 * 37 + 4 * 37);
  in.query = shape({36});
  EXPECT_THAT([&] { Workspace(ctx, in, {}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("attention_residual::Workspace: query has shape [36]")));
  in.query = shape({37}, DType::kF64);
  EXPECT_THAT([&] { Explain(ctx, in, {}); }, ThrowsMessage<InvalidArgument>(HasSubstr("query has dtype f64")));
}

TEST(AttentionResidualTest, ErrorsNameTheArgumentAndWriteNothing) {
  const Fixture f(6);
  Context ctx(1);
  const auto forward = [&](const std::function<void(BackwardInputs&, Options&)>& change, const std::string& message) {
    BackwardInputs in = f.inputs();
    Options options;
    change(in, options);
    EXPECT_THAT([&] { Forward(ctx, in, options, f.outputs()); }, ThrowsMessage<InvalidArgument>(HasSubstr(message)));
    EXPECT_TRUE(std::isnan(f.o.Get({0, 0, 0})));
  };
  const Buffer wide(DType::kF64, {6});
  forward([](auto& in, auto&) { in.query = {}; }, "attention_residual::Forward: query is absent");
  forward([](auto& in, auto&) { in.residuals = {}; }, "residuals is absent");
  forward([](auto& in, auto&) { in.residuals = in.residuals.Slice(0, 0, 0); }, "expected at least one layer");
  forward([](auto& in, auto&) { in.residuals = in.residuals.Slice(3, 0, 0); }, "expected at least one channel");
  forward([&](auto& in, auto&) { in.residuals = f.o.view().Slice(0, 0, 1); }, "o has shape [2,9,6], expected [9,6]");
  forward([&](auto& in, auto&) { in.residuals = f.query.view(); }, "residuals has shape [6], expected [L, ..., D]");
  forward([&](auto& in, auto&) { in.weight = wide.view(); }, "weight has dtype f64, expected f32, bf16 or f16 beside");
  forward([](auto& in, auto&) { in.weight = in.weight.Slice(0, 0, 5); }, "weight has shape [5], expected [6]");
  forward([](auto&, auto& options) { options.eps = -1; }, "eps is -1, expected a number >= 0");
  forward([](auto&, auto& options) { options.scale = std::nan(""); }, "scale is nan, expected a finite number");
  BackwardInputs in = f.inputs();
  EXPECT_THAT([&] { Forward(ctx, in, {}, {f.o.view(), f.dquery.view()}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("weights has shape [6], expected [4,2,9]")));
  EXPECT_THAT([&] { Forward(ctx, in, {}, {f.residuals.view().Slice(0, 0, 1), {}}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("o has shape [1,2,9,6], expected [2,9,6]")));
  EXPECT_THAT([&] { Backward(ctx, in, {}, {.dresiduals = f.residuals.view()}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("dresiduals overlaps residuals")));
  in.weight = {};
  EXPECT_THAT([&] { Backward(ctx, in, {}, f.gradients()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("dweight is asked for, expected weight with it")));
}

}  // namespace
}  // namespace heed::attention_residual
