// mLSTM against simple GLA with a normaliser, for any m.
#include "heed/ops/gated/mlstm/mlstm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/ops/gated/simple_gla/simple_gla.h"

namespace heed::mlstm {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

double LogSigmoid(double x) { return std::min(x, 0.0) - std::log1p(std::exp(-std::abs(x))); }

class MLstm : public testing::Test {
 protected:
  static constexpr int64_t B = 2, T = 90, H = 3, K = 12, V = 20;

  template <class F>
  static Buffer Filled(const std::vector<int64_t>& sizes, const F& f) {
    Buffer buffer(DType::kF64, sizes);
    std::vector<int64_t> at(sizes.size());
    do {
      SetElement(buffer.view(), at, f(at));
    } while (NextIndex(sizes, at));
    return buffer;
  }
  Buffer Normal(const std::vector<int64_t>& sizes) { return Buffer(DType::kF64, sizes).FillNormal(++seed_); }
  Inputs In(const Buffer& i, const Buffer& f) const {
    return {{q_.view(), k_.view(), v_.view(), i.view(), f.view()}, {}};
  }
  Buffer Run(const Inputs& in, const Options& options = {}) {
    Buffer o(DType::kF64, {B, T, H, V});
    Forward(ctx_, in, options, {o.view(), {}});
    return o;
  }
  static double LargestDifference(const Buffer& a, const Buffer& b) {
    double difference = 0;
    std::vector<int64_t> at(a.view().sizes().size());
    do {
      difference = std::max(difference, std::abs(GetElement(a.view(), at) - GetElement(b.view(), at)));
    } while (NextIndex(a.view().sizes(), at));
    return difference;
  }

  uint64_t seed_ = 0;
  const Buffer q_ = Normal({B, T, H, K}), k_ = Normal({B, T, H, K}), v_ = Normal({B, T, H, V});
  const Buffer i_ = Normal({B, T, H}), f_ = Normal({B, T, H});
  Context ctx_{2};
};

TEST_F(MLstm, IsASimpleGlaOverItsNormalizer) {
  const Buffer g = Filled({B, T, H}, [&](const auto& at) { return LogSigmoid(GetElement(f_.view(), at)); });
  const auto weighted = [&](int64_t channels, const auto& value) {
    return Filled({B, T, H, channels},
                  [&](const std::vector<int64_t>& at) { return std::exp(i_.Get({at[0], at[1], at[2]})) * value(at); });
  };
  const Buffer values = weighted(V, [&](const auto& at) { return GetElement(v_.view(), at); });
  const Buffer ones = weighted(1, [](const auto&) { return 1; });
  const Buffer numerators(DType::kF64, {B, T, H, V}), products(DType::kF64, {B, T, H, 1});
  const auto gla = [&](const Buffer& v, const Buffer& o) {
    simple_gla::Forward(ctx_, {{q_.view(), k_.view(), v.view(), g.view()}, {}}, {}, {o.view(), {}});
  };
  gla(values, numerators);
  gla(ones, products);
  const Buffer expected = Filled({B, T, H, V}, [&](const std::vector<int64_t>& at) {
    const double product = products.Get({at[0], at[1], at[2], 0});
    return GetElement(numerators.view(), at) / std::max(std::abs(product), 1.0);
  });
  Options options;
  options.eps = 0;
  EXPECT_LT(LargestDifference(Run(In(i_, f_), options), expected), 1e-12);
}

// Where no denominator is at its floor, a constant in the input gates cancels, however large.
TEST_F(MLstm, InputGatesOfEightHundredAreAsGoodAsAny) {
  const auto positive = [](const Buffer& x) {
    return Filled({B, T, H, K}, [&](const auto& at) { return 1 + std::abs(GetElement(x.view(), at)); });
  };
  const Buffer q = positive(q_), k = positive(k_);
  const auto run = [&](double more) {
    const Buffer i = Filled({B, T, H}, [&](const auto& at) { return GetElement(i_.view(), at) + more; });
    Inputs in = In(i, f_);
    in.q = q.view();
    in.k = k.view();
    Options options;
    options.eps = 0;
    return Run(in, options);
  };
  EXPECT_LT(LargestDifference(run(800), run(8)), 1e-11);
}

// 20000 tokens with a decay of 1 - 4.5e-5 each; an f32 m near 10 would round the log decays to multiples of 1e-6.
TEST_F(MLstm, AGateThatIsNearlyOpenForgetsWhatItShould) {
  constexpr int64_t kTokens = 20000;
  const std::vector<float> key(kTokens, 1.0f), f(kTokens, 10.0f);
  std::vector<float> i(kTokens, -std::numeric_limits<float>::infinity()), o(kTokens);
  i[0] = 10;
  const auto view = [&](const std::vector<float>& x, const std::vector<int64_t>& sizes) {
    return ConstTensorView(x.data(), DType::kF32, sizes);
  };
  Inputs in;
  in.q = in.k = in.v = view(key, {1, kTokens, 1, 1});
  in.i = view(i, {1, kTokens, 1});
  in.f = view(f, {1, kTokens, 1});
  float S = 0, z = 0, m = 0;
  Forward(ctx_, in, {},
          {TensorView(o.data(), DType::kF32, {1, kTokens, 1, 1}),
           {TensorView(&S, DType::kF32, {1, 1, 1, 1}), TensorView(&z, DType::kF32, {1, 1, 1}),
            TensorView(&m, DType::kF32, {1, 1})}});
  const double expected = 10 + (kTokens - 1) * LogSigmoid(10);
  EXPECT_NEAR(std::log(static_cast<double>(S)) + static_cast<double>(m), expected, 2e-5);
  EXPECT_NEAR(static_cast<double>(z), static_cast<double>(S), 1e-6);
}

TEST_F(MLstm, WhatIsNeitherKeptNorWrittenIsZero) {
  const double infinity = std::numeric_limits<double>::infinity();
  const auto closed_at = [&](const Buffer& gate) {
    return Filled({B, T, H}, [&](const std::vector<int64_t>& at) {
      return at[1] == 70 ? -infinity : GetElement(gate.view(), at);
    });
  };
  const Buffer i = closed_at(i_), f = closed_at(f_);
  const Buffer o = Run(In(i, f));
  const Buffer expected =
      Filled({B, T, H, V}, [&](const std::vector<int64_t>& at) { return at[1] == 70 ? 0 : GetElement(o.view(), at); });
  EXPECT_EQ(LargestDifference(o, expected), 0);
  std::vector<int64_t> at(4);
  do {
    ASSERT_TRUE(std::isfinite(GetElement(o.view(), at)));
  } while (NextIndex(o.view().sizes(), at));
}

TEST_F(MLstm, AStateWithoutItsMaximumAndABadEpsAreRefused) {
  const Buffer S(DType::kF64, {B, H, K, V});
  Inputs in = In(i_, f_);
  in.initial.S = S.view();
  EXPECT_THAT([&] { Run(in); }, ThrowsMessage<InvalidArgument>(HasSubstr("initial_state.m")));
  in.initial = {};
  Options options;
  options.eps = -1;
  EXPECT_THAT([&] { Run(in, options); },
              ThrowsMessage<InvalidArgument>(HasSubstr("eps is -1, expected a finite number >= 0")));
  in.f = {};
  EXPECT_THAT([&] { Run(in); }, ThrowsMessage<InvalidArgument>(HasSubstr("f is absent")));
}

}  // namespace
}  // namespace heed::mlstm
