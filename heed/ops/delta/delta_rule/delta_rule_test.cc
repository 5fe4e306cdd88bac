// Delta rules against each other: one recurrence with different gates, keys and factors.
#include "heed/ops/delta/delta_rule/delta_rule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/ops/delta/comba/comba.h"
#include "heed/ops/delta/delta_product/delta_product.h"
#include "heed/ops/delta/gated_delta_rule/gated_delta_rule.h"
#include "heed/ops/delta/gdn2/gdn2.h"
#include "heed/ops/delta/kda/kda.h"
#include "heed/ops/delta/rwkv7/rwkv7.h"

namespace heed::delta_rule {
namespace {

class DeltaRules : public testing::Test {
 protected:
  static constexpr int64_t B = 2, T = 90, H = 3, K = 12, V = 20;

  template <class F>
  static Buffer Filled(std::vector<int64_t> sizes, const F& f) {
    Buffer buffer(DType::kF64, sizes);
    std::vector<int64_t> at(sizes.size());
    do {
      SetElement(buffer.view(), at, f(at));
    } while (NextIndex(sizes, at));
    return buffer;
  }
  Buffer Normal(std::vector<int64_t> sizes) { return Buffer(DType::kF64, sizes).FillNormal(++seed_); }
  // Rows of norm 1.
  Buffer Keys() {
    const Buffer rows = Normal({B, T, H, K});
    return Filled({B, T, H, K}, [&](const std::vector<int64_t>& at) {
      double sum = 0;
      for (int64_t i = 0; i < K; ++i) sum += std::pow(rows.Get({at[0], at[1], at[2], i}), 2);
      return GetElement(rows.view(), at) / std::sqrt(sum);
    });
  }
  // The number of each token, repeated for all channels.
  static Buffer Repeated(const Buffer& by_token, int64_t channels, double factor = 1) {
    return Filled({B, T, H, channels},
                  [&](const std::vector<int64_t>& at) { return factor * by_token.Get({at[0], at[1], at[2]}); });
  }
  Inputs Of(const Buffer& k) const { return {{q_.view(), k.view(), v_.view(), beta_.view()}, {}}; }
  gated_delta_rule::Inputs GatedOf(const Buffer& k) const {
    return {{q_.view(), k.view(), v_.view(), g_.view(), beta_.view()}, {}};
  }
  kda::Inputs KdaOf(const Buffer& k, const Buffer& log_decay) const {
    return {{q_.view(), k.view(), v_.view(), log_decay.view(), beta_.view()}, {}};
  }
  template <class In, class Out>
  Buffer Run(void (*forward)(Context&, const In&, const Options&, const Out&), const In& in,
             const Options& options = {}) {
    Buffer o(DType::kF64, {B, T, H, V});
    forward(ctx_, in, options, {o.view(), {}});
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
  Random random_{5};
  const Buffer q_ = Normal({B, T, H, K}), k_ = Keys(), v_ = Normal({B, T, H, V});
  const Buffer beta_ = Filled({B, T, H}, [&](const auto&) { return random_.Uniform(0, 2); });
  const Buffer g_ = Filled({B, T, H}, [&](const auto&) { return std::log(random_.Uniform(0.5, 1)); });
  Context ctx_{2};
};

TEST_F(DeltaRules, AKeyOfNormOneReadsWhatWasWrittenLast) {
  const Buffer ones = Filled({B, T, H}, [](const auto&) { return 1; });
  Inputs in = Of(k_);
  in.q = k_.view();
  in.beta = ones.view();
  Options options;
  options.scale = 1;
  EXPECT_LT(LargestDifference(Run(&Forward, in, options), v_), 1e-13);
}

TEST_F(DeltaRules, WithoutABetaNothingIsWritten) {
  const Buffer zeros(DType::kF64, {B, T, H}), o(DType::kF64, {B, T, H, V});
  zeros.FillConstant(0);
  o.FillConstant(0);
  Inputs in = Of(k_);
  in.beta = zeros.view();
  EXPECT_EQ(LargestDifference(Run(&Forward, in), o), 0);
}

TEST_F(DeltaRules, ADecayOfOneIsNone) {
  const Buffer none(DType::kF64, {B, T, H});
  none.FillConstant(0);
  gated_delta_rule::Inputs in = GatedOf(k_);
  in.log_decay = none.view();
  EXPECT_LT(LargestDifference(Run(&gated_delta_rule::Forward, in), Run(&Forward, Of(k_))), 1e-14);
}

TEST_F(DeltaRules, OneGateForAllChannelsIsTheScalarOne) {
  const Buffer expected = Run(&gated_delta_rule::Forward, GatedOf(k_));
  const Buffer by_key = Repeated(g_, K);
  EXPECT_LT(LargestDifference(Run(&kda::Forward, KdaOf(k_, by_key)), expected), 1e-13);
}

TEST_F(DeltaRules, EraseAndWriteAlikeAreABeta) {
  const Buffer by_key = Repeated(g_, K), erase = Repeated(beta_, K), write = Repeated(beta_, V);
  const Buffer expected = Run(&kda::Forward, KdaOf(k_, by_key));
  const gdn2::Inputs in = {{q_.view(), k_.view(), v_.view(), by_key.view(), erase.view(), write.view()}, {}};
  EXPECT_LT(LargestDifference(Run(&gdn2::Forward, in), expected), 1e-13);
}

TEST_F(DeltaRules, OneKeyToReadAndWriteIsTheGatedRule) {
  const Buffer expected = Run(&gated_delta_rule::Forward, GatedOf(k_));
  const comba::Inputs in = {{q_.view(), k_.view(), v_.view(), k_.view(), g_.view(), beta_.view()}, {}};
  EXPECT_LT(LargestDifference(Run(&comba::Forward, in), expected), 1e-13);
}

// S~^T k of a decayed state is S^T (a .* k): the delta rule as a case of RWKV-7.
TEST_F(DeltaRules, Rwkv7HoldsTheDeltaRule) {
  const Buffer by_key = Repeated(g_, K);
  const Buffer expected = Run(&kda::Forward, KdaOf(k_, by_key));
  const auto keys = [&](double sign, bool with_beta, bool with_decay) {
    return Filled({B, T, H, K}, [&](const std::vector<int64_t>& at) {
      const double beta = with_beta ? beta_.Get({at[0], at[1], at[2]}) : 1;
      const double a = with_decay ? std::exp(g_.Get({at[0], at[1], at[2]})) : 1;
      return sign * beta * a * GetElement(k_.view(), at);
    });
  };
  const Buffer written = keys(1, true, false), read = keys(-1, false, true);
  rwkv7::Inputs in;
  in.r = q_.view();
  in.log_decay = by_key.view();
  in.v = v_.view();
  in.k = in.b = written.view();
  in.a = read.view();
  Options options;
  options.scale = 1 / std::sqrt(static_cast<double>(K));
  EXPECT_LT(LargestDifference(Run(&rwkv7::Forward, in, options), expected), 1e-13);
}

// [B, T, H, ...] with x at every `every`-th token from `first` on, and 0 at the others.
Buffer AtEvery(const Buffer& x, int64_t every, int64_t first) {
  std::vector<int64_t> sizes(x.view().sizes().begin(), x.view().sizes().end());
  sizes[1] *= every;
  const Buffer spread(DType::kF64, sizes);
  spread.FillConstant(0);
  std::vector<int64_t> at(sizes.size());
  const std::vector<int64_t> from(x.view().sizes().begin(), x.view().sizes().end());
  do {
    std::vector<int64_t> to = at;
    to[1] = to[1] * every + first;
    SetElement(spread.view(), to, GetElement(x.view(), at));
  } while (NextIndex(from, at));
  return spread;
}

TEST_F(DeltaRules, AProductIsTheGatedRuleOverItsSteps) {
  constexpr int64_t n = 3;
  const Buffer v = Normal({B, T, n, H, V});
  const Buffer k =
      Filled({B, T, n, H, K}, [&](const auto&) { return random_.Normal() / std::sqrt(static_cast<double>(K)); });
  const Buffer beta = Filled({B, T, n, H}, [&](const auto&) { return random_.Uniform(0, 1); });
  const auto steps = [](const Buffer& x) {
    std::vector<int64_t> sizes = {B, T * n};
    for (int axis = 3; axis < x.view().rank(); ++axis) sizes.push_back(x.view().size(axis));
    return TensorView(x.view().data(), DType::kF64, sizes);
  };
  for (const bool decays : {false, true}) {
    delta_product::Inputs in = {{q_.view(), k.view(), v.view(), {}, beta.view()}, {}};
    if (decays) in.log_decay = g_.view();
    const Buffer o = Run(&delta_product::Forward, in);

    const Buffer q = AtEvery(q_, n, n - 1), g = AtEvery(g_, n, 0);
    const Buffer of_steps(DType::kF64, {B, T * n, H, V});
    if (decays) {
      gated_delta_rule::Forward(ctx_, {{q.view(), steps(k), steps(v), g.view(), steps(beta)}, {}}, {},
                                {of_steps.view(), {}});
    } else {
      Forward(ctx_, {{q.view(), steps(k), steps(v), steps(beta)}, {}}, {}, {of_steps.view(), {}});
    }
    EXPECT_LT(LargestDifference(AtEvery(o, n, n - 1), of_steps), 1e-13);
  }
}

// With beta = 2 each step is a reflection along its key: two steps along keys at an angle a rotate the state by 2 a,
// which no single step can.
TEST_F(DeltaRules, TwoReflectionsAreARotation) {
  const double angle = 0.3;
  const Buffer k(DType::kF64, {1, 1, 2, 1, 2}), v(DType::kF64, {1, 1, 2, 1, 2});
  const Buffer q(DType::kF64, {1, 1, 1, 2}), beta(DType::kF64, {1, 1, 2, 1});
  const Buffer before(DType::kF64, {1, 1, 2, 2}), o(DType::kF64, {1, 1, 1, 2});
  const Buffer after(DType::kF64, {1, 1, 2, 2});
  v.FillConstant(0);
  q.FillConstant(1);
  beta.FillConstant(2);
  before.FillNormal(1);
  k.Set({0, 0, 0, 0, 0}, 1);
  k.Set({0, 0, 0, 0, 1}, 0);
  k.Set({0, 0, 1, 0, 0}, std::cos(angle));
  k.Set({0, 0, 1, 0, 1}, std::sin(angle));
  delta_product::Inputs in = {{q.view(), k.view(), v.view(), {}, beta.view()}, {}};
  in.initial.S = before.view();
  delta_product::Forward(ctx_, in, {}, {o.view(), {after.view()}});
  const double c = std::cos(2 * angle), s = std::sin(2 * angle);
  for (int64_t j = 0; j < 2; ++j) {
    const double x = before.Get({0, 0, 0, j}), y = before.Get({0, 0, 1, j});
    EXPECT_NEAR(after.Get({0, 0, 0, j}), c * x - s * y, 1e-14);
    EXPECT_NEAR(after.Get({0, 0, 1, j}), s * x + c * y, 1e-14);
  }
}

TEST_F(DeltaRules, AProductOfNoStepsIsRefused) {
  const Buffer k(DType::kF64, {B, T, 0, H, K}), v(DType::kF64, {B, T, 0, H, V});
  const Buffer beta(DType::kF64, {B, T, 0, H}), o(DType::kF64, {B, T, H, V});
  delta_product::Inputs in = {{q_.view(), k.view(), v.view(), {}, beta.view()}, {}};
  EXPECT_THAT([&] { delta_product::Forward(ctx_, in, {}, {o.view(), {}}); },
              testing::ThrowsMessage<InvalidArgument>(testing::HasSubstr("n >= 1")));
  in.k = k_.view();
  in.v = v_.view();
  EXPECT_THAT([&] { delta_product::Forward(ctx_, in, {}, {o.view(), {}}); },
              testing::ThrowsMessage<InvalidArgument>(testing::HasSubstr("[B, T, n, HV, V]")));
}

TEST_F(DeltaRules, AnAbsentBetaIsRefused) {
  Inputs in = Of(k_);
  in.beta = {};
  const Buffer o(DType::kF64, {B, T, H, V});
  try {
    Forward(ctx_, in, {}, {o.view(), {}});
    FAIL();
  } catch (const InvalidArgument& e) {
    EXPECT_STREQ(e.what(), "delta_rule::Forward: beta is absent, expected a tensor");
  }
}

}  // namespace
}  // namespace heed::delta_rule
