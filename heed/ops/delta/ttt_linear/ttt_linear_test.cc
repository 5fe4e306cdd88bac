// ttt_linear beyond random problems: what a mini-batch is, reproducibility, edges, and errors.
#include "heed/ops/delta/ttt_linear/ttt_linear.h"

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

namespace heed::ttt_linear {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

// 2 sequences of T tokens, 2 heads of 12 channels, with results.
struct Fixture {
  int64_t T;
  Buffer q, k, v, weight, bias, eta, lr, initial, o, state;

  explicit Fixture(int64_t tokens, DType dtype = DType::kF32)
      : T(tokens), q(dtype, {2, T, 2, 12}), k(dtype, {2, T, 2, 12}), v(dtype, {2, T, 2, 12}), weight(dtype, {2, 12}),
        bias(dtype, {2, 12}), eta(dtype, {2, T, 2}), lr(dtype, {2, T, 2}), initial(dtype, {2, 2, 2, 13, 12}),
        o(dtype, {2, T, 2, 12}), state(dtype, {2, 2, 2, 13, 12}) {
    uint64_t seed = 0;
    for (const Buffer* x : {&q, &k, &v, &bias, &lr, &initial}) x->FillNormal(++seed);
    weight.FillConstant(0.75);
    eta.FillConstant(0.02);
    for (const Buffer* x : {&o, &state}) x->Poison();
  }
  Inputs inputs(int64_t begin, int64_t end) const {
    return {.q = q.view().Slice(1, begin, end),
            .k = k.view().Slice(1, begin, end),
            .v = v.view().Slice(1, begin, end),
            .weight = weight.view(),
            .bias = bias.view(),
            .eta = eta.view().Slice(1, begin, end),
            .lr = lr.view().Slice(1, begin, end),
            .initial_state = initial.view()};
  }
  Inputs inputs() const { return inputs(0, T); }
  Outputs outputs() const { return {o.view(), state.view()}; }
};

Buffer Positions(int64_t position) {
  const Buffer positions(DType::kI64, {2});
  for (const int64_t n : {0, 1}) positions.as<int64_t>()[n] = position;
  return positions;
}

// Both parts of a call of all tokens, the second with the state and the position of the first.
void RunInParts(const Fixture& f, int64_t at, Options options) {
  Context ctx(1);
  const Buffer middle(f.state.view().dtype(), f.state.view().sizes());
  Forward(ctx, f.inputs(0, at), options, {f.o.view().Slice(1, 0, at), middle.view()});
  Inputs rest = f.inputs(at, f.T);
  rest.initial_state = middle.view();
  const Buffer positions = Positions(at);
  options.positions = positions.view();
  Forward(ctx, rest, options, {f.o.view().Slice(1, at, f.T), f.state.view()});
}

TEST(TttLinearTest, SplitsWhereMiniBatchesBeginAndAtMultiplesOf16HaveTheSameBits) {
  Context ctx(1);
  const Fixture whole(100), split(100);
  for (const auto& [mini_batch, at] : {std::pair<int64_t, int64_t>{16, 48}, {5, 35}, {40, 40}, {40, 56}, {200, 64}}) {
    Options options;
    options.mini_batch = mini_batch;
    Forward(ctx, whole.inputs(), options, whole.outputs());
    RunInParts(split, at, options);
    EXPECT_TRUE(SameBits(whole.o.view(), split.o.view())) << mini_batch << " " << at;
    EXPECT_TRUE(SameBits(whole.state.view(), split.state.view())) << mini_batch << " " << at;
  }
}

TEST(TttLinearTest, AnySplitIsTheWholeUpToRounding) {
  Context ctx(1);
  const Fixture whole(45, DType::kF64), split(45, DType::kF64);
  for (const int64_t mini_batch : {1, 4, 16, 30, 100}) {
    Options options;
    options.mini_batch = mini_batch;
    Forward(ctx, whole.inputs(), options, whole.outputs());
    for (const int64_t at : {1, 7, 17, 31, 44}) {
      RunInParts(split, at, options);
      const std::vector<double> expected = Elements(whole.o.view()), found = Elements(split.o.view());
      for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-9) << mini_batch << " " << at;
      const std::vector<double> state = Elements(whole.state.view()), later = Elements(split.state.view());
      for (size_t i = 0; i < state.size(); ++i) EXPECT_NEAR(later[i], state[i], 1e-8) << mini_batch << " " << at;
    }
  }
}

TEST(TttLinearTest, TheSumOfGradientsIsZeroAndUnreadWhereAMiniBatchBegins) {
  Context ctx(1);
  const Fixture f(32);
  Forward(ctx, f.inputs(0, 16), {}, {f.o.view().Slice(1, 0, 16), f.state.view()});
  const std::vector<double> state = Elements(f.state.view());
  // The sum of a complete mini-batch is 0.
  for (size_t i = 0; i < state.size(); ++i) {
    if (i / (13 * 12) % 2 == 1) EXPECT_EQ(state[i], 0);
  }
  // Neither is the sum read where a mini-batch begins.
  const Fixture other(32);
  const Buffer poisoned(DType::kF32, f.initial.view().sizes());
  for (int64_t n = 0; n < 2; ++n) {
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t i = 0; i < 13; ++i) {
        for (int64_t j = 0; j < 12; ++j) {
          SetElement(poisoned.view(), std::vector<int64_t>{n, h, 0, i, j}, f.initial.Get({n, h, 0, i, j}));
          SetElement(poisoned.view(), std::vector<int64_t>{n, h, 1, i, j}, std::nan(""));
        }
      }
    }
  }
  Forward(ctx, f.inputs(), {}, f.outputs());
  Inputs in = other.inputs();
  in.initial_state = poisoned.view();
  Forward(ctx, in, {}, other.outputs());
  EXPECT_TRUE(SameBits(f.o.view(), other.o.view()));
}

TEST(TttLinearTest, BitsDoNotDependOnThreads) {
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
  Backward(one, in, {}, {.dk = a.o.view(), .dweight = da.view()});
  Backward(three, in, {}, {.dk = b.o.view(), .dweight = db.view()});
  EXPECT_TRUE(SameBits(a.o.view(), b.o.view()));
  EXPECT_TRUE(SameBits(da.view(), db.view()));
}

TEST(TttLinearTest, AStepHasTheBitsOfACallOfOneToken) {
  Context ctx(1);
  for (const int64_t position : {0, 7, 15, 31}) {
    const Fixture f(1);
    const Buffer positions = Positions(position), state(DType::kF32, f.initial.view().sizes()),
                 o(DType::kF32, {2, 2, 12});
    state.FillNormal(6);  // as f.initial
    Options options;
    options.positions = positions.view();
    Forward(ctx, f.inputs(), options, f.outputs());
    const auto row = [](const Buffer& x) {
      const TensorView& t = x.view();
      std::vector<int64_t> sizes(t.sizes().begin(), t.sizes().end()), strides(t.strides().begin(), t.strides().end());
      sizes.erase(sizes.begin() + 1);
      strides.erase(strides.begin() + 1);
      return ConstTensorView(t.data(), t.dtype(), sizes, strides);
    };
    const StepInputs token = {.q = row(f.q),
                              .k = row(f.k),
                              .v = row(f.v),
                              .weight = f.weight.view(),
                              .bias = f.bias.view(),
                              .eta = row(f.eta),
                              .lr = row(f.lr)};
    Step(ctx, token, options, state.view(), o.view());
    EXPECT_TRUE(SameBits(state.view(), f.state.view()));
    EXPECT_EQ(Elements(o.view()), Elements(f.o.view()));
  }
}

TEST(TttLinearTest, ANanOfALaterTokenOrOfAQueryDoesNotSpread) {
  Context ctx(1);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Fixture good(40), bad(40);
  Forward(ctx, good.inputs(), {}, good.outputs());
  bad.q.Set({0, 20, 1, 3}, nan);
  bad.k.Set({1, 25, 0, 2}, nan);
  Forward(ctx, bad.inputs(), {}, bad.outputs());
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t t = 0; t < 40; ++t) {
      for (int64_t h = 0; h < 2; ++h) {
        const bool spoilt = (b == 0 && t == 20 && h == 1) || (b == 1 && t >= 25 && h == 0);
        EXPECT_EQ(std::isnan(bad.o.Get({b, t, h, 0})), spoilt) << b << " " << t << " " << h;
        if (!spoilt) EXPECT_EQ(bad.o.Get({b, t, h, 5}), good.o.Get({b, t, h, 5}));
      }
    }
  }
}

TEST(TttLinearTest, NoTokensLeaveTheStateAsItIs) {
  Context ctx(1);
  const Fixture f(0);
  const Buffer positions = Positions(3);
  Options options;
  options.positions = positions.view();
  Forward(ctx, f.inputs(), options, f.outputs());
  EXPECT_TRUE(SameBits(f.initial.view(), f.state.view()));
}

TEST(TttLinearTest, EqualTokensAndZerosHaveFiniteResults) {
  Context ctx(1);
  for (const double value : {0.0, 1.0}) {
    const Fixture f(40);
    for (const Buffer* x : {&f.q, &f.k, &f.v, &f.initial}) x->FillConstant(value);
    Forward(ctx, f.inputs(), {}, f.outputs());
    for (const double x : Elements(f.o.view())) EXPECT_TRUE(std::isfinite(x));
    BackwardInputs in;
    static_cast<Inputs&>(in) = f.inputs();
    in.d_o = f.v.view();
    Backward(ctx, in, {}, {.dk = f.o.view()});
    for (const double x : Elements(f.o.view())) EXPECT_TRUE(std::isfinite(x));
  }
}

TEST(TttLinearTest, WorkspaceIsWhatThePassesReserve) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const Fixture f(200, dtype);
    const Buffer positions = Positions(5), gradient(dtype, {2, 200, 2, 12}), of_weight(dtype, {2, 12});
    Options options;
    for (const int64_t position : {0, 5}) {  // inside a mini-batch
      if (position > 0) options.positions = positions.view();
      BackwardInputs in;
      static_cast<Inputs&>(in) = f.inputs();
      in.d_o = f.v.view();
      for (const int threads : {1, 3}) {
        Context forward(threads), backward(threads);
        Forward(forward, f.inputs(), options, f.outputs());
        EXPECT_EQ(ReservedBytes(forward), Workspace(forward, f.inputs(), options));
        EXPECT_EQ(ReservedBytes(forward), Explain(forward, f.inputs(), options).workspace_bytes);
        Backward(backward, in, options, {.dk = gradient.view(), .dweight = of_weight.view()});
        EXPECT_EQ(ReservedBytes(backward), BackwardWorkspace(backward, f.inputs(), options));
      }
    }
  }
}

TEST(TttLinearTest, ExplainNeedsShapesAlone) {
  const Context ctx(1);
  const auto shape = [](std::initializer_list<int64_t> sizes, DType dtype = DType::kF32) {
    return ConstTensorView(nullptr, dtype, sizes);
  };
  Inputs in = {.q = shape({2, 200, 2, 12}),
               .k = shape({2, 200, 2, 12}),
               .v = shape({2, 200, 2, 12}),
               .weight = shape({2, 12}),
               .bias = shape({2, 12}),
               .eta = shape({2, 200, 2})};
  Options options;
  const Explanation e = Explain(ctx, in, options);
  EXPECT_EQ(e.kernel, "ttt_linear_chunks");
  EXPECT_EQ(e.flops, 2 * 2 * 200 * (6 * 12 * 13 + 32 * 25));
  EXPECT_EQ(e.bytes, 4 * (2 * 200 * 2 * (4 * 12 + 1) + 2 * 2 * 12));
  options.positions = shape({2}, DType::kI32);  // without numbers, 0
  EXPECT_EQ(Explain(ctx, in, options).workspace_bytes, e.workspace_bytes);
  options.mini_batch = 0;
  EXPECT_THAT([&] { Explain(ctx, in, options); },
              ThrowsMessage<InvalidArgument>(HasSubstr("ttt_linear::Explain: mini_batch is 0, expected at least 1")));
  in.eta = shape({2, 199, 2});
  EXPECT_THAT([&] { BackwardWorkspace(ctx, in, {}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("ttt_linear::BackwardWorkspace: eta has shape [2,199,2]")));
}

TEST(TttLinearTest, ErrorsNameTheArgumentAndWriteNothing) {
  const Fixture f(9);
  Context ctx(1);
  const Buffer negative = Positions(-1), one = Positions(1);
  const auto forward = [&](const std::function<void(Inputs&, Options&)>& change, const std::string& message) {
    Inputs in = f.inputs();
    Options options;
    change(in, options);
    EXPECT_THAT([&] { Forward(ctx, in, options, f.outputs()); }, ThrowsMessage<InvalidArgument>(HasSubstr(message)));
    EXPECT_TRUE(std::isnan(f.o.Get({0, 0, 0, 0})));
  };
  forward([](auto& in, auto&) { in.q = {}; }, "ttt_linear::Forward: q is absent");
  forward([](auto& in, auto&) { in.k = in.k.Slice(1, 0, 8); }, "k has shape [2,8,2,12], expected [2,9,2,12]");
  forward([](auto& in, auto&) { in.v = in.v.Slice(3, 0, 10); }, "v has shape [2,9,2,10], expected [2,9,2,12]");
  forward([](auto& in, auto&) { in.q = in.q.Slice(3, 0, 0); }, "expected at least one channel");
  forward([](auto& in, auto&) { in.weight = {}; }, "weight is absent");
  forward([](auto& in, auto&) { in.bias = in.bias.Slice(1, 0, 4); }, "bias has shape [2,4], expected [2,12]");
  forward([](auto& in, auto&) { in.eta = in.eta.Slice(2, 0, 1); }, "eta has shape [2,9,1]");
  forward([](auto& in, auto&) { in.lr = in.lr.Slice(2, 0, 1); }, "lr has shape [2,9,1]");
  forward([](auto&, auto& options) { options.mini_batch = 0; }, "mini_batch is 0, expected at least 1");
  forward([](auto&, auto& options) { options.eps = -1; }, "eps is -1, expected a finite number >= 0");
  forward([](auto&, auto& options) { options.scale = std::nan(""); }, "scale is nan, expected a finite number");
  forward([&](auto& in, auto&) { in.initial_state = in.initial_state.Slice(3, 0, 12); }, "initial_state has shape");
  forward([&](auto& in, auto&) { in.initial_state = f.state.view(); }, "final_state overlaps initial_state");
  forward([&](auto&, auto& options) { options.positions = negative.view(); }, "positions[0] is -1, expected 0 or more");
  forward(
      [&](auto& in, auto& options) {
        in.initial_state = {};
        options.positions = one.view();
      },
      "positions[0] is 1, expected 0 without initial_state");
  forward([&](auto&, auto& options) { options.positions = f.lr.view(); }, "positions has dtype f32, expected i32");
  BackwardInputs in;
  static_cast<Inputs&>(in) = f.inputs();
  in.lr = {};
  in.d_o = f.v.view();
  EXPECT_THAT([&] { Backward(ctx, in, {}, {.dlr = f.lr.view()}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("dlr is asked for, expected none")));
  EXPECT_THAT([&] { Backward(ctx, in, {}, {.dv = f.v.view()}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("dv overlaps v")));
  const Inputs with_state = {.q = f.q.view(), .initial_state = f.initial.view()};
  EXPECT_THAT([&] { Step(ctx, with_state, {}, f.state.view(), f.o.view()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("initial_state is given, expected none")));
}

}  // namespace
}  // namespace heed::ttt_linear
