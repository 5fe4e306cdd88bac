// SSD against related mechanisms, reproducibility, memory and errors.
#include "heed/ops/ssm/ssd/ssd.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/ops/gated/simple_gla/simple_gla.h"

namespace heed::ssd {
namespace {

bool SameBits(const Buffer& a, const Buffer& b) {
  const TensorView& x = a.view();
  return std::memcmp(x.data(), b.view().data(), static_cast<size_t>(x.num_elements()) * SizeOf(x.dtype())) == 0;
}

double Value(const TensorView& t, const std::vector<int64_t>& index) { return GetElement(t, index); }

class SsdTest : public testing::Test {
 protected:
  static constexpr int64_t B = 2, T = 150, H = 6, G = 2, P = 20, N = 24;

  SsdTest() {
    for (int64_t h = 0; h < H; ++h) A.Set({h}, -0.5 * static_cast<double>(h + 1));
    dt_bias.FillConstant(-2);
    in.x = x.view();
    in.dt = dt.view();
    in.A = A.view();
    in.B = b.view();
    in.C = c.view();
    in.D = D.view();
    in.z = z.view();
    in.dt_bias = dt_bias.view();
    options.dt_softplus = true;
  }
  Buffer Normal(std::initializer_list<int64_t> sizes) { return Buffer(DType::kF32, sizes).FillNormal(++seed_); }
  struct Result {
    Buffer o, state, dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial;
  };
  Result Both(int threads, const Inputs& inputs) {
    Context ctx(threads);
    const DType f = DType::kF32;
    Result r = {Buffer(f, {B, T, H, P}), Buffer(f, {B, H, P, N}), Buffer(f, {B, T, H, P}), Buffer(f, {B, T, H}),
                Buffer(f, {H}),          Buffer(f, {B, T, G, N}), Buffer(f, {B, T, G, N}), Buffer(f, {H, P}),
                Buffer(f, {B, T, H, P}), Buffer(f, {H}),          Buffer(f, {B, H, P, N})};
    Forward(ctx, inputs, options, {r.o.view(), {r.state.view()}});
    Backward(ctx, {inputs, d_o.view(), {}}, options,
             {{r.dx.view(), r.ddt.view(), r.dA.view(), r.dB.view(), r.dC.view(), r.dD.view(), r.dz.view(),
               r.ddt_bias.view()},
              {r.dinitial.view()}});
    return r;
  }

  uint64_t seed_ = 0;
  const Buffer x = Normal({B, T, H, P}), dt = Normal({B, T, H}), b = Normal({B, T, G, N}), c = Normal({B, T, G, N}),
               D = Normal({H, P}), z = Normal({B, T, H, P}), d_o = Normal({B, T, H, P}), A = Normal({H}),
               dt_bias = Normal({H});
  Inputs in;
  Options options;
  Context ctx_{2};
};

TEST_F(SsdTest, WithoutSoftplusSkipAndGateItIsSimpleGla) {
  const Buffer g(DType::kF32, {B, T, H}), v(DType::kF32, {B, T, H, P});
  const Buffer steps(DType::kF32, {B, T, H});
  for (int64_t i = 0; i < B * T * H; ++i) {
    const float delta = std::exp(dt.view().as<float>()[i] - 2);
    steps.view().as<float>()[i] = delta;
    g.view().as<float>()[i] = delta * A.view().as<float>()[i % H];
    for (int64_t p = 0; p < P; ++p) {
      v.view().as<float>()[i * P + p] = delta * x.view().as<float>()[i * P + p];
    }
  }
  Inputs plain;
  plain.x = x.view();
  plain.dt = steps.view();
  plain.A = A.view();
  plain.B = b.view();
  plain.C = c.view();
  const Buffer o(DType::kF32, {B, T, H, P}), expected(DType::kF32, {B, T, H, P});
  const Buffer state(DType::kF32, {B, H, P, N}), last(DType::kF32, {B, H, N, P});
  Forward(ctx_, plain, {}, {o.view(), {state.view()}});
  simple_gla::Options same;
  same.scale = 1;
  simple_gla::Forward(ctx_, {c.view(), b.view(), v.view(), g.view()}, same, {expected.view(), {last.view()}});
  EXPECT_TRUE(SameBits(o, expected));
  EXPECT_EQ(Value(state.view(), {1, 2, 3, 4}), Value(last.view(), {1, 2, 4, 3}));
}

TEST_F(SsdTest, BitsDoNotDependOnThreads) {
  const Result one = Both(1, in), three = Both(3, in);
  EXPECT_TRUE(SameBits(one.o, three.o));
  EXPECT_TRUE(SameBits(one.state, three.state));
  EXPECT_TRUE(SameBits(one.dx, three.dx));
  EXPECT_TRUE(SameBits(one.ddt, three.ddt));
  EXPECT_TRUE(SameBits(one.dA, three.dA));
  EXPECT_TRUE(SameBits(one.dB, three.dB));
  EXPECT_TRUE(SameBits(one.dC, three.dC));
  EXPECT_TRUE(SameBits(one.dD, three.dD));
  EXPECT_TRUE(SameBits(one.dz, three.dz));
  EXPECT_TRUE(SameBits(one.ddt_bias, three.ddt_bias));
  EXPECT_TRUE(SameBits(one.dinitial, three.dinitial));
}

TEST_F(SsdTest, ASplitAtABlockHasTheBitsOfTheWhole) {
  const Buffer whole(DType::kF32, {B, T, H, P}), parts(DType::kF32, {B, T, H, P});
  const Buffer last(DType::kF32, {B, H, P, N}), state(DType::kF32, {B, H, P, N}), end(DType::kF32, {B, H, P, N});
  Forward(ctx_, in, options, {whole.view(), {last.view()}});
  const auto tokens = [&](int64_t begin, int64_t stop) {
    Inputs part = in;
    for (ConstTensorView* t : {&part.x, &part.dt, &part.B, &part.C, &part.z}) {
      *t = t->Slice(1, begin, stop);
    }
    return part;
  };
  Forward(ctx_, tokens(0, 64), options, {parts.view().Slice(1, 0, 64), {state.view()}});
  Inputs rest = tokens(64, T);
  rest.initial.S = state.view();
  Forward(ctx_, rest, options, {parts.view().Slice(1, 64, T), {end.view()}});
  EXPECT_TRUE(SameBits(parts, whole));
  EXPECT_TRUE(SameBits(end, last));
}

TEST_F(SsdTest, MemoryIsWhatTheFormulasSay) {
  const auto threads = static_cast<int64_t>(ctx_.num_threads());
  const int64_t rows_n = 32, rows_p = 32, tokens = B * T * H;  // whole vectors of AVX-512
  EXPECT_LE(Workspace(ctx_, in, options),
            threads * 4 * (rows_n * rows_p + 64 * (3 * rows_n + 3 * rows_p)) + 2 * 4 * tokens + 8192);
  EXPECT_LE(BackwardWorkspace(ctx_, in, options),
            threads * 4 * ((3 + 2) * rows_n * rows_p + 64 * (9 * rows_n + 3 * rows_p)) + 4 * tokens * (2 * P + 3 + 1) +
                2 * 4 * B * T * G * rows_n + 32768);
}

TEST_F(SsdTest, AGradientMayNotLieWhereTheOneOfTheStateIsRead) {
  const Buffer both(DType::kF32, {B, T, H, P});
  both.FillConstant(7);
  const ConstTensorView d_state(both.view().data(), DType::kF32, {B, H, P, N});
  EXPECT_THAT([&] { Backward(ctx_, {in, d_o.view(), {d_state}}, options, {{both.view()}, {}}); },
              testing::ThrowsMessage<InvalidArgument>(
                  testing::HasSubstr("ssd::Backward: dx overlaps d_state, expected memory of its own")));
  EXPECT_EQ(both.Get({1, 149, 5, 19}), 7);
}

TEST_F(SsdTest, BadInputIsNamedAndNothingIsWritten) {
  const Buffer o(DType::kF32, {B, T, H, P});
  o.FillConstant(7);
  const auto message = [&](const Inputs& inputs, const Options& call, const Outputs& out) {
    try {
      Forward(ctx_, inputs, call, out);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  Inputs bad = in;
  bad.dt = A.view();
  EXPECT_THAT(message(bad, options, {o.view(), {}}),
              testing::HasSubstr("ssd::Forward: dt has shape [6], expected [2,150,6]"));
  bad = in;
  bad.B = z.view();
  EXPECT_THAT(message(bad, options, {o.view(), {}}), testing::HasSubstr("B has shape"));
  bad = in;
  bad.D = dt.view();
  EXPECT_THAT(message(bad, options, {o.view(), {}}), testing::HasSubstr("D has shape"));
  EXPECT_THAT(message(in, options, {z.view(), {}}), testing::HasSubstr("o"));
  Options limits = options;
  limits.dt_min = 2;
  limits.dt_max = 1;
  EXPECT_THAT(message(in, limits, {o.view(), {}}),
              testing::HasSubstr("dt_limit ends with 1, expected at least its begin, 2"));
  limits.dt_max = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(message(in, limits, {o.view(), {}}), testing::HasSubstr("dt_limit ends"));
  const Buffer growing(DType::kF32, {H});
  growing.FillConstant(0.5);
  bad = in;
  bad.A = growing.view();
  ctx_.set_checks(true);
  EXPECT_THAT(message(bad, options, {o.view(), {}}), testing::HasSubstr("dt gives a log decay delta A of"));
  for (int64_t i = 0; i < B * T * H * P; ++i) ASSERT_EQ(o.view().as<float>()[i], 7);
  ctx_.set_checks(false);
  EXPECT_EQ(message(bad, options, {o.view(), {}}), "no error");
  EXPECT_TRUE(std::isfinite(o.view().as<float>()[B * T * H * P - 1]));
}

TEST_F(SsdTest, TokensThatDoNotCountHaveNothing) {
  const int64_t lengths[] = {100, 150}, starts[] = {30, 0};
  options.lengths = {lengths, DType::kI64, {B}};
  options.starts = {starts, DType::kI64, {B}};
  const Result r = Both(2, in);
  for (const int64_t t : {0, 29, 100, 149}) {
    for (const Buffer* of : {&r.o, &r.dx, &r.dz}) {
      EXPECT_EQ(Value(of->view(), {0, t, 3, 7}), 0);
      EXPECT_NE(Value(of->view(), {1, t, 3, 7}), 0);
    }
    EXPECT_EQ(Value(r.ddt.view(), {0, t, 3}), 0);
    EXPECT_EQ(Value(r.dB.view(), {0, t, 1, 7}), 0);
  }
}

}  // namespace
}  // namespace heed::ssd
