// Properties of long convolutions that comparison with the reference cannot show: reproducibility, edge cases, memory,
// errors.
#include "heed/ops/ssm/long_convolution/long_convolution.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/engines/scan/convolution.h"
#include "heed/harness/buffer.h"
#include "heed/harness/unfair_executor.h"

namespace heed::long_convolution {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;
using Shape = std::vector<int64_t>;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

enum class Layout { kTokens, kChannels, kNeither };

// A call with its memory.
struct Call {
  Call(DType dtype, int64_t B, int64_t D, int64_t T, int64_t L, Layout layout = Layout::kTokens)
      : u(Over(layout, dtype, {B, D, T})), d_o(Over(layout, dtype, {B, D, T})), o(Over(layout, dtype, {B, D, T})),
        du(Over(layout, dtype, {B, D, T})), kernel(dtype, {D, L}), dkernel(dtype, {D, L}), skip(dtype, {D}),
        dskip(dtype, {D}) {
    u.FillNormal(1);
    d_o.FillNormal(2);
    kernel.FillNormal(3);
    skip.FillNormal(4);
  }
  static Buffer Over(Layout layout, DType dtype, const Shape& sizes) {
    const int64_t D = sizes[1], T = sizes[2], step = layout == Layout::kNeither ? 2 : 1;
    const Shape strides = layout == Layout::kChannels ? Shape{D * T, 1, D} : Shape{step * D * T, step * T, step};
    return Buffer(dtype, sizes, strides, Placement::kBeforeGuard);
  }

  BackwardInputs Views() const {
    BackwardInputs in;
    in.u = u.view();
    in.kernel = kernel.view();
    in.D = skip.view();
    in.d_o = d_o.view();
    return in;
  }
  Gradients Results() const {
    Gradients out;
    out.u = du.view();
    out.kernel = dkernel.view();
    out.D = dskip.view();
    return out;
  }
  void Run(Context& ctx) const { Forward(ctx, Views(), options, {o.view()}); }
  const Call& Both(Context& ctx) const {
    Run(ctx);
    Backward(ctx, Views(), options, Results());
    return *this;
  }
  std::vector<std::pair<std::string, Buffer>> Written() const {
    return {{"o", o}, {"du", du}, {"dkernel", dkernel}, {"dD", dskip}};
  }

  Buffer u, d_o, o, du, kernel, dkernel, skip, dskip;
  Options options;
};

template <class F>
void ForEach(const Buffer& buffer, const F& f) {
  Shape at(buffer.view().sizes().size());
  if (buffer.view().num_elements() == 0) return;
  do {
    f(at);
  } while (NextIndex(buffer.view().sizes(), at));
}

void Copy(const ConstTensorView& from, const TensorView& to) {
  Shape at(to.sizes().size());
  do {
    SetElement(to, at, GetElement(from, at));
  } while (NextIndex(to.sizes(), at));
}

void ExpectSameBits(const Call& a, const Call& b) {
  const auto as = a.Written(), bs = b.Written();
  for (size_t i = 0; i < as.size(); ++i) {
    EXPECT_TRUE(SameBits(as[i].second.view(), bs[i].second.view())) << as[i].first;
  }
}

// Direct sums, one block, and several blocks.
constexpr std::pair<int64_t, int64_t> kTokensAndTaps[] = {{70, 9}, {300, 300}, {700, 200}};

class LongConvolution : public testing::TestWithParam<DType> {
 protected:
  Context ctx_{2};
};
INSTANTIATE_TEST_SUITE_P(AllDTypes, LongConvolution,
                         testing::Values(DType::kF64, DType::kF32, DType::kBF16, DType::kF16),
                         [](const auto& value) { return Name(value.param); });

TEST_P(LongConvolution, ChoosesByLengthAndTaps) {
  EXPECT_EQ(scan::TransformLength(9, 70), 0);
  EXPECT_EQ(scan::TransformLength(300, 300), 512);
  EXPECT_EQ(scan::TransformLength(200, 700), 256);
  EXPECT_EQ(scan::TransformLength(5000, 300), 512);  // no more taps than tokens
  EXPECT_EQ(scan::TransformLength(0, 5000), 0);
  const Call direct(GetParam(), 1, 3, 70, 9), blocks(GetParam(), 1, 3, 700, 200);
  EXPECT_EQ(Explain(ctx_, direct.Views(), {}).kernel, "convolution_direct");
  EXPECT_EQ(Explain(ctx_, blocks.Views(), {}).kernel, "convolution_fourier");
  EXPECT_EQ(Explain(ctx_, direct.Views(), {}).flops, 2.0 * 3 * 70 * 9);
  EXPECT_EQ(Explain(ctx_, blocks.Views(), {}).flops, 3 * 5.0 * (8 + 2) * 256 * 7);
}

TEST_P(LongConvolution, BitsDependNeitherOnThreadsNorOnWhatIsContiguous) {
  for (const auto& [T, L] : kTokensAndTaps) {
    for (const std::string& target : AvailableTargets()) {
      Context single(1);
      single.set_isa(target);
      const Call one = Call(GetParam(), 3, 37, T, L).Both(single);
      for (const Layout layout : {Layout::kChannels, Layout::kNeither}) {
        ExpectSameBits(one, Call(GetParam(), 3, 37, T, L, layout).Both(single));
      }
      for (const int threads : {2, 8}) {
        UnfairExecutor executor(threads, 5);
        Context unfair(executor.executor());
        unfair.set_isa(target);
        ExpectSameBits(one, Call(GetParam(), 3, 37, T, L).Both(unfair));
      }
    }
  }
}

TEST_P(LongConvolution, PaddedAndPackedSequencesHaveTheBitsOfOneAlone) {
  for (const auto& [T, L] : kTokensAndTaps) {
    const int64_t n = T, taps = L;
    const Call alone = Call(GetParam(), 1, 19, n, taps).Both(ctx_);
    const auto check = [&](Call& into, int64_t b, int64_t first) {
      const auto part = [&](const Buffer& buffer) {
        return buffer.view().Slice(0, b, b + 1).Slice(2, first, first + n);
      };
      Copy(alone.u.view(), part(into.u));
      Copy(alone.d_o.view(), part(into.d_o));
      Copy(alone.kernel.view(), into.kernel.view());
      into.Both(ctx_);
      EXPECT_TRUE(SameBits(alone.o.view(), part(into.o)));
      EXPECT_TRUE(SameBits(alone.du.view(), part(into.du)));
    };
    Call padded(GetParam(), 3, 19, n + 40, taps);
    const int64_t lengths[] = {50, n + 9, n + 40}, starts[] = {0, 9, n + 40};
    padded.options.lengths = {lengths, DType::kI64, {3}};
    padded.options.starts = {starts, DType::kI64, {3}};
    check(padded, 1, 9);
    Call packed(GetParam(), 1, 19, n + 90, taps, Layout::kChannels);
    const int64_t bounds[] = {0, 30, n + 30, n + 30, n + 90};
    packed.options.cu_seqlens = {bounds, DType::kI64, {5}};
    check(packed, 0, 30);
  }
}

TEST_P(LongConvolution, BackwardsInTimeIsForwardsOnWhatIsReversed) {
  for (const auto& [T, L] : kTokensAndTaps) {
    const Call forwards = Call(GetParam(), 2, 5, T, L).Both(ctx_);
    Call backwards(GetParam(), 2, 5, T, L);
    for (const auto& [from, to] : {std::pair(forwards.u, backwards.u), {forwards.d_o, backwards.d_o}}) {
      ForEach(to, [&, &f = from, &t = to, last = T - 1](const Shape& at) {
        SetElement(t.view(), at, GetElement(f.view(), Shape{at[0], at[1], last - at[2]}));
      });
    }
    backwards.options.reverse = true;
    backwards.Both(ctx_);
    for (const auto& [a, b] : {std::pair(forwards.o, backwards.o), {forwards.du, backwards.du}}) {
      ForEach(a, [&, &f = a, &t = b, last = T - 1](const Shape& at) {
        ASSERT_EQ(GetElement(f.view(), at), GetElement(t.view(), Shape{at[0], at[1], last - at[2]}));
      });
    }
    EXPECT_TRUE(SameBits(forwards.dkernel.view(), backwards.dkernel.view()));
  }
}

TEST_P(LongConvolution, TokensThatDoNotCountAreZeroAndNeverRead) {
  for (const Layout layout : {Layout::kTokens, Layout::kChannels, Layout::kNeither}) {
    for (const auto& [T, L] : kTokensAndTaps) {
      Call call(GetParam(), 2, 18, T, L, layout);
      const int64_t lengths[] = {T - 7, 0}, starts[] = {5, 0};
      call.options.lengths = {lengths, DType::kI64, {2}};
      call.options.starts = {starts, DType::kI64, {2}};
      const auto counts = [&](const Shape& at) { return at[2] >= starts[at[0]] && at[2] < lengths[at[0]]; };
      ForEach(call.u, [&](const Shape& at) {
        if (counts(at)) return;
        SetElement(call.u.view(), at, kNaN);
        SetElement(call.d_o.view(), at, kNaN);
      });
      call.Both(ctx_);
      for (const auto& [name, buffer] : call.Written()) {
        ForEach(buffer, [&, &name = name, &buffer = buffer](const Shape& at) {
          const double value = GetElement(buffer.view(), at);
          ASSERT_FALSE(std::isnan(value)) << name;
          ASSERT_TRUE(at.size() < 3 || counts(at) || value == 0) << name << ShapeString(at);
        });
      }
    }
  }
}

// An input impulse returns the kernel; a kernel with one tap of 1 delays.
TEST_P(LongConvolution, ImpulsesReadTheOtherOut) {
  for (const auto& [T, L] : kTokensAndTaps) {
    const int64_t late = T / 3, taps = L;
    Call call(GetParam(), 1, 2, T, L);
    call.u.FillConstant(0);
    call.skip.FillConstant(0);
    for (int64_t d = 0; d < 2; ++d) call.u.Set({0, d, late}, 1);
    call.Run(ctx_);
    const bool exact = scan::TransformLength(L, T) == 0;
    const double error = exact ? 0 : GetParam() == DType::kF64 ? 1e-13 : 2e-5;
    ForEach(call.o, [&](const Shape& at) {
      const int64_t s = at[2] - late;
      const double expected = s >= 0 && s < taps ? call.kernel.Get({at[1], s}) : 0;
      EXPECT_NEAR(GetElement(call.o.view(), at), expected, error + 1e-2 * (exact ? 0 : std::abs(expected)));
    });
  }
}

TEST_P(LongConvolution, BothMethodsAgree) {
  // One tap beyond the limit of direct sums.
  const Call direct = Call(GetParam(), 1, 3, 1024, 64).Both(ctx_);
  const Call blocks(GetParam(), 1, 3, 1024, 65);
  blocks.kernel.FillConstant(0);
  Copy(direct.kernel.view(), blocks.kernel.view().Slice(1, 0, 64));
  blocks.Both(ctx_);
  ASSERT_EQ(Explain(ctx_, direct.Views(), {}).kernel, "convolution_direct");
  ASSERT_EQ(Explain(ctx_, blocks.Views(), {}).kernel, "convolution_fourier");
  const double unit = GetParam() == DType::kF64    ? 0x1p-50
                      : GetParam() == DType::kF32  ? 0x1p-21
                      : GetParam() == DType::kBF16 ? 0x1p-7
                                                   : 0x1p-10;
  for (const auto& [a, b] : {std::pair(direct.o, blocks.o), {direct.du, blocks.du}, {direct.dkernel, blocks.dkernel}}) {
    ForEach(a, [&, &x = a, &y = b](const Shape& at) {
      const double scale = at.size() == 2 ? 32 : 8;  // norms of 1024 and of 64 numbers
      EXPECT_NEAR(GetElement(x.view(), at), GetElement(y.view(), at), 8 * unit * scale);
    });
  }
}

TEST_P(LongConvolution, NaNAndInfinityStayInTheirChannelAndSequence) {
  for (const auto& [T, L] : kTokensAndTaps) {
    for (const double value : {kNaN, kInfinity}) {
      const Call call(GetParam(), 2, 20, T, L);
      call.u.Set({1, 7, 30}, value);
      call.Both(ctx_);
      for (const auto& [name, buffer] : call.Written()) {
        ForEach(buffer, [&, &name = name, &buffer = buffer](const Shape& at) {
          const bool own = at.size() == 3 ? name == "o" && at[0] == 1 && at[1] == 7 : at[0] == 7;
          ASSERT_TRUE(own || std::isfinite(GetElement(buffer.view(), at))) << name;
        });
      }
      EXPECT_FALSE(std::isfinite(call.o.Get({1, 7, 30})));
      EXPECT_FALSE(std::isfinite(call.dkernel.Get({7, 0})));
    }
  }
}

TEST_P(LongConvolution, NoTapsLeaveTheShareOfTheInput) {
  const Call call = Call(GetParam(), 2, 5, 40, 0).Both(ctx_);
  const double error = GetParam() == DType::kBF16 ? 0x1p-8 : GetParam() == DType::kF16 ? 0x1p-11 : 1e-7;
  ForEach(call.o, [&](const Shape& at) {
    const double expected = call.skip.Get({at[1]}) * GetElement(call.u.view(), at);
    EXPECT_NEAR(GetElement(call.o.view(), at), expected, error * std::abs(expected));
  });
  for (const Shape& sizes : {Shape{2, 5, 0}, {0, 5, 7}, {2, 0, 7}}) {
    const Call none = Call(GetParam(), sizes[0], sizes[1], sizes[2], 0).Both(ctx_);
    for (int64_t d = 0; d < sizes[1]; ++d) EXPECT_EQ(none.dskip.Get({d}), 0);
  }
  const Call no_batch = Call(GetParam(), 0, 3, 9, 4).Both(ctx_);
  ForEach(no_batch.dkernel, [&](const Shape& at) { EXPECT_EQ(GetElement(no_batch.dkernel.view(), at), 0); });
}

TEST_P(LongConvolution, GradientsThatAreNotAskedForChangeNoOthers) {
  for (const auto& [T, L] : kTokensAndTaps) {
    const Call all = Call(GetParam(), 2, 21, T, L).Both(ctx_);
    for (int only = 0; only < 3; ++only) {
      const Call one(GetParam(), 2, 21, T, L);
      Gradients out;
      if (only == 0) out.u = one.du.view();
      if (only == 1) out.kernel = one.dkernel.view();
      if (only == 2) out.D = one.dskip.view();
      Backward(ctx_, one.Views(), {}, out);
      const auto index = static_cast<size_t>(only + 1);
      EXPECT_TRUE(SameBits(all.Written()[index].second.view(), one.Written()[index].second.view()));
    }
  }
}

TEST_P(LongConvolution, MemoryIsWithinItsFormula) {
  for (const int threads : {1, 4}) {
    Context ctx(threads);
    for (const auto& [T, L] : {std::pair<int64_t, int64_t>{70, 9}, {3000, 3000}, {70000, 900}}) {
      for (const Layout layout : {Layout::kTokens, Layout::kChannels}) {
        const Call call(GetParam(), 1, 40, T, L, layout);
        const int64_t n = std::max<int64_t>(scan::TransformLength(L, T), 512);
        const int64_t E = GetParam() == DType::kF64 ? 8 : 4, W = layout == Layout::kChannels ? 16 : 1;
        const int64_t S = (T + n - 1) / n * n, few = 8 << 10;
        const int64_t forward = threads * (E * (W * (S + 3 * n + 512) + 2 * n + 512) + few);
        const int64_t backward = threads * (E * (W * (2 * S + 4 * n + 1024) + 8 * n + 2048) + 128 * L + few);
        EXPECT_LE(Workspace(ctx, call.Views(), {}), forward);
        EXPECT_LE(BackwardWorkspace(ctx, call.Views(), {}), backward);
        EXPECT_TRUE(T == 70 || 3 * BackwardWorkspace(ctx, call.Views(), {}) > 2 * backward);
      }
    }
  }
}

TEST(LongConvolutionErrors, NameTheArgumentAndNothingIsWritten) {
  Context ctx(1);
  const auto expect = [&](const std::function<void(BackwardInputs&, Options&, Outputs&, Gradients&)>& spoil,
                          const std::string& message, bool backward = false) {
    const Call call(DType::kF32, 2, 4, 9, 3);
    BackwardInputs in = call.Views();
    Options options;
    Outputs out = {call.o.view()};
    Gradients gradients = call.Results();
    spoil(in, options, out, gradients);
    EXPECT_THAT(
        [&] {
          if (backward) Backward(ctx, in, options, gradients);
          if (!backward) Forward(ctx, in, options, out);
        },
        ThrowsMessage<InvalidArgument>(
            HasSubstr(std::string("long_convolution::") + (backward ? "Backward: " : "Forward: ") + message)));
    for (const auto& [name, buffer] : call.Written()) {
      for (const uint8_t byte : buffer.bytes()) ASSERT_EQ(byte, 0xFF) << name << message;
    }
  };
  const Buffer other(DType::kF32, {4, 10});
  const int64_t long_lengths[] = {9, 10};
  expect([&](auto& in, auto&, auto&, auto&) { in.u = {}; }, "u is absent, expected a tensor");
  expect([&](auto& in, auto&, auto&, auto&) { in.u = in.kernel; }, "u has shape [4,3], expected [B, D, T]");
  expect([&](auto& in, auto&, auto&, auto&) { in.kernel = {}; }, "kernel is absent, expected a tensor");
  expect([&](auto& in, auto&, auto&, auto&) { in.kernel = other.view(); },
         "kernel has shape [4,10], expected [D, L] with L <= T = 9");
  expect([&](auto& in, auto&, auto&, auto&) { in.kernel = in.kernel.Slice(0, 0, 3); },
         "kernel has shape [3,3], expected [4,3]");
  expect([&](auto& in, auto&, auto&, auto&) { in.D = in.D.Slice(0, 0, 3); }, "D has shape [3], expected [4]");
  expect([&](auto&, auto& options, auto&, auto&) { options.lengths = {long_lengths, DType::kI64, {2}}; },
         "lengths[1] is 10, expected 0 to T = 9");
  expect([&](auto& in, auto&, auto& out, auto&) { out.o = {const_cast<void*>(in.u.data()), DType::kF32, {2, 4, 9}}; },
         "o overlaps u, expected memory of its own");
  expect([&](auto& in, auto&, auto&, auto&) { in.d_o = {}; }, "d_o is absent, expected a tensor", true);
  expect([&](auto& in, auto&, auto&, auto&) { in.D = {}; }, "dD is asked for, expected none", true);
  expect([&](auto&, auto&, auto&, auto& out) { out.kernel = out.D; }, "dkernel has shape [4], expected [4,3]", true);
}

}  // namespace
}  // namespace heed::long_convolution
