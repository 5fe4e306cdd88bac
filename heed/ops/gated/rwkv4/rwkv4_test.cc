// RWKV-4 as a softmax over the past, for keys of any magnitude.
#include "heed/ops/gated/rwkv4/rwkv4.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"

namespace heed::rwkv4 {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

class Rwkv4 : public testing::Test {
 protected:
  static constexpr int64_t B = 2, T = 90, C = 37;

  Rwkv4() {
    for (int64_t c = 0; c < C; ++c) w_.Set({c}, -0.05 * static_cast<double>(c));
  }
  Inputs In(const Buffer& k) const { return {{k.view(), v_.view(), w_.view(), u_.view()}, {}}; }
  static double LargestDifference(const Buffer& a, const Buffer& b) {
    double difference = 0;
    std::vector<int64_t> at(a.view().sizes().size());
    do {
      difference = std::max(difference, std::abs(GetElement(a.view(), at) - GetElement(b.view(), at)));
    } while (NextIndex(a.view().sizes(), at));
    return difference;
  }

  const Buffer k_ = Buffer(DType::kF64, {B, T, C}).FillNormal(1);
  const Buffer v_ = Buffer(DType::kF64, {B, T, C}).FillNormal(2);
  const Buffer u_ = Buffer(DType::kF64, {C}).FillNormal(3);
  const Buffer w_ = Buffer(DType::kF64, {C});
  Context ctx_{2};
};

TEST_F(Rwkv4, IsASoftmaxOverThePast) {
  const Buffer o(DType::kF64, {B, T, C});
  Forward(ctx_, In(k_), {}, {o.view(), {}});
  for (const int64_t c : {0, 5, 36}) {
    for (const int64_t t : {0, 1, 64, 89}) {
      double numerator = 0, denominator = 0;
      for (int64_t s = 0; s <= t; ++s) {
        const double distance = s == t ? u_.Get({c}) : static_cast<double>(t - 1 - s) * w_.Get({c});
        const double weight = std::exp(distance + k_.Get({1, s, c}));
        numerator += weight * v_.Get({1, s, c});
        denominator += weight;
      }
      EXPECT_NEAR(o.Get({1, t, c}), numerator / denominator, 1e-13) << c << " " << t;
    }
  }
}

TEST_F(Rwkv4, AConstantOnKeysCancelsHoweverLarge) {
  const Buffer far(DType::kF64, {B, T, C}), o(DType::kF64, {B, T, C}), of_far(DType::kF64, {B, T, C});
  std::vector<int64_t> at(3);
  do {
    SetElement(far.view(), at, GetElement(k_.view(), at) + 5000);
  } while (NextIndex(far.view().sizes(), at));
  Forward(ctx_, In(k_), {}, {o.view(), {}});
  Forward(ctx_, In(far), {}, {of_far.view(), {}});
  EXPECT_LT(LargestDifference(o, of_far), 1e-9);
}

// 20000 tokens with a log decay of -1e-5 each; an f32 maximum of 40 has a resolution of 4e-6. The remaining error is a
// rounding of num per token, since nothing is written.
TEST_F(Rwkv4, AChannelThatHardlyFadesFadesAsItShould) {
  constexpr int64_t kTokens = 20000;
  std::vector<float> k(kTokens, -1e9f), v(kTokens, 0.0f), o(kTokens);
  k[0] = 40;
  v[0] = 1;
  float w = -1e-5f, u = 0, num = 0, den = 0, max = 0;
  const auto view = [](std::vector<float>& x) { return TensorView(x.data(), DType::kF32, {1, kTokens, 1}); };
  const auto one = [](float& x) { return TensorView(&x, DType::kF32, {1}); };
  const auto state = [](float& x) { return TensorView(&x, DType::kF32, {1, 1}); };
  Forward(ctx_, {{view(k), view(v), one(w), one(u)}, {}}, {}, {view(o), {state(num), state(den), state(max)}});
  const double expected = 40 + (kTokens - 1) * static_cast<double>(w);
  EXPECT_NEAR(std::log(static_cast<double>(num)) + static_cast<double>(max), expected, kTokens * 0x1p-24);
  EXPECT_EQ(num, den);
}

TEST_F(Rwkv4, StepsGoOnFromAState) {
  const Buffer o(DType::kF64, {B, T, C}), one(DType::kF64, {B, C});
  const Buffer num(DType::kF64, {B, C}), den(DType::kF64, {B, C}), max(DType::kF64, {B, C});
  const State state = {num.view(), den.view(), max.view()};
  Forward(ctx_, In(k_), {}, {o.view(), {}});
  Inputs in = In(k_);
  in.k = in.k.Slice(1, 0, 80);
  in.v = in.v.Slice(1, 0, 80);
  const Buffer first(DType::kF64, {B, 80, C});
  Forward(ctx_, in, {}, {first.view(), state});
  const auto token = [](const Buffer& x, int64_t t) {
    const ConstTensorView row = ConstTensorView(x.view()).Slice(1, t, t + 1);
    const int64_t sizes[] = {B, C}, strides[] = {row.stride(0), row.stride(2)};
    return ConstTensorView(row.data(), row.dtype(), sizes, strides);
  };
  for (int64_t t = 80; t < T; ++t) {
    Step(ctx_, {token(k_, t), token(v_, t), w_.view(), u_.view()}, {}, state, one.view());
    for (int64_t c = 0; c < C; ++c) EXPECT_EQ(one.Get({1, c}), o.Get({1, t, c})) << t;
  }
}

TEST_F(Rwkv4, GradientsAndReferencesAreThoseOfItsOwnNames) {
  const Buffer d_o = Buffer(DType::kF64, {B, T, C}).FillNormal(4);
  const auto like = [](const Buffer& x) { return Buffer(DType::kF64, x.view().sizes()); };
  const Buffer dk = like(k_), dv = like(v_), dw = like(w_), du = like(u_);
  const Buffer dk_ = like(k_), dv_ = like(v_), dw_ = like(w_), du_ = like(u_);
  const BackwardInputs in = {In(k_), d_o.view(), {}};
  Backward(ctx_, in, {}, {{dk.view(), dv.view(), dw.view(), du.view()}, {}});
  BackwardReference(in, {}, {{dk_.view(), dv_.view(), dw_.view(), du_.view()}, {}});
  EXPECT_LT(LargestDifference(dk, dk_), 1e-13);
  EXPECT_LT(LargestDifference(dv, dv_), 1e-13);
  EXPECT_LT(LargestDifference(dw, dw_), 1e-11);
  EXPECT_LT(LargestDifference(du, du_), 1e-12);
  const Buffer o = like(k_), reference = like(k_);
  Forward(ctx_, In(k_), {}, {o.view(), {}});
  Reference(In(k_), {}, {reference.view(), {}});
  EXPECT_LT(LargestDifference(o, reference), 1e-13);
}

TEST_F(Rwkv4, ErrorsSpeakOfItsOwnNames) {
  const Buffer o(DType::kF64, {B, T, C}), num(DType::kF64, {B, C});
  Inputs in = In(k_);
  in.initial.num = num.view();
  EXPECT_THAT([&] { Forward(ctx_, in, {}, {o.view(), {}}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("initial_state.max is absent")));
  in.initial = {};
  in.k = {};
  EXPECT_THAT([&] { Forward(ctx_, in, {}, {o.view(), {}}); }, ThrowsMessage<InvalidArgument>(HasSubstr("k is absent")));
}

}  // namespace
}  // namespace heed::rwkv4
