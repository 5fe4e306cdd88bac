// path_attention beyond random problems: limits that are known, reproducibility, edges, and errors.
#include "heed/ops/exact/path_attention/path_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/harness/reserved_bytes.h"
#include "heed/ops/exact/path_attention/path_attention_internal.h"

namespace heed::path_attention {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// 2 sequences of T tokens, 4 query heads of 2 key heads, with results and gradients.
struct Fixture {
  int64_t T;
  Buffer q, k, v, w, beta, g, o, lse, d_o, dq, dk, dv, dw, dbeta, dg;

  explicit Fixture(int64_t tokens, DType dtype = DType::kF32)
      : T(tokens), q(dtype, {2, T, 4, 12}), k(dtype, {2, T, 2, 12}), v(dtype, {2, T, 2, 10}), w(dtype, {2, T, 2, 12}),
        beta(dtype, {2, T, 2}), g(dtype, {2, T, 4}), o(dtype, {2, T, 4, 10}), lse(dtype, {2, 4, T}),
        d_o(dtype, {2, T, 4, 10}), dq(dtype, {2, T, 4, 12}), dk(dtype, {2, T, 2, 12}), dv(dtype, {2, T, 2, 10}),
        dw(dtype, {2, T, 2, 12}), dbeta(dtype, {2, T, 2}), dg(dtype, {2, T, 4}) {
    uint64_t seed = 0;
    for (const Buffer* x : {&q, &k, &v, &d_o}) x->FillNormal(++seed);
    w.FillNormal(++seed, 0.25);
    beta.FillConstant(1.3);
    g.FillConstant(-0.05);
    for (const Buffer* x : {&o, &lse, &dq, &dk, &dv, &dw, &dbeta, &dg}) x->Poison();
  }
  Inputs inputs(int64_t begin, int64_t end) const {
    return {.q = q.view().Slice(1, begin, end),
            .k = k.view().Slice(1, begin, end),
            .v = v.view().Slice(1, begin, end),
            .w = w.view().Slice(1, begin, end),
            .beta = beta.view().Slice(1, begin, end),
            .log_forget = g.view().Slice(1, begin, end)};
  }
  Inputs inputs() const { return inputs(0, T); }
  Outputs outputs() const { return {o.view(), lse.view()}; }
  BackwardInputs backward() const {
    BackwardInputs in;
    static_cast<Inputs&>(in) = inputs();
    in.o = o.view();
    in.lse = lse.view();
    in.d_o = d_o.view();
    return in;
  }
  Gradients gradients() const { return {dq.view(), dk.view(), dv.view(), dw.view(), dbeta.view(), dg.view()}; }
};

// The largest distance of two tensors of one shape.
double Distance(const TensorView& a, const TensorView& b) {
  const std::vector<double> x = Elements(a), y = Elements(b);
  double most = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    most = std::isfinite(x[i]) && std::isfinite(y[i]) ? std::max(most, std::abs(x[i] - y[i])) : kInfinity;
  }
  return most;
}

TEST(PathAttentionTest, ReflectionsInOneDirectionAlternateTheSign) {
  // D = 1, w = 1, beta = 2: H = -1, so that s_ij = (-1)^(i - j) scale q_i k_j.
  Context ctx(1);
  constexpr int64_t T = 200;
  const Buffer q(DType::kF64, {1, T, 1, 1}), k(DType::kF64, {1, T, 1, 1}), w(DType::kF64, {1, T, 1, 1}),
      beta(DType::kF64, {1, T, 1}), o(DType::kF64, {1, T, 1, 1});
  q.FillConstant(1);
  k.FillConstant(1);
  w.FillConstant(1);
  beta.FillConstant(2);
  const Buffer v(DType::kF64, {1, T, 1, 1});
  v.FillNormal(3);
  Forward(ctx, {.q = q.view(), .k = k.view(), .v = v.view(), .w = w.view(), .beta = beta.view()}, {}, {o.view(), {}});
  for (int64_t i = 0; i < T; ++i) {
    double sum = 0, weighted = 0;
    for (int64_t j = 0; j <= i; ++j) {
      const double p = std::exp((i - j) % 2 == 0 ? 1.0 : -1.0);
      sum += p;
      weighted += p * v.Get({0, j, 0, 0});
    }
    EXPECT_NEAR(o.Get({0, i, 0, 0}), weighted / sum, 1e-12) << i;
  }
}

TEST(PathAttentionTest, AProjectionHidesWhatKeysHaveInItsDirection) {
  // beta |w|^2 = 1 removes the direction of w: with all of q along it, earlier keys have the logit 0.
  Context ctx(1);
  const Fixture f(150, DType::kF64);
  f.beta.FillConstant(1);
  f.g.FillConstant(0);
  for (const Buffer* x : {&f.q, &f.w}) {
    x->FillConstant(0);
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t t = 0; t < f.T; ++t) {
        for (int64_t h = 0; h < x->view().size(2); ++h) x->Set({b, t, h, 7}, 1);
      }
    }
  }
  Forward(ctx, f.inputs(), {.scale = 1.0}, f.outputs());
  for (int64_t t = 0; t < f.T; ++t) {
    EXPECT_NEAR(f.lse.Get({1, 2, t}), std::log(std::exp(f.k.Get({1, t, 1, 7})) + static_cast<double>(t)), 1e-12) << t;
  }
}

TEST(PathAttentionTest, BitsDoNotDependOnThreads) {
  Context one(1), three(3);
  const Fixture a(333), b(333);
  Forward(one, a.inputs(), {}, a.outputs());
  Forward(three, b.inputs(), {}, b.outputs());
  EXPECT_TRUE(SameBits(a.o.view(), b.o.view()));
  EXPECT_TRUE(SameBits(a.lse.view(), b.lse.view()));
  Backward(one, a.backward(), {}, a.gradients());
  for (int repeat = 0; repeat < 5; ++repeat) {
    for (const Buffer* x : {&b.dq, &b.dk, &b.dv, &b.dw, &b.dbeta, &b.dg}) x->Poison();
    Backward(three, b.backward(), {}, b.gradients());
    EXPECT_TRUE(SameBits(a.dq.view(), b.dq.view()));
    EXPECT_TRUE(SameBits(a.dk.view(), b.dk.view()));
    EXPECT_TRUE(SameBits(a.dv.view(), b.dv.view()));
    EXPECT_TRUE(SameBits(a.dw.view(), b.dw.view()));
    EXPECT_TRUE(SameBits(a.dbeta.view(), b.dbeta.view()));
    EXPECT_TRUE(SameBits(a.dg.view(), b.dg.view()));
  }
}

TEST(PathAttentionTest, ASequenceHasTheSameBitsAloneAndPacked) {
  Context ctx(2);
  const Fixture whole(210), alone(210);
  const Buffer bounds(DType::kI32, {3});
  for (int i = 0; i < 3; ++i) bounds.as<int32_t>()[i] = i == 0 ? 0 : i == 1 ? 75 : 210;
  Inputs packed = whole.inputs();
  for (ConstTensorView* x : {&packed.q, &packed.k, &packed.v, &packed.w, &packed.beta, &packed.log_forget}) {
    *x = x->Slice(0, 1, 2);
  }
  const Outputs row = {whole.o.view().Slice(0, 1, 2), whole.lse.view().Slice(0, 1, 2)};
  Forward(ctx, packed, {.cu_seqlens = bounds.view()}, row);
  Forward(ctx, alone.inputs(75, 210), {}, {alone.o.view().Slice(1, 75, 210), alone.lse.view().Slice(2, 75, 210)});
  EXPECT_EQ(Elements(row.o.Slice(1, 75, 210)), Elements(alone.o.view().Slice(0, 1, 2).Slice(1, 75, 210)));
  EXPECT_EQ(Elements(row.lse.Slice(2, 75, 210)), Elements(alone.lse.view().Slice(0, 1, 2).Slice(2, 75, 210)));
}

TEST(PathAttentionTest, LaterTokensDoNotMatter) {
  Context ctx(2);
  const Fixture f(150), whole(150);
  Forward(ctx, whole.inputs(), {}, whole.outputs());
  for (const Buffer* x : {&f.q, &f.k, &f.v, &f.w, &f.beta, &f.g}) {
    const TensorView later = x->view().Slice(1, 100, 150);
    std::vector<int64_t> index(static_cast<size_t>(later.rank()));
    do SetElement(later, index, std::nan(""));
    while (NextIndex(later.sizes(), index));
  }
  Forward(ctx, f.inputs(), {}, f.outputs());
  EXPECT_EQ(Elements(f.o.view().Slice(1, 0, 100)), Elements(whole.o.view().Slice(1, 0, 100)));
  for (const double x : Elements(f.o.view().Slice(1, 100, 150))) EXPECT_TRUE(std::isnan(x));
}

TEST(PathAttentionTest, ANanInAQueryStaysInItsRow) {
  Context ctx(1);
  const Fixture f(130), whole(130);
  Forward(ctx, whole.inputs(), {}, whole.outputs());
  f.q.Set({0, 70, 1, 3}, std::nan(""));
  Forward(ctx, f.inputs(), {}, f.outputs());
  EXPECT_TRUE(std::isnan(f.o.Get({0, 70, 1, 0})));
  f.o.Set({0, 70, 1, 0}, 0);
  for (int64_t c = 0; c < 10; ++c) f.o.Set({0, 70, 1, c}, whole.o.Get({0, 70, 1, c}));
  EXPECT_TRUE(SameBits(f.o.view(), whole.o.view()));
}

TEST(PathAttentionTest, AGateOfMinusInfinityBeginsASequence) {
  Context ctx(1);
  const Fixture cut(150), alone(150);
  for (int64_t h = 0; h < 4; ++h) {
    for (int64_t b = 0; b < 2; ++b) cut.g.Set({b, 70, h}, -kInfinity);
  }
  Forward(ctx, cut.inputs(), {}, cut.outputs());
  Forward(ctx, alone.inputs(70, 150), {}, {alone.o.view().Slice(1, 70, 150), alone.lse.view().Slice(2, 70, 150)});
  EXPECT_LT(Distance(cut.o.view().Slice(1, 70, 150), alone.o.view().Slice(1, 70, 150)), 1e-5);
  Backward(ctx, cut.backward(), {}, cut.gradients());
  for (const Buffer* x : {&cut.dq, &cut.dk, &cut.dv, &cut.dw, &cut.dbeta, &cut.dg}) {
    for (const double element : Elements(x->view())) ASSERT_TRUE(std::isfinite(element));
  }
  for (int64_t h = 0; h < 4; ++h) EXPECT_EQ(cut.dg.Get({1, 70, h}), 0);
}

TEST(PathAttentionTest, TheFirstTokenHasNoPath) {
  Context ctx(1);
  const Fixture f(100);
  Forward(ctx, f.inputs(), {}, f.outputs());
  Backward(ctx, f.backward(), {}, f.gradients());
  for (int64_t h = 0; h < 2; ++h) {
    EXPECT_EQ(f.dbeta.Get({0, 0, h}), 0);
    EXPECT_EQ(f.dg.Get({0, 0, h}), 0);
    for (int64_t c = 0; c < 12; ++c) EXPECT_EQ(f.dw.Get({0, 0, h, c}), 0);
  }
}

TEST(PathAttentionTest, NoTokensWriteNothing) {
  Context ctx(1);
  const Fixture f(0);
  Forward(ctx, f.inputs(), {}, f.outputs());
  Backward(ctx, f.backward(), {}, f.gradients());
}

TEST(PathAttentionTest, ExcludedTokensHaveNoResults) {
  Context ctx(1);
  const Fixture f(80);
  const Buffer lengths(DType::kI64, {2}), starts(DType::kI64, {2});
  lengths.as<int64_t>()[0] = 70;
  lengths.as<int64_t>()[1] = 0;
  starts.as<int64_t>()[0] = 3;
  starts.as<int64_t>()[1] = 0;
  const Options options = {.lengths = lengths.view(), .starts = starts.view()};
  Forward(ctx, f.inputs(), options, f.outputs());
  Backward(ctx, f.backward(), options, f.gradients());
  for (const int64_t t : {0, 2, 70, 79}) {
    EXPECT_EQ(f.o.Get({0, t, 1, 1}), 0);
    EXPECT_EQ(f.lse.Get({0, 1, t}), -kInfinity);
    EXPECT_EQ(f.dk.Get({0, t, 1, 1}), 0);
    EXPECT_EQ(f.dg.Get({0, t, 1}), 0);
  }
  EXPECT_NE(f.o.Get({0, 3, 1, 1}), 0);
  for (const double x : Elements(f.o.view().Slice(0, 1, 2))) EXPECT_EQ(x, 0);
}

TEST(PathAttentionTest, APositiveGateIsRefusedOnlyWhereValuesAreChecked) {
  Context ctx(1), checks(1);
  checks.set_checks(true);
  const Fixture f(9);
  f.g.Set({1, 3, 2}, 0.5);
  Forward(ctx, f.inputs(), {}, f.outputs());
  EXPECT_TRUE(std::isfinite(f.lse.Get({1, 2, 8})));
  EXPECT_THAT([&] { Forward(checks, f.inputs(), {}, f.outputs()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("log_forget has an element 0.5, expected <= 0 everywhere")));
}

TEST(PathAttentionTest, KeysThatPassedAllTokensAreTheReferences) {
  Context ctx(2);
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    const Fixture f(50, dtype);
    for (const int64_t newest : {1, 17, 50}) {
      const KeyInputs in = {.w = f.w.view().Slice(1, 50 - newest, 50), .beta = f.beta.view().Slice(1, 50 - newest, 50)};
      const DType wide = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
      const Buffer keys(wide, {2, 50, 2, 12}), expected(wide, {2, 50, 2, 12});
      for (const Buffer* x : {&keys, &expected}) x->FillNormal(9);
      TransformKeys(ctx, in, keys.view());
      TransformKeysReference(in, expected.view());
      EXPECT_LT(Distance(keys.view(), expected.view()), dtype == DType::kF64 ? 1e-13 : 5e-5) << newest;
    }
  }
  const Fixture f(50);
  EXPECT_THAT(
      [&] { TransformKeys(ctx, {f.w.view(), f.beta.view()}, f.k.view().Slice(1, 0, 49)); },
      ThrowsMessage<InvalidArgument>(HasSubstr("keys has shape [2,49,2,12], expected [2, at least 50, 2, 12]")));
  EXPECT_THAT([&] { TransformKeys(ctx, {f.w.view(), f.g.view()}, f.k.view()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("beta has shape [2,50,4], expected [2,50,2]")));
  EXPECT_THAT([&] { TransformKeys(ctx, {f.w.view(), f.beta.view()}, f.w.view()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("keys overlaps w")));
}

TEST(PathAttentionTest, WorkspaceIsWhatThePassesReserve) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const Fixture f(200, dtype);
    for (const int threads : {1, 3}) {
      Context forward(threads), backward(threads);
      Forward(forward, f.inputs(), {}, f.outputs());
      EXPECT_EQ(ReservedBytes(forward), Workspace(forward, f.inputs(), {}));
      EXPECT_EQ(ReservedBytes(forward), Explain(forward, f.inputs(), {}).workspace_bytes);
      Backward(backward, f.backward(), {}, f.gradients());
      EXPECT_EQ(ReservedBytes(backward), BackwardWorkspace(backward, f.inputs(), {}));
    }
  }
}

TEST(PathAttentionTest, ExplainNeedsShapesAlone) {
  const Context ctx(1);
  const auto shape = [](std::initializer_list<int64_t> sizes, DType dtype = DType::kF32) {
    return ConstTensorView(nullptr, dtype, sizes);
  };
  Inputs in = {.q = shape({2, 200, 4, 12}),
               .k = shape({2, 200, 2, 12}),
               .v = shape({2, 200, 2, 10}),
               .w = shape({2, 200, 2, 12}),
               .beta = shape({2, 200, 2})};
  const Explanation e = Explain(ctx, in, {});
  EXPECT_EQ(e.kernel, "path_blocks");
  EXPECT_EQ(e.flops, 2 * 4 * 200 * 201 / 2 * (2 * (12 + 10) + 2.0 * 12 * 12 / 64));
  EXPECT_EQ(e.visited_pairs, 2 * 4 * (64 * (64 + 128 + 192) + 8 * 200));
  EXPECT_EQ(e.bytes, 4 * 2 * 200 * (4 * 12 + 4 * 10 + 2 * (2 * 12 + 10 + 1)));
  Options options;
  options.cu_seqlens = shape({5}, DType::kI32);  // without numbers, sequences of one length
  for (ConstTensorView* t : {&in.q, &in.k, &in.v, &in.w}) *t = t->Slice(0, 0, 1);
  in.beta = in.beta.Slice(0, 0, 1);
  EXPECT_EQ(Explain(ctx, in, options).flops, 4 * 4 * 50 * 51 / 2 * (2 * (12 + 10) + 2.0 * 12 * 12 / 64));
  in.w = shape({2, 200, 4, 12});
  EXPECT_THAT([&] { Workspace(ctx, in, {}); },
              ThrowsMessage<InvalidArgument>(
                  HasSubstr("path_attention::Workspace: w has shape [2,200,4,12], expected [1,200,2,12]")));
}

TEST(PathAttentionTest, ErrorsNameTheArgumentAndWriteNothing) {
  const Fixture f(9);
  Context ctx(1);
  const auto forward = [&](const std::function<void(Inputs&, Options&)>& change, const std::string& message) {
    Inputs in = f.inputs();
    Options options;
    change(in, options);
    EXPECT_THAT([&] { Forward(ctx, in, options, f.outputs()); }, ThrowsMessage<InvalidArgument>(HasSubstr(message)));
    EXPECT_TRUE(std::isnan(f.o.Get({0, 0, 0, 0})));
  };
  forward([](auto& in, auto&) { in.q = {}; }, "path_attention::Forward: q is absent");
  forward([](auto& in, auto&) { in.w = {}; }, "w is absent");
  forward([](auto& in, auto&) { in.beta = {}; }, "beta is absent");
  forward([](auto& in, auto&) { in.k = in.k.Slice(1, 0, 8); }, "k has shape [2,8,2,12], expected [2,9,2,12]");
  forward([](auto& in, auto&) { in.v = in.v.Slice(2, 0, 1); }, "v has shape [2,9,1,10], expected [2,9,2,10]");
  forward([](auto& in, auto&) { in.w = in.w.Slice(3, 0, 4); }, "w has shape [2,9,2,4], expected [2,9,2,12]");
  forward([](auto& in, auto&) { in.q = in.q.Slice(2, 0, 3); }, "q has 3 heads, expected a multiple of the 2 of k");
  forward([](auto& in, auto&) { in.k = in.k.Slice(2, 0, 0); }, "expected at least one head");
  forward([](auto& in, auto&) { in.v = in.v.Slice(3, 0, 0); }, "expected at least one channel");
  forward([](auto& in, auto&) { in.beta = in.beta.Slice(2, 0, 1); }, "beta has shape [2,9,1], expected [2,9,2]");
  forward([](auto& in, auto&) { in.log_forget = in.beta; }, "log_forget has shape [2,9,2], expected [2,9,4]");
  forward([](auto&, auto& options) { options.scale = kInfinity; }, "scale is inf, expected a finite number");
  const Fixture other(9, DType::kF64);
  forward([&](auto& in, auto&) { in.k = other.k.view(); }, "k has dtype f64, expected f32");
  forward([&](auto& in, auto&) { in.q = f.o.view(); }, "k has shape");
  EXPECT_THAT([&] { Forward(ctx, f.inputs(), {}, {f.d_o.view(), f.d_o.view()}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("lse has shape")));
  BackwardInputs in = f.backward();
  in.lse = {};
  EXPECT_THAT([&] { Backward(ctx, in, {}, f.gradients()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("lse is absent")));
  in = f.backward();
  in.o = f.q.view();
  EXPECT_THAT([&] { Backward(ctx, in, {}, f.gradients()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("o has shape [2,9,4,12], expected [2,9,4,10]")));
  in = f.backward();
  in.log_forget = {};
  EXPECT_THAT([&] { Backward(ctx, in, {}, f.gradients()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("dlog_forget is asked for, expected none")));
  EXPECT_THAT([&] { Backward(ctx, f.backward(), {}, {.dv = f.v.view()}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("dv overlaps v")));
  EXPECT_TRUE(std::isnan(f.dq.Get({0, 0, 0, 0})));
}

}  // namespace
}  // namespace heed::path_attention
