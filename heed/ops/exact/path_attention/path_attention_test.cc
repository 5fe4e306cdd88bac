// path_attention beyond random problems: limits that are known, reproducibility, edges, and errors.
#include "heed/ops/exact/path_attention/path_attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/ops/exact/path_attention/path_attention_internal.h"
#include "tests/attention_form_checks.h"
#include "tests/form_checks.h"

namespace heed::path_attention {
namespace {

using form::Distance;
using form::kInfinity;
using form::Refuses;
using form::Tokens;

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
  }
  Inputs inputs(const Tokens& part) const {
    return {.q = part(q), .k = part(k), .v = part(v), .w = part(w), .beta = part(beta), .log_forget = part(g)};
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
  Gradients gradients() const { return {dq.view(), dk.view(), dv.view(), dw.view(), dbeta.view(), dg.view()}; }
};

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

TEST(PathAttentionTest, BitsDoNotDependOnThreads) { form::ExpectBitsDoNotDependOnThreads<Fixture>(333, Options()); }

TEST(PathAttentionTest, ASequenceHasTheSameBitsAloneAndPacked) {
  form::ExpectASequenceHasTheSameBitsAloneAndPacked<Fixture, Options>();
}

TEST(PathAttentionTest, LaterTokensDoNotMatter) { form::ExpectLaterTokensDoNotMatter<Fixture>(); }

TEST(PathAttentionTest, ANanInAQueryStaysInItsRow) {
  form::ExpectANanInAQueryStaysInItsRow(Fixture(130), Fixture(130));
}

TEST(PathAttentionTest, AGateOfMinusInfinityBeginsASequence) {
  form::ExpectAGateOfMinusInfinityBeginsASequence<Fixture>();
}

TEST(PathAttentionTest, TheFirstTokenHasNoPath) {
  Context ctx(1);
  const Fixture f(100);
  form::RunBothPasses(ctx, f);
  for (int64_t h = 0; h < 2; ++h) {
    EXPECT_EQ(f.dbeta.Get({0, 0, h}), 0);
    EXPECT_EQ(f.dg.Get({0, 0, h}), 0);
    for (int64_t c = 0; c < 12; ++c) EXPECT_EQ(f.dw.Get({0, 0, h, c}), 0);
  }
}

TEST(PathAttentionTest, NoTokensWriteNothing) {
  Context ctx(1);
  const Fixture f(0);
  form::RunBothPasses(ctx, f);
}

TEST(PathAttentionTest, ExcludedTokensHaveNoResults) { form::ExpectExcludedTokensHaveNoResults<Fixture, Options>(); }

TEST(PathAttentionTest, APositiveGateIsRefusedOnlyWhereValuesAreChecked) {
  form::ExpectAPositiveGateIsRefusedOnlyWhereValuesAreChecked<Fixture>();
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
  EXPECT_THAT([&] { TransformKeys(ctx, {f.w.view(), f.beta.view()}, f.k.view().Slice(1, 0, 49)); },
              Refuses("keys has shape [2,49,2,12], expected [2, at least 50, 2, 12]"));
  EXPECT_THAT([&] { TransformKeys(ctx, {f.w.view(), f.g.view()}, f.k.view()); },
              Refuses("beta has shape [2,50,4], expected [2,50,2]"));
  EXPECT_THAT([&] { TransformKeys(ctx, {f.w.view(), f.beta.view()}, f.w.view()); }, Refuses("keys overlaps w"));
}

TEST(PathAttentionTest, WorkspaceIsWhatThePassesReserve) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const Fixture f(200, dtype);
    form::ExpectWorkspaceIsReserved(f.backward(), Options(), f.outputs(), f.gradients());
  }
}

TEST(PathAttentionTest, ExplainNeedsShapesAlone) {
  const Context ctx(1);
  Inputs in = form::ShapesOf(Fixture(200).inputs());
  in.log_forget = {};
  const Explanation e = Explain(ctx, in, {});
  EXPECT_EQ(e.kernel, "path_blocks");
  EXPECT_EQ(e.flops, 2 * 4 * 200 * 201 / 2 * (2 * (12 + 10) + 2.0 * 12 * 12 / 64));
  EXPECT_EQ(e.visited_pairs, 2 * 4 * (64 * (64 + 128 + 192) + 8 * 200));
  EXPECT_EQ(e.bytes, 4 * 2 * 200 * (4 * 12 + 4 * 10 + 2 * (2 * 12 + 10 + 1)));
  Options options;
  options.cu_seqlens = ConstTensorView(nullptr, DType::kI32, {5});  // without numbers, sequences of one length
  in = form::ShapesOf(Fixture(200).inputs(Tokens{0, 200, 1}));
  EXPECT_EQ(Explain(ctx, in, options).flops, 4 * 4 * 50 * 51 / 2 * (2 * (12 + 10) + 2.0 * 12 * 12 / 64));
  in.w = ConstTensorView(nullptr, DType::kF32, {2, 200, 4, 12});
  EXPECT_THAT([&] { Workspace(ctx, in, {}); },
              Refuses("path_attention::Workspace: w has shape [2,200,4,12], expected [1,200,2,12]"));
}

TEST(PathAttentionTest, ErrorsNameTheArgumentAndWriteNothing) {
  const Fixture f(9);
  form::ExpectErrorsOfGatedAttention<Options>("path_attention", f);
  const auto forward = form::ForwardRefuses<Options>(f);
  forward([](auto& in, auto&) { in.w = {}; }, "w is absent");
  forward([](auto& in, auto&) { in.beta = {}; }, "beta is absent");
  forward([](auto& in, auto&) { in.w = in.w.Slice(3, 0, 4); }, "w has shape [2,9,2,4], expected [2,9,2,12]");
  forward([](auto& in, auto&) { in.beta = in.beta.Slice(2, 0, 1); }, "beta has shape [2,9,1], expected [2,9,2]");
}

}  // namespace
}  // namespace heed::path_attention
