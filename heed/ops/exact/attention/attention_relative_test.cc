// Properties of the relative bias that comparison with its reference cannot show.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/ops/exact/attention/cases/attention_variations_case.h"
#include "heed/ops/positions/alibi.h"

namespace heed::attention {
namespace {

// Problems in which rows are consecutive positions of one head, and others in which heads share vectors.
const Sizes kSizes[] = {{.B = 2, .Tq = 150, .Tk = 200, .Hq = 4, .Hkv = 2, .D = 8, .Dv = 8},
                        {.B = 1, .Tq = 3, .Tk = 700, .Hq = 6, .Hkv = 2, .D = 8, .Dv = 8},
                        {.B = 2, .Tq = 1, .Tk = 90, .Hq = 3, .Hkv = 3, .D = 8, .Dv = 8}};

Problem WithRelativeBias(DType dtype, const Sizes& sizes, int64_t span) {
  Problem p = MakeProblem(dtype, sizes);
  const DType wide = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  p.options.relative_bias = Keep(p, Buffer(wide, {sizes.Hq, span}).FillNormal(7, 2));
  return WithGradients(p, 3);
}

// Returns the problem with a dense bias that has the same numbers for all pairs.
Problem WithBias(const Problem& relative) {
  Problem p = relative;
  const Sizes s = SizesOf(p);
  const ConstTensorView& line = relative.options.relative_bias;
  const Buffer bias(line.dtype(), {s.Hq, s.Tq, s.Tk});
  for (int64_t h = 0; h < s.Hq; ++h) {
    for (int64_t i = 0; i < s.Tq; ++i) {
      for (int64_t j = 0; j < s.Tk; ++j) {
        const int64_t distance = s.Tk - s.Tq + i - j;
        const bool inside = distance >= 0 && distance < line.size(1);
        bias.Set({h, i, j}, inside ? GetElement(line, std::vector<int64_t>{h, distance}) : 0);
      }
    }
  }
  p.options.relative_bias = {};
  p.options.bias = Keep(p, bias);
  return WithGradients(p, 3);
}

class RelativeBias : public testing::TestWithParam<DType> {
 protected:
  // Calls f(context, problem with a relative bias) for all targets, sizes and spans.
  template <class F>
  void ForAll(const F& f) {
    for (const std::string& target : AvailableTargets(GetParam())) {
      Context ctx(2);
      ctx.set_isa(target);
      for (const Sizes& sizes : kSizes) {
        for (const int64_t span : {1, 2, 17, 64, 131, 5000}) {
          for (const bool causal : {false, true}) {
            Problem p = WithRelativeBias(GetParam(), sizes, span);
            p.options.causal = causal;
            SCOPED_TRACE(target + " " + Title(p));
            f(ctx, p);
          }
        }
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(DTypes, RelativeBias, testing::Values(DType::kF64, DType::kF32, DType::kBF16, DType::kF16),
                         [](const auto& value) { return Name(value.param); });

TEST_P(RelativeBias, HasTheBitsOfABiasByPair) {
  ForAll([](Context& ctx, const Problem& p) {
    const Problem by_pair = WithBias(p);
    EXPECT_EQ(Difference(RunForward(ctx, p), RunForward(ctx, by_pair)), "");
    const auto a = RunBackward(ctx, p), b = RunBackward(ctx, by_pair);
    for (size_t g = 0; g < 3; ++g) EXPECT_EQ(Difference(a[g].view(), b[g].view()), "") << p.gradients[g].name;
  });
}

TEST_P(RelativeBias, ItsGradientIsTheSumAlongDiagonalsOfThatOfABiasByPair) {
  ForAll([](Context& ctx, const Problem& p) {
    const Sizes s = SizesOf(p);
    const Problem by_pair = WithBias(p);
    const auto a = RunBackward(ctx, p), b = RunBackward(ctx, by_pair);
    ASSERT_EQ(p.gradients.back().name, "drelative_bias");
    ASSERT_EQ(by_pair.gradients.back().name, "dbias");
    const double unit = p.in.q.dtype() == DType::kF64 ? 0x1p-52 : 0x1p-23;
    for (int64_t h = 0; h < s.Hq; ++h) {
      for (int64_t d = 0; d < p.options.relative_bias.size(1); ++d) {
        double sum = 0, magnitude = 0;
        for (int64_t i = 0; i < s.Tq; ++i) {
          const int64_t j = s.Tk - s.Tq + i - d;
          if (j < 0 || j >= s.Tk) continue;
          const double x = GetElement(b.back().view(), std::vector<int64_t>{h, i, j});
          sum += x;
          magnitude += std::abs(x);
        }
        // Sums of a few hundred numbers in a chain.
        EXPECT_NEAR(GetElement(a.back().view(), std::vector<int64_t>{h, d}), sum, 300 * unit * magnitude)
            << h << " " << d;
      }
    }
  });
}

TEST_P(RelativeBias, ItsGradientDoesNotDependOnThreads) {
  for (const Sizes& sizes : {Sizes{.B = 3, .Tq = 90, .Tk = 1700, .Hq = 4, .Hkv = 2, .D = 8, .Dv = 8},
                             Sizes{.B = 2, .Tq = 600, .Tk = 600, .Hq = 2, .Hkv = 1, .D = 8, .Dv = 8}}) {
    const Problem p = WithRelativeBias(GetParam(), sizes, 700);
    Context one(1);
    const auto expected = RunBackward(one, p);
    for (const int threads : {2, 3, 5}) {
      Context ctx(threads);
      for (int i = 0; i < 5; ++i) EXPECT_EQ(Difference(RunBackward(ctx, p), expected), "") << threads;
    }
  }
}

// With causal masks ALiBi is a relative bias of all distances, -slope (p - j).
TEST_P(RelativeBias, GeneralisesAlibi) {
  const Sizes& sizes = kSizes[0];
  const bool wide = GetParam() == DType::kF64;
  Problem p = MakeProblem(GetParam(), sizes), alibi = p;
  p.options.causal = alibi.options.causal = true;
  const std::vector<double> slopes = AlibiSlopes(sizes.Hq);
  const Buffer line(wide ? DType::kF64 : DType::kF32, {sizes.Hq, sizes.Tk});
  for (int64_t h = 0; h < sizes.Hq; ++h) {
    for (int64_t d = 0; d < sizes.Tk; ++d) line.Set({h, d}, -slopes[static_cast<size_t>(h)] * static_cast<double>(d));
  }
  p.options.relative_bias = Keep(p, line);
  alibi.options.alibi = KeepFloats(alibi, slopes, DType::kF64);
  Context ctx(2);
  const Result a = RunForward(ctx, p), b = RunForward(ctx, alibi);
  const double tolerance = wide ? 1e-14 : GetParam() == DType::kF32 ? 3e-6 : 0x1p-6;
  std::vector<int64_t> at(a.o.view().sizes().size());
  do EXPECT_NEAR(GetElement(a.o.view(), at), GetElement(b.o.view(), at), tolerance);
  while (NextIndex(a.o.view().sizes(), at));
}

// A position may be far from all keys: then no pair is in the span.
TEST_P(RelativeBias, OfFarPositionsAddsNothing) {
  Context ctx(1);
  for (const int64_t start : {int64_t{1} << 61, int64_t{1} << 40, -(int64_t{1} << 61), int64_t{-400}, int64_t{5000}}) {
    Problem p = WithRelativeBias(GetParam(), kSizes[0], 300);
    p.options.query_starts = KeepInts(p, {start, start});
    p.options.invariant = true;  // with AMX, 16-bit logits that need nothing else are scaled in the exponent
    Problem plain = p;
    plain.options.relative_bias = {};
    EXPECT_EQ(Difference(RunForward(ctx, p), RunForward(ctx, plain)), "") << start;
    const std::vector<Buffer> gradients = RunBackward(ctx, p);
    const TensorView& d = gradients.back().view();
    for (int64_t i = 0; i < d.num_elements(); ++i) EXPECT_EQ(LoadAsDouble(d.dtype(), d.data(), i), 0) << start;
  }
}

TEST_P(RelativeBias, OfMinusInfinityMasksEvenNaN) {
  Context ctx(1);
  for (const Sizes& sizes : kSizes) {
    Problem p = MakeProblem(GetParam(), sizes);
    p.options.causal = true;
    p.options.invariant = true;  // with AMX, 16-bit logits that need nothing else are scaled in the exponent
    const Buffer line(DType::kF32, {sizes.Hq, 2});
    line.FillConstant(0);
    for (int64_t h = 0; h < sizes.Hq; ++h) line.Set({h, 1}, -HUGE_VAL);
    p.options.relative_bias = Keep(p, line);
    // The last row sees its own key and all but the one before it.
    Problem window = p;
    window.options.relative_bias = {};
    const Buffer mask(DType::kBool, {sizes.Tq, sizes.Tk});
    for (int64_t i = 0; i < sizes.Tq; ++i) {
      for (int64_t j = 0; j < sizes.Tk; ++j) mask.Set({i, j}, sizes.Tk - sizes.Tq + i - j != 1);
    }
    window.options.mask = Keep(window, mask);
    EXPECT_EQ(Difference(RunForward(ctx, p), RunForward(ctx, window)), "");
    p = MakeProblem(GetParam(), sizes);
    p.options = window.options;
    p.options.mask = {};
    p.options.relative_bias = Keep(p, line);
    p.in.k = Keep(p, Buffer(GetParam(), {sizes.B, sizes.Tk, sizes.Hkv, sizes.D}).FillNormal(2));
    const Buffer& k = p.memory.back();
    const Result before = RunForward(ctx, p);
    for (int64_t b = 0; b < sizes.B; ++b) k.Set({b, sizes.Tk - 2, 0, 0}, std::nan(""));
    const Result after = RunForward(ctx, p);
    for (int64_t d = 0; d < sizes.Dv; ++d) {
      const std::vector<int64_t> last = {0, sizes.Tq - 1, 0, d};
      EXPECT_EQ(GetElement(after.o.view(), last), GetElement(before.o.view(), last));
    }
  }
}

}  // namespace
}  // namespace heed::attention
