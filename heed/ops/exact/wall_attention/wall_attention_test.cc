// wall_attention beyond random problems: limits that are known, reproducibility, edges, and errors.
#include "heed/ops/exact/wall_attention/wall_attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/ops/exact/wall_attention/wall_attention_internal.h"
#include "tests/attention_form_checks.h"
#include "tests/form_checks.h"

namespace heed::wall_attention {
namespace {

using form::Distance;
using form::kInfinity;
using form::Refuses;
using form::Tokens;

// 2 sequences of T tokens, 4 query heads of 2 key heads, as many heads of decays as asked for, results and gradients.
struct Fixture {
  int64_t T;
  Buffer q, k, v, a, g, o, lse, d_o, dq, dk, dv, da, dg;

  explicit Fixture(int64_t tokens, DType dtype = DType::kF32, int64_t heads = 4)
      : T(tokens), q(dtype, {2, T, 4, 12}), k(dtype, {2, T, 2, 12}), v(dtype, {2, T, 2, 10}),
        a(dtype, {2, T, heads, 12}), g(dtype, {2, T, 4}), o(dtype, {2, T, 4, 10}), lse(dtype, {2, 4, T}),
        d_o(dtype, {2, T, 4, 10}), dq(dtype, {2, T, 4, 12}), dk(dtype, {2, T, 2, 12}), dv(dtype, {2, T, 2, 10}),
        da(dtype, {2, T, heads, 12}), dg(dtype, {2, T, 4}) {
    uint64_t seed = 0;
    for (const Buffer* x : {&q, &k, &v, &d_o}) x->FillNormal(++seed);
    a.FillConstant(-0.03);
    g.FillConstant(-0.05);
  }
  Inputs inputs(const Tokens& part) const {
    return {.q = part(q), .k = part(k), .v = part(v), .log_decay = part(a), .log_forget = part(g)};
  }
  Outputs outputs(const Tokens& part) const { return {part(o), part(lse, 2)}; }
  Inputs inputs() const { return inputs(Tokens{0, T}); }
  Outputs outputs() const { return outputs(Tokens{0, T}); }
  BackwardInputs backward() const {
    BackwardInputs in;
    static_cast<Inputs&>(in) = inputs();
    in.o = o.view();
    in.lse = lse.view();
    in.d_o = d_o.view();
    return in;
  }
  Gradients gradients() const { return {dq.view(), dk.view(), dv.view(), da.view(), dg.view()}; }
};

TEST(WallAttentionTest, AConstantDecayIsAPowerOfTheDistance) {
  // D = 1, log_decay = -c: s_ij = scale q_i k_j exp(-c (i - j)).
  Context ctx(1);
  constexpr int64_t T = 200;
  constexpr double kRate = 0.05;
  const Buffer q(DType::kF64, {1, T, 1, 1}), k(DType::kF64, {1, T, 1, 1}), a(DType::kF64, {1, T, 1, 1}),
      v(DType::kF64, {1, T, 1, 1}), o(DType::kF64, {1, T, 1, 1});
  q.FillConstant(1);
  k.FillConstant(3);
  a.FillConstant(-kRate);
  v.FillNormal(3);
  Forward(ctx, {.q = q.view(), .k = k.view(), .v = v.view(), .log_decay = a.view()}, {}, {o.view(), {}});
  for (int64_t i = 0; i < T; ++i) {
    double sum = 0, weighted = 0;
    for (int64_t j = 0; j <= i; ++j) {
      const double p = std::exp(3 * std::exp(-kRate * static_cast<double>(i - j)));
      sum += p;
      weighted += p * v.Get({0, j, 0, 0});
    }
    EXPECT_NEAR(o.Get({0, i, 0, 0}), weighted / sum, 1e-12) << i;
  }
}

TEST(WallAttentionTest, DecaysThatUnderflowLeaveTheOwnKeyAlone) {
  // exp(-300) is 0 in f32: earlier keys have the logit 0, the own key <q, k>.
  Context ctx(1);
  const Fixture f(150);
  f.a.FillConstant(-300);
  f.g.FillConstant(0);
  Forward(ctx, f.inputs(), {.scale = 1.0}, f.outputs());
  for (int64_t t = 0; t < f.T; ++t) {
    double own = 0;
    for (int64_t c = 0; c < 12; ++c) own += f.q.Get({1, t, 2, c}) * f.k.Get({1, t, 1, c});
    EXPECT_NEAR(f.lse.Get({1, 2, t}), std::log(std::exp(own) + static_cast<double>(t)), 1e-5) << t;
  }
  Backward(ctx, f.backward(), {.scale = 1.0}, f.gradients());
  for (const double x : Elements(f.da.view())) EXPECT_EQ(x, 0);
  for (const double x : Elements(f.dq.view())) EXPECT_TRUE(std::isfinite(x));
}

TEST(WallAttentionTest, SharedDecaysAreThoseOfEachHead) {
  // 2 heads of decays against the same decays for each of 4 query heads.
  Context ctx(2);
  const Fixture shared(150, DType::kF64, 2), each(150, DType::kF64, 4);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t t = 0; t < 150; ++t) {
      for (int64_t h = 0; h < 4; ++h) {
        for (int64_t c = 0; c < 12; ++c) {
          const double decay = -0.01 * static_cast<double>((t + 3 * c + 7 * (h / 2)) % 11);
          each.a.Set({b, t, h, c}, decay);
          shared.a.Set({b, t, h / 2, c}, decay);
        }
      }
    }
  }
  for (const Fixture* f : {&shared, &each}) form::RunBothPasses(ctx, *f);
  EXPECT_EQ(Elements(shared.o.view()), Elements(each.o.view()));
  EXPECT_LT(Distance(shared.dk.view(), each.dk.view()), 1e-12);
  EXPECT_LT(Distance(shared.dv.view(), each.dv.view()), 1e-12);
  for (int64_t t = 0; t < 150; ++t) {
    EXPECT_NEAR(shared.da.Get({1, t, 1, 5}), each.da.Get({1, t, 2, 5}) + each.da.Get({1, t, 3, 5}), 1e-12);
  }
}

TEST(WallAttentionTest, BitsDoNotDependOnThreads) { form::ExpectBitsDoNotDependOnThreads<Fixture>(333, Options()); }

TEST(WallAttentionTest, ASequenceHasTheSameBitsAloneAndPacked) {
  form::ExpectASequenceHasTheSameBitsAloneAndPacked<Fixture, Options>();
}

TEST(WallAttentionTest, LaterTokensDoNotMatter) { form::ExpectLaterTokensDoNotMatter<Fixture>(); }

TEST(WallAttentionTest, ANanInAQueryStaysInItsRow) {
  form::ExpectANanInAQueryStaysInItsRow(Fixture(130), Fixture(130));
}

TEST(WallAttentionTest, AGateOfMinusInfinityBeginsASequence) {
  form::ExpectAGateOfMinusInfinityBeginsASequence<Fixture>();
}

TEST(WallAttentionTest, TheFirstTokensGatesDecayNothing) {
  Context ctx(1);
  const Fixture f(100);
  form::RunBothPasses(ctx, f);
  for (int64_t h = 0; h < 4; ++h) {
    EXPECT_EQ(f.dg.Get({0, 0, h}), 0);
    for (int64_t c = 0; c < 12; ++c) EXPECT_EQ(f.da.Get({0, 0, h, c}), 0);
  }
}

TEST(WallAttentionTest, ADecayOfMinusInfinityRemovesAChannel) {
  // Later queries find 0 in that channel of earlier keys.
  Context ctx(1);
  const Fixture cut(150), zero(150);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < 4; ++h) cut.a.Set({b, 70, h, 3}, -kInfinity);
    for (int64_t t = 0; t < 70; ++t) {
      for (int64_t h = 0; h < 2; ++h) zero.k.Set({b, t, h, 3}, 0);
    }
  }
  for (const Fixture* f : {&cut, &zero}) form::RunBothPasses(ctx, *f);
  EXPECT_LT(Distance(cut.o.view().Slice(1, 70, 150), zero.o.view().Slice(1, 70, 150)), 1e-5);
  for (const Buffer* x : {&cut.dq, &cut.dk, &cut.dv, &cut.da, &cut.dg}) {
    for (const double element : Elements(x->view())) ASSERT_TRUE(std::isfinite(element));
  }
  for (int64_t h = 0; h < 4; ++h) {
    EXPECT_EQ(cut.da.Get({1, 70, h, 3}), 0);
    EXPECT_NE(cut.da.Get({1, 70, h, 2}), 0);
    EXPECT_LT(std::abs(cut.da.Get({1, 140, h, 3}) - zero.da.Get({1, 140, h, 3})), 1e-4);
  }
}

TEST(WallAttentionTest, NoTokensWriteNothing) {
  Context ctx(1);
  const Fixture f(0);
  form::RunBothPasses(ctx, f);
}

TEST(WallAttentionTest, ExcludedTokensHaveNoResults) { form::ExpectExcludedTokensHaveNoResults<Fixture, Options>(); }

TEST(WallAttentionTest, APositiveGateIsRefusedOnlyWhereValuesAreChecked) {
  form::ExpectAPositiveGateIsRefusedOnlyWhereValuesAreChecked<Fixture>();
  Context ctx(1), checks(1);
  checks.set_checks(true);
  const Fixture f(9);
  f.a.Set({1, 3, 2, 5}, 0.25);
  Forward(ctx, f.inputs(), {}, f.outputs());
  EXPECT_TRUE(std::isfinite(f.lse.Get({1, 2, 8})));
  EXPECT_THAT([&] { Forward(checks, f.inputs(), {}, f.outputs()); },
              Refuses("log_decay has an element 0.25, expected <= 0 everywhere"));
  EXPECT_THAT([&] { TransformKeys(checks, {f.a.view()}, f.q.view()); },
              Refuses("log_decay has an element 0.25, expected <= 0 everywhere"));
}

TEST(WallAttentionTest, KeysThatDecayedByAllTokensAreTheReferences) {
  Context ctx(2);
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    const Fixture f(150, dtype);
    f.a.Set({1, 130, 3, 4}, -kInfinity);
    for (const int64_t newest : {1, 17, 100, 150}) {
      const KeyInputs in = {.log_decay = f.a.view().Slice(1, 150 - newest, 150)};
      const DType wide = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
      const Buffer keys(wide, {2, 150, 4, 12}), expected(wide, {2, 150, 4, 12});
      for (const Buffer* x : {&keys, &expected}) x->FillNormal(9);
      TransformKeys(ctx, in, keys.view());
      TransformKeysReference(in, expected.view());
      EXPECT_LT(Distance(keys.view(), expected.view()), dtype == DType::kF64 ? 1e-14 : 5e-6) << newest;
    }
  }
  const Fixture f(50);
  EXPECT_THAT([&] { TransformKeys(ctx, {f.a.view()}, f.q.view().Slice(1, 0, 49)); },
              Refuses("keys has shape [2,49,4,12], expected [2, at least 50, 4, 12]"));
  EXPECT_THAT([&] { TransformKeys(ctx, {f.a.view()}, f.k.view()); },
              Refuses("keys has shape [2,50,2,12], expected [2,50,4,12]"));
  EXPECT_THAT([&] { TransformKeys(ctx, {f.g.view()}, f.q.view()); },
              Refuses("log_decay has shape [2,50,4], expected [B, N, Hg, D]"));
  EXPECT_THAT([&] { TransformKeys(ctx, {f.a.view()}, f.a.view()); }, Refuses("keys overlaps log_decay"));
}

TEST(WallAttentionTest, WorkspaceIsWhatThePassesReserve) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const Fixture f(200, dtype);
    form::ExpectWorkspaceIsReserved(f.backward(), Options(), f.outputs(), f.gradients());
  }
}

TEST(WallAttentionTest, ExplainNeedsShapesAlone) {
  const Context ctx(1);
  Inputs in = form::ShapesOf(Fixture(200).inputs());
  in.log_forget = {};
  const Explanation e = Explain(ctx, in, {});
  EXPECT_EQ(e.kernel, "wall_blocks");
  EXPECT_EQ(e.flops, 2 * 4 * 200 * 201 / 2 * (2 * (12 + 10)));
  EXPECT_EQ(e.visited_pairs, 2 * 4 * (64 * (64 + 128 + 192) + 8 * 200));
  EXPECT_EQ(e.bytes, 4 * 2 * 200 * (2 * 4 * 12 + 4 * 10 + 2 * (12 + 10)));
  Options options;
  options.cu_seqlens = ConstTensorView(nullptr, DType::kI32, {5});  // without numbers, sequences of one length
  in = form::ShapesOf(Fixture(200).inputs(Tokens{0, 200, 1}));
  EXPECT_EQ(Explain(ctx, in, options).flops, 4 * 4 * 50 * 51 / 2 * (2 * (12 + 10)));
  in.log_decay = ConstTensorView(nullptr, DType::kF32, {2, 200, 3, 12});
  EXPECT_THAT([&] { Workspace(ctx, in, {}); }, Refuses("wall_attention::Workspace: log_decay has 3 heads"));
}

TEST(WallAttentionTest, ErrorsNameTheArgumentAndWriteNothing) {
  const Fixture f(9);
  form::ExpectErrorsOfGatedAttention<Options>("wall_attention", f);
  const auto forward = form::ForwardRefuses<Options>(f);
  forward([](auto& in, auto&) { in.log_decay = {}; }, "log_decay is absent");
  forward([](auto& in, auto&) { in.log_decay = in.log_decay.Slice(3, 0, 4); },
          "log_decay has shape [2,9,4,4], expected [2,9,4,12]");
  forward([](auto& in, auto&) { in.log_decay = in.log_decay.Slice(2, 0, 3); },
          "log_decay has 3 heads, expected a multiple of the 2 of k that divides the 4 of q");
  forward([](auto& in, auto&) { in.log_decay = in.log_forget; }, "log_decay has shape [2,9,4], expected [B, T, Hg, D]");
}

}  // namespace
}  // namespace heed::wall_attention
