// Properties of Performer: its estimate, causality, reproducibility, memory, errors.
#include "heed/ops/linear/performer/performer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/harness/unfair_executor.h"
#include "heed/ops/linear/performer/orthogonal_features.h"

namespace heed::performer {
namespace {

bool SameBits(const TensorView& a, const TensorView& b) {
  std::vector<int64_t> index(a.sizes().size());
  if (a.num_elements() == 0) return true;
  do {
    const double x = GetElement(a, index), y = GetElement(b, index);
    if (std::memcmp(&x, &y, sizeof(x)) != 0) return false;
  } while (NextIndex(a.sizes(), index));
  return true;
}

// A causal call with its memory, states and gradients.
struct Call {
  static constexpr DType f = DType::kF32;
  static constexpr int64_t K = 20, V = 36, M = 50;

  Call(int64_t batch, int64_t tokens, int64_t key_heads, int64_t group, uint64_t seed = 1)
      : B(batch), T(tokens), H(key_heads), HV(key_heads * group) {
    const auto normal = [&](const std::vector<int64_t>& sizes) { return Buffer(f, sizes).FillNormal(++seed); };
    q = normal({B, T, H, K});
    k = normal({B, T, H, K});
    v = normal({B, T, HV, V});
    d_o = normal({B, T, HV, V});
    W = normal({M, K});
    S = normal({B, HV, M, V});
    z = Buffer(f, {B, HV, M}).FillConstant(30);
    m = normal({B, HV});
    d_S = normal({B, HV, M, V});
    d_z = normal({B, HV, M});
    options.causal = true;
    Allocate();
  }
  void Allocate() {
    o = Buffer(f, {B, T, HV, V});
    for (auto* to : {&last_S, &dS}) *to = Buffer(f, {B, HV, M, V});
    for (auto* to : {&last_z, &dz}) *to = Buffer(f, {B, HV, M});
    last_m = Buffer(f, {B, HV});
    dq = Buffer(f, {B, T, H, K});
    dk = Buffer(f, {B, T, H, K});
    dv = Buffer(f, {B, T, HV, V});
    dW = Buffer(f, {M, K});
  }

  BackwardInputs Views() const {
    BackwardInputs in;
    in.q = q.view();
    in.k = k.view();
    in.v = v.view();
    in.projection = W.view();
    in.d_o = d_o.view();
    if (!options.causal) return in;
    in.initial = {S.view(), z.view(), m.view()};
    in.d_final = {d_S.view(), d_z.view(), {}};
    return in;
  }
  Outputs Results() const {
    return {o.view(), options.causal ? State{last_S.view(), last_z.view(), last_m.view()} : State{}};
  }
  Gradients GradientViews() const {
    Gradients out;
    out.q = dq.view();
    out.k = dk.view();
    out.v = dv.view();
    out.projection = dW.view();
    if (options.causal) out.initial = {dS.view(), dz.view(), {}};
    return out;
  }
  void Run(Context& ctx) const {
    Forward(ctx, Views(), options, Results());
    Backward(ctx, Views(), options, GradientViews());
  }
  std::vector<Buffer> Everything() const { return {o, last_S, last_z, last_m, dq, dk, dv, dW, dS, dz}; }
  Call Again() const {
    Call copy = *this;
    copy.Allocate();
    return copy;
  }

  int64_t B, T, H, HV;
  Buffer q, k, v, d_o, W, S, z, m, d_S, d_z;
  Buffer o, last_S, last_z, last_m, dq, dk, dv, dW, dS, dz;
  Options options;
};

void ExpectSameBits(const Call& a, const Call& b) {
  const auto x = a.Everything(), y = b.Everything();
  for (size_t i = 0; i < x.size(); ++i) {
    EXPECT_TRUE(SameBits(x[i].view(), y[i].view())) << "result " << i;
  }
}

TEST(Performer, BitsDoNotDependOnThreads) {
  for (const bool causal : {true, false}) {
    for (const auto& [H, group] : {std::pair<int64_t, int64_t>{1, 1}, {2, 3}}) {
      Call one(2, 150, H, group);
      one.options.causal = causal;
      Context single(1);
      one.Run(single);
      for (const int threads : {2, 5}) {
        const Call other = one.Again(), late = one.Again();
        Context ctx(threads);
        other.Run(ctx);
        ExpectSameBits(one, other);
        UnfairExecutor executor(threads, 5);
        Context unfair(executor.executor());
        late.Run(unfair);
        ExpectSameBits(one, late);
      }
    }
  }
}

TEST(Performer, BitsAreThoseOfASequenceAlone) {
  // Tokens [9, 86) of row 1 of a batch.
  const Call alone(1, 77, 2, 1);
  Call batch(3, 100, 2, 1, 100);
  const auto put = [](const Buffer& from, const TensorView& to) {
    std::vector<int64_t> index(to.sizes().size());
    do {
      SetElement(to, index, GetElement(from.view(), index));
    } while (NextIndex(to.sizes(), index));
  };
  const auto tokens = [](const Buffer& x) { return x.view().Slice(0, 1, 2).Slice(1, 9, 86); };
  const auto row = [](const Buffer& x) { return x.view().Slice(0, 1, 2); };
  put(alone.q, tokens(batch.q));
  put(alone.k, tokens(batch.k));
  put(alone.v, tokens(batch.v));
  put(alone.d_o, tokens(batch.d_o));
  put(alone.S, row(batch.S));
  put(alone.z, row(batch.z));
  put(alone.m, row(batch.m));
  put(alone.d_S, row(batch.d_S));
  put(alone.d_z, row(batch.d_z));
  put(alone.W, batch.W.view());
  const Buffer lengths(DType::kI64, {3}), starts(DType::kI64, {3});
  for (const int64_t b : {0, 1, 2}) {
    lengths.Set({b}, b == 1 ? 86 : 100);
    starts.Set({b}, b == 1 ? 9 : 0);
  }
  batch.options.lengths = lengths.view();
  batch.options.starts = starts.view();
  Context ctx(2);
  alone.Run(ctx);
  batch.Run(ctx);
  EXPECT_TRUE(SameBits(alone.o.view(), tokens(batch.o)));
  EXPECT_TRUE(SameBits(alone.dq.view(), tokens(batch.dq)));
  EXPECT_TRUE(SameBits(alone.dk.view(), tokens(batch.dk)));
  EXPECT_TRUE(SameBits(alone.dv.view(), tokens(batch.dv)));
  EXPECT_TRUE(SameBits(alone.last_S.view(), row(batch.last_S)));
  EXPECT_TRUE(SameBits(alone.last_m.view(), row(batch.last_m)));
  EXPECT_TRUE(SameBits(alone.dS.view(), row(batch.dS)));
}

TEST(Performer, SplitsAtBlocksKeepTheBits) {
  const Call whole(2, 200, 1, 2), parts = whole.Again();
  Context ctx(2);
  Forward(ctx, whole.Views(), whole.options, whole.Results());
  Inputs in = whole.Views();
  Outputs out = parts.Results();
  const Buffer m(Call::f, {2, 2});
  const State boundary = {parts.dS.view(), parts.dz.view(), m.view()};
  in.q = whole.q.view().Slice(1, 0, 128);
  in.k = whole.k.view().Slice(1, 0, 128);
  in.v = whole.v.view().Slice(1, 0, 128);
  out.o = parts.o.view().Slice(1, 0, 128);
  out.final = boundary;
  Forward(ctx, in, whole.options, out);
  in.q = whole.q.view().Slice(1, 128, 200);
  in.k = whole.k.view().Slice(1, 128, 200);
  in.v = whole.v.view().Slice(1, 128, 200);
  in.initial = {boundary.S, boundary.z, boundary.m};
  out.o = parts.o.view().Slice(1, 128, 200);
  out.final = parts.Results().final;
  Forward(ctx, in, whole.options, out);
  EXPECT_TRUE(SameBits(whole.o.view(), parts.o.view()));
  EXPECT_TRUE(SameBits(whole.last_S.view(), parts.last_S.view()));
  EXPECT_TRUE(SameBits(whole.last_z.view(), parts.last_z.view()));
  EXPECT_TRUE(SameBits(whole.last_m.view(), parts.last_m.view()));
}

TEST(Performer, OutputsDoNotDependOnLaterKeys) {
  const Call before(1, 90, 1, 1), after = before.Again();
  Context ctx(1);
  Forward(ctx, before.Views(), before.options, before.Results());
  for (int64_t t = 40; t < 90; ++t) {
    for (int64_t i = 0; i < Call::K; ++i) {
      after.k.Set({0, t, 0, i}, 3 * after.k.Get({0, t, 0, i}));
    }
  }
  Forward(ctx, after.Views(), after.options, after.Results());
  EXPECT_TRUE(SameBits(before.o.view().Slice(1, 0, 40), after.o.view().Slice(1, 0, 40)));
  EXPECT_FALSE(SameBits(before.o.view(), after.o.view()));
}

// Keys of increasing size move the maximum at every token.
TEST(Performer, AMaximumThatMovesAtEveryTokenLosesNothing) {
  Call call(1, 100, 1, 1);
  for (int64_t t = 0; t < call.T; ++t) {
    for (int64_t i = 0; i < Call::K; ++i) {
      call.k.Set({0, t, 0, i}, static_cast<double>(t + 1) / 25 * call.k.Get({0, 0, 0, i}));
    }
  }
  Context ctx(1);
  call.Run(ctx);
  const Buffer expected(DType::kF64, {1, 100, 1, Call::V});
  Reference(call.Views(), call.options, {expected.view(), {}});
  for (int64_t t = 0; t < call.T; ++t) {
    for (int64_t i = 0; i < Call::V; ++i) {
      EXPECT_NEAR(call.o.Get({0, t, 0, i}), expected.Get({0, t, 0, i}), 1e-4);
    }
  }
}

TEST(Performer, EstimatesSoftmaxAttention) {
  constexpr int64_t T = 24, K = 8, V = 4;
  const auto error = [&](int64_t M, uint64_t seed) {
    const DType f = DType::kF64;
    const auto small = [&](std::vector<int64_t> sizes, uint64_t of) {
      const Buffer x = Buffer(f, sizes).FillNormal(of);
      for (int64_t i = 0; i < x.view().num_elements(); ++i) x.view().as<double>()[i] *= 0.7;
      return x;
    };
    const Buffer q = small({1, T, 1, K}, 1), k = small({1, T, 1, K}, 2), v = small({1, T, 1, V}, 3), W(f, {M, K}),
                 o(f, {1, T, 1, V});
    Context ctx(1);
    OrthogonalFeatures(ctx, seed, {}, W.view());
    Inputs in;
    in.q = q.view();
    in.k = k.view();
    in.v = v.view();
    in.projection = W.view();
    Options options;
    options.eps = 0;
    Forward(ctx, in, options, {o.view(), {}});
    double worst = 0;
    for (int64_t t = 0; t < T; ++t) {
      std::vector<double> sum(V, 0.0);
      double total = 0;
      for (int64_t s = 0; s < T; ++s) {
        double product = 0;
        for (int64_t i = 0; i < K; ++i) product += q.Get({0, t, 0, i}) * k.Get({0, s, 0, i});
        const double weight = std::exp(product / std::sqrt(static_cast<double>(K)));
        total += weight;
        for (int64_t i = 0; i < V; ++i) sum[static_cast<size_t>(i)] += weight * v.Get({0, s, 0, i});
      }
      for (int64_t i = 0; i < V; ++i) {
        worst = std::max(worst, std::abs(o.Get({0, t, 0, i}) - sum[static_cast<size_t>(i)] / total));
      }
    }
    return worst;
  };
  EXPECT_LT(error(16384, 5), 0.05);
  EXPECT_LT(error(16384, 5), error(64, 5) / 4);
}

TEST(Performer, WorkspaceIsWhatIsReservedAndWithinTheFormula) {
  for (const bool causal : {true, false}) {
    Call call(2, 300, 2, 2);
    call.options.causal = causal;
    for (const int threads : {1, 3}) {
      Context ctx(threads);
      const int64_t forward = Workspace(ctx, call.Views(), call.options);
      const int64_t backward = BackwardWorkspace(ctx, call.Views(), call.options);
      const int64_t K = 32, V = 48, M = 64, blocks = (300 + 63) / 64, few = 8 << 10;
      EXPECT_LE(forward, threads * (4 * (M * V + M * K + 64 * (3 * M + 2 * V + K)) + few));
      EXPECT_LE(
          backward,
          threads * (4 * (blocks * M * (V + 2) + 2 * M * (V + 1) + 3 * M * K + 64 * (8 * M + 4 * V + 2 * K)) + few) +
              8 * M * K + 2 * 4 * 2 * 300 * 2 * M);
      EXPECT_GT(forward, threads * 4 * Call::M * Call::V);
    }
  }
}

class PerformerMistakes : public testing::Test {
 protected:
  template <class F>
  static std::string MessageOf(const F& f) {
    try {
      f();
    } catch (const InvalidArgument& e) {
      return e.what();
    }
    return "no error";
  }
  std::string OfForward() {
    return MessageOf([&] { Forward(ctx_, in, call.options, call.Results()); });
  }

  Call call{1, 5, 1, 1};
  BackwardInputs in = call.Views();
  Context ctx_{1};
};

TEST_F(PerformerMistakes, AreNamed) {
  using testing::HasSubstr;
  in.projection = {};
  EXPECT_THAT(OfForward(), HasSubstr("performer::Forward: projection is absent"));
  in.projection = call.W.view().Slice(0, 0, 0);
  EXPECT_THAT(OfForward(), HasSubstr("projection has shape [0,20], expected [M, K = 20], M >= 1"));
  in.projection = call.W.view().Slice(1, 0, 19);
  EXPECT_THAT(OfForward(), HasSubstr("projection has shape [50,19]"));
  const Buffer wide(DType::kF64, {Call::M, Call::K});
  in.projection = wide.view();
  EXPECT_THAT(OfForward(), HasSubstr("projection has dtype f64, expected f32"));
  in = call.Views();
  in.initial.m = {};
  EXPECT_THAT(OfForward(), HasSubstr("initial_state.m is absent"));
  in = call.Views();
  in.d_final.m = call.m.view();
  EXPECT_THAT(MessageOf([&] { Backward(ctx_, in, call.options, call.GradientViews()); }),
              HasSubstr("d_state.m is given, expected none"));
  in = call.Views();
  Gradients out = call.GradientViews();
  out.projection = call.W.view();
  EXPECT_THAT(MessageOf([&] { Backward(ctx_, in, call.options, out); }), HasSubstr("dprojection"));
  call.options.eps = -1;
  EXPECT_THAT(OfForward(), HasSubstr("eps is -1, expected a finite number >= 0"));
  call.options = {};
  EXPECT_THAT(MessageOf([&] { Step(ctx_, {}, call.options, {}, {}); }), HasSubstr("causal is false"));
  EXPECT_THAT(OfForward(), HasSubstr("initial_state is given, expected none"));
}

}  // namespace
}  // namespace heed::performer
