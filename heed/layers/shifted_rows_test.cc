// Token shift on every SIMD target, compared with its formula in double and with gradients by hand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/layers/shifted_rows_internal.h"

namespace heed::layers {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

struct Problem {
  int64_t B, T, C, M;
  Buffer x, first, mix, dy;  // `first` may be absent

  Problem(DType dtype, int64_t of_B, int64_t of_T, int64_t of_C, int64_t of_M, bool has_first)
      : B(of_B), T(of_T), C(of_C), M(of_M) {
    const int64_t sizes[] = {B, T, C}, strides[] = {T * (C + 5), C + 5, 1};
    x = Buffer(dtype, sizes, strides, Placement::kBeforeGuard).FillNormal(1);
    if (has_first) first = Buffer(dtype, {B, C}).FillNormal(2);
    mix = Buffer(dtype, {M, C}).FillNormal(3);
    dy = Buffer(dtype, {M, B, T, C}).FillNormal(4);
  }
  ShiftedRows in() const { return {x.view(), first.view(), mix.view()}; }
  double Before(int64_t b, int64_t t, int64_t i) const {
    if (t > 0) return x.Get({b, t - 1, i});
    return first.present() ? first.Get({b, i}) : 0;
  }
};

struct Results {
  Buffer y, dx, dfirst, dmix;
};

Results ResultsOf(Context& ctx, const Problem& p) {
  const DType dtype = p.x.view().dtype();
  Results r{Buffer(dtype, {p.M, p.B, p.T, p.C}), Buffer(dtype, {p.B, p.T, p.C}), {}, Buffer(dtype, {p.M, p.C})};
  if (p.first.present()) r.dfirst = Buffer(dtype, {p.B, p.C});
  ShiftedRowsForward(ctx, p.in(), r.y.view());
  ShiftedRowsBackward(ctx, p.in(), p.dy.view(), {r.dx.view(), r.dfirst.view(), r.dmix.view()});
  return r;
}

TEST(ShiftedRowsTest, AgreeWithTheirFormulas) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    const double tolerance = dtype == DType::kF64   ? 1e-14
                             : dtype == DType::kF32 ? 1e-6
                             : dtype == DType::kF16 ? 1e-3
                                                    : 8e-3;
    for (const std::string& target : AvailableTargets(dtype)) {
      Context ctx(2);
      ctx.set_isa(target);
      for (const int64_t C : {1, 7, 16, 37}) {
        for (const int64_t T : {1, 2, 5}) {
          SCOPED_TRACE(std::string(Name(dtype)) + " " + target + ", C " + std::to_string(C) + ", T " +
                       std::to_string(T));
          const Problem p(dtype, 2, T, C, C % 3 + 1, T != 2);
          const Results r = ResultsOf(ctx, p);
          const auto near = [&](double found, double expected, double size) {
            EXPECT_NEAR(found, expected, tolerance * (std::abs(expected) + size));
          };
          for (int64_t i = 0; i < C; ++i) {
            std::vector<double> dmix(static_cast<size_t>(p.M));
            for (int64_t b = 0; b < 2; ++b) {
              double dfirst = 0;
              for (int64_t t = 0; t < T; ++t) {
                double dx = 0;
                for (int64_t m = 0; m < p.M; ++m) {
                  const double share = p.mix.Get({m, i}), now = p.x.Get({b, t, i}), before = p.Before(b, t, i);
                  near(r.y.Get({m, b, t, i}), share * now + (1 - share) * before, 4);
                  dx += share * p.dy.Get({m, b, t, i});
                  if (t + 1 < T) dx += (1 - share) * p.dy.Get({m, b, t + 1, i});
                  if (t == 0) dfirst += (1 - share) * p.dy.Get({m, b, t, i});
                  dmix[static_cast<size_t>(m)] += p.dy.Get({m, b, t, i}) * (now - before);
                }
                near(r.dx.Get({b, t, i}), dx, 10);
              }
              if (p.first.present()) near(r.dfirst.Get({b, i}), dfirst, 10);
            }
            for (int64_t m = 0; m < p.M; ++m) near(r.dmix.Get({m, i}), dmix[static_cast<size_t>(m)], 20);
          }
        }
      }
    }
  }
}

TEST(ShiftedRowsTest, BitsDoNotDependOnThreads) {
  const Problem p(DType::kF32, 3, 501, 70, 3, true);
  Context one(1), three(3);
  const Results a = ResultsOf(one, p), b = ResultsOf(three, p);
  EXPECT_TRUE(SameBits(a.y.view(), b.y.view()) && SameBits(a.dx.view(), b.dx.view()) &&
              SameBits(a.dfirst.view(), b.dfirst.view()) && SameBits(a.dmix.view(), b.dmix.view()));
}

TEST(ShiftedRowsTest, EmptyTensorsHaveGradientsOfZero) {
  Context ctx(1);
  for (const auto& sizes : {std::vector<int64_t>{2, 0, 5}, {0, 3, 5}, {2, 3, 0}}) {
    const Problem p(DType::kF32, sizes[0], sizes[1], sizes[2], 2, true);
    const Results r = ResultsOf(ctx, p);
    for (const Buffer& gradient : {r.dfirst, r.dmix}) {
      for (const double number : Elements(gradient.view())) EXPECT_EQ(number, 0);
    }
  }
}

TEST(ShiftedRowsTest, ErrorsNameTheArgument) {
  Context ctx(1);
  const Problem p(DType::kF32, 2, 3, 5, 2, true);
  const Buffer y(DType::kF32, {2, 2, 3, 5}), small(DType::kF32, {2, 4}), wide(DType::kF64, {2, 5});
  const auto forward = [&](const ShiftedRows& in, const Buffer& out) {
    return [&ctx, in, out] { ShiftedRowsForward(ctx, in, out.view()); };
  };
  const auto says = [](const char* text) { return ThrowsMessage<InvalidArgument>(HasSubstr(text)); };
  EXPECT_THAT(forward({small.view(), {}, p.mix.view()}, y), says("token_shift: x has shape [2,4], expected [B, T, C]"));
  EXPECT_THAT(forward({p.x.view(), {}, small.view()}, y), says("token_shift: mix has shape [2,4], expected [2,5]"));
  EXPECT_THAT(forward({p.x.view(), {}, y.view()}, y), says("token_shift: mix has shape [2,2,3,5], expected [M, C]"));
  EXPECT_THAT(forward({p.x.view(), small.view(), p.mix.view()}, y), says("token_shift: first has shape [2,4]"));
  EXPECT_THAT(forward({p.x.view(), wide.view(), p.mix.view()}, y), says("token_shift: first has dtype f64"));
  EXPECT_THAT(forward(p.in(), small), says("token_shift: y has shape [2,4], expected [2,2,3,5]"));
  EXPECT_THAT([&] { ShiftedRowsBackward(ctx, p.in(), small.view(), {}); }, says("token_shift: dy has shape [2,4]"));
  EXPECT_THAT([&] { ShiftedRowsBackward(ctx, {p.x.view(), {}, p.mix.view()}, p.dy.view(), {{}, small.view(), {}}); },
              says("token_shift: dfirst is asked for"));
}

}  // namespace
}  // namespace heed::layers
