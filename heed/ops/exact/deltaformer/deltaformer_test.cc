// deltaformer beyond random problems: limits that are known, reproducibility, decoding, edges, and errors.
#include "heed/ops/exact/deltaformer/deltaformer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/ops/exact/attention/attention.h"
#include "tests/attention_form_checks.h"
#include "tests/form_checks.h"

namespace heed::deltaformer {
namespace {

using form::Distance;
using form::kInfinity;
using form::Refuses;
using form::Tokens;

// 2 sequences of T tokens, 4 query heads of 2 key heads, with results and gradients.
struct Fixture {
  int64_t T;
  Buffer q, k, v, w, beta, o, u, lse, d_o, d_u, dq, dk, dv, dbeta, dw;

  explicit Fixture(int64_t tokens, DType dtype = DType::kF32)
      : T(tokens), q(dtype, {2, T, 4, 12}), k(dtype, {2, T, 2, 12}), v(dtype, {2, T, 2, 10}), w(dtype, {2, T, 2, 12}),
        beta(dtype, {2, T, 2}), o(dtype, {2, T, 4, 10}), u(dtype, {2, T, 2, 10}),
        lse(dtype == DType::kF64 ? DType::kF64 : DType::kF32, {2, 4, T}), d_o(dtype, {2, T, 4, 10}),
        d_u(dtype, {2, T, 2, 10}), dq(dtype, {2, T, 4, 12}), dk(dtype, {2, T, 2, 12}), dv(dtype, {2, T, 2, 10}),
        dbeta(dtype, {2, T, 2}), dw(dtype, {2, T, 2, 12}) {
    uint64_t seed = 0;
    for (const Buffer* x : {&q, &k, &v, &w, &d_o, &d_u}) x->FillNormal(++seed);
    beta.FillConstant(0.8);
  }
  Inputs inputs(const Tokens& part) const {
    return {.q = part(q), .k = part(k), .v = part(v), .beta = part(beta), .w = part(w)};
  }
  Outputs outputs(const Tokens& part) const { return {part(o), part(u), part(lse, 2)}; }
  Inputs inputs() const { return inputs(Tokens{0, T}); }
  Outputs outputs() const { return outputs(Tokens{0, T}); }
  BackwardInputs backward() const {
    BackwardInputs in;
    static_cast<Inputs&>(in) = inputs();
    in.o = o.view();
    in.u = u.view();
    in.lse = lse.view();
    in.d_o = d_o.view();
    in.d_u = d_u.view();
    return in;
  }
  Gradients gradients() const { return {dq.view(), dk.view(), dv.view(), dbeta.view(), dw.view()}; }
  // The inputs of the tokens from `begin` on.
  ValueInputs newest(int64_t begin, int64_t end) const {
    return {.k = k.view().Slice(1, 0, end),
            .v = v.view().Slice(1, begin, end),
            .beta = beta.view().Slice(1, begin, end),
            .w = w.view().Slice(1, begin, end)};
  }
};

TEST(DeltaformerTest, WithoutSubtractionItIsAttention) {
  Context ctx(2);
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    const Fixture f(150, dtype), plain(150, dtype);
    f.beta.FillConstant(0);
    Forward(ctx, f.inputs(), {}, f.outputs());
    attention::Options causal;
    causal.causal = true;
    attention::Forward(ctx, {f.q.view(), f.k.view(), f.v.view()}, causal, {plain.o.view(), plain.lse.view()});
    EXPECT_TRUE(SameBits(f.u.view(), f.v.view()));
    EXPECT_TRUE(SameBits(f.o.view(), plain.o.view()));
    EXPECT_TRUE(SameBits(f.lse.view(), plain.lse.view()));
  }
}

TEST(DeltaformerTest, EqualWeightsHalveEqualValues) {
  // All logits are 0 and all values 1: u_0 = 1, u_1 = 0, then the mean of all earlier ones is 1/2 and stays so.
  Context ctx(1);
  const Fixture f(200, DType::kF64);
  f.v.FillConstant(1);
  Inputs in = f.inputs();
  in.beta = {};  // 1
  Forward(ctx, in, {.scale = 0.0}, f.outputs());
  for (int64_t t = 0; t < f.T; ++t) {
    EXPECT_NEAR(f.u.Get({1, t, 1, 3}), t == 0 ? 1 : t == 1 ? 0 : 0.5, 1e-13) << t;
    EXPECT_NEAR(f.o.Get({1, t, 3, 3}), t == 0 ? 1 : 0.5, 1e-13) << t;
    EXPECT_NEAR(f.lse.Get({1, 3, t}), std::log(static_cast<double>(t + 1)), 1e-13) << t;
  }
}

TEST(DeltaformerTest, AWeightOfOneAlternatesWithItsToken) {
  // Each token reads the token before it alone, by a coordinate that grows: u_i = v_i - u_{i-1}.
  Context ctx(1);
  const Fixture f(140, DType::kF64);
  for (const Buffer* x : {&f.k, &f.w}) x->FillConstant(0);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t t = 0; t < f.T; ++t) {
      for (int64_t h = 0; h < 2; ++h) {
        f.k.Set({b, t, h, 0}, static_cast<double>(t));
        f.w.Set({b, t, h, 0}, 1);
      }
    }
  }
  f.v.FillConstant(1);
  f.beta.FillConstant(1);
  Forward(ctx, f.inputs(), {.scale = 800.0}, f.outputs());
  for (int64_t t = 0; t < f.T; ++t) EXPECT_EQ(f.u.Get({0, t, 1, 2}), t % 2 == 0 ? 1 : 0) << t;
}

TEST(DeltaformerTest, BitsDoNotDependOnThreads) { form::ExpectBitsDoNotDependOnThreads<Fixture>(333, Options()); }

TEST(DeltaformerTest, ASequenceHasTheSameBitsAloneAndPacked) {
  form::ExpectASequenceHasTheSameBitsAloneAndPacked<Fixture, Options>();
}

TEST(DeltaformerTest, ValuesHaveTheSameBitsInAnyParts) {
  Context ctx(2);
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    const Fixture whole(200, dtype), parts(200, dtype), tokens(200, dtype);
    Forward(ctx, whole.inputs(), {}, whole.outputs());
    int64_t begin = 0;
    for (const int64_t end : {0, 3, 64, 150, 193, 200}) {
      Values(ctx, parts.newest(begin, end), {}, parts.u.view().Slice(1, 0, end));
      begin = end;
    }
    EXPECT_TRUE(SameBits(whole.u.view(), parts.u.view()));
    for (int64_t t = 0; t < 200; ++t) {
      Values(ctx, tokens.newest(t, t + 1), {}, tokens.u.view().Slice(1, 0, t + 1));
    }
    EXPECT_TRUE(SameBits(whole.u.view(), tokens.u.view()));
    const Buffer expected(DType::kF64, {2, 200, 2, 10});
    ValuesReference(whole.newest(0, 200), {}, expected.view());
    EXPECT_LT(Distance(whole.u.view(), expected.view()), dtype == DType::kF64   ? 1e-12
                                                         : dtype == DType::kF32 ? 1e-4
                                                                                : 0.2);
  }
}

TEST(DeltaformerTest, ValuesReadKeysWhereThereIsNoQuery) {
  Context ctx(1);
  const Fixture f(90), plain(90);
  ValueInputs in = f.newest(0, 90);
  in.w = in.k;
  Values(ctx, in, {}, f.u.view());
  in.w = {};
  Values(ctx, in, {}, plain.u.view());
  EXPECT_TRUE(SameBits(f.u.view(), plain.u.view()));
  ValueInputs last = f.newest(80, 90);
  last.w = {};
  Values(ctx, last, {}, plain.u.view());
  EXPECT_TRUE(SameBits(f.u.view(), plain.u.view()));
}

TEST(DeltaformerTest, KeysThatReadTheValuesHaveBothGradients) {
  Context ctx(1);
  const Fixture f(130, DType::kF64), plain(130, DType::kF64);
  BackwardInputs in = f.backward();
  in.w = in.k;
  Forward(ctx, in, {}, f.outputs());
  Backward(ctx, in, {}, f.gradients());
  in.w = {};
  Gradients out = plain.gradients();
  out.dw = {};
  Backward(ctx, in, {}, out);
  const std::vector<double> dk = Elements(f.dk.view()), dw = Elements(f.dw.view()), sum = Elements(plain.dk.view());
  for (size_t i = 0; i < sum.size(); ++i) ASSERT_NEAR(sum[i], dk[i] + dw[i], 1e-14);
  EXPECT_TRUE(SameBits(plain.dv.view(), f.dv.view()));
}

TEST(DeltaformerTest, GradientsDoNotDependOnWhichAreRequested) {
  Context ctx(2);
  for (const DType dtype : {DType::kF32, DType::kF16}) {
    const Fixture f(130, dtype), one(130, dtype);
    Forward(ctx, f.inputs(), {}, f.outputs());
    Backward(ctx, f.backward(), {}, f.gradients());
    for (TensorView Gradients::* member :
         {&Gradients::dq, &Gradients::dk, &Gradients::dv, &Gradients::dbeta, &Gradients::dw}) {
      Gradients out;
      out.*member = one.gradients().*member;
      Backward(ctx, f.backward(), {}, out);
      EXPECT_TRUE(SameBits(f.gradients().*member, out.*member));
    }
  }
}

TEST(DeltaformerTest, LaterTokensDoNotMatter) { form::ExpectLaterTokensDoNotMatter<Fixture>(); }

TEST(DeltaformerTest, ANanInAQueryStaysInItsRow) {
  const Fixture f(130), whole(130);
  form::ExpectANanInAQueryStaysInItsRow(f, whole);
  EXPECT_TRUE(SameBits(f.u.view(), whole.u.view()));
}

TEST(DeltaformerTest, TheFirstTokenReadsNothing) {
  Context ctx(1);
  const Fixture f(100);
  form::RunBothPasses(ctx, f);
  for (int64_t h = 0; h < 2; ++h) {
    EXPECT_EQ(f.dbeta.Get({0, 0, h}), 0);
    for (int64_t c = 0; c < 10; ++c) EXPECT_EQ(f.u.Get({0, 0, h, c}), f.v.Get({0, 0, h, c}));
    for (int64_t c = 0; c < 12; ++c) EXPECT_EQ(f.dw.Get({0, 0, h, c}), 0);
  }
}

TEST(DeltaformerTest, NoTokensWriteNothing) {
  Context ctx(1);
  const Fixture f(0);
  form::RunBothPasses(ctx, f);
  Values(ctx, f.newest(0, 0), {}, f.u.view());
}

TEST(DeltaformerTest, ExcludedTokensHaveNoResults) { form::ExpectExcludedTokensHaveNoResults<Fixture, Options>(); }

TEST(DeltaformerTest, WorkspaceIsWhatThePassesReserve) {
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16}) {
    const Fixture f(200, dtype);
    form::ExpectWorkspaceIsReserved(f.backward(), Options(), f.outputs(), f.gradients());
  }
}

TEST(DeltaformerTest, ExplainNeedsShapesAlone) {
  const Context ctx(1);
  Inputs in = form::ShapesOf(Fixture(200).inputs());
  in.beta = in.w = {};
  const Explanation e = Explain(ctx, in, {});
  EXPECT_THAT(e.kernel, testing::HasSubstr("deltaformer on softmax_"));
  EXPECT_EQ(e.flops, 2 * 6 * 200 * 201 / 2 * 2 * (12 + 10));
  EXPECT_GE(e.visited_pairs, 2 * 6 * 200 * 201 / 2);
  EXPECT_LE(e.visited_pairs, 2 * 6 * 200 * 200);
  EXPECT_EQ(e.bytes, 4 * 2 * 200 * (4 * 12 + 4 * 10 + 2 * (12 + 3 * 10)));
  in.beta = ConstTensorView(nullptr, DType::kF32, {2, 200, 3});
  EXPECT_THAT([&] { Workspace(ctx, in, {}); }, Refuses("deltaformer::Workspace: beta has shape [2,200,3]"));
}

TEST(DeltaformerTest, ErrorsNameTheArgumentAndWriteNothing) {
  const Fixture f(9);
  Context ctx(1);
  form::ExpectErrorsOfAttention<Options>("deltaformer", f);
  const auto forward = form::ForwardRefuses<Options>(f);
  forward([](auto& in, auto&) { in.v = {}; }, "v is absent");
  forward([](auto& in, auto&) { in.k = in.k.Slice(1, 0, 8); }, "k has shape [2,8,2,12], expected [2,9,2,12]");
  forward([](auto& in, auto&) { in.w = in.w.Slice(3, 0, 4); }, "w has shape [2,9,2,4], expected [2,9,2,12]");
  forward([](auto& in, auto&) { in.beta = in.beta.Slice(2, 0, 1); }, "beta has shape [2,9,1], expected [2,9,2]");
  forward([&](auto& in, auto&) { in.v = f.u.view(); }, "u overlaps v");
  Outputs out = f.outputs();
  out.u = {};
  EXPECT_THAT([&] { Forward(ctx, f.inputs(), {}, out); }, Refuses("u is absent"));
  out.u = f.o.view();
  EXPECT_THAT([&] { Forward(ctx, f.inputs(), {}, out); }, Refuses("u has shape"));

  const auto backward = form::BackwardRefuses(f);
  backward([](auto& in, auto&) { in.lse = {}; }, "deltaformer::Backward: lse is absent");
  backward([](auto& in, auto&) { in.u = {}; }, "u is absent");
  backward([](auto& in, auto&) { in.d_o = {}; }, "d_o is absent");
  backward([&](auto& in, auto&) { in.o = f.q.view(); }, "o has shape [2,9,4,12], expected [2,9,4,10]");
  backward([&](auto& in, auto&) { in.d_u = f.q.view(); }, "d_u has shape [2,9,4,12], expected [2,9,2,10]");
  backward([](auto& in, auto&) { in.w = {}; }, "dw is asked for, expected none");

  const auto values = [&](const std::function<void(ValueInputs&, TensorView&)>& change, const std::string& message) {
    ValueInputs in = f.newest(7, 9);
    TensorView u = f.u.view();
    change(in, u);
    EXPECT_THAT([&] { Values(ctx, in, {}, u); }, Refuses(message));
    EXPECT_TRUE(std::isnan(f.u.Get({0, 8, 0, 0})));
  };
  values([](auto& in, auto&) { in.k = in.k.Slice(1, 0, 1); }, "deltaformer::Values: v has 2 tokens, expected at most");
  values([](auto& in, auto&) { in.w = in.w.Slice(1, 0, 1); }, "w has shape [2,1,2,12], expected [2,2,2,12]");
  values([](auto&, auto& u) { u = u.Slice(1, 0, 8); }, "u has shape [2,8,2,10], expected [2,9,2,10]");
  values([&](auto& in, auto&) { in.v = f.u.view().Slice(1, 0, 2); }, "u overlaps v");
}

}  // namespace
}  // namespace heed::deltaformer
