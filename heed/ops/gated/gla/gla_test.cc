// GLA against related mechanisms: simple GLA if all channels share a decay, and a sum of outer products without decay.
#include "heed/ops/gated/gla/gla.h"

#include <gtest/gtest.h>

#include <cmath>

#include "heed/harness/buffer.h"
#include "heed/ops/gated/retention/retention.h"
#include "heed/ops/gated/simple_gla/simple_gla.h"

namespace heed::gla {
namespace {

double LargestDifference(const Buffer& a, const Buffer& b) {
  double difference = 0;
  std::vector<int64_t> at(a.view().sizes().size());
  do {
    difference = std::max(difference, std::abs(GetElement(a.view(), at) - GetElement(b.view(), at)));
  } while (NextIndex(a.view().sizes(), at));
  return difference;
}

class GlaTest : public testing::Test {
 protected:
  static constexpr int64_t B = 2, T = 90, H = 3, K = 12, V = 20;
  Buffer Normal(std::initializer_list<int64_t> sizes) { return Buffer(DType::kF64, sizes).FillNormal(++seed_); }
  uint64_t seed_ = 0;
  const Buffer q_ = Normal({B, T, H, K}), k_ = Normal({B, T, H, K}), v_ = Normal({B, T, H, V});
  Context ctx_{2};
};

TEST_F(GlaTest, OneGateForAllChannelsIsSimpleGla) {
  const Buffer by_token(DType::kF64, {B, T, H}), by_key(DType::kF64, {B, T, H, K});
  Random random(3);
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t h = 0; h < H; ++h) {
        const double g = std::log(random.Uniform(0.5, 1));
        by_token.Set({b, t, h}, g);
        for (int64_t i = 0; i < K; ++i) by_key.Set({b, t, h, i}, g);
      }
    }
  }
  const Buffer o(DType::kF64, {B, T, H, V}), expected(DType::kF64, {B, T, H, V});
  Forward(ctx_, {q_.view(), k_.view(), v_.view(), by_key.view(), {}}, {}, {o.view(), {}});
  simple_gla::Forward(ctx_, {q_.view(), k_.view(), v_.view(), by_token.view(), {}}, {}, {expected.view(), {}});
  EXPECT_LT(LargestDifference(o, expected), 1e-13);
}

// S^T is the state with keys v and values k, and reading it with the queries of one form gives o of the other.
TEST_F(GlaTest, AGateOfColumnsIsTheAdjointOfOneOfRows) {
  const Buffer by_value(DType::kF64, {B, T, H, V}), none(DType::kF64, {B, T, H, K});
  none.FillConstant(0);
  Random random(4);
  std::vector<int64_t> at(4);
  do {
    SetElement(by_value.view(), at, std::log(random.Uniform(0.3, 1)));
  } while (NextIndex(by_value.view().sizes(), at));
  Options options;
  options.scale = 0.5;
  const Buffer o(DType::kF64, {B, T, H, V}), state(DType::kF64, {B, H, K, V});
  Inputs in = {q_.view(), k_.view(), v_.view(), none.view(), {}};
  in.log_decay_v = by_value.view();
  Forward(ctx_, in, options, {o.view(), {state.view()}});

  const Buffer dq(DType::kF64, {B, T, H, V}), unused = Normal({B, T, H, V});
  BackwardInputs adjoint;
  adjoint.q = unused.view();
  adjoint.k = v_.view();
  adjoint.v = k_.view();
  adjoint.log_decay = by_value.view();
  adjoint.d_o = q_.view();
  Gradients gradients;
  gradients.q = dq.view();
  Backward(ctx_, adjoint, options, gradients);
  EXPECT_LT(LargestDifference(o, dq), 1e-13);

  const Buffer transposed(DType::kF64, {B, H, V, K}), other(DType::kF64, {B, T, H, K});
  Forward(ctx_, adjoint, options, {other.view(), {transposed.view()}});
  for (int64_t i = 0; i < K; ++i) {
    for (int64_t j = 0; j < V; ++j) {
      EXPECT_NEAR(state.Get({1, 2, i, j}), transposed.Get({1, 2, j, i}), 1e-13);
    }
  }
}

TEST_F(GlaTest, WithoutDecayTheStateIsASumOfOuterProducts) {
  const Buffer none(DType::kF64, {B, T, H, K});
  none.FillConstant(0);
  const Buffer o(DType::kF64, {B, T, H, V}), state(DType::kF64, {B, H, K, V});
  Forward(ctx_, {q_.view(), k_.view(), v_.view(), none.view(), {}}, {}, {o.view(), {state.view()}});
  for (int64_t i = 0; i < K; ++i) {
    double sum = 0;
    for (int64_t t = 0; t < T; ++t) sum += k_.Get({1, t, 2, i}) * v_.Get({1, t, 2, 7});
    EXPECT_NEAR(state.Get({1, 2, i, 7}), sum, 1e-13);
  }
}

TEST_F(GlaTest, RetentionsOwnDecaysAreThoseOfThePaper) {
  const std::vector<double> decays = retention::LogDecays(H);
  const Buffer given(DType::kF64, {H});
  for (int64_t h = 0; h < H; ++h) {
    given.Set({h}, decays[static_cast<size_t>(h)]);
    EXPECT_NEAR(std::exp(decays[static_cast<size_t>(h)]), 1 - std::pow(2.0, -5.0 - h), 1e-15);
  }
  const Buffer o(DType::kF64, {B, T, H, V}), expected(DType::kF64, {B, T, H, V});
  retention::Forward(ctx_, {q_.view(), k_.view(), v_.view(), {}, {}}, {}, {o.view(), {}});
  retention::Forward(ctx_, {q_.view(), k_.view(), v_.view(), given.view(), {}}, {}, {expected.view(), {}});
  EXPECT_TRUE(SameBits(o.view(), expected.view()));
  const Buffer reference(DType::kF64, {B, T, H, V});
  retention::Reference({q_.view(), k_.view(), v_.view(), {}, {}}, {}, {reference.view(), {}});
  EXPECT_LT(LargestDifference(o, reference), 1e-13);
}

}  // namespace
}  // namespace heed::gla
