// Norms, activations and other operations on rows, on every SIMD target, compared with their formulas in double.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/layers/activation.h"
#include "heed/layers/arena_internal.h"
#include "heed/layers/norm.h"
#include "heed/layers/rows_internal.h"

namespace heed::layers {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

void OnEveryTarget(const std::function<void(Context&)>& f) {
  for (const std::string& target : AvailableTargets()) {
    SCOPED_TRACE(target);
    Context ctx(2);
    ctx.set_isa(target);
    f(ctx);
  }
}

TEST(ActivationTest, EachIsItsFormula) {
  std::vector<float> x = {0, -0.f, 1e-30f, -1e-30f, 100, -100, 1e30f, -1e30f};
  for (float v = -14; v < 14; v += .0137f) x.push_back(v);
  OnEveryTarget([&](Context& ctx) {
    for (int i = 0; i <= static_cast<int>(Activation::kMinusExp); ++i) {
      std::vector<float> y(x.size());
      ActivateRows call;
      call.activation = static_cast<Activation>(i);
      call.x = {x.data(), 0};
      call.y = {y.data(), 0};
      call.rows = 1;
      call.size = x.size();
      layers::Run(ctx, call);
      for (size_t j = 0; j < x.size(); ++j) {
        const double expected = ActivationReference(call.activation, x[j]);
        if (std::abs(expected) > 3e38) continue;  // squares and exponentials overflow
        // The formula of gelu_tanh subtracts nearly equal numbers for negative x, where the kernel is accurate.
        const double floor = call.activation == Activation::kGeluTanh ? 1e-13 : 1e-35;
        EXPECT_NEAR(y[j], expected, 2e-5 * std::abs(expected) + floor) << i << " at " << x[j];
        EXPECT_NEAR(y[j], expected, 5e-7 * (std::abs(expected) + .05)) << i << " at " << x[j];
      }
    }
  });
}

TEST(ActivationTest, NaNStaysNaN) {
  const std::vector<float> x = {NAN, 1, NAN};
  OnEveryTarget([&](Context& ctx) {
    for (int i = 0; i <= static_cast<int>(Activation::kMinusExp); ++i) {
      std::vector<float> y(3);
      ActivateRows call;
      call.activation = static_cast<Activation>(i);
      call.x = {x.data(), 0};
      call.y = {y.data(), 0};
      call.rows = 1;
      call.size = 3;
      layers::Run(ctx, call);
      EXPECT_TRUE(std::isnan(y[0]) && !std::isnan(y[1]) && std::isnan(y[2])) << i;
    }
  });
}

TEST(ActivationTest, NamesAreThoseOfTransformers) {
  EXPECT_EQ(ActivationFromName("gelu_new"), Activation::kGeluTanh);
  EXPECT_EQ(ActivationFromName("gelu"), Activation::kGelu);
  EXPECT_EQ(ActivationFromName("silu"), Activation::kSilu);
  EXPECT_THAT([] { ActivationFromName("sine"); },
              ThrowsMessage<InvalidArgument>(HasSubstr("name is 'sine', expected one of 'gelu', ")));
}

TEST(RowsTest, ScaledRowsAreTheirFormulas) {
  Random random(4);
  OnEveryTarget([&](Context& ctx) {
    for (const Scaling scaling : {Scaling::kLayer, Scaling::kRms, Scaling::kUnit}) {
      for (const size_t size : {1u, 3u, 16u, 37u, 70u}) {
        const size_t heads = 3, rows = 5, stride = heads * size + 2;
        const auto normals = [&](size_t count) {
          std::vector<float> values(count);
          for (float& value : values) value = static_cast<float>(1 + random.Normal());
          return values;
        };
        const std::vector<float> x = normals(rows * stride), gate = normals(rows * stride),
                                 weight = normals(heads * size), bias = normals(heads * size);
        std::vector<float> y(rows * stride, -7);
        ScaleRows call;
        call.scaling = scaling;
        call.x = {x.data(), static_cast<ptrdiff_t>(stride)};
        call.y = {y.data(), static_cast<ptrdiff_t>(stride)};
        const bool gated = random.Chance(.7);
        call.gate = {gated ? gate.data() : nullptr, static_cast<ptrdiff_t>(stride)};
        call.gate_first = random.Chance(.5);
        call.weight = weight.data();
        call.bias = random.Chance(.5) ? bias.data() : nullptr;
        call.weight_per_head = random.Chance(.5);
        call.eps = .01;
        call.rows = rows;
        call.heads = heads;
        call.size = size;
        layers::Run(ctx, call);
        const double n = scaling == Scaling::kUnit ? 1 : static_cast<double>(size);
        for (size_t row = 0; row < rows; ++row) {
          for (size_t head = 0; head < heads; ++head) {
            const size_t at = row * stride + head * size, weight_offset = call.weight_per_head ? head * size : 0;
            std::vector<double> v(size);
            double mean = 0, squares = 0;
            for (size_t i = 0; i < size; ++i) {
              v[i] = x[at + i];
              if (gated && call.gate_first) v[i] *= ActivationReference(Activation::kSilu, gate[at + i]);
              mean += v[i] / n;
            }
            if (scaling != Scaling::kLayer) mean = 0;
            for (size_t i = 0; i < size; ++i) squares += (v[i] - mean) * (v[i] - mean);
            for (size_t i = 0; i < size; ++i) {
              double expected = (v[i] - mean) / std::sqrt(squares / n + call.eps) * weight[weight_offset + i];
              if (call.bias != nullptr) expected += bias[weight_offset + i];
              if (gated && !call.gate_first) expected *= ActivationReference(Activation::kSilu, gate[at + i]);
              EXPECT_NEAR(y[at + i], expected, 3e-6 * (1 + std::abs(expected)));
            }
          }
          EXPECT_EQ(y[row * stride + heads * size], -7);
        }
      }
    }
  });
}

TEST(RowsTest, MixedAndDecayingRowsAreTheirFormulas) {
  OnEveryTarget([](Context& ctx) {
    const size_t rows = 3, size = 19;
    const Buffer x = Buffer(DType::kF32, {3, 19}).FillNormal(1), before = Buffer(DType::kF32, {3, 19}).FillNormal(2),
                 own = Buffer(DType::kF32, {3, 19}).FillNormal(5), of = Buffer(DType::kF32, {19}).FillNormal(3),
                 factor = Buffer(DType::kF32, {19}).FillNormal(4), y(DType::kF32, {3, 19});
    MixRows mix;
    mix.x = {x.as<float>(), 19};
    mix.before = {before.as<float>(), 19};
    mix.mix = {of.as<float>(), 0};
    mix.y = {y.as<float>(), 19};
    mix.rows = rows;
    mix.size = size;
    layers::Run(ctx, mix);
    for (int64_t r = 0; r < 3; ++r) {
      for (int64_t i = 0; i < 19; ++i) {
        EXPECT_NEAR(y.Get({r, i}), of.Get({i}) * x.Get({r, i}) + (1 - of.Get({i})) * before.Get({r, i}), 1e-6);
      }
    }
    mix.mix = {own.as<float>(), 19};
    layers::Run(ctx, mix);
    for (int64_t r = 0; r < 3; ++r) {
      for (int64_t i = 0; i < 19; ++i) {
        EXPECT_NEAR(y.Get({r, i}), own.Get({r, i}) * x.Get({r, i}) + (1 - own.Get({r, i})) * before.Get({r, i}), 1e-6);
      }
    }
    DecayRows decay;
    decay.x = mix.x;
    decay.slope = -2;
    decay.bias = of.as<float>();
    decay.factor = factor.as<float>();
    decay.y = mix.y;
    decay.rows = rows;
    decay.size = size;
    layers::Run(ctx, decay);
    for (int64_t r = 0; r < 3; ++r) {
      for (int64_t i = 0; i < 19; ++i) {
        EXPECT_NEAR(y.Get({r, i}), factor.Get({i}) * std::log1p(std::exp(-2 * x.Get({r, i}) + of.Get({i}))), 1e-5);
      }
    }
  });
}

TEST(NormTest, AgreesWithItsReferenceInPlaceToo) {
  for (const NormKind kind : {NormKind::kLayer, NormKind::kRms}) {
    const Buffer weight = Buffer(DType::kBF16, {45}).FillNormal(1), bias = Buffer(DType::kF32, {45}).FillNormal(2);
    const Weights weights([&](const std::string& name) -> ConstTensorView {
      return name == "weight" ? weight.view() : name == "bias" ? bias.view() : TensorView();
    });
    const Norm::Config config = {45, kind, 1e-5};
    const Norm norm(config, weights);
    const Buffer x = Buffer(DType::kF32, {7, 45}).FillNormal(3), expected(DType::kF64, {7, 45}),
                 y(DType::kF32, {7, 45});
    Norm::Reference(config, weights, x.view(), expected.view());
    Context ctx(2);
    norm.Forward(ctx, x.view(), y.view());
    for (int64_t r = 0; r < 7; ++r) {
      for (int64_t i = 0; i < 45; ++i) EXPECT_NEAR(y.Get({r, i}), expected.Get({r, i}), 3e-6);
    }
    norm.Forward(ctx, x.view(), x.view());
    EXPECT_TRUE(SameBits(x.view(), y.view()));
    EXPECT_THAT(
        [&] { norm.Forward(ctx, Buffer(DType::kF32, {7, 44}).view(), y.view()); },
        ThrowsMessage<InvalidArgument>(HasSubstr("layers::Norm::Forward: x has shape [7,44], expected [7,45]")));
    EXPECT_THAT([&] { Norm({45, kind, -1}, weights); }, ThrowsMessage<InvalidArgument>(HasSubstr("config.eps is -1")));
  }
}

TEST(FrameTest, FramesNestAndTheirMemoryServesTheNextOne) {
  float* first = nullptr;
  {
    Frame outer;
    first = outer.Floats(100);
    first[99] = 1;
    {
      Frame inner;
      float* more = inner.Floats(1 << 20);
      more[0] = more[(1 << 20) - 1] = 2;
    }
    EXPECT_EQ(first[99], 1);
    EXPECT_GE(outer.Floats(100), first + 100);
  }
  float* again = nullptr;
  {
    Frame frame;
    again = frame.Floats(100);
    EXPECT_GT(frame.Floats(1 << 20), again);
  }
  Frame frame;
  EXPECT_EQ(frame.Floats(100), again);
}

}  // namespace
}  // namespace heed::layers
