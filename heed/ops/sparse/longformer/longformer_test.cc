// Properties of longformer that comparison with its reference cannot show. tests/conformance_test.cc compares with the
// reference for every SIMD target, dtype and size, tests/random_options_test.cc for random options.
#include "heed/ops/sparse/longformer/longformer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/patterns/pattern.h"

namespace heed::longformer {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

Buffer Ints(const std::vector<int64_t>& values, const std::vector<int64_t>& shape) {
  const Buffer buffer(DType::kI64, shape);
  std::ranges::copy(values, buffer.as<int64_t>());
  return buffer;
}
Buffer Ints(const std::vector<int64_t>& values) { return Ints(values, {std::ssize(values)}); }

// A call of B sequences of T tokens, two query heads per key head, with its results and gradients.
struct Fixture {
  int64_t B, T;
  DType dtype;
  Buffer q, k, v, qg, kg, vg, d_o, tokens;
  Buffer o, lse, dq, dk, dv, dqg, dkg, dvg;
  Options options;
  bool own = true;

  Fixture(int64_t batch, int64_t num_tokens, const Buffer& global, DType type = DType::kF32)
      : B(batch), T(num_tokens), dtype(type), tokens(global) {
    const std::vector<int64_t> queries = {B, T, 4, 24}, keys = {B, T, 2, 24}, values = {B, T, 2, 16};
    const std::vector<int64_t> results = {B, T, 4, 16};
    uint64_t seed = 0;
    for (const auto& [buffer, sizes] : {std::pair{&q, queries},
                                        {&k, keys},
                                        {&v, values},
                                        {&qg, queries},
                                        {&kg, keys},
                                        {&vg, values},
                                        {&d_o, results},
                                        {&o, results},
                                        {&dq, queries},
                                        {&dk, keys},
                                        {&dv, values},
                                        {&dqg, queries},
                                        {&dkg, keys},
                                        {&dvg, values}}) {
      *buffer = Buffer(dtype, sizes);
      buffer->FillNormal(++seed);
    }
    lse = Buffer(dtype == DType::kF64 ? DType::kF64 : DType::kF32, {B, 4, T});
    options.window = 10;
    options.tokens = tokens.view();
  }

  Inputs inputs() const {
    if (!own) return {q.view(), k.view(), v.view(), {}, {}, {}};
    return {q.view(), k.view(), v.view(), qg.view(), kg.view(), vg.view()};
  }
  Outputs outputs() const { return {o.view(), lse.view()}; }
  BackwardInputs backward_inputs() const {
    BackwardInputs in;
    static_cast<Inputs&>(in) = inputs();
    in.o = o.view();
    in.lse = lse.view();
    in.d_o = d_o.view();
    return in;
  }
  Gradients gradients() const {
    if (!own) return {dq.view(), dk.view(), dv.view(), {}, {}, {}};
    return {dq.view(), dk.view(), dv.view(), dqg.view(), dkg.view(), dvg.view()};
  }
  void Run(int threads = 1) const {
    Context ctx(threads);
    Forward(ctx, inputs(), options, outputs());
    Backward(ctx, backward_inputs(), options, gradients());
  }
  std::vector<Buffer> results() const { return {o, lse, dq, dk, dv, dqg, dkg, dvg}; }
};

void FillRow(const Buffer& buffer, int64_t b, int64_t t, double value) {
  for (int64_t h = 0; h < buffer.view().size(2); ++h) {
    for (int64_t d = 0; d < buffer.view().size(3); ++d) buffer.Set({b, t, h, d}, value);
  }
}

TEST(LongformerTest, SharedProjectionsAreAttentionWithThePatternBitForBit) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    Fixture f(2, 150, Ints({7, 0, 149, -1}), dtype);
    f.own = false;
    f.options.softcap = 20;
    f.options.dropout = 0.2;
    f.options.seed = 5;
    f.Run();
    const Fixture g(2, 150, f.tokens, dtype);
    attention::Options options;
    options.pattern = patterns::Longformer(10, f.tokens.view());
    options.softcap = 20;
    options.dropout = 0.2;
    options.seed = 5;
    Context ctx(1);
    attention::Forward(ctx, {g.q.view(), g.k.view(), g.v.view()}, options, {g.o.view(), g.lse.view()});
    attention::Backward(ctx, {g.q.view(), g.k.view(), g.v.view(), g.o.view(), g.lse.view(), g.d_o.view(), {}}, options,
                        {g.dq.view(), g.dk.view(), g.dv.view(), {}, {}, {}, {}, {}});
    for (size_t i = 0; i < 5; ++i)
      EXPECT_TRUE(SameBits(f.results()[i].view(), g.results()[i].view())) << Name(dtype) << i;
  }
}

TEST(LongformerTest, RowsOfTokensAreAttentionOfTheirOwnProjections) {
  Fixture f(2, 150, Ints({3, 3, 70, 149}));
  f.Run();
  const Fixture full(2, 150, f.tokens);
  Context ctx(1);
  attention::Forward(ctx, {f.qg.view(), f.kg.view(), f.vg.view()}, {}, {full.o.view(), full.lse.view()});
  attention::Options options;
  options.pattern = patterns::Longformer(10, f.tokens.view());
  const Fixture local(2, 150, f.tokens);
  attention::Forward(ctx, {f.q.view(), f.k.view(), f.v.view()}, options, {local.o.view(), local.lse.view()});
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t t = 0; t < 150; ++t) {
      const Fixture& expected = t == 3 || t == 70 || t == 149 ? full : local;
      for (int64_t h = 0; h < 4; ++h) {
        EXPECT_EQ(f.lse.Get({b, h, t}), expected.lse.Get({b, h, t})) << b << " " << t;
        for (int64_t d = 0; d < 16; ++d) {
          ASSERT_EQ(f.o.Get({b, t, h, d}), expected.o.Get({b, t, h, d})) << b << " " << t << " " << h << " " << d;
        }
      }
    }
  }
}

TEST(LongformerTest, EachProjectionHasItsOwnGradient) {
  Fixture f(1, 100, Ints({2, 60}));
  f.Run();
  for (int64_t t = 0; t < 100; ++t) {
    const bool is_token = t == 2 || t == 60;
    double q = 0, qg = 0;
    for (int64_t d = 0; d < 24; ++d) {
      q += std::abs(f.dq.Get({0, t, 1, d}));
      qg += std::abs(f.dqg.Get({0, t, 1, d}));
    }
    EXPECT_EQ(q == 0, is_token) << t;
    EXPECT_EQ(qg == 0, !is_token) << t;
  }
  // Gradients of rows of global tokens reach kg and vg only, gradients of other rows k and v only.
  const Fixture g(1, 100, f.tokens);
  for (const int64_t t : {2, 60}) FillRow(g.d_o, 0, t, 0);
  g.Run();
  EXPECT_TRUE(SameBits(f.dk.view(), g.dk.view()) && SameBits(f.dv.view(), g.dv.view()));
  for (const Buffer& gradient : {g.dqg, g.dkg, g.dvg}) {
    EXPECT_TRUE(std::ranges::all_of(Elements(gradient.view()), [](double x) { return x == 0; }));
  }
}

TEST(LongformerTest, WhatNobodyReadsCannotLeak) {
  const Buffer tokens = Ints({0, 40});
  Fixture clean(1, 130, tokens), dirty(1, 130, tokens);
  for (int64_t t = 0; t < 130; ++t) FillRow(t == 0 || t == 40 ? dirty.q : dirty.qg, 0, t, kNaN);
  clean.Run();
  dirty.Run();
  for (size_t i = 0; i < 8; ++i) EXPECT_TRUE(SameBits(clean.results()[i].view(), dirty.results()[i].view())) << i;
}

TEST(LongformerTest, NaNOfTokensStaysWithThem) {
  const Buffer tokens = Ints({5});
  Fixture clean(1, 130, tokens), dirty(1, 130, tokens);
  FillRow(dirty.qg, 0, 5, kNaN);
  FillRow(dirty.d_o, 0, 5, kNaN);
  clean.Run();
  dirty.Run();
  EXPECT_TRUE(std::isnan(dirty.o.Get({0, 5, 0, 0})));
  for (const size_t i : {2, 3, 4}) EXPECT_TRUE(SameBits(clean.results()[i].view(), dirty.results()[i].view())) << i;
  EXPECT_TRUE(std::isnan(dirty.dkg.Get({0, 100, 0, 0})) && std::isnan(dirty.dqg.Get({0, 5, 0, 0})));
  EXPECT_EQ(dirty.dqg.Get({0, 6, 0, 0}), 0);
}

TEST(LongformerTest, PaddedTokensSeeAndAreNotSeen) {
  Fixture f(1, 60, Ints({50}));
  const Buffer lengths = Ints({40});
  f.options.key_lengths = lengths.view();
  for (const Buffer& buffer : {f.k, f.v, f.kg, f.vg}) {
    for (int64_t t = 40; t < 60; ++t) FillRow(buffer, 0, t, kNaN);
  }
  f.Run();
  for (const Buffer& result : f.results()) {
    for (const double x : Elements(result.view())) ASSERT_FALSE(std::isnan(x));
  }
  EXPECT_NE(f.o.Get({0, 50, 0, 0}), 0);         // a row that sees 40 keys
  EXPECT_EQ(f.lse.Get({0, 0, 55}), -HUGE_VAL);  // whose window has no key left
  EXPECT_EQ(f.dkg.Get({0, 50, 0, 0}), 0);
}

TEST(LongformerTest, QueryLengthsCutTokensToo) {
  Fixture f(1, 60, Ints({10, 50}));
  const Buffer lengths = Ints({40});
  f.options.query_lengths = lengths.view();
  f.Run();
  EXPECT_NE(f.o.Get({0, 10, 0, 0}), 0);
  EXPECT_EQ(f.o.Get({0, 50, 0, 0}), 0);
  EXPECT_EQ(f.lse.Get({0, 0, 50}), -HUGE_VAL);
  EXPECT_EQ(f.dqg.Get({0, 50, 0, 0}), 0);
}

TEST(LongformerTest, TokensOfEachSequence) {
  Fixture both(2, 90, Ints({4, -1, 80, 20}, {2, 2}));
  both.Run();
  for (int64_t b = 0; b < 2; ++b) {
    Fixture one(1, 90, b == 0 ? Ints({4}) : Ints({20, 80}));
    const auto row = [&](const Buffer& buffer) { return buffer.view().Slice(0, b, b + 1); };
    const Outputs out = one.outputs();
    Context ctx(1);
    Forward(ctx, {row(both.q), row(both.k), row(both.v), row(both.qg), row(both.kg), row(both.vg)}, one.options, out);
    EXPECT_EQ(Elements(out.o), Elements(row(both.o)));
    EXPECT_EQ(Elements(out.lse), Elements(row(both.lse)));
    BackwardInputs in;
    static_cast<Inputs&>(in) = {row(both.q), row(both.k), row(both.v), row(both.qg), row(both.kg), row(both.vg)};
    in.o = out.o, in.lse = out.lse, in.d_o = row(both.d_o);
    Backward(ctx, in, one.options, one.gradients());
    for (size_t i = 2; i < 8; ++i) EXPECT_EQ(Elements(one.results()[i].view()), Elements(row(both.results()[i]))) << i;
  }
}

TEST(LongformerTest, PackedIsEachSequenceAlone) {
  // Ten surplus rows follow the last sequence.
  Fixture packed(1, 200, Ints({0, 66, -1}));
  const Buffer bounds = Ints({0, 70, 70, 190});
  packed.options.cu_seqlens_q = bounds.view();
  Context ctx(2);
  const Buffer lse(DType::kF32, {4, 200});
  Forward(ctx, packed.inputs(), packed.options, {packed.o.view(), lse.view()});
  BackwardInputs in = packed.backward_inputs();
  in.lse = lse.view();
  Backward(ctx, in, packed.options, packed.gradients());
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 70}, {70, 190}}) {
    Fixture one(1, end - begin, packed.tokens);
    const auto part = [&](const Buffer& buffer) { return buffer.view().Slice(1, begin, end); };
    static_cast<Inputs&>(in) = {part(packed.q),  part(packed.k),  part(packed.v),
                                part(packed.qg), part(packed.kg), part(packed.vg)};
    Forward(ctx, in, one.options, one.outputs());
    EXPECT_EQ(Elements(one.o.view()), Elements(part(packed.o)));
    EXPECT_EQ(Elements(one.lse.view()), Elements(lse.view().Slice(1, begin, end)));
    in.o = one.o.view(), in.lse = one.lse.view(), in.d_o = part(packed.d_o);
    Backward(ctx, in, one.options, one.gradients());
    for (size_t i = 2; i < 8; ++i)
      EXPECT_EQ(Elements(one.results()[i].view()), Elements(part(packed.results()[i]))) << i;
  }
  EXPECT_EQ(lse.Get({0, 195}), -HUGE_VAL);
  for (const Buffer& result : {packed.o, packed.dq, packed.dk, packed.dv, packed.dqg, packed.dkg, packed.dvg}) {
    EXPECT_EQ(result.Get({0, 195, 0, 0}), 0);
  }
}

TEST(LongformerTest, TokensThatAreAbsentChangeNothing) {
  Fixture plain(1, 80, Ints({9, 30})), noisy(1, 80, Ints({30, -1, 80, 9, 9, 100000, 30}));
  plain.Run();
  noisy.Run();
  for (size_t i = 0; i < 8; ++i) EXPECT_TRUE(SameBits(plain.results()[i].view(), noisy.results()[i].view())) << i;
}

TEST(LongformerTest, WithoutTokensItIsAWindow) {
  Fixture f(1, 80, Ints({}));
  f.options.window = 0;  // each row sees itself
  f.Run();
  for (int64_t t = 0; t < 80; ++t) {
    for (int64_t d = 0; d < 16; ++d) EXPECT_EQ(f.o.Get({0, t, 3, d}), f.v.Get({0, t, 1, d}));
  }
  for (const Buffer& gradient : {f.dqg, f.dkg, f.dvg}) {
    EXPECT_TRUE(std::ranges::all_of(Elements(gradient.view()), [](double x) { return x == 0; }));
  }
  Fixture wide(1, 80, Ints({})), odd(1, 80, Ints({}));
  odd.options.window = 11;
  wide.Run();
  odd.Run();
  EXPECT_TRUE(SameBits(wide.o.view(), odd.o.view()));
}

TEST(LongformerTest, NothingMayBeEmpty) {
  for (const auto& [B, T] : {std::pair<int64_t, int64_t>{0, 5}, {2, 0}}) {
    Fixture f(B, T, Ints({0, 3}));
    EXPECT_NO_THROW(f.Run());
  }
  Fixture all(1, 70, Ints({}));  // global tokens only
  std::vector<int64_t> every(70);
  for (int64_t i = 0; i < 70; ++i) every[static_cast<size_t>(i)] = i;
  all.tokens = Ints(every);
  all.options.tokens = all.tokens.view();
  all.Run();
  EXPECT_TRUE(std::ranges::all_of(Elements(all.dk.view()), [](double x) { return x == 0; }));
  EXPECT_NE(all.dkg.Get({0, 0, 0, 0}), 0);
}

TEST(LongformerTest, BitsDoNotDependOnThreadsOrWhereTokensStand) {
  Fixture one(2, 150, Ints({0, 77})), three(2, 150, one.tokens);
  one.Run(1);
  three.Run(3);
  for (size_t i = 0; i < 8; ++i) EXPECT_TRUE(SameBits(one.results()[i].view(), three.results()[i].view())) << i;
  // The query of global token 77 has position 120 here.
  Fixture moved(2, 150, Ints({120, 0}));
  for (int64_t h = 0; h < 4; ++h) {
    for (int64_t d = 0; d < 24; ++d) moved.qg.Set({0, 120, h, d}, one.qg.Get({0, 77, h, d}));
  }
  moved.Run();
  for (int64_t d = 0; d < 16; ++d) EXPECT_EQ(moved.o.Get({0, 120, 2, d}), one.o.Get({0, 77, 2, d}));
}

TEST(LongformerTest, DropoutOfTokensIsTheirOwn) {
  Fixture f(1, 64, Ints({1}));
  f.options.dropout = 0.5;
  f.options.seed = 3;
  f.Run();
  const Fixture again(1, 64, f.tokens);
  attention::Options options;
  options.dropout = 0.5;
  options.seed = 3;
  const Buffer starts = Ints({int64_t{1} << 31});
  options.query_starts = starts.view();
  Context ctx(1);
  const Buffer o(DType::kF32, {1, 1, 4, 16});
  attention::Forward(ctx, {f.qg.view().Slice(1, 1, 2), f.kg.view(), f.vg.view()}, options, {o.view(), {}});
  EXPECT_EQ(Elements(o.view()), Elements(f.o.view().Slice(1, 1, 2)));
}

TEST(LongformerTest, CostIsOfTheWindowAndTheTokens) {
  Context ctx(1);
  const auto explain = [&](int64_t T, const std::vector<int64_t>& tokens) {
    const ConstTensorView rows(nullptr, DType::kF32, {1, T, 2, 64});
    const Buffer global = Ints(tokens);
    Options options;
    options.window = 128;
    options.tokens = global.view();
    return Explain(ctx, {rows, rows, rows, rows, rows, rows}, options);
  };
  const double tokens = 2, T = 4096;
  const Explanation e = explain(4096, {0, 2000});
  // Rows at both ends see less of the window, and columns of global tokens inside the window are seen once.
  const double pairs = 2 * ((T - tokens) * (129 + tokens) + tokens * T);
  EXPECT_LT(e.flops, 256 * pairs);
  EXPECT_GT(e.flops, 256 * pairs * 0.95);
  EXPECT_LT(e.visited_pairs, 3 * pairs);
  EXPECT_LT(explain(8192, {0, 2000}).visited_pairs, 2.1 * e.visited_pairs);
  EXPECT_THAT(e.kernel, HasSubstr("longformer on softmax_"));
  // One more global token adds one row, not a block of rows.
  EXPECT_LT(explain(4096, {0, 2000, 3000}).visited_pairs - e.visited_pairs, 16 * 2 * T + 4 * 64 * T);
}

TEST(LongformerTest, WorkspaceIsWhatTheGatheredRowsAddToAttention) {
  Context ctx(2);
  Fixture f(1, 500, Ints({0, 9}));
  const int64_t own = Workspace(ctx, f.inputs(), f.options);
  const int64_t own_backward = BackwardWorkspace(ctx, f.backward_inputs(), f.options, f.gradients());
  f.own = false;
  const int64_t shared = Workspace(ctx, f.inputs(), f.options);
  const int64_t shared_backward = BackwardWorkspace(ctx, f.backward_inputs(), f.options, f.gradients());
  EXPECT_GT(own, shared);
  EXPECT_LT(own, shared + 64 * 1024);
  EXPECT_GT(own_backward, 0);
  EXPECT_LT(own_backward, 2 * shared_backward + 64 * 1024);
}

TEST(LongformerTest, BadInputIsNamedAndNothingIsWritten) {
  struct Bad {
    const char* message;
    std::function<void(Fixture&, Inputs&, Outputs&)> change;
  };
  const Buffer negative = Ints({-2}), of_three = Ints({1, 2, 3}, {3, 1}), deep = Ints({1}, {1, 1, 1});
  const Buffer lengths = Ints({61, 1});
  const Buffer bounds = Ints({0, 60});
  const Buffer wrong(DType::kF32, {2, 60, 3, 24}), other(DType::kF64, {2, 60, 4, 24}), floats(DType::kF32, {1});
  const Buffer short_k(DType::kF32, {2, 59, 2, 24});
  const Bad all[] = {
      {"longformer: window is -1, expected 0 or more", [](Fixture& f, Inputs&, Outputs&) { f.options.window = -1; }},
      {"longformer::Forward: tokens is absent, expected a tensor",
       [](Fixture& f, Inputs&, Outputs&) { f.options.tokens = {}; }},
      {"longformer::Forward: tokens has dtype f32, expected i32 or i64",
       [&](Fixture& f, Inputs&, Outputs&) { f.options.tokens = floats.view(); }},
      {"longformer: tokens has -2, expected 0 or more, or -1",
       [&](Fixture& f, Inputs&, Outputs&) { f.options.tokens = negative.view(); }},
      {"longformer: tokens has shape [1,1,1], expected [n] or [B, n]",
       [&](Fixture& f, Inputs&, Outputs&) { f.options.tokens = deep.view(); }},
      {"longformer::Forward: tokens has shape [3,1], expected [n], or [2, n] by sequence",
       [&](Fixture& f, Inputs&, Outputs&) { f.options.tokens = of_three.view(); }},
      {"longformer::Forward: kg is absent, expected qg, kg and vg, or none of them",
       [](Fixture&, Inputs& in, Outputs&) { in.kg = {}; }},
      {"longformer::Forward: qg is absent, expected qg, kg and vg, or none of them",
       [](Fixture&, Inputs& in, Outputs&) { in.qg = {}; }},
      {"longformer::Forward: qg has shape [2,60,3,24], expected [2,60,4,24] as q",
       [&](Fixture&, Inputs& in, Outputs&) { in.qg = wrong.view(); }},
      {"longformer::Forward: qg has dtype f64, expected f32 as q",
       [&](Fixture&, Inputs& in, Outputs&) { in.qg = other.view(); }},
      {"longformer::Forward: k has 59 tokens, expected 60 as q",
       [&](Fixture& f, Inputs& in, Outputs&) {
         f.own = false;
         in = f.inputs();
         in.k = short_k.view();
       }},
      {"longformer::Forward: o overlaps qg, expected memory of its own",
       [](Fixture& f, Inputs&, Outputs& out) { out.o = TensorView(f.qg.view().data(), DType::kF32, {2, 60, 4, 16}); }},
      {"longformer::Forward: key_lengths contains 61, expected 0 to 60",
       [&](Fixture& f, Inputs&, Outputs&) { f.options.key_lengths = lengths.view(); }},
      {"longformer::Forward: q has shape [2,60,4,24], expected a leading axis of 1 with cu_seqlens_q",
       [&](Fixture& f, Inputs&, Outputs&) { f.options.cu_seqlens_q = bounds.view(); }},
      {"longformer::Forward: dropout is 1, expected 0 <= dropout < 1",
       [](Fixture& f, Inputs&, Outputs&) { f.options.dropout = 1; }},
      {"longformer::Forward: q is absent, expected a tensor",
       [](Fixture& f, Inputs& in, Outputs&) {
         f.own = false;
         in = f.inputs();
         in.q = {};
       }},
  };
  Context ctx(1);
  for (const Bad& bad : all) {
    Fixture f(2, 60, Ints({1}));
    f.o.FillConstant(7);
    Inputs in = f.inputs();
    Outputs out = f.outputs();
    bad.change(f, in, out);
    EXPECT_THAT([&] { Forward(ctx, in, f.options, out); }, ThrowsMessage<InvalidArgument>(HasSubstr(bad.message)));
    EXPECT_EQ(f.o.Get({0, 0, 0, 0}), 7) << bad.message;
  }
}

TEST(LongformerTest, BadGradientsAreNamedAndNothingIsWritten) {
  Context ctx(1);
  Fixture f(2, 60, Ints({1}));
  f.Run();
  f.dq.FillConstant(7);
  const auto refuses = [&](const BackwardInputs& in, const Gradients& out, const char* message) {
    EXPECT_THAT([&] { Backward(ctx, in, f.options, out); }, ThrowsMessage<InvalidArgument>(HasSubstr(message)));
    EXPECT_EQ(f.dq.Get({0, 0, 0, 0}), 7);
  };
  Gradients out = f.gradients();
  out.dkg = f.dvg.view();
  refuses(f.backward_inputs(), out, "longformer::Backward: dkg has shape [2,60,2,16], expected [2,60,2,24] as kg");
  out = f.gradients();
  out.dkg = f.dk.view();
  refuses(f.backward_inputs(), out, "longformer::Backward: dkg overlaps dk, expected memory of its own");
  out = f.gradients();
  out.dvg = f.v.view();
  refuses(f.backward_inputs(), out, "longformer::Backward: dvg overlaps v, expected memory of its own");
  BackwardInputs in = f.backward_inputs();
  in.qg = in.kg = in.vg = {};
  refuses(in, f.gradients(), "longformer::Backward: dqg is asked for, expected qg with it");
  in = f.backward_inputs();
  in.o = {};
  refuses(in, f.gradients(), "longformer::Backward: o is absent, expected a tensor");
}

TEST(LongformerTest, SomeGradientsAreThoseOfAll) {
  Fixture all(1, 100, Ints({3, 50})), some(1, 100, all.tokens);
  all.Run();
  Context ctx(1);
  Forward(ctx, some.inputs(), some.options, some.outputs());
  Gradients out;
  out.dk = some.dk.view();
  out.dvg = some.dvg.view();
  Backward(ctx, some.backward_inputs(), some.options, out);
  EXPECT_TRUE(SameBits(all.dk.view(), some.dk.view()) && SameBits(all.dvg.view(), some.dvg.view()));
}

}  // namespace
}  // namespace heed::longformer
