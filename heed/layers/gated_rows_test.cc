// Gated rows on every SIMD target, compared with their formulas in double and with differences of these.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/layers/gated_rows_internal.h"

namespace heed::layers {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;
using Numbers = std::vector<double>;

// The gate of one number.
double Gate(RowGate gate, double g) {
  if (gate == RowGate::kLogSigmoid) return g < 0 ? g - std::log1p(std::exp(g)) : -std::log1p(std::exp(-g));
  return (gate == RowGate::kSilu ? g : 1) / (1 + std::exp(-g));
}

// The options of a call, and its tensors in double and row-major order; absent ones are empty.
struct Problem {
  GatedRows options;
  int64_t rows = 0, heads = 1, size = 0;
  Numbers x, gate, weight;
  bool weight_of_head = false;
};

Numbers Formula(const Problem& p) {
  Numbers y;
  for (int64_t row = 0; row < p.rows * p.heads; ++row) {
    Numbers z, a;
    double squares = 0;
    for (int64_t i = 0; i < p.size; ++i) {
      const auto at = static_cast<size_t>(row * p.size + i);
      a.push_back(p.gate.empty() ? 1 : Gate(p.options.activation, p.gate[at]));
      z.push_back((p.x.empty() ? 1 : p.x[at]) * (p.options.gate_first ? a.back() : 1));
      squares += z.back() * z.back();
    }
    if (p.options.norm == RowNorm::kRms) squares /= static_cast<double>(p.size);
    const double r = p.options.norm == RowNorm::kNone ? p.options.factor : 1 / std::sqrt(squares + p.options.eps);
    for (int64_t i = 0; i < p.size; ++i) {
      const auto at = static_cast<size_t>(i), head = static_cast<size_t>(p.weight_of_head ? row % p.heads * p.size : 0);
      const double w = p.weight.empty() ? 1 : p.weight[head + at];
      y.push_back(z[at] * r * w * (p.options.gate_first ? 1 : a[at]));
    }
  }
  return y;
}

// The gradient of <dy, y> for one of the tensors, by central differences.
Numbers Difference(const Problem& p, Numbers Problem::* tensor, const Numbers& dy) {
  Numbers gradient;
  for (size_t i = 0; i < (p.*tensor).size(); ++i) {
    constexpr double kStep = 1e-5;
    double slope = 0;
    for (const double step : {kStep, -kStep}) {
      Problem other = p;
      (other.*tensor)[i] += step;
      const Numbers y = Formula(other);
      for (size_t j = 0; j < y.size(); ++j) slope += dy[j] * y[j] / (2 * step);
    }
    gradient.push_back(slope);
  }
  return gradient;
}

void OnEveryTarget(DType dtype, const std::function<void(Context&)>& f) {
  for (const std::string& target : AvailableTargets(dtype)) {
    SCOPED_TRACE(target);
    Context ctx(2);
    ctx.set_isa(target);
    f(ctx);
  }
}

// The errors of sums of `size` terms, and of one rounding to the dtype.
double Tolerance(DType dtype) {
  return dtype == DType::kF64 ? 1e-8 : dtype == DType::kF32 ? 1e-5 : dtype == DType::kF16 ? 2e-3 : 1.6e-2;
}

void ExpectNear(const Buffer& found, const Numbers& expected, const char* name) {
  const Numbers numbers = Elements(found.view());
  ASSERT_EQ(numbers.size(), expected.size()) << name;
  for (size_t i = 0; i < numbers.size(); ++i) {
    EXPECT_NEAR(numbers[i], expected[i], Tolerance(found.view().dtype()) * (1 + std::abs(expected[i]))) << name << i;
  }
}

// A tensor [rows, heads, size] whose rows are further apart than their elements.
Buffer Spread(DType dtype, int64_t rows, int64_t heads, int64_t size) {
  const int64_t sizes[] = {rows, heads, size}, strides[] = {heads * (size + 3) + 2, size + 3, 1};
  return Buffer(dtype, sizes, strides, Placement::kBeforeGuard);
}

struct Tensors {
  Buffer x, gate, weight;
};

void Check(Context& ctx, Problem p, const Tensors& t, DType dtype) {
  GatedRows in = p.options;
  in.x = t.x.view();
  in.gate = t.gate.view();
  in.weight = t.weight.view();
  if (t.x.present()) p.x = Elements(t.x.view());
  if (t.gate.present()) p.gate = Elements(t.gate.view());
  if (t.weight.present()) p.weight = Elements(t.weight.view());
  const Buffer y(dtype, {p.rows, p.heads, p.size}), dy = Spread(dtype, p.rows, p.heads, p.size).FillNormal(7);
  GatedRowsForward(ctx, in, y.view());
  ExpectNear(y, Formula(p), "y");
  const auto like = [](const Buffer& b) { return b.present() ? Buffer(b.view().dtype(), b.view().sizes()) : Buffer(); };
  const Buffer dx = like(t.x), dgate = like(t.gate), dweight = like(t.weight);
  GatedRowsBackward(ctx, in, dy.view(), {dx.view(), dgate.view(), dweight.view()});
  const Numbers arriving = Elements(dy.view());
  if (dx.present()) ExpectNear(dx, Difference(p, &Problem::x, arriving), "dx");
  if (dgate.present()) ExpectNear(dgate, Difference(p, &Problem::gate, arriving), "dgate");
  if (dweight.present()) ExpectNear(dweight, Difference(p, &Problem::weight, arriving), "dweight");
}

TEST(GatedRowsTest, AgreeWithTheirFormulasAndDifferences) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    OnEveryTarget(dtype, [&](Context& ctx) {
      Random random(11);
      for (const RowNorm norm : {RowNorm::kNone, RowNorm::kRms, RowNorm::kUnit}) {
        for (const RowGate activation : {RowGate::kSilu, RowGate::kSigmoid, RowGate::kLogSigmoid}) {
          for (const int64_t size : {1, 3, 8, 21, 40}) {
            Problem p;
            p.options.norm = norm;
            p.options.activation = activation;
            p.options.gate_first = random.Chance(.5);
            p.options.eps = .3;
            p.options.factor = .7;
            p.rows = 2;
            p.heads = 2;
            p.size = size;
            SCOPED_TRACE(std::string(Name(dtype)) + ", size " + std::to_string(size) + ", gate " +
                         std::to_string(static_cast<int>(activation)) + ", norm " +
                         std::to_string(static_cast<int>(norm)) + (p.options.gate_first ? ", gate first" : ""));
            Tensors t;
            if (norm != RowNorm::kNone || random.Chance(.7)) t.x = Spread(dtype, 2, 2, size).FillNormal(1);
            if (!t.x.present() || random.Chance(.8)) t.gate = Spread(dtype, 2, 2, size).FillNormal(2, 3);
            p.weight_of_head = random.Chance(.5);
            if (norm != RowNorm::kNone && random.Chance(.7)) {
              t.weight = (p.weight_of_head ? Buffer(dtype, {2, size}) : Buffer(dtype, {size})).FillNormal(3);
            }
            Check(ctx, p, t, dtype);
          }
        }
      }
    });
  }
}

TEST(GatedRowsTest, GatesOfLargeNumbersAreFinite) {
  const Buffer gate(DType::kF32, {8}), y(DType::kF32, {8}), dgate(DType::kF32, {8}), dy(DType::kF32, {8});
  const double numbers[] = {0, 100, -100, 1e4, -1e4, 1e30, -1e30, 1e-30};
  for (int64_t i = 0; i < 8; ++i) gate.Set({i}, numbers[i]);
  dy.FillConstant(1);
  OnEveryTarget(DType::kF32, [&](Context& ctx) {
    for (const RowGate activation : {RowGate::kSilu, RowGate::kSigmoid, RowGate::kLogSigmoid}) {
      GatedRows in;
      in.gate = gate.view();
      in.norm = RowNorm::kNone;
      in.activation = activation;
      GatedRowsForward(ctx, in, y.view());
      GatedRowsBackward(ctx, in, dy.view(), {{}, dgate.view(), {}});
      for (int64_t i = 0; i < 8; ++i) {
        const double expected = Gate(activation, numbers[i]);
        EXPECT_NEAR(y.Get({i}), expected, 1e-6 * (std::abs(expected) + 1e-4)) << numbers[i];
        EXPECT_TRUE(std::abs(dgate.Get({i})) <= 1.1) << numbers[i];
      }
    }
  });
}

TEST(GatedRowsTest, BitsDependNeitherOnThreadsNorOnStrides) {
  const DType dtype = DType::kF32;
  const Buffer x = Spread(dtype, 301, 4, 70).FillNormal(1), gate = Spread(dtype, 301, 4, 70).FillNormal(2),
               weight = Buffer(dtype, {4, 70}).FillNormal(3), dy = Buffer(dtype, {301, 4, 70}).FillNormal(4);
  for (const RowNorm norm : {RowNorm::kNone, RowNorm::kRms}) {
    std::vector<std::vector<Buffer>> results;
    for (const int threads : {1, 3}) {
      for (const bool dense : {false, true}) {
        const auto dense_of = [&](const Buffer& from) {
          const Buffer to(dtype, {301, 4, 70});
          for (int64_t r = 0; r < 301; ++r) {
            for (int64_t h = 0; h < 4; ++h) {
              for (int64_t i = 0; i < 70; ++i) to.Set({r, h, i}, from.Get({r, h, i}));
            }
          }
          return to;
        };
        const Buffer own_x = dense ? dense_of(x) : x, own_gate = dense ? dense_of(gate) : gate;
        GatedRows in;
        in.x = own_x.view();
        in.gate = own_gate.view();
        in.norm = norm;
        in.eps = 1e-6;
        if (norm == RowNorm::kRms) in.weight = weight.view();
        Context ctx(threads);
        const std::vector<Buffer> out = {Buffer(dtype, {301, 4, 70}), Buffer(dtype, {301, 4, 70}),
                                         Buffer(dtype, {301, 4, 70}), Buffer(dtype, {4, 70}).FillConstant(0)};
        GatedRowsForward(ctx, in, out[0].view());
        GatedRowsBackward(ctx, in, dy.view(),
                          {out[1].view(), out[2].view(), norm == RowNorm::kRms ? out[3].view() : TensorView()});
        results.push_back(out);
      }
    }
    for (const std::vector<Buffer>& out : results) {
      for (size_t i = 0; i < out.size(); ++i) EXPECT_TRUE(SameBits(out[i].view(), results[0][i].view())) << i;
    }
  }
}

TEST(GatedRowsTest, EmptyTensorsHaveGradientsOfZero) {
  Context ctx(1);
  for (const auto& sizes : {std::vector<int64_t>{0, 5}, {3, 0}}) {
    const Buffer x(DType::kF32, sizes), y(DType::kF32, sizes), dy(DType::kF32, sizes), dx(DType::kF32, sizes),
        weight(DType::kF32, {sizes[1]}), dweight(DType::kF32, {sizes[1]});
    GatedRows in;
    in.x = x.view();
    in.weight = weight.view();
    GatedRowsForward(ctx, in, y.view());
    GatedRowsBackward(ctx, in, dy.view(), {dx.view(), {}, dweight.view()});
    for (const double number : Elements(dweight.view())) EXPECT_EQ(number, 0);
    in.norm = RowNorm::kNone;
    in.weight = {};
    GatedRowsForward(ctx, in, y.view());
  }
}

TEST(GatedRowsTest, ErrorsNameTheArgument) {
  Context ctx(1);
  const Buffer x(DType::kF32, {3, 5}), y(DType::kF32, {3, 5}), other(DType::kF32, {3, 4}), wide(DType::kF64, {3, 5}),
      weight(DType::kF32, {5}), narrow(DType::kF32, {4}), heads(DType::kF32, {2, 5}), none;
  const int64_t sizes[] = {3, 5}, strides[] = {10, 2};
  const Buffer apart(DType::kF32, sizes, strides, Placement::kAligned);
  const auto forward = [&](const Buffer& of_x, const Buffer& gate, const Buffer& w, RowNorm norm, const Buffer& out,
                           double eps) {
    return [&, norm, eps] {
      GatedRows in;
      in.x = of_x.view();
      in.gate = gate.view();
      in.weight = w.view();
      in.norm = norm;
      in.eps = eps;
      GatedRowsForward(ctx, in, out.view());
    };
  };
  const auto says = [](const char* text) { return ThrowsMessage<InvalidArgument>(HasSubstr(text)); };
  const RowNorm rms = RowNorm::kRms, without = RowNorm::kNone;
  EXPECT_THAT(forward(none, x, none, rms, y, 0), says("gated_rows: x is absent, expected a tensor beside a norm"));
  EXPECT_THAT(forward(x, other, none, rms, y, 0), says("gated_rows: gate has shape [3,4], expected [3,5]"));
  EXPECT_THAT(forward(x, wide, none, rms, y, 0), says("gated_rows: gate has dtype f64"));
  EXPECT_THAT(forward(apart, none, none, rms, y, 0), says("gated_rows: x has stride 2 on its last axis"));
  EXPECT_THAT(forward(x, none, narrow, rms, y, 0), says("gated_rows: weight has shape [4], expected [5]"));
  EXPECT_THAT(forward(x, none, heads, rms, y, 0), says("gated_rows: weight has shape [2,5], expected [3,5]"));
  EXPECT_THAT(forward(x, none, weight, without, y, 0), says("gated_rows: weight is given without a norm"));
  EXPECT_THAT(forward(x, none, none, rms, y, -1), says("gated_rows: eps is -1"));
  EXPECT_THAT(forward(x, none, none, rms, other, 0), says("gated_rows: y has shape [3,4], expected [3,5]"));
  EXPECT_THAT(forward(x, none, none, rms, x, 0), says("gated_rows: y"));
  GatedRows in;
  in.x = x.view();
  EXPECT_THAT([&] { GatedRowsBackward(ctx, in, {}, {}); }, says("gated_rows: dy is absent"));
  EXPECT_THAT([&] { GatedRowsBackward(ctx, in, y.view(), {{}, other.view(), {}}); },
              says("gated_rows: dgate is asked for"));
  EXPECT_THAT([&] { GatedRowsBackward(ctx, in, y.view(), {{}, {}, weight.view()}); },
              says("gated_rows: dweight is asked for"));
}

}  // namespace
}  // namespace heed::layers
