// Properties that comparison with causal_conv1d::Reference cannot show: reproducibility, edge cases, errors.
#include "heed/ops/ssm/causal_conv1d/causal_conv1d.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/harness/unfair_executor.h"

namespace heed::causal_conv1d {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;
using Shape = std::vector<int64_t>;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

void Copy(const ConstTensorView& from, const TensorView& to) {
  Shape index(to.sizes().size());
  if (to.num_elements() == 0) return;
  do {
    SetElement(to, index, GetElement(from, index));
  } while (NextIndex(to.sizes(), index));
}

// Contiguous tokens, channels, or neither.
enum class Layout { kTokens, kChannels, kNeither };

Buffer Make(Layout layout, DType dtype, int64_t B, int64_t D, int64_t T) {
  const int64_t d = std::max<int64_t>(D, 1), t = std::max<int64_t>(T, 1);
  const Shape strides = layout == Layout::kTokens     ? Shape{d * t, t, 1}
                        : layout == Layout::kChannels ? Shape{d * t, 1, d}
                                                      : Shape{2 * d * t, 2 * t, 2};
  return Buffer(dtype, Shape{B, D, T}, strides, Placement::kBeforeGuard);
}

// A call with its memory.
struct Call {
  Call(DType dtype, int64_t B, int64_t D, int64_t T, int64_t W, Layout layout = Layout::kTokens,
       int64_t sequences = -1) {
    const DType state = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    const int64_t N = sequences < 0 ? B : sequences;
    x = Make(layout, dtype, B, D, T).FillNormal(1);
    d_o = Make(layout, dtype, B, D, T).FillNormal(2);
    o = Make(layout, dtype, B, D, T);
    dx = Make(layout, dtype, B, D, T);
    weight = Buffer(dtype, {D, W}).FillNormal(3);
    bias = Buffer(dtype, {D}).FillNormal(4);
    initial = Buffer(state, {N, D, W - 1}).FillNormal(5);
    d_final = Buffer(state, {N, D, W - 1}).FillNormal(6);
    final = Buffer(state, {N, D, W - 1});
    dinitial = Buffer(state, {N, D, W - 1});
    dweight = Buffer(dtype, {D, W});
    dbias = Buffer(dtype, {D});
    options.activation = Activation::kSilu;
  }

  BackwardInputs Inputs() const {
    BackwardInputs in;
    in.x = x.view();
    in.weight = weight.view();
    in.bias = bias.view();
    in.initial.inputs = initial.view();
    in.d_o = d_o.view();
    in.d_final.inputs = d_final.view();
    return in;
  }
  Gradients Results() const { return {{dx.view(), dweight.view(), dbias.view()}, {dinitial.view()}}; }
  const Call& Forward(Context& ctx) const {
    causal_conv1d::Forward(ctx, Inputs(), options, {o.view(), {final.view()}});
    return *this;
  }
  const Call& Both(Context& ctx) const {
    Forward(ctx);
    Backward(ctx, Inputs(), options, Results());
    return *this;
  }
  std::vector<std::pair<const char*, Buffer>> Written() const {
    return {{"o", o}, {"state", final}, {"dx", dx}, {"dw", dweight}, {"db", dbias}, {"dinitial_state", dinitial}};
  }

  Buffer x, d_o, o, dx, weight, bias, initial, d_final, final, dinitial, dweight, dbias;
  Options options;
};

void ExpectSameBits(const Call& a, const Call& b) {
  const auto as = a.Written(), bs = b.Written();
  for (size_t i = 0; i < as.size(); ++i) {
    EXPECT_TRUE(SameBits(as[i].second.view(), bs[i].second.view())) << as[i].first;
  }
}

class CausalConv1d : public testing::TestWithParam<DType> {
 protected:
  Context ctx_{2};
};
INSTANTIATE_TEST_SUITE_P(AllDTypes, CausalConv1d, testing::Values(DType::kF64, DType::kF32, DType::kBF16, DType::kF16),
                         [](const auto& value) { return Name(value.param); });

TEST_P(CausalConv1d, BitsDoNotDependOnThreads) {
  for (const Layout layout : {Layout::kTokens, Layout::kChannels}) {
    for (const auto& [B, D, T] : {std::tuple{2, 300, 150}, {3, 20, 2100}}) {
      Context single(1);
      const Call one = Call(GetParam(), B, D, T, 4, layout).Both(single);
      for (const int threads : {2, 3, 8}) {
        Context ctx(threads);
        ExpectSameBits(one, Call(GetParam(), B, D, T, 4, layout).Both(ctx));
        UnfairExecutor executor(threads, 5);
        Context unfair(executor.executor());
        ExpectSameBits(one, Call(GetParam(), B, D, T, 4, layout).Both(unfair));
      }
    }
  }
}

TEST_P(CausalConv1d, BitsDoNotDependOnWhatIsContiguous) {
  for (const std::string& target : AvailableTargets()) {
    ctx_.set_isa(target);
    for (const auto& [D, T, W] :
         {std::tuple{1, 140, 4}, {5, 1, 4}, {19, 7, 9}, {37, 300, 4}, {270, 129, 3}, {3, 2500, 6}, {33, 140, 150}}) {
      for (const bool reverse : {false, true}) {
        Call calls[] = {Call(GetParam(), 2, D, T, W, Layout::kTokens), Call(GetParam(), 2, D, T, W, Layout::kChannels),
                        Call(GetParam(), 2, D, T, W, Layout::kNeither)};
        for (Call& call : calls) {
          call.options.reverse = reverse;
          call.Both(ctx_);
        }
        ExpectSameBits(calls[0], calls[1]);
        ExpectSameBits(calls[0], calls[2]);
        // Mixed layouts of the tensors of one call.
        Call mixed = calls[0];
        mixed.o = Make(Layout::kChannels, GetParam(), 2, D, T);
        mixed.dx = Make(Layout::kNeither, GetParam(), 2, D, T);
        mixed.d_o = calls[1].d_o;
        ExpectSameBits(calls[0], mixed.Both(ctx_));
      }
    }
  }
}

TEST_P(CausalConv1d, ReverseIsTheSameOnReversedTokens) {
  const int64_t T = 150;
  for (const Layout layout : {Layout::kTokens, Layout::kChannels}) {
    const Call forward = Call(GetParam(), 2, 21, T, 5, layout).Both(ctx_);
    Call reversed(GetParam(), 2, 21, T, 5, layout);
    const auto flipped = [&](const Buffer& buffer) {
      const TensorView& v = buffer.view();
      return TensorView(v.as<char>() + (T - 1) * v.stride(2) * int64_t(SizeOf(v.dtype())), v.dtype(), {2, 21, T},
                        {v.stride(0), v.stride(1), -v.stride(2)});
    };
    Copy(flipped(forward.x), reversed.x.view());
    Copy(flipped(forward.d_o), reversed.d_o.view());
    reversed.options.reverse = true;
    reversed.Both(ctx_);
    EXPECT_TRUE(SameBits(forward.o.view(), flipped(reversed.o)));
    EXPECT_TRUE(SameBits(forward.dx.view(), flipped(reversed.dx)));
    EXPECT_TRUE(SameBits(forward.final.view(), reversed.final.view()));
    EXPECT_TRUE(SameBits(forward.dweight.view(), reversed.dweight.view()));
    EXPECT_TRUE(SameBits(forward.dinitial.view(), reversed.dinitial.view()));
  }
}

TEST_P(CausalConv1d, AnySplitOfASequenceKeepsTheBits) {
  const int64_t T = 300, D = 20;
  for (const Layout layout : {Layout::kTokens, Layout::kChannels}) {
    for (const int64_t W : {1, 2, 4, 30}) {
      const Call whole = Call(GetParam(), 2, D, T, W, layout).Forward(ctx_);
      const int64_t borders[] = {0, 1, 3, 3, 20, 21, 170, 300};
      Buffer state = whole.initial;
      for (size_t i = 0; i + 1 < std::size(borders); ++i) {
        Call part(GetParam(), 2, D, borders[i + 1] - borders[i], W, layout);
        Copy(ConstTensorView(whole.x.view()).Slice(2, borders[i], borders[i + 1]), part.x.view());
        part.initial = state;
        part.Forward(ctx_);
        EXPECT_TRUE(SameBits(ConstTensorView(whole.o.view()).Slice(2, borders[i], borders[i + 1]), part.o.view()))
            << "W = " << W << " at " << borders[i];
        state = part.final;
      }
      EXPECT_TRUE(SameBits(whole.final.view(), state.view()));
    }
  }
}

TEST_P(CausalConv1d, StepsHaveTheBitsOfTheWhole) {
  // One vector of channels more than a task of Step, and a remainder.
  for (const auto& [D, T] : {std::pair{1055, 6}, {5, 40}}) {
    for (const int64_t W : {1, 2, 3, 4, 5, 9}) {
      for (const bool has_bias : {true, false}) {
        Call whole(GetParam(), 2, D, T, W);
        BackwardInputs in = whole.Inputs();
        if (!has_bias) in.bias = {};
        causal_conv1d::Forward(ctx_, in, whole.options, {whole.o.view(), {whole.final.view()}});
        const Buffer state = whole.initial, o(GetParam(), {2, D});
        for (int64_t t = 0; t < T; ++t) {
          const auto token = [&, t = t](const ConstTensorView& v) {
            const ConstTensorView at = v.Slice(2, t, t + 1);
            return ConstTensorView(at.data(), at.dtype(), {at.size(0), at.size(1)}, {at.stride(0), at.stride(1)});
          };
          Step(ctx_, {token(in.x), in.weight, in.bias}, whole.options, {state.view()}, o.view());
          EXPECT_TRUE(SameBits(o.view(), token(whole.o.view()))) << "W = " << W << " t = " << t;
        }
        EXPECT_TRUE(SameBits(state.view(), whole.final.view())) << "W = " << W;
      }
    }
  }
}

TEST_P(CausalConv1d, BitsAreThoseOfASequenceAlone) {
  // Lengths, starts, packing and other batch entries only select the tokens of a sequence.
  const int64_t D = 18, W = 4, n = 200;
  for (const Layout layout : {Layout::kTokens, Layout::kChannels}) {
    const Call alone = Call(GetParam(), 1, D, n, W, layout).Both(ctx_);
    const auto check = [&](Call& into, int64_t b, int64_t first, int64_t sequence) {
      const auto part = [&](const Buffer& buffer) {
        return buffer.view().Slice(0, b, b + 1).Slice(2, first, first + n);
      };
      const auto of_state = [&](const Buffer& buffer) { return buffer.view().Slice(0, sequence, sequence + 1); };
      Copy(alone.x.view(), part(into.x));
      Copy(alone.d_o.view(), part(into.d_o));
      Copy(alone.initial.view(), of_state(into.initial));
      Copy(alone.d_final.view(), of_state(into.d_final));
      into.Both(ctx_);
      EXPECT_TRUE(SameBits(alone.o.view(), part(into.o)));
      EXPECT_TRUE(SameBits(alone.dx.view(), part(into.dx)));
      EXPECT_TRUE(SameBits(alone.final.view(), of_state(into.final)));
      EXPECT_TRUE(SameBits(alone.dinitial.view(), of_state(into.dinitial)));
    };
    Call padded(GetParam(), 3, D, 230, W, layout);
    const int64_t lengths[] = {50, 209, 230}, starts[] = {0, 9, 230};
    padded.options.lengths = {lengths, DType::kI64, {3}};
    padded.options.starts = {starts, DType::kI64, {3}};
    check(padded, 1, 9, 1);
    Call packed(GetParam(), 1, D, 250, W, layout, 4);
    const int32_t bounds[] = {0, 30, 230, 230, 250};
    packed.options.cu_seqlens = {bounds, DType::kI32, {5}};
    check(packed, 0, 30, 1);
    // An empty sequence copies its state, and the gradient of the final state to that of the initial one.
    EXPECT_TRUE(SameBits(packed.final.view().Slice(0, 2, 3), packed.initial.view().Slice(0, 2, 3)));
    EXPECT_TRUE(SameBits(packed.dinitial.view().Slice(0, 2, 3), packed.d_final.view().Slice(0, 2, 3)));
  }
}

TEST_P(CausalConv1d, TokensThatDoNotCountAreZeroAndNeverRead) {
  for (const Layout layout : {Layout::kTokens, Layout::kChannels, Layout::kNeither}) {
    for (const bool reverse : {false, true}) {
      Call call(GetParam(), 2, 19, 60, 4, layout);
      const int64_t lengths[] = {53, 0}, starts[] = {5, 0};
      call.options.lengths = {lengths, DType::kI64, {2}};
      call.options.starts = {starts, DType::kI64, {2}};
      call.options.reverse = reverse;
      const auto counts = [&](const Shape& at) { return at[2] >= starts[at[0]] && at[2] < lengths[at[0]]; };
      Shape at(3);
      do {
        if (counts(at)) continue;
        SetElement(call.x.view(), at, kNaN);
        SetElement(call.d_o.view(), at, kNaN);
      } while (NextIndex(call.x.view().sizes(), at));
      call.Both(ctx_);
      for (const auto& [name, buffer] : call.Written()) {
        Shape index(buffer.view().sizes().size());
        do {
          const double value = GetElement(buffer.view(), index);
          EXPECT_FALSE(std::isnan(value)) << name << ShapeString(index);
          if (index.size() == 3 && buffer.view().size(2) == 60 && !counts(index)) {
            EXPECT_EQ(value, 0) << name << ShapeString(index);
          }
        } while (NextIndex(buffer.view().sizes(), index));
      }
    }
  }
}

TEST_P(CausalConv1d, AShortSequenceKeepsTheEndOfItsInitialState) {
  const Call call = Call(GetParam(), 1, 3, 2, 5).Both(ctx_);
  for (int64_t c = 0; c < 3; ++c) {
    EXPECT_EQ(call.final.Get({0, c, 0}), call.initial.Get({0, c, 2}));
    EXPECT_EQ(call.final.Get({0, c, 1}), call.initial.Get({0, c, 3}));
    EXPECT_EQ(call.final.Get({0, c, 2}), call.x.Get({0, c, 0}));
    EXPECT_EQ(call.final.Get({0, c, 3}), call.x.Get({0, c, 1}));
  }
}

TEST_P(CausalConv1d, NoTokensPassStatesThroughAndGiveNoGradients) {
  for (const Layout layout : {Layout::kTokens, Layout::kChannels}) {
    const Call call = Call(GetParam(), 2, 5, 0, 4, layout).Both(ctx_);
    EXPECT_TRUE(SameBits(call.final.view(), call.initial.view()));
    EXPECT_TRUE(SameBits(call.dinitial.view(), call.d_final.view()));
    for (int64_t c = 0; c < 5; ++c) EXPECT_EQ(call.dbias.Get({c}), 0);
  }
  Call(GetParam(), 0, 5, 7, 4).Both(ctx_);
  Call(GetParam(), 2, 0, 7, 4).Both(ctx_);
}

TEST_P(CausalConv1d, ANaNReachesTheTokensThatSeeItAndNoOthers) {
  for (const Layout layout : {Layout::kTokens, Layout::kChannels}) {
    Call call(GetParam(), 1, 20, 70, 4, layout);
    call.x.Set({0, 7, 30}, kNaN);
    call.Forward(ctx_);
    Shape at(3);
    do {
      const bool sees = at[1] == 7 && at[2] >= 30 && at[2] < 34;
      EXPECT_EQ(std::isnan(GetElement(call.o.view(), at)), sees) << ShapeString(at);
    } while (NextIndex(call.o.view().sizes(), at));
  }
}

TEST_P(CausalConv1d, SiluOfHugeAndTinyArgumentsIsFinite) {
  Call call(GetParam(), 1, 1, 8, 1);
  const double values[] = {6e4, -6e4, 100, -100, 88, -88, 0, 1e-4};
  for (int64_t t = 0; t < 8; ++t) call.x.Set({0, 0, t}, values[t]);
  call.weight.Set({0, 0}, 1);
  call.bias.Set({0}, 0);
  call.d_o.FillConstant(1);
  call.Both(ctx_);
  for (int64_t t = 0; t < 8; ++t) {
    const double p = call.x.Get({0, 0, t}), s = 1 / (1 + std::exp(-p));
    const double relative = GetParam() == DType::kBF16 ? 5e-3 : 1e-3;
    EXPECT_NEAR(call.o.Get({0, 0, t}), p * s, relative * std::abs(p * s) + 1e-7) << p;
    EXPECT_NEAR(call.dx.Get({0, 0, t}), s + p * s * (1 - s), 5e-3) << p;
  }
}

TEST_P(CausalConv1d, GradientsThatAreNotAskedForChangeNoOthers) {
  for (const Layout layout : {Layout::kTokens, Layout::kChannels}) {
    const Call all = Call(GetParam(), 2, 21, 150, 4, layout).Both(ctx_);
    for (int only = 0; only < 4; ++only) {
      const Call one(GetParam(), 2, 21, 150, 4, layout);
      Gradients out;
      if (only == 0) out.x = one.dx.view();
      if (only == 1) out.weight = one.dweight.view();
      if (only == 2) out.bias = one.dbias.view();
      if (only == 3) out.initial.inputs = one.dinitial.view();
      Backward(ctx_, one.Inputs(), one.options, out);
      const auto a = all.Written()[static_cast<size_t>(only + 2)], b = one.Written()[static_cast<size_t>(only + 2)];
      EXPECT_TRUE(SameBits(a.second.view(), b.second.view())) << a.first;
    }
  }
}

// Gradients by central differences of <d_o, o> + <d_final, final>, in f64.
TEST(CausalConv1dGradients, AreDifferences) {
  Context ctx(2);
  for (const bool reverse : {false, true}) {
    Call call(DType::kF64, 2, 3, 70, 4);
    const int64_t lengths[] = {70, 2}, starts[] = {3, 0};
    call.options.lengths = {lengths, DType::kI64, {2}};
    call.options.starts = {starts, DType::kI64, {2}};
    call.options.reverse = reverse;
    call.Both(ctx);
    const auto loss = [&] {
      call.Forward(ctx);
      double sum = 0;
      for (const auto& [a, b] : {std::pair{call.o, call.d_o}, {call.final, call.d_final}}) {
        Shape at(3);
        do {
          sum += GetElement(a.view(), at) * GetElement(b.view(), at);
        } while (NextIndex(a.view().sizes(), at));
      }
      return sum;
    };
    for (const auto& [input, gradient] : {std::pair{call.x, call.dx},
                                          {call.weight, call.dweight},
                                          {call.bias, call.dbias},
                                          {call.initial, call.dinitial}}) {
      Shape at(input.view().sizes().size());
      do {
        const double x = GetElement(input.view(), at), h = 1e-5;
        SetElement(input.view(), at, x + h);
        const double above = loss();
        SetElement(input.view(), at, x - h);
        const double below = loss();
        SetElement(input.view(), at, x);
        const double expected = (above - below) / (2 * h);
        EXPECT_NEAR(GetElement(gradient.view(), at), expected, 1e-7 * std::max(1.0, std::abs(expected)))
            << ShapeString(at);
      } while (NextIndex(input.view().sizes(), at));
    }
  }
}

TEST(CausalConv1dWorkspace, IsWhatTheHeaderSays) {
  Context ctx(3);
  using Sizes = std::tuple<int64_t, int64_t, int64_t>;
  for (const auto& [D, T, W] : {Sizes{1, 5000, 4}, {300, 70, 4}, {4096, 40000, 20}}) {
    for (const bool last : {false, true}) {
      const Shape sizes = {2, D, T}, strides = last ? Shape{D * T, 1, D} : Shape{D * T, T, 1};
      Inputs in;
      in.x = {nullptr, DType::kF32, sizes, strides};
      in.weight = {nullptr, DType::kF32, {D, W}};
      const int64_t table = 4 * (W + 1) * (D + 64), runs = 2 * ((T + 1023) / 1024);
      EXPECT_LE(Workspace(ctx, in, {}), table + 3 * 4 * 272 * (2 * W + 18));
      EXPECT_LE(BackwardWorkspace(ctx, in, {}),
                table + std::min<int64_t>(32, runs) * 8 * (W + 1) * (D + 64) + 3 * 4 * 272 * (4 * W + 265));
      const Explanation e = Explain(ctx, in, {});
      EXPECT_EQ(e.workspace_bytes, Workspace(ctx, in, {}));
      EXPECT_EQ(e.flops, 2.0 * 2 * static_cast<double>(D * T * W));
      EXPECT_THAT(e.why, HasSubstr(last && D > 1 ? "channels in lanes" : "tokens in lanes"));
    }
  }
}

TEST(CausalConv1dErrors, NameTheArgumentAndNothingIsWritten) {
  Context ctx(1);
  const auto expect = [&](const std::function<void(BackwardInputs&, Options&, Outputs&)>& spoil,
                          const std::string& message) {
    const Call call(DType::kF32, 2, 4, 9, 3);
    BackwardInputs in = call.Inputs();
    Options options;
    Outputs out = {call.o.view(), {call.final.view()}};
    spoil(in, options, out);
    EXPECT_THAT([&] { Forward(ctx, in, options, out); },
                ThrowsMessage<InvalidArgument>("causal_conv1d::Forward: " + message));
    for (const auto& [name, buffer] : call.Written()) {
      for (const uint8_t byte : buffer.bytes()) ASSERT_EQ(byte, 0xFF) << name << message;
    }
  };
  const Buffer other(DType::kF32, {2, 4, 8}), wide(DType::kF64, {2, 4, 9});
  const int64_t long_lengths[] = {9, 10}, negative[] = {-1, 0}, descending[] = {0, 5, 3};
  expect([&](auto& in, auto&, auto&) { in.x = {}; }, "x is absent, expected a tensor");
  expect([&](auto& in, auto&, auto&) { in.x = in.weight; }, "x has shape [4,3], expected [B, D, T]");
  expect([&](auto& in, auto&, auto&) { in.x = {negative, DType::kI64, {2, 1, 1}}; },
         "x has dtype i64, expected f64, f32, bf16 or f16");
  expect([&](auto& in, auto&, auto&) { in.weight = {}; }, "weight is absent, expected a tensor");
  expect([&](auto& in, auto&, auto&) { in.weight = in.weight.Slice(1, 0, 0); },
         "weight has shape [4,0], expected [D, W] with W >= 1");
  expect([&](auto& in, auto&, auto&) { in.weight = in.weight.Slice(0, 0, 3); },
         "weight has shape [3,3], expected [4,3]");
  expect([&](auto& in, auto&, auto&) { in.weight = wide.view().Slice(2, 0, 1); },
         "weight has shape [2,4,1], expected [D, W] with W >= 1");
  expect([&](auto& in, auto&, auto&) { in.bias = {wide.view().data(), DType::kF64, {4}}; },
         "bias has dtype f64, expected f32");
  expect([&](auto& in, auto&, auto&) { in.initial.inputs = other.view(); },
         "initial_state has shape [2,4,8], expected [2,4,2]");
  expect([&](auto& in, auto&, auto&) { in.initial.inputs = wide.view().Slice(2, 0, 2); },
         "initial_state has dtype f64, expected f32");
  expect([&](auto&, auto& options, auto&) { options.lengths = {long_lengths, DType::kI64, {2}}; },
         "lengths[1] is 10, expected 0 to T = 9");
  expect([&](auto&, auto& options, auto&) { options.starts = {negative, DType::kI64, {2}}; },
         "starts[0] is -1, expected 0 to T = 9");
  expect([&](auto&, auto& options, auto&) { options.cu_seqlens = {descending, DType::kI64, {3}}; },
         "x has shape [2,4,9], expected a leading axis of 1 with cu_seqlens");
  expect([&](auto&, auto&, auto& out) { out.o = {}; }, "o is absent, expected a tensor");
  expect([&](auto&, auto&, auto& out) { out.o = other.view(); }, "o has shape [2,4,8], expected [2,4,9]");
  expect([&](auto& in, auto&, auto& out) { out.o = {const_cast<void*>(in.x.data()), DType::kF32, {2, 4, 9}}; },
         "o overlaps x, expected memory of its own");
  expect([&](auto&, auto&, auto& out) { out.o = {out.o.data(), DType::kF32, {2, 4, 9}, {36, 0, 1}}; },
         "o has strides [36,0,1] for shape [2,4,9], expected strides that reach every element once");
  expect([&](auto& in, auto&,
             auto& out) { out.final.inputs = {const_cast<void*>(in.initial.inputs.data()), DType::kF32, {2, 4, 2}}; },
         "final_state overlaps initial_state, expected memory of its own");
  const Call packed(DType::kF32, 1, 4, 9, 3, Layout::kTokens, 2);
  Options options;
  options.cu_seqlens = {descending, DType::kI64, {3}};
  EXPECT_THAT([&] { Forward(ctx, packed.Inputs(), options, {packed.o.view(), {}}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("cu_seqlens[2] is 3, expected 5 to T = 9")));
}

TEST(CausalConv1dErrors, OfBackwardAndStepNameTheArgument) {
  Context ctx(1);
  const Call call(DType::kF32, 2, 4, 9, 3);
  const auto expect = [&](const std::function<void(BackwardInputs&, Gradients&)>& spoil, const std::string& message) {
    BackwardInputs in = call.Inputs();
    Gradients out = call.Results();
    spoil(in, out);
    EXPECT_THAT([&] { Backward(ctx, in, {}, out); },
                ThrowsMessage<InvalidArgument>("causal_conv1d::Backward: " + message));
  };
  expect([&](auto& in, auto&) { in.d_o = {}; }, "d_o is absent, expected a tensor");
  expect([&](auto& in, auto&) { in.d_final.inputs = in.x; }, "d_state has shape [2,4,9], expected [2,4,2]");
  expect([&](auto&, auto& out) { out.x = out.initial.inputs; }, "dx has shape [2,4,2], expected [2,4,9]");
  expect([&](auto&, auto& out) { out.weight = out.bias; }, "dweight has shape [4], expected [4,3]");
  expect([&](auto& in, auto&) { in.bias = {}; }, "dbias is asked for, expected none: there is no such input");
  expect([&](auto& in, auto& out) { out.x = {const_cast<void*>(in.d_o.data()), DType::kF32, {2, 4, 9}}; },
         "dx overlaps d_o, expected memory of its own");

  const Buffer x(DType::kF32, {2, 4}), o(DType::kF32, {2, 4}), small(DType::kF32, {2, 4, 1});
  const ConstTensorView weight = call.weight.view();
  const auto step = [&](const ConstTensorView& in, const TensorView& state, const TensorView& out) {
    return [=, &ctx] { Step(ctx, {in, weight, {}}, {}, {state}, out); };
  };
  EXPECT_THAT(step(call.x.view(), call.final.view(), o.view()),
              ThrowsMessage<InvalidArgument>("causal_conv1d::Step: x has shape [2,4,9], expected one token of each "
                                             "sequence: [B, D]"));
  EXPECT_THAT(step(x.view(), small.view(), o.view()),
              ThrowsMessage<InvalidArgument>("causal_conv1d::Step: state has shape [2,4,1], expected [2,4,2]"));
  EXPECT_THAT(step(x.view(), {}, o.view()),
              ThrowsMessage<InvalidArgument>("causal_conv1d::Step: state is absent, expected a tensor"));
  EXPECT_THAT(step(x.view(), call.final.view(), x.view()),
              ThrowsMessage<InvalidArgument>("causal_conv1d::Step: o overlaps x, expected memory of its own"));
  for (const auto& [name, buffer] : call.Written()) {
    for (const uint8_t byte : buffer.bytes()) ASSERT_EQ(byte, 0xFF) << name;
  }
}

}  // namespace
}  // namespace heed::causal_conv1d
