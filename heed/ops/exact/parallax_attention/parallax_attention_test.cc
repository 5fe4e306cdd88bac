// parallax_attention beyond random problems: limits that are known, reproducibility, edges, and errors.
#include "heed/ops/exact/parallax_attention/parallax_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/ops/exact/attention/attention.h"
#include "tests/attention_form_checks.h"
#include "tests/form_checks.h"

namespace heed::parallax_attention {
namespace {

using form::Distance;
using form::kInfinity;
using form::Refuses;
using form::Tokens;

// 2 sequences, 4 query heads of 2 key heads, results and gradients.
struct Fixture {
  int64_t Tq, Tk;
  Buffer q, r, k, v, o, m, a, lse, d_o, dq, dr, dk, dv;

  explicit Fixture(int64_t tokens, DType dtype = DType::kF32) : Fixture(tokens, tokens, dtype) {}
  Fixture(int64_t queries, int64_t keys, DType dtype)
      : Tq(queries), Tk(keys), q(dtype, {2, Tq, 4, 12}), r(dtype, {2, Tq, 4, 12}), k(dtype, {2, Tk, 2, 12}),
        v(dtype, {2, Tk, 2, 10}), o(dtype, {2, Tq, 4, 10}), m(Wide(dtype), {2, Tq, 4, 10}), a(Wide(dtype), {2, 4, Tq}),
        lse(Wide(dtype), {2, 4, Tq}), d_o(dtype, {2, Tq, 4, 10}), dq(dtype, {2, Tq, 4, 12}), dr(dtype, {2, Tq, 4, 12}),
        dk(dtype, {2, Tk, 2, 12}), dv(dtype, {2, Tk, 2, 10}) {
    uint64_t seed = 0;
    for (const Buffer* x : {&q, &r, &k, &v, &d_o}) x->FillNormal(++seed);
  }
  static DType Wide(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

  Inputs inputs(const Tokens& part) const { return {.q = part(q), .r = part(r), .k = part(k), .v = part(v)}; }
  Outputs outputs(const Tokens& part) const { return {part(o), part(m), part(a, 2), part(lse, 2)}; }
  Inputs inputs() const { return {q.view(), r.view(), k.view(), v.view()}; }
  Outputs outputs() const { return {o.view(), m.view(), a.view(), lse.view()}; }
  BackwardInputs backward() const {
    BackwardInputs in;
    static_cast<Inputs&>(in) = inputs();
    in.o = o.view();
    in.m = m.view();
    in.a = a.view();
    in.lse = lse.view();
    in.d_o = d_o.view();
    return in;
  }
  Gradients gradients() const { return {dq.view(), dr.view(), dk.view(), dv.view()}; }
};

TEST(ParallaxAttentionTest, WithoutSecondQueriesItIsAttention) {
  Context ctx(2);
  const Fixture f(150, DType::kF64);
  const Buffer expected(DType::kF64, {2, 150, 4, 10}), lse(DType::kF64, {2, 4, 150});
  f.r.FillConstant(0);
  for (const int64_t window : {0, 1, 64, 70}) {
    Forward(ctx, f.inputs(), {.window = window}, f.outputs());
    attention::Options options;
    options.causal = true;
    if (window > 0) options.window.left = window - 1;
    attention::Forward(ctx, {f.q.view(), f.k.view(), f.v.view()}, options, {expected.view(), lse.view()});
    for (const Buffer* x : {&f.o, &f.m}) EXPECT_LT(Distance(x->view(), expected.view()), 1e-14) << window;
    EXPECT_LT(Distance(f.lse.view(), lse.view()), 1e-14);
    for (const double x : Elements(f.a.view())) EXPECT_EQ(x, 0);
  }
}

TEST(ParallaxAttentionTest, EqualWeightsGiveTheCovarianceOfValuesAndKeys) {
  // q = 0 and D = Dv = 1: o_i = mean(v) - r_i cov(k, v) over the keys so far.
  Context ctx(1);
  constexpr int64_t T = 200;
  const Buffer q(DType::kF64, {1, T, 1, 1}), r(DType::kF64, {1, T, 1, 1}), k(DType::kF64, {1, T, 1, 1}),
      v(DType::kF64, {1, T, 1, 1}), o(DType::kF64, {1, T, 1, 1});
  q.FillConstant(0);
  uint64_t seed = 4;
  for (const Buffer* x : {&r, &k, &v}) x->FillNormal(++seed);
  Forward(ctx, {q.view(), r.view(), k.view(), v.view()}, {}, {o.view(), {}, {}, {}});
  double of_k = 0, of_v = 0, of_both = 0;
  for (int64_t i = 0; i < T; ++i) {
    of_k += k.Get({0, i, 0, 0});
    of_v += v.Get({0, i, 0, 0});
    of_both += k.Get({0, i, 0, 0}) * v.Get({0, i, 0, 0});
    const double n = static_cast<double>(i + 1), covariance = of_both / n - of_k / n * of_v / n;
    EXPECT_NEAR(o.Get({0, i, 0, 0}), of_v / n - r.Get({0, i, 0, 0}) * covariance, 1e-12) << i;
  }
}

TEST(ParallaxAttentionTest, ALargeMeanOfTheSecondLogitsCancelsExactly) {
  // A channel of 1 in all keys and of 4096 in r moves every t by 4096, and nothing else. Keys of sixteenths have t
  // without rounding; a difference of moments, which are about 4096 |v|, would be wrong by 1e-4.
  Context ctx(1);
  constexpr int64_t T = 300;
  const Buffer q(DType::kF32, {1, T, 1, 2}), r(DType::kF32, {1, T, 1, 2}), k(DType::kF32, {1, T, 1, 2}),
      v(DType::kF32, {1, T, 1, 5}), o(DType::kF32, {1, T, 1, 5}), expected(DType::kF64, {1, T, 1, 5});
  v.FillNormal(3);
  for (int64_t t = 0; t < T; ++t) {
    q.Set({0, t, 0, 0}, 0.25 * static_cast<double>(t % 5));
    q.Set({0, t, 0, 1}, 0);
    r.Set({0, t, 0, 0}, 1);
    r.Set({0, t, 0, 1}, 4096);
    k.Set({0, t, 0, 0}, static_cast<double>(t * 7 % 33 - 16) / 16);
    k.Set({0, t, 0, 1}, 1);
  }
  Forward(ctx, {q.view(), r.view(), k.view(), v.view()}, {}, {o.view(), {}, {}, {}});
  Reference({q.view(), r.view(), k.view(), v.view()}, {}, {expected.view(), {}, {}, {}});
  EXPECT_LT(Distance(o.view(), expected.view()), 1e-6);
}

TEST(ParallaxAttentionTest, DecodingHasTheBitsOfTheSequence) {
  Context ctx(2);
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    for (const int64_t window : {0, 50, 64, 90}) {
      const Fixture whole(200, dtype), part(200, dtype);
      Forward(ctx, whole.inputs(), {.window = window}, whole.outputs());
      const auto compute = [&](int64_t begin, int64_t end) {
        Inputs in = part.inputs(Tokens{0, end});
        in.q = in.q.Slice(1, begin, end);
        in.r = in.r.Slice(1, begin, end);
        Forward(ctx, in, {.window = window}, part.outputs(Tokens{begin, end}));
      };
      for (int64_t begin = 0; begin < 130; begin += 13) compute(begin, begin + 13);
      for (int64_t t = 130; t < 200; ++t) compute(t, t + 1);
      EXPECT_TRUE(SameBits(whole.o.view(), part.o.view())) << Name(dtype) << window;
      EXPECT_TRUE(SameBits(whole.m.view(), part.m.view()));
      EXPECT_TRUE(SameBits(whole.a.view(), part.a.view()));
      EXPECT_TRUE(SameBits(whole.lse.view(), part.lse.view()));
    }
  }
}

TEST(ParallaxAttentionTest, GradientsOfTheLastRowsAreThoseOfTheSequence) {
  // Rows before the last 90 have no part in the loss.
  Context ctx(3);
  const Fixture whole(200, DType::kF64), part(90, 200, DType::kF64);
  for (const auto& [to, from] : {std::pair{&part.q, &whole.q}, {&part.r, &whole.r}, {&part.d_o, &whole.d_o}}) {
    const std::vector<int64_t> sizes = {2, 90, 4, from->view().size(3)};
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t t = 0; t < 90; ++t) {
        for (int64_t h = 0; h < 4; ++h) {
          for (int64_t c = 0; c < sizes[3]; ++c) to->Set({b, t, h, c}, from->Get({b, t + 110, h, c}));
        }
      }
    }
  }
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t t = 0; t < 110; ++t) {
      for (int64_t h = 0; h < 4; ++h) {
        for (int64_t c = 0; c < 10; ++c) whole.d_o.Set({b, t, h, c}, 0);
      }
    }
  }
  for (const Fixture* f : {&whole, &part}) form::RunBothPasses(ctx, *f);
  EXPECT_EQ(Elements(part.o.view()), Elements(whole.o.view().Slice(1, 110, 200)));
  EXPECT_LT(Distance(part.dq.view(), whole.dq.view().Slice(1, 110, 200)), 1e-12);
  EXPECT_LT(Distance(part.dr.view(), whole.dr.view().Slice(1, 110, 200)), 1e-12);
  EXPECT_LT(Distance(part.dk.view(), whole.dk.view()), 1e-12);
  EXPECT_LT(Distance(part.dv.view(), whole.dv.view()), 1e-12);
}

TEST(ParallaxAttentionTest, BitsDoNotDependOnThreads) {
  for (const int64_t window : {0, 100}) {
    form::ExpectBitsDoNotDependOnThreads<Fixture>(333, Options{.window = window});
  }
}

TEST(ParallaxAttentionTest, ASequenceHasTheSameBitsAloneAndPacked) {
  form::ExpectASequenceHasTheSameBitsAloneAndPacked<Fixture, Options>();
}

TEST(ParallaxAttentionTest, KeysThatARowDoesNotSeeDoNotMatter) {
  Context ctx(2);
  for (const int64_t window : {0, 30}) {
    const Fixture f(150), whole(150);
    Forward(ctx, whole.inputs(), {.window = window}, whole.outputs());
    Backward(ctx, whole.backward(), {.window = window}, whole.gradients());
    for (int64_t c = 0; c < 10; ++c) {  // the keys and values of tokens 70 to 74
      for (int64_t t = 70; t < 75; ++t) {
        for (int64_t b = 0; b < 2; ++b) {
          f.k.Set({b, t, 1, c}, std::nan(""));
          f.v.Set({b, t, 1, c}, std::nan(""));
        }
      }
    }
    Forward(ctx, f.inputs(), {.window = window}, f.outputs());
    const int64_t after = window > 0 ? 74 + window : 150;
    for (int64_t t = 0; t < 150; ++t) {
      const bool sees = t >= 70 && t < after;
      for (int64_t c = 0; c < 10; ++c) {
        ASSERT_EQ(std::isnan(f.o.Get({1, t, 3, c})), sees) << t;
        ASSERT_EQ(std::isnan(f.m.Get({1, t, 3, c})), sees) << t;
        if (!sees) ASSERT_EQ(f.o.Get({1, t, 3, c}), whole.o.Get({1, t, 3, c}));
        ASSERT_EQ(f.o.Get({1, t, 1, c}), whole.o.Get({1, t, 1, c}));  // another key head
      }
    }
    Backward(ctx, f.backward(), {.window = window}, f.gradients());
    for (int64_t t = 0; t < 70; ++t) {
      ASSERT_EQ(f.dq.Get({1, t, 3, 2}), whole.dq.Get({1, t, 3, 2})) << t;
      ASSERT_EQ(f.dr.Get({1, t, 3, 2}), whole.dr.Get({1, t, 3, 2})) << t;
    }
    if (window > 0) {  // keys of rows none of which sees those tokens
      for (int64_t t = 0; t + window <= 70; ++t) {
        ASSERT_EQ(f.dk.Get({1, t, 1, 2}), whole.dk.Get({1, t, 1, 2})) << t;
        ASSERT_EQ(f.dv.Get({1, t, 1, 2}), whole.dv.Get({1, t, 1, 2})) << t;
      }
      ASSERT_EQ(f.dk.Get({1, 104, 1, 2}), whole.dk.Get({1, 104, 1, 2}));
    }
  }
}

TEST(ParallaxAttentionTest, ANanInAQueryStaysInItsRow) {
  Context ctx(1);
  const Fixture f(130), whole(130);
  Forward(ctx, whole.inputs(), {}, whole.outputs());
  f.q.Set({0, 70, 1, 3}, std::nan(""));
  f.r.Set({1, 71, 2, 3}, std::nan(""));
  Forward(ctx, f.inputs(), {}, f.outputs());
  EXPECT_TRUE(std::isnan(f.o.Get({0, 70, 1, 0})));
  EXPECT_TRUE(std::isnan(f.o.Get({1, 71, 2, 0})));
  EXPECT_EQ(f.m.Get({1, 71, 2, 0}), whole.m.Get({1, 71, 2, 0}));  // r has no part in it
  for (int64_t c = 0; c < 10; ++c) {
    f.o.Set({0, 70, 1, c}, whole.o.Get({0, 70, 1, c}));
    f.o.Set({1, 71, 2, c}, whole.o.Get({1, 71, 2, c}));
  }
  EXPECT_TRUE(SameBits(f.o.view(), whole.o.view()));
}

TEST(ParallaxAttentionTest, NoTokensWriteNothing) {
  Context ctx(1);
  const Fixture none(0);
  form::RunBothPasses(ctx, none);
  const Fixture keys(0, 70, DType::kF32);  // keys that no row sees
  form::RunBothPasses(ctx, keys);
  for (const double x : Elements(keys.dk.view())) EXPECT_EQ(x, 0);
  for (const double x : Elements(keys.dv.view())) EXPECT_EQ(x, 0);
}

TEST(ParallaxAttentionTest, ExcludedTokensHaveNoResults) {
  Context ctx(1);
  const Fixture f(60, 80, DType::kF32);             // row i is at token i + 20
  const Buffer lengths = form::Integers({70, 15});  // 15 is before the first row
  const Buffer starts = form::Integers({23, 3});
  const Options options = {.lengths = lengths.view(), .starts = starts.view()};
  Forward(ctx, f.inputs(), options, f.outputs());
  Backward(ctx, f.backward(), options, f.gradients());
  for (const int64_t t : {0, 2, 50, 59}) {
    EXPECT_EQ(f.o.Get({0, t, 1, 1}), 0);
    EXPECT_EQ(f.m.Get({0, t, 1, 1}), 0);
    EXPECT_EQ(f.a.Get({0, 1, t}), 0);
    EXPECT_EQ(f.lse.Get({0, 1, t}), -kInfinity);
    EXPECT_EQ(f.dq.Get({0, t, 1, 1}), 0);
    EXPECT_EQ(f.dr.Get({0, t, 1, 1}), 0);
  }
  for (const int64_t t : {0, 22, 70, 79}) {
    EXPECT_EQ(f.dk.Get({0, t, 1, 1}), 0);
    EXPECT_EQ(f.dv.Get({0, t, 1, 1}), 0);
  }
  for (const int64_t t : {3, 49}) EXPECT_NE(f.o.Get({0, t, 1, 1}), 0);
  for (const int64_t t : {23, 69}) EXPECT_NE(f.dv.Get({0, t, 1, 1}), 0);
  for (const Buffer* x : {&f.o, &f.m, &f.dk, &f.dv}) {
    for (const double element : Elements(x->view().Slice(0, 1, 2))) EXPECT_EQ(element, 0);
  }
}

TEST(ParallaxAttentionTest, GradientsThatAreNotRequestedAreNotComputed) {
  Context ctx(2);
  const Fixture all(100);
  form::RunBothPasses(ctx, all);
  for (int one = 0; one < 4; ++one) {
    const Fixture f(100);
    const Gradients whole = f.gradients();
    Gradients only;
    TensorView Gradients::* const fields[] = {&Gradients::dq, &Gradients::dr, &Gradients::dk, &Gradients::dv};
    only.*fields[one] = whole.*fields[one];
    BackwardInputs in = all.backward();
    Backward(ctx, in, {}, only);
    EXPECT_TRUE(SameBits(only.*fields[one], all.gradients().*fields[one])) << one;
  }
}

TEST(ParallaxAttentionTest, WorkspaceIsWhatThePassesReserve) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const Fixture f(200, dtype);
    form::ExpectWorkspaceIsReserved(f.backward(), Options(), f.outputs(), f.gradients());
  }
}

TEST(ParallaxAttentionTest, ExplainNeedsShapesAlone) {
  const Context ctx(1);
  Inputs in = form::ShapesOf(Fixture(200).inputs());
  const Explanation e = Explain(ctx, in, {});
  EXPECT_EQ(e.kernel, "parallax_blocks");
  EXPECT_EQ(e.flops, 2 * 4 * 200 * 201 / 2 * (4 * (12 + 10)));
  EXPECT_EQ(e.visited_pairs, 2 * 4 * (64 * (64 + 128 + 192) + 8 * 200));
  EXPECT_EQ(e.bytes, 4 * 2 * 200 * (2 * 4 * 12 + 4 * 10 + 2 * (12 + 10)));
  EXPECT_EQ(Explain(ctx, in, {.window = 1}).flops, 2 * 4 * 200 * (4 * (12 + 10)));
  EXPECT_EQ(Explain(ctx, in, {.window = 1}).visited_pairs, 2 * 4 * (64 * (64 + 64 + 64) + 8 * 8));
  in.q = in.r = ConstTensorView(nullptr, DType::kF32, {2, 1, 4, 12});  // decoding
  EXPECT_EQ(Explain(ctx, in, {}).flops, 2 * 4 * 200 * (4 * (12 + 10)));
  EXPECT_EQ(Explain(ctx, in, {}).visited_pairs, 2 * 4 * 200);
  in.r = ConstTensorView(nullptr, DType::kF32, {2, 1, 3, 12});
  EXPECT_THAT([&] { Workspace(ctx, in, {}); }, Refuses("parallax_attention::Workspace: r has shape [2,1,3,12]"));
}

TEST(ParallaxAttentionTest, ErrorsNameTheArgumentAndWriteNothing) {
  const Fixture f(9);
  Context ctx(1);
  form::ExpectErrorsOfAttention<Options>("parallax_attention", f);
  const auto forward = form::ForwardRefuses<Options>(f);
  forward([](auto& in, auto&) { in.r = {}; }, "r is absent");
  forward([](auto& in, auto&) { in.r = in.r.Slice(2, 0, 2); }, "r has shape [2,9,2,12], expected [2,9,4,12]");
  forward([](auto& in, auto&) { in.k = in.k.Slice(1, 0, 8); }, "v has shape [2,9,2,10], expected [2,8,2,10]");
  forward(
      [](auto& in, auto&) {
        in.k = in.k.Slice(1, 0, 8);
        in.v = in.v.Slice(1, 0, 8);
      },
      "q has 9 tokens, expected at most the 8 of k");
  forward([](auto&, auto& options) { options.window = -1; }, "window is -1, expected at least 0");
  const Buffer bounds = form::Integers({0, 9});
  const auto one = [&](const Buffer& x, int64_t tokens) { return x.view().Slice(0, 0, 1).Slice(1, 9 - tokens, 9); };
  EXPECT_THAT(
      [&] {
        Forward(ctx, {one(f.q, 4), one(f.r, 4), one(f.k, 9), one(f.v, 9)}, {.cu_seqlens = bounds.view()},
                {one(f.o, 4), {}, {}, {}});
      },
      Refuses("q has 4 tokens, expected the 9 of k, as sequences are packed"));
  EXPECT_THAT([&] { Forward(ctx, f.inputs(), {}, {f.d_o.view(), {}, f.lse.view(), f.d_o.view()}); },
              Refuses("lse has shape"));
  EXPECT_THAT([&] { Forward(ctx, f.inputs(), {}, {f.d_o.view(), f.d_o.view(), {}, {}}); }, Refuses("m overlaps o"));
  const auto backward = form::BackwardRefuses(f);
  backward([](auto& in, auto&) { in.a = {}; }, "a is absent");
  backward([&](auto& in, auto&) { in.m = f.q.view(); }, "m has shape [2,9,4,12], expected [2,9,4,10]");
}

}  // namespace
}  // namespace heed::parallax_attention
