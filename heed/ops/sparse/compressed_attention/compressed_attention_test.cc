// Properties of compressed attention that comparison with its reference cannot show. tests/conformance_test.cc compares
// with the reference for every SIMD target, dtype and size, tests/random_options_test.cc for random options.
#include "heed/ops/sparse/compressed_attention/compressed_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/sparse/compressed_attention/compressed_attention_case.h"

namespace heed::compressed_attention {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kCount = 5;

// A call of B sequences with 4 query heads, 2 key heads and ratio 4, and its results and gradients.
struct Fixture {
  int64_t B, Tq, Tk, N;
  DType dtype;
  Options options;
  bool chooses = false;
  Buffer q, k, v, k_cmp, v_cmp, chosen, sinks, d_o, d_lse;
  Buffer o, lse, dq, dk, dv, dk_cmp, dv_cmp, dsinks;

  Fixture(int64_t batch, int64_t rows, int64_t keys, DType type = DType::kF32)
      : B(batch), Tq(rows), Tk(keys), N(keys / 4), dtype(type) {
    options.ratio = 4;
    options.window = 10;
    uint64_t seed = 0;
    for (const auto& [buffer, sizes] : std::vector<std::pair<Buffer*, std::vector<int64_t>>>{{&q, {B, Tq, 4, 24}},
                                                                                             {&k, {B, Tk, 2, 24}},
                                                                                             {&v, {B, Tk, 2, 16}},
                                                                                             {&k_cmp, {B, N, 2, 24}},
                                                                                             {&v_cmp, {B, N, 2, 16}},
                                                                                             {&sinks, {4}},
                                                                                             {&d_o, {B, Tq, 4, 16}},
                                                                                             {&o, {B, Tq, 4, 16}},
                                                                                             {&dq, {B, Tq, 4, 24}},
                                                                                             {&dk, {B, Tk, 2, 24}},
                                                                                             {&dv, {B, Tk, 2, 16}},
                                                                                             {&dk_cmp, {B, N, 2, 24}},
                                                                                             {&dv_cmp, {B, N, 2, 16}},
                                                                                             {&dsinks, {4}}}) {
      *buffer = Buffer(dtype, sizes);
      buffer->FillNormal(++seed);
    }
    const DType wide = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    lse = Buffer(wide, {B, 4, Tq});
    d_lse = Buffer(wide, {B, 4, Tq}).FillNormal(++seed);
    chosen = Buffer(DType::kI64, {B, Tq, kCount});
    Random random(7);
    for (int64_t row = 0; row < B * Tq; ++row) {
      ChooseKeys(random, (Tk - Tq + row % Tq + 1) / 4, {chosen.as<int64_t>() + row * kCount, kCount});
    }
  }

  Inputs inputs() const {
    Inputs in = {q.view(), k.view(), v.view(), k_cmp.view(), v_cmp.view(), {}, sinks.view()};
    if (chooses) in.chosen = chosen.view();
    return in;
  }
  BackwardInputs backward_inputs() const {
    BackwardInputs in;
    static_cast<Inputs&>(in) = inputs();
    in.o = o.view(), in.lse = lse.view(), in.d_o = d_o.view(), in.d_lse = d_lse.view();
    return in;
  }
  Gradients gradients() const { return {dq.view(), dk.view(), dv.view(), dk_cmp.view(), dv_cmp.view(), dsinks.view()}; }
  void Run(int threads = 1) const {
    Context ctx(threads);
    Forward(ctx, inputs(), options, {o.view(), lse.view()});
    Backward(ctx, backward_inputs(), options, gradients());
  }
  std::vector<Buffer> results() const { return {o, lse, dq, dk, dv, dk_cmp, dv_cmp, dsinks}; }
};

double Distance(const ConstTensorView& a, const ConstTensorView& b) {
  const std::vector<double> x = Elements(a), y = Elements(b);
  double largest = 0;
  for (size_t i = 0; i < x.size(); ++i) largest = std::max(largest, std::abs(x[i] - y[i]));
  return x.size() == y.size() ? largest : kNaN;
}

void SetRow(const Buffer& buffer, int64_t b, int64_t t, double value) {
  for (int64_t h = 0; h < buffer.view().size(2); ++h) {
    for (int64_t e = 0; e < buffer.view().size(3); ++e) buffer.Set({b, t, h, e}, value);
  }
}

TEST(CompressedAttentionTest, ARatioOfOneWithoutAWindowIsCausalAttention) {
  for (const bool chooses : {false, true}) {
    Fixture f(2, 50, 50, DType::kF64);
    f.options.ratio = 1;
    f.options.window = 0;
    Inputs in = f.inputs();
    in.k_cmp = in.k, in.v_cmp = in.v;
    const Buffer all(DType::kI32, {2, 50, 50});
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t i = 0; i < 50; ++i) {
        for (int64_t j = 0; j < 50; ++j) all.Set({b, i, j}, static_cast<double>(j <= i ? i - j : -1));
      }
    }
    if (chooses) in.chosen = all.view();
    Context ctx(1);
    Forward(ctx, in, f.options, {f.o.view(), f.lse.view()});
    attention::Options causal;
    causal.causal = true;
    causal.sinks = f.sinks.view();
    const Buffer o(DType::kF64, {2, 50, 4, 16}), lse(DType::kF64, {2, 4, 50});
    attention::Forward(ctx, {in.q, in.k, in.v}, causal, {o.view(), lse.view()});
    EXPECT_LT(Distance(f.o.view(), o.view()), 1e-14) << chooses;
    EXPECT_LT(Distance(f.lse.view(), lse.view()), 1e-14) << chooses;
  }
}

TEST(CompressedAttentionTest, BeforeTheFirstCompleteKeyItIsAttentionWithAWindow) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    Fixture f(2, 50, 50, dtype);
    f.options.ratio = 51;
    Inputs in = f.inputs();
    in.sinks = {};
    Context ctx(1);
    Forward(ctx, in, f.options, {f.o.view(), f.lse.view()});
    attention::Options window;
    window.causal = true;
    window.window.left = 9;
    const Buffer o(dtype, {2, 50, 4, 16}), lse(f.lse.view().dtype(), {2, 4, 50});
    attention::Forward(ctx, {in.q, in.k, in.v}, window, {o.view(), lse.view()});
    EXPECT_EQ(Elements(f.o.view()), Elements(o.view())) << Name(dtype);
    EXPECT_EQ(Elements(f.lse.view()), Elements(lse.view())) << Name(dtype);
  }
}

TEST(CompressedAttentionTest, ChoosingAllThatAreCompleteIsNoChoice) {
  Fixture f(1, 60, 70, DType::kF64);
  f.Run();
  const Fixture all(1, 60, 70, DType::kF64);
  const Buffer chosen(DType::kI32, {1, 60, 2, 17});
  for (int64_t i = 0; i < 60; ++i) {
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t c = 0; c < 17; ++c) chosen.Set({0, i, h, c}, c < (11 + i) / 4 ? static_cast<double>(c) : -1);
    }
  }
  BackwardInputs in = all.backward_inputs();
  in.chosen = chosen.view();
  Context ctx(1);
  Forward(ctx, in, all.options, {all.o.view(), all.lse.view()});
  Backward(ctx, in, all.options, all.gradients());
  for (size_t i = 0; i < f.results().size(); ++i) {
    EXPECT_LT(Distance(f.results()[i].view(), all.results()[i].view()), 1e-12) << i;
  }
}

TEST(CompressedAttentionTest, TheOrderOfChosenKeysDoesNotMatter) {
  Fixture f(2, 40, 40), reordered(2, 40, 40);
  f.chooses = reordered.chooses = true;
  reordered.chosen = Buffer(DType::kI32, {2, 40, kCount});
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t i = 0; i < 40; ++i) {
      for (int64_t n = 0; n < kCount; ++n) reordered.chosen.Set({b, i, n}, f.chosen.Get({b, i, (3 * n + i) % kCount}));
    }
  }
  f.Run();
  reordered.Run();
  for (size_t i = 0; i < f.results().size(); ++i) {
    EXPECT_TRUE(SameBits(f.results()[i].view(), reordered.results()[i].view())) << i;
  }
}

TEST(CompressedAttentionTest, GradientsAreFiniteDifferencesOfTheReference) {
  for (const bool chooses : {false, true}) {
    Fixture f(1, 12, 20, DType::kF64);
    f.chooses = chooses;
    f.options.window = 5;
    BackwardReference(f.backward_inputs(), f.options, f.gradients());
    const auto sum = [&] {
      Reference(f.inputs(), f.options, {f.o.view(), f.lse.view()});
      double total = 0;
      for (const auto& [of, result] : {std::pair{f.d_o, f.o}, {f.d_lse, f.lse}}) {
        const std::vector<double> x = Elements(of.view()), y = Elements(result.view());
        for (size_t i = 0; i < x.size(); ++i) total += x[i] * y[i];
      }
      return total;
    };
    Random random(3);
    for (const auto& [x, gradient] : {std::pair{f.q, f.dq},
                                      {f.k, f.dk},
                                      {f.v, f.dv},
                                      {f.k_cmp, f.dk_cmp},
                                      {f.v_cmp, f.dv_cmp},
                                      {f.sinks, f.dsinks}}) {
      for (int trial = 0; trial < 6; ++trial) {
        const int64_t at = random.Integer(0, x.view().num_elements() - 1);
        double* const element = x.as<double>() + at;
        const double before = *element;
        *element = before + 1e-5;
        const double above = sum();
        *element = before - 1e-5;
        const double below = sum();
        *element = before;
        EXPECT_NEAR((above - below) / 2e-5, gradient.as<double>()[at], 1e-7);
      }
    }
  }
}

TEST(CompressedAttentionTest, ARowIsNotInfluencedByWhatItDoesNotSee) {
  for (const bool chooses : {false, true}) {
    Fixture clean(1, 40, 40), dirty(1, 40, 40);
    clean.chooses = dirty.chooses = chooses;
    // Rows before 28 see neither tokens from 28 on nor compressed key 7, whose last token is 31.
    for (const Buffer& buffer : {dirty.k, dirty.v}) SetRow(buffer, 0, 28, kNaN);
    for (const Buffer& buffer : {dirty.k_cmp, dirty.v_cmp}) SetRow(buffer, 0, 7, kNaN);
    clean.Run();
    dirty.Run();
    EXPECT_EQ(Elements(clean.o.view().Slice(1, 0, 28)), Elements(dirty.o.view().Slice(1, 0, 28)));
    EXPECT_TRUE(std::isnan(dirty.o.Get({0, 28, 0, 0})));
    if (chooses) continue;
    EXPECT_TRUE(std::isnan(dirty.o.Get({0, 39, 0, 0})));  // sees compressed key 7, not token 28
  }
}

TEST(CompressedAttentionTest, KeysThatNoRowSeesHaveNoGradient) {
  Fixture f(1, 5, 40, DType::kF64);
  f.chooses = true;
  f.Run();
  std::vector<bool> is_chosen(10, false);
  for (const double c : Elements(f.chosen.view())) {
    if (c >= 0) is_chosen[static_cast<size_t>(c)] = true;
  }
  for (int64_t c = 0; c < 10; ++c) EXPECT_EQ(f.dk_cmp.Get({0, c, 0, 0}) != 0, is_chosen[static_cast<size_t>(c)]) << c;
  for (int64_t t = 0; t < 40; ++t) EXPECT_EQ(f.dv.Get({0, t, 0, 0}) != 0, t >= 35 - 9) << t;
  f.options.window = 0;
  f.Run();
  for (const Buffer& gradient : {f.dk, f.dv}) {
    EXPECT_TRUE(std::ranges::all_of(Elements(gradient.view()), [](double x) { return x == 0; }));
  }
}

TEST(CompressedAttentionTest, WithoutAKeyARowIsZero) {
  Fixture f(1, 20, 20);
  f.options.window = 0;
  f.Run();
  for (int64_t i = 0; i < 20; ++i) {
    EXPECT_EQ(f.o.Get({0, i, 1, 2}) == 0, i < 3) << i;
    EXPECT_EQ(f.lse.Get({0, 1, i}) == -HUGE_VAL, i < 3) << i;
    EXPECT_EQ(f.dq.Get({0, i, 1, 2}) == 0, i < 3) << i;
  }
}

TEST(CompressedAttentionTest, LastTokensWithTheirPositionAreEnough) {
  const Fixture whole(2, 8, 80, DType::kF64), last(2, 8, 80, DType::kF64);
  whole.Run();
  BackwardInputs in = last.backward_inputs();
  const int64_t from = 80 - 8 - 9;  // of the first token that a row sees
  in.k = in.k.Slice(1, from, 80), in.v = in.v.Slice(1, from, 80);
  Options options = last.options;
  options.start = 72;
  Gradients g = last.gradients();
  g.dk = g.dk.Slice(1, from, 80), g.dv = g.dv.Slice(1, from, 80);
  Context ctx(1);
  Forward(ctx, in, options, {last.o.view(), last.lse.view()});
  Backward(ctx, in, options, g);
  EXPECT_LT(Distance(last.o.view(), whole.o.view()), 1e-14);
  EXPECT_LT(Distance(last.lse.view(), whole.lse.view()), 1e-13);
  EXPECT_LT(Distance(last.dq.view(), whole.dq.view()), 1e-13);
  EXPECT_LT(Distance(last.dk_cmp.view(), whole.dk_cmp.view()), 1e-13);
  EXPECT_LT(Distance(g.dk, whole.dk.view().Slice(1, from, 80)), 1e-13);
}

TEST(CompressedAttentionTest, BitsDoNotDependOnThreads) {
  for (const bool chooses : {false, true}) {
    Fixture one(2, 150, 150), three(2, 150, 150);
    one.chooses = three.chooses = chooses;
    one.Run(1);
    three.Run(3);
    for (size_t i = 0; i < one.results().size(); ++i) {
      EXPECT_TRUE(SameBits(one.results()[i].view(), three.results()[i].view())) << i;
    }
  }
}

TEST(CompressedAttentionTest, BitsDoNotDependOnBatchNeighboursOrStrides) {
  for (const bool chooses : {false, true}) {
    Fixture both(2, 100, 100);
    both.chooses = chooses;
    both.Run();
    for (int64_t b = 0; b < 2; ++b) {
      const Fixture one(1, 100, 100);
      const auto row = [&](const Buffer& buffer) { return buffer.view().Slice(0, b, b + 1); };
      // Tensors with the axis of heads before tokens.
      const auto strided = [&](const Buffer& buffer) {
        const TensorView from = row(buffer);
        const int64_t T = from.size(1), H = from.size(2), D = from.size(3);
        const int64_t sizes[] = {1, T, H, D}, strides[] = {T * H * D, D, T * D, 1};
        const Buffer to(from.dtype(), sizes, strides, Placement::kBeforeGuard);
        std::vector<int64_t> index(4);
        do SetElement(to.view(), index, GetElement(from, index));
        while (NextIndex(from.sizes(), index));
        return to;
      };
      const Buffer q = strided(both.q), k = strided(both.k), v = strided(both.v), k_cmp = strided(both.k_cmp),
                   v_cmp = strided(both.v_cmp), d_o = strided(both.d_o);
      Context ctx(1);
      BackwardInputs in = one.backward_inputs();
      in.q = q.view(), in.k = k.view(), in.v = v.view(), in.k_cmp = k_cmp.view(), in.v_cmp = v_cmp.view();
      in.d_o = d_o.view(), in.d_lse = row(both.d_lse), in.sinks = both.sinks.view();
      if (chooses) in.chosen = row(both.chosen);
      Forward(ctx, in, one.options, {one.o.view(), one.lse.view()});
      Gradients g = one.gradients();
      g.dsinks = {};
      Backward(ctx, in, one.options, g);
      for (const auto& [a, of] : {std::pair{one.o, both.o},
                                  {one.lse, both.lse},
                                  {one.dq, both.dq},
                                  {one.dk, both.dk},
                                  {one.dv, both.dv},
                                  {one.dk_cmp, both.dk_cmp},
                                  {one.dv_cmp, both.dv_cmp}}) {
        EXPECT_EQ(Elements(a.view()), Elements(row(of)));
      }
    }
  }
}

TEST(CompressedAttentionTest, EmptySizesAreAllowed) {
  for (const auto& [B, Tq, Tk] : {std::tuple{0, 5, 5}, {2, 0, 9}, {2, 0, 0}, {1, 3, 3}}) {
    for (const bool chooses : {false, true}) {
      Fixture f(B, Tq, Tk);
      f.chooses = chooses;
      f.Run();
      for (const Buffer& result : f.results()) {
        for (const double x : Elements(result.view())) ASSERT_FALSE(std::isnan(x));
      }
    }
  }
}

TEST(CompressedAttentionTest, WorkspaceCountsThePartsAndDq) {
  const Fixture f(1, 128, 128);
  const Context ctx(1);
  const int64_t rows = 128 * 4;
  attention::Options window;
  window.causal = true;
  window.window.left = 9;
  const attention::Inputs in = {f.q.view(), f.k.view(), f.v.view()};
  EXPECT_GE(Workspace(ctx, f.inputs(), f.options), attention::Workspace(ctx, in, window) + 2 * rows * 17 * 4);
  const int64_t of_window =
      attention::BackwardWorkspace(ctx, {f.q.view(), f.k.view(), f.v.view(), {}, {}, {}, {}}, window,
                                   {f.dq.view(), f.dk.view(), f.dv.view(), {}, {}, {}, {}, {}});
  EXPECT_GE(BackwardWorkspace(ctx, f.backward_inputs(), f.options, f.gradients()), of_window + rows * 24 * 4);
}

TEST(CompressedAttentionTest, ErrorsNameTheArgumentAndWriteNothing) {
  Fixture f(1, 30, 30);
  f.chooses = true;
  f.o.Poison();
  Context ctx(1);
  const auto forward = [&](const std::function<void(Inputs&, Options&, Outputs&)>& change, const std::string& message) {
    Inputs in = f.inputs();
    Options options = f.options;
    Outputs out = {f.o.view(), f.lse.view()};
    change(in, options, out);
    EXPECT_THAT([&] { Forward(ctx, in, options, out); },
                ThrowsMessage<InvalidArgument>(HasSubstr("compressed_attention::Forward: " + message)));
    EXPECT_TRUE(std::isnan(f.o.Get({0, 0, 0, 0})));
  };
  forward([](auto&, Options& o, auto&) { o.ratio = 0; }, "ratio is 0, expected 1 or more");
  forward([](auto&, Options& o, auto&) { o.window = -1; }, "window is -1, expected 0 or more");
  forward([](auto&, Options& o, auto&) { o.scale = kNaN; }, "scale is nan");
  forward([](auto&, Options& o, auto&) { o.start = -1; }, "start is -1, expected 0 or more, as k has 30 tokens");
  forward([](Inputs& in, auto&, auto&) { in.q = {}; }, "q is absent");
  forward([](Inputs& in, auto&, auto&) { in.v_cmp = {}; }, "v_cmp is absent, expected [1,N,2,16]");
  forward([](Inputs& in, auto&, auto&) { in.k_cmp = in.k_cmp.Slice(2, 0, 1); },
          "k_cmp has shape [1,7,1,24], expected [1,N,2,24]");
  forward([](Inputs& in, auto&, auto&) { in.k_cmp = in.k_cmp.Slice(1, 0, 6); },
          "k_cmp has 6 compressed keys, expected 7 or more");
  forward([&](Inputs& in, Options& o, auto&) { o.ratio = 8, in.v_cmp = in.v_cmp.Slice(1, 0, 6); },
          "v_cmp has 6 compressed values, expected 7 as k_cmp");
  forward([](Inputs& in, auto&, auto&) { in.k = in.k.Slice(1, 0, 29), in.v = in.v.Slice(1, 0, 29); },
          "q has 30 tokens, expected at most the 29 of k");
  forward([](Inputs& in, auto&, auto&) { in.sinks = in.sinks.Slice(0, 0, 3); }, "sinks has shape [3], expected [4]");
  forward([&](Inputs& in, auto&, auto&) { in.chosen = f.sinks.view(); }, "chosen has dtype f32, expected i32 or i64");
  forward([](Inputs& in, auto&, auto&) { in.chosen = in.chosen.Slice(1, 0, 29); },
          "chosen has shape [1,29,5], expected [1,30,n] or [1,30,2,n]");
  forward([&](auto&, auto&, Outputs& out) { out.lse = out.lse.Slice(1, 0, 3); }, "lse has shape [1,3,30]");
  forward([&](Inputs& in, auto&, auto&) { in.v_cmp = f.o.view().Slice(1, 0, 7).Slice(2, 0, 2); }, "o overlaps v_cmp");

  const auto chosen = [&](std::initializer_list<int64_t> at, double key, const std::string& message) {
    const double before = f.chosen.Get(at);
    f.chosen.Set(at, key);
    forward([](auto&, auto&, auto&) {}, message);
    f.chosen.Set(at, before);
  };
  chosen({0, 12, 4}, 3, "chosen has key 3 in row 12 of sequence 0, expected -1, or one of the 3 keys that are");
  chosen({0, 29, 0}, -2, "chosen has key -2 in row 29 of sequence 0, expected -1");
  chosen({0, 29, 0}, 7, "chosen has key 7 in row 29 of sequence 0, expected -1, or one of the 7 keys");
  const double other = f.chosen.Get({0, 29, 3});
  const std::string key = std::to_string(static_cast<int>(other));
  chosen({0, 29, 1}, other, "chosen has key " + key + " twice in row 29 of sequence 0, expected it once");

  f.Run();
  const auto backward = [&](const std::function<void(BackwardInputs&, Gradients&)>& change,
                            const std::string& message) {
    BackwardInputs in = f.backward_inputs();
    Gradients g = f.gradients();
    change(in, g);
    EXPECT_THAT([&] { Backward(ctx, in, f.options, g); },
                ThrowsMessage<InvalidArgument>(HasSubstr("compressed_attention::Backward: " + message)));
  };
  backward([](BackwardInputs& in, auto&) { in.d_o = {}; }, "d_o is absent");
  backward([](BackwardInputs& in, auto&) { in.lse = {}; }, "lse is absent");
  backward([](BackwardInputs& in, auto&) { in.d_lse = in.d_lse.Slice(1, 0, 1); }, "d_lse has shape [1,1,30]");
  backward([](BackwardInputs& in, auto&) { in.sinks = {}; }, "dsinks is asked for, expected sinks with it");
  backward([](auto&, Gradients& g) { g.dk_cmp = g.dk_cmp.Slice(1, 0, 3); },
           "dk_cmp has shape [1,3,2,24], expected [1,7,2,24]");
  backward([&](auto&, Gradients& g) { g.dk_cmp = f.k_cmp.view(); }, "dk_cmp overlaps k_cmp");
}

}  // namespace
}  // namespace heed::compressed_attention
