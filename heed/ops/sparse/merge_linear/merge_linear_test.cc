// merge_linear against its reference, as attention over a union of keys, its edge cases, and its errors.
#include "heed/ops/sparse/merge_linear/merge_linear.h"

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
#include "heed/ops/exact/attention/attention.h"

namespace heed::merge_linear {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// A call of 2 sequences and 3 heads, with its result and gradients.
struct Fixture {
  int64_t T, D;
  Buffer o, lse, num, den, gate, d_o;
  Buffer out, dexact, dlse, dnum, dden, dgate;

  explicit Fixture(int64_t rows, int64_t channels, DType of_o = DType::kF32, DType of_num = DType::kF32)
      : T(rows), D(channels) {
    const bool wide = of_o == DType::kF64;
    const DType scalar = wide ? DType::kF64 : DType::kF32;
    const std::vector<int64_t> tensor = {2, T, 3, D}, row = {2, T, 3}, of_lse = {2, 3, T}, heads = {3};
    uint64_t seed = 0;
    for (const auto& [buffer, dtype, sizes] :
         std::vector<std::tuple<Buffer*, DType, std::vector<int64_t>>>{{&o, of_o, tensor},
                                                                       {&lse, scalar, of_lse},
                                                                       {&num, of_num, tensor},
                                                                       {&den, scalar, row},
                                                                       {&gate, scalar, heads},
                                                                       {&d_o, of_o, tensor},
                                                                       {&out, of_o, tensor},
                                                                       {&dexact, of_o, tensor},
                                                                       {&dlse, scalar, of_lse},
                                                                       {&dnum, of_num, tensor},
                                                                       {&dden, scalar, row},
                                                                       {&dgate, scalar, heads}}) {
      *buffer = Buffer(dtype, sizes);
      buffer->FillNormal(++seed);
    }
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t i = 0; i < T; ++i) {
        for (int64_t h = 0; h < 3; ++h) den.Set({b, i, h}, std::abs(den.Get({b, i, h})));
      }
    }
    for (int64_t h = 0; h < 3; ++h) gate.Set({h}, std::abs(gate.Get({h})));
  }

  Inputs inputs() const { return {o.view(), lse.view(), num.view(), den.view(), gate.view()}; }
  BackwardInputs backward_inputs() const {
    BackwardInputs in;
    static_cast<Inputs&>(in) = inputs();
    in.d_o = d_o.view();
    return in;
  }
  Gradients gradients() const { return {dexact.view(), dlse.view(), dnum.view(), dden.view(), dgate.view()}; }
  void Run(Context& ctx) const {
    Forward(ctx, inputs(), out.view());
    Backward(ctx, backward_inputs(), gradients());
  }
  void Run() const {
    Context ctx(1);
    Run(ctx);
  }
  std::vector<Buffer> results() const { return {out, dexact, dlse, dnum, dden, dgate}; }
};

// Compares the largest error of each result, relative to the largest value.
void ExpectNear(const Fixture& f, double tolerance) {
  Fixture expected(f.T, f.D, DType::kF64, DType::kF64);
  for (const auto& [from, to] : {std::pair{f.out, &expected.out},
                                 {f.dexact, &expected.dexact},
                                 {f.dlse, &expected.dlse},
                                 {f.dnum, &expected.dnum},
                                 {f.dden, &expected.dden},
                                 {f.dgate, &expected.dgate}}) {
    *to = Buffer(DType::kF64, from.view().sizes());
  }
  Reference(f.inputs(), expected.out.view());
  BackwardReference(f.backward_inputs(), expected.gradients());
  for (size_t i = 0; i < 6; ++i) {
    const std::vector<double> got = Elements(f.results()[i].view()), want = Elements(expected.results()[i].view());
    double largest = 1, error = 0;
    for (size_t n = 0; n < got.size(); ++n) {
      largest = std::max(largest, std::abs(want[n]));
      error = std::max(error, std::abs(got[n] - want[n]));
      ASSERT_FALSE(std::isnan(got[n])) << i << " " << n;
    }
    EXPECT_LE(error, tolerance * largest) << i;
  }
}

TEST(MergeLinearTest, AgreesWithTheReference) {
  for (const std::string& target : AvailableTargets()) {
    Context ctx(2);
    ctx.set_isa(target);
    for (const int64_t channels : {1, 7, 64, 65}) {
      for (const auto& [of_o, of_num, tolerance] : {std::tuple{DType::kF64, DType::kF64, 1e-13},
                                                    {DType::kF32, DType::kF32, 2e-6},
                                                    {DType::kBF16, DType::kF32, 5e-3},
                                                    {DType::kF32, DType::kBF16, 5e-3},
                                                    {DType::kF16, DType::kF16, 1e-3}}) {
        const Fixture f(9, channels, of_o, of_num);
        f.Run(ctx);
        SCOPED_TRACE(target + " " + Name(of_o) + " " + Name(of_num) + " " + std::to_string(channels));
        ExpectNear(f, tolerance);
      }
    }
  }
}

TEST(MergeLinearTest, WithFeaturesThatAreExponentialsItIsAttentionOverTheUnion) {
  const DType dtype = DType::kF64;
  const Buffer q(dtype, {1, 5, 2, 8}), k(dtype, {1, 12, 2, 8}), v(dtype, {1, 12, 2, 8}), whole(dtype, {1, 5, 2, 8});
  uint64_t seed = 0;
  for (const Buffer& x : {q, k, v}) x.FillNormal(++seed);
  Context ctx(1);
  attention::Forward(ctx, {q.view(), k.view(), v.view()}, {}, {whole.view(), {}});
  const auto part = [&](int64_t begin, int64_t end, const Buffer& o, const Buffer& lse) {
    attention::Forward(ctx, {q.view(), k.view().Slice(1, begin, end), v.view().Slice(1, begin, end)}, {},
                       {o.view(), lse.view()});
  };
  const Buffer o(dtype, {1, 5, 2, 8}), lse(dtype, {1, 2, 5}), num(dtype, {1, 5, 2, 8}), of_num(dtype, {1, 2, 5}),
      den(dtype, {1, 5, 2});
  part(0, 4, o, lse);
  part(4, 12, num, of_num);
  for (int64_t i = 0; i < 5; ++i) {
    for (int64_t h = 0; h < 2; ++h) {
      const double sum = std::exp(of_num.Get({0, h, i}));
      den.Set({0, i, h}, sum);
      for (int64_t e = 0; e < 8; ++e) num.Set({0, i, h, e}, sum * num.Get({0, i, h, e}));
    }
  }
  const Buffer out(dtype, {1, 5, 2, 8});
  Forward(ctx, {o.view(), lse.view(), num.view(), den.view(), {}}, out.view());
  const std::vector<double> got = Elements(out.view()), want = Elements(whole.view());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-14);
}

TEST(MergeLinearTest, NoLogSumExpOverflows) {
  for (const double lse : {-1e30, -5000.0, -800.0, -100.0, 0.0, 87.0, 89.0, 700.0, 720.0, 5000.0}) {
    SCOPED_TRACE(lse);
    for (const DType dtype : {DType::kF32, DType::kF64}) {
      const Fixture f(3, 5, dtype, dtype);
      f.lse.FillConstant(lse);
      f.Run();
      ExpectNear(f, dtype == DType::kF64 ? 1e-12 : 2e-6);
    }
  }
}

TEST(MergeLinearTest, ARowWithoutOnePartIsTheOther) {
  const Fixture f(4, 6, DType::kF64, DType::kF64);
  f.lse.FillConstant(-kInfinity);
  f.o.FillConstant(kNaN);  // not read
  f.Run();
  EXPECT_NEAR(f.out.Get({1, 2, 1, 3}), f.num.Get({1, 2, 1, 3}) / f.den.Get({1, 2, 1}), 1e-14);
  EXPECT_EQ(f.dexact.Get({1, 2, 1, 3}), 0);
  EXPECT_EQ(f.dlse.Get({1, 1, 2}), 0);
  EXPECT_EQ(f.dgate.Get({1}), 0);
  for (const double lse : {-2000.0, -3.0, 2000.0}) {
    const Fixture g(4, 6, DType::kF64, DType::kF64);
    g.lse.FillConstant(lse);
    g.num.FillConstant(0);
    g.den.FillConstant(0);
    g.Run();
    EXPECT_DOUBLE_EQ(g.out.Get({1, 2, 1, 3}), g.o.Get({1, 2, 1, 3}));
    EXPECT_DOUBLE_EQ(g.dexact.Get({1, 2, 1, 3}), g.d_o.Get({1, 2, 1, 3}));
    EXPECT_EQ(g.dlse.Get({1, 1, 2}), 0);
  }
}

TEST(MergeLinearTest, ARowWithoutPartsIsZeroAndHasNoGradient) {
  const Fixture f(4, 6);
  f.lse.FillConstant(-kInfinity);
  f.den.FillConstant(0);
  f.Run();
  for (const Buffer& result : f.results()) {
    for (const double x : Elements(result.view())) EXPECT_EQ(x, 0);
  }
}

TEST(MergeLinearTest, BitsDoNotDependOnThreadsOrStrides) {
  const Fixture one(37, 20), three(37, 20);
  one.Run();
  Context ctx(3);
  three.Run(ctx);
  for (size_t i = 0; i < 6; ++i) EXPECT_TRUE(SameBits(one.results()[i].view(), three.results()[i].view())) << i;
  const int64_t sizes[] = {2, 37, 3, 20}, strides[] = {3 * 37 * 20, 20, 37 * 20, 1};
  const Buffer o(DType::kF32, sizes, strides, Placement::kBeforeGuard);
  std::vector<int64_t> index(4);
  do SetElement(o.view(), index, GetElement(one.o.view(), index));
  while (NextIndex(sizes, index));
  Inputs in = one.inputs();
  in.o = o.view();
  Forward(ctx, in, three.out.view());
  EXPECT_TRUE(SameBits(one.out.view(), three.out.view()));
}

TEST(MergeLinearTest, ErrorsNameTheArgumentAndWriteNothing) {
  const Fixture f(4, 6);
  f.out.Poison();
  Context ctx(1);
  const auto forward = [&](const std::function<void(Inputs&)>& change, const std::string& message) {
    Inputs in = f.inputs();
    change(in);
    EXPECT_THAT([&] { Forward(ctx, in, f.out.view()); }, ThrowsMessage<InvalidArgument>(HasSubstr(message)));
    EXPECT_TRUE(std::isnan(f.out.Get({0, 0, 0, 0})));
  };
  const Buffer wide(DType::kF64, {2, 4, 3, 6});
  forward([](Inputs& in) { in.lse = {}; }, "merge_linear::Forward: lse is absent");
  forward([](Inputs& in) { in.lse = in.lse.Slice(2, 0, 3); }, "lse has shape [2,3,3], expected [2,3,4]");
  forward([&](Inputs& in) { in.num = wide.view(); }, "num has dtype f64, expected f32, bf16 or f16 beside f32");
  forward([](Inputs& in) { in.den = in.den.Slice(2, 0, 2); }, "den has shape [2,4,2], expected [2,4,3]");
  forward([](Inputs& in) { in.gate = in.gate.Slice(0, 0, 2); }, "gate has shape [2], expected [3]");
  forward([&](Inputs& in) { in.num = f.out.view(); }, "out overlaps num");
  BackwardInputs in = f.backward_inputs();
  in.gate = {};
  EXPECT_THAT([&] { Backward(ctx, in, f.gradients()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("dgate is asked for, expected gate with it")));
}

}  // namespace
}  // namespace heed::merge_linear
