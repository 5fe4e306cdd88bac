// Linear: agreement with its reference, bits of a row, parts, errors.
#include "heed/layers/linear.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/harness/buffer.h"

namespace heed::layers {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

Buffer Multiply(Context& ctx, const Linear& linear, const Buffer& x) {
  const Buffer y(DType::kF32, {x.view().size(0), linear.outputs()});
  linear.Forward(ctx, x.view(), y.view());
  return y;
}

TEST(LinearTest, AgreesWithItsReferenceOnEveryTarget) {
  Random random(1);
  for (const std::string& target : AvailableTargets()) {
    for (int trial = 0; trial < 12; ++trial) {
      const int64_t rows = random.Pick<int64_t>({1, 2, 3, 5, 7, 13, 65, 200});
      const int64_t inputs = random.Pick<int64_t>({1, 2, 17, 63, 255, 256, 257, 600});
      const int64_t outputs = random.Pick<int64_t>({1, 3, 15, 64, 65, 100, 300});
      const DType dtype = random.Pick({DType::kF32, DType::kBF16, DType::kF16});
      const Buffer x = Buffer(DType::kF32, {rows, inputs}).FillNormal(1);
      const Buffer w = Buffer(dtype, {outputs, inputs}).FillNormal(2), b = Buffer(DType::kF32, {outputs}).FillNormal(3);
      const bool bias = random.Chance(.5);
      const Linear linear(w.view(), bias ? b.view() : TensorView());
      EXPECT_EQ(linear.dtype(), dtype == DType::kBF16 ? DType::kBF16 : DType::kF32);
      Context ctx(2);
      ctx.set_isa(target);
      const Buffer y = Multiply(ctx, linear, x), expected(DType::kF64, {rows, outputs});
      Linear::Reference(x.view(), w.view(), bias ? b.view() : TensorView(), expected.view());
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t o = 0; o < outputs; ++o) {
          ASSERT_NEAR(y.Get({r, o}), expected.Get({r, o}),
                      2e-6 * std::sqrt(static_cast<double>(inputs)) * (1 + std::abs(expected.Get({r, o}))))
              << target << " " << Name(dtype) << " " << rows << " " << inputs << " " << outputs << " at " << r << ", "
              << o;
        }
      }
    }
  }
}

TEST(LinearTest, BitsOfARowDependNeitherOnItsNeighboursNorOnThreads) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Buffer x = Buffer(DType::kF32, {391, 519}).FillNormal(1), w = Buffer(dtype, {203, 519}).FillNormal(2);
    const Linear linear(w.view());
    Context one(1), three(3);
    const Buffer whole = Multiply(one, linear, x);
    EXPECT_TRUE(SameBits(Multiply(three, linear, x).view(), whole.view()));
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 1}, {1, 3}, {3, 8}, {8, 20}, {20, 391}}) {
      const Buffer part =
          Multiply(three, linear, x.As(TensorView(x.as<float>() + begin * 519, DType::kF32, {end - begin, 519})));
      EXPECT_TRUE(SameBits(part.view(), whole.view().Slice(0, begin, end))) << begin;
    }
  }
}

TEST(LinearTest, PartsAreConcatenated) {
  const Buffer a = Buffer(DType::kF32, {70, 9}).FillNormal(1), b = Buffer(DType::kF32, {9, 5}).FillNormal(2),
               bias = Buffer(DType::kF32, {5}).FillNormal(3), x = Buffer(DType::kF32, {2, 9}).FillNormal(4);
  const ConstTensorView transposed(b.view().data(), DType::kF32, {5, 9}, {1, 5});
  Context ctx(1);
  const Linear both(std::array{LinearPart{a.view(), {}, false}, LinearPart{b.view(), bias.view(), true}});
  const Buffer y = Multiply(ctx, both, x);
  EXPECT_TRUE(SameBits(y.view().Slice(1, 0, 70), Multiply(ctx, Linear(a.view()), x).view()));
  EXPECT_TRUE(SameBits(y.view().Slice(1, 70, 75), Multiply(ctx, Linear(transposed, bias.view()), x).view()));
  EXPECT_EQ(both.outputs(), 75);
}

TEST(LinearTest, RowsMayHaveStrides) {
  const Buffer w = Buffer(DType::kF32, {33, 12}).FillNormal(1), x = Buffer(DType::kF32, {9, 20}).FillNormal(2);
  const Buffer y(DType::kF32, {9, 50}), dense(DType::kF32, {9, 12});
  for (int64_t r = 0; r < 9; ++r) {
    for (int64_t e = 0; e < 12; ++e) dense.Set({r, e}, x.Get({r, 4 + e}));
  }
  Context ctx(1);
  const Linear linear(w.view());
  linear.Forward(ctx, x.view().Slice(1, 4, 16), y.view().Slice(1, 7, 40));
  EXPECT_TRUE(SameBits(y.view().Slice(1, 7, 40), Multiply(ctx, linear, dense).view()));
  EXPECT_TRUE(std::isnan(y.Get({0, 6})));
  EXPECT_TRUE(std::isnan(y.Get({8, 40})));
}

TEST(LinearTest, NoRowsAreNoWork) {
  Context ctx(1);
  const Buffer w = Buffer(DType::kF32, {3, 4}).FillNormal(1);
  Multiply(ctx, Linear(w.view()), Buffer(DType::kF32, {0, 4}));
}

TEST(LinearTest, WrongWeightsAndArgumentsAreNamed) {
  const Buffer w = Buffer(DType::kF32, {3, 4}).FillNormal(1), other = Buffer(DType::kF32, {3, 5}).FillNormal(1);
  const auto says = [](const std::string& what) { return ThrowsMessage<InvalidArgument>(HasSubstr(what)); };
  EXPECT_THAT([&] { Linear(Buffer(DType::kI32, {3, 4}).view()); }, says("layers::Linear: weight has dtype i32"));
  EXPECT_THAT([&] { Linear(Buffer(DType::kF32, {3}).view()); }, says("layers::Linear: weight has shape [3]"));
  EXPECT_THAT([&] { Linear(w.view(), Buffer(DType::kF32, {4}).view()); },
              says("layers::Linear: bias has shape [4], expected [3]"));
  EXPECT_THAT([&] { Linear(std::array{LinearPart{w.view(), {}, false}, LinearPart{other.view(), {}, false}}); },
              says("layers::Linear: weight has 5 inputs, expected 4 as the first part"));
  EXPECT_THAT([&] { Linear(std::span<const LinearPart>()); }, says("layers::Linear: parts is empty"));
  const Linear linear(w.view());
  Context ctx(1);
  const Buffer x = Buffer(DType::kF32, {2, 4}).FillNormal(1), y(DType::kF32, {2, 3});
  const auto call = [&](const ConstTensorView& in, const TensorView& out) {
    return [&, in, out] { linear.Forward(ctx, in, out); };
  };
  EXPECT_THAT(call(other.view(), y.view()), says("layers::Linear::Forward: x has shape [3,5], expected [3,4]"));
  EXPECT_THAT(call(x.view(), x.view().Slice(1, 0, 3)), says("layers::Linear::Forward: y"));
  EXPECT_THAT(call(x.view(), Buffer(DType::kF32, {2, 4}).view()),
              says("layers::Linear::Forward: y has shape [2,4], expected [2,3]"));
  EXPECT_THAT([&] { Linear().Forward(ctx, x.view(), y.view()); }, says("there are no weights"));
  EXPECT_TRUE(std::isnan(y.Get({0, 0})));
}

}  // namespace
}  // namespace heed::layers
