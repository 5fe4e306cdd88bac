// wall_attention beyond random problems: limits that are known, reproducibility, edges, and errors.
#include "heed/ops/exact/wall_attention/wall_attention.h"

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
#include "heed/ops/exact/wall_attention/wall_attention_internal.h"

namespace heed::wall_attention {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

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
    for (const Buffer* x : {&o, &lse, &dq, &dk, &dv, &da, &dg}) x->Poison();
  }
  Inputs inputs(int64_t begin, int64_t end) const {
    return {.q = q.view().Slice(1, begin, end),
            .k = k.view().Slice(1, begin, end),
            .v = v.view().Slice(1, begin, end),
            .log_decay = a.view().Slice(1, begin, end),
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
  Gradients gradients() const { return {dq.view(), dk.view(), dv.view(), da.view(), dg.view()}; }
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
  for (const Fixture* f : {&shared, &each}) {
    Forward(ctx, f->inputs(), {}, f->outputs());
    Backward(ctx, f->backward(), {}, f->gradients());
  }
  EXPECT_EQ(Elements(shared.o.view()), Elements(each.o.view()));
  EXPECT_LT(Distance(shared.dk.view(), each.dk.view()), 1e-12);
  EXPECT_LT(Distance(shared.dv.view(), each.dv.view()), 1e-12);
  for (int64_t t = 0; t < 150; ++t) {
    EXPECT_NEAR(shared.da.Get({1, t, 1, 5}), each.da.Get({1, t, 2, 5}) + each.da.Get({1, t, 3, 5}), 1e-12);
  }
}

TEST(WallAttentionTest, BitsDoNotDependOnThreads) {
  Context one(1), three(3);
  const Fixture a(333), b(333);
  Forward(one, a.inputs(), {}, a.outputs());
  Forward(three, b.inputs(), {}, b.outputs());
  EXPECT_TRUE(SameBits(a.o.view(), b.o.view()));
  EXPECT_TRUE(SameBits(a.lse.view(), b.lse.view()));
  Backward(one, a.backward(), {}, a.gradients());
  for (int repeat = 0; repeat < 5; ++repeat) {
    for (const Buffer* x : {&b.dq, &b.dk, &b.dv, &b.da, &b.dg}) x->Poison();
    Backward(three, b.backward(), {}, b.gradients());
    EXPECT_TRUE(SameBits(a.dq.view(), b.dq.view()));
    EXPECT_TRUE(SameBits(a.dk.view(), b.dk.view()));
    EXPECT_TRUE(SameBits(a.dv.view(), b.dv.view()));
    EXPECT_TRUE(SameBits(a.da.view(), b.da.view()));
    EXPECT_TRUE(SameBits(a.dg.view(), b.dg.view()));
  }
}

TEST(WallAttentionTest, ASequenceHasTheSameBitsAloneAndPacked) {
  Context ctx(2);
  const Fixture whole(210), alone(210);
  const Buffer bounds(DType::kI32, {3});
  for (int i = 0; i < 3; ++i) bounds.as<int32_t>()[i] = i == 0 ? 0 : i == 1 ? 75 : 210;
  Inputs packed = whole.inputs();
  for (ConstTensorView* x : {&packed.q, &packed.k, &packed.v, &packed.log_decay, &packed.log_forget}) {
    *x = x->Slice(0, 1, 2);
  }
  const Outputs row = {whole.o.view().Slice(0, 1, 2), whole.lse.view().Slice(0, 1, 2)};
  Forward(ctx, packed, {.cu_seqlens = bounds.view()}, row);
  Forward(ctx, alone.inputs(75, 210), {}, {alone.o.view().Slice(1, 75, 210), alone.lse.view().Slice(2, 75, 210)});
  EXPECT_EQ(Elements(row.o.Slice(1, 75, 210)), Elements(alone.o.view().Slice(0, 1, 2).Slice(1, 75, 210)));
  EXPECT_EQ(Elements(row.lse.Slice(2, 75, 210)), Elements(alone.lse.view().Slice(0, 1, 2).Slice(2, 75, 210)));
}

TEST(WallAttentionTest, LaterTokensDoNotMatter) {
  Context ctx(2);
  const Fixture f(150), whole(150);
  Forward(ctx, whole.inputs(), {}, whole.outputs());
  for (const Buffer* x : {&f.q, &f.k, &f.v, &f.a, &f.g}) {
    const TensorView later = x->view().Slice(1, 100, 150);
    std::vector<int64_t> index(static_cast<size_t>(later.rank()));
    do SetElement(later, index, std::nan(""));
    while (NextIndex(later.sizes(), index));
  }
  Forward(ctx, f.inputs(), {}, f.outputs());
  EXPECT_EQ(Elements(f.o.view().Slice(1, 0, 100)), Elements(whole.o.view().Slice(1, 0, 100)));
  for (const double x : Elements(f.o.view().Slice(1, 100, 150))) EXPECT_TRUE(std::isnan(x));
}

TEST(WallAttentionTest, ANanInAQueryStaysInItsRow) {
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

TEST(WallAttentionTest, AGateOfMinusInfinityBeginsASequence) {
  Context ctx(1);
  const Fixture cut(150), alone(150);
  for (int64_t h = 0; h < 4; ++h) {
    for (int64_t b = 0; b < 2; ++b) cut.g.Set({b, 70, h}, -kInfinity);
  }
  Forward(ctx, cut.inputs(), {}, cut.outputs());
  Forward(ctx, alone.inputs(70, 150), {}, {alone.o.view().Slice(1, 70, 150), alone.lse.view().Slice(2, 70, 150)});
  EXPECT_LT(Distance(cut.o.view().Slice(1, 70, 150), alone.o.view().Slice(1, 70, 150)), 1e-5);
  Backward(ctx, cut.backward(), {}, cut.gradients());
  for (const Buffer* x : {&cut.dq, &cut.dk, &cut.dv, &cut.da, &cut.dg}) {
    for (const double element : Elements(x->view())) ASSERT_TRUE(std::isfinite(element));
  }
  for (int64_t h = 0; h < 4; ++h) EXPECT_EQ(cut.dg.Get({1, 70, h}), 0);
}

TEST(WallAttentionTest, TheFirstTokensGatesDecayNothing) {
  Context ctx(1);
  const Fixture f(100);
  Forward(ctx, f.inputs(), {}, f.outputs());
  Backward(ctx, f.backward(), {}, f.gradients());
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
  for (const Fixture* f : {&cut, &zero}) {
    Forward(ctx, f->inputs(), {}, f->outputs());
    Backward(ctx, f->backward(), {}, f->gradients());
  }
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
  Forward(ctx, f.inputs(), {}, f.outputs());
  Backward(ctx, f.backward(), {}, f.gradients());
}

TEST(WallAttentionTest, ExcludedTokensHaveNoResults) {
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

TEST(WallAttentionTest, APositiveGateIsRefusedOnlyWhereValuesAreChecked) {
  Context ctx(1), checks(1);
  checks.set_checks(true);
  const Fixture f(9);
  f.g.Set({1, 3, 2}, 0.5);
  Forward(ctx, f.inputs(), {}, f.outputs());
  EXPECT_TRUE(std::isfinite(f.lse.Get({1, 2, 8})));
  EXPECT_THAT([&] { Forward(checks, f.inputs(), {}, f.outputs()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("log_forget has an element 0.5, expected <= 0 everywhere")));
  f.a.Set({1, 3, 2, 5}, 0.25);
  Forward(ctx, f.inputs(), {}, f.outputs());
  EXPECT_TRUE(std::isfinite(f.lse.Get({1, 2, 8})));
  EXPECT_THAT([&] { Forward(checks, f.inputs(), {}, f.outputs()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("log_decay has an element 0.25, expected <= 0 everywhere")));
  EXPECT_THAT([&] { TransformKeys(checks, {f.a.view()}, f.q.view()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("log_decay has an element 0.25, expected <= 0 everywhere")));
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
  EXPECT_THAT(
      [&] { TransformKeys(ctx, {f.a.view()}, f.q.view().Slice(1, 0, 49)); },
      ThrowsMessage<InvalidArgument>(HasSubstr("keys has shape [2,49,4,12], expected [2, at least 50, 4, 12]")));
  EXPECT_THAT([&] { TransformKeys(ctx, {f.a.view()}, f.k.view()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("keys has shape [2,50,2,12], expected [2,50,4,12]")));
  EXPECT_THAT([&] { TransformKeys(ctx, {f.g.view()}, f.q.view()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("log_decay has shape [2,50,4], expected [B, N, Hg, D]")));
  EXPECT_THAT([&] { TransformKeys(ctx, {f.a.view()}, f.a.view()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("keys overlaps log_decay")));
}

TEST(WallAttentionTest, WorkspaceIsWhatThePassesReserve) {
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

TEST(WallAttentionTest, ExplainNeedsShapesAlone) {
  const Context ctx(1);
  const auto shape = [](std::initializer_list<int64_t> sizes, DType dtype = DType::kF32) {
    return ConstTensorView(nullptr, dtype, sizes);
  };
  Inputs in = {.q = shape({2, 200, 4, 12}),
               .k = shape({2, 200, 2, 12}),
               .v = shape({2, 200, 2, 10}),
               .log_decay = shape({2, 200, 4, 12})};
  const Explanation e = Explain(ctx, in, {});
  EXPECT_EQ(e.kernel, "wall_blocks");
  EXPECT_EQ(e.flops, 2 * 4 * 200 * 201 / 2 * (2 * (12 + 10)));
  EXPECT_EQ(e.visited_pairs, 2 * 4 * (64 * (64 + 128 + 192) + 8 * 200));
  EXPECT_EQ(e.bytes, 4 * 2 * 200 * (2 * 4 * 12 + 4 * 10 + 2 * (12 + 10)));
  Options options;
  options.cu_seqlens = shape({5}, DType::kI32);  // without numbers, sequences of one length
  for (ConstTensorView* t : {&in.q, &in.k, &in.v, &in.log_decay}) *t = t->Slice(0, 0, 1);
  EXPECT_EQ(Explain(ctx, in, options).flops, 4 * 4 * 50 * 51 / 2 * (2 * (12 + 10)));
  in.log_decay = shape({2, 200, 3, 12});
  EXPECT_THAT([&] { Workspace(ctx, in, {}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("wall_attention::Workspace: log_decay has 3 heads")));
}

TEST(WallAttentionTest, ErrorsNameTheArgumentAndWriteNothing) {
  const Fixture f(9);
  Context ctx(1);
  const auto forward = [&](const std::function<void(Inputs&, Options&)>& change, const std::string& message) {
    Inputs in = f.inputs();
    Options options;
    change(in, options);
    EXPECT_THAT([&] { Forward(ctx, in, options, f.outputs()); }, ThrowsMessage<InvalidArgument>(HasSubstr(message)));
    EXPECT_TRUE(std::isnan(f.o.Get({0, 0, 0, 0})));
  };
  forward([](auto& in, auto&) { in.q = {}; }, "wall_attention::Forward: q is absent");
  forward([](auto& in, auto&) { in.log_decay = {}; }, "log_decay is absent");
  forward([](auto& in, auto&) { in.k = in.k.Slice(1, 0, 8); }, "k has shape [2,8,2,12], expected [2,9,2,12]");
  forward([](auto& in, auto&) { in.v = in.v.Slice(2, 0, 1); }, "v has shape [2,9,1,10], expected [2,9,2,10]");
  forward([](auto& in, auto&) { in.log_decay = in.log_decay.Slice(3, 0, 4); },
          "log_decay has shape [2,9,4,4], expected [2,9,4,12]");
  forward([](auto& in, auto&) { in.log_decay = in.log_decay.Slice(2, 0, 3); },
          "log_decay has 3 heads, expected a multiple of the 2 of k that divides the 4 of q");
  forward([](auto& in, auto&) { in.log_decay = in.log_forget; }, "log_decay has shape [2,9,4], expected [B, T, Hg, D]");
  forward([](auto& in, auto&) { in.q = in.q.Slice(2, 0, 3); }, "q has 3 heads, expected a multiple of the 2 of k");
  forward([](auto& in, auto&) { in.k = in.k.Slice(2, 0, 0); }, "expected at least one head");
  forward([](auto& in, auto&) { in.v = in.v.Slice(3, 0, 0); }, "expected at least one channel");
  forward([](auto& in, auto&) { in.log_forget = in.log_forget.Slice(2, 0, 2); },
          "log_forget has shape [2,9,2], expected [2,9,4]");
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
}  // namespace heed::wall_attention
