// Properties of efficient attention: masks, reproducibility, memory, errors.
#include "heed/ops/linear/efficient_attention/efficient_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"

namespace heed::efficient_attention {
namespace {

bool SameBits(const Buffer& a, const Buffer& b) {
  const TensorView& x = a.view();
  return std::memcmp(x.data(), b.view().data(), static_cast<size_t>(x.num_elements()) * SizeOf(x.dtype())) == 0;
}

class EfficientAttentionTest : public testing::Test {
 protected:
  static constexpr int64_t B = 2, T = 150, H = 2, HV = 6, K = 24, V = 20;

  EfficientAttentionTest() {
    in.q = q.view();
    in.k = k.view();
    in.v = v.view();
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t t = 0; t < T; ++t) mask.Set({b, t}, (t + b) % 3 == 0 ? 0 : 1);
    }
    in.kv_mask = mask.view();
  }
  Buffer Normal(std::initializer_list<int64_t> sizes) { return Buffer(DType::kF32, sizes).FillNormal(++seed_); }
  struct Result {
    Buffer o, dq, dk, dv;
  };
  Result Both(int threads) const {
    Context ctx(threads);
    const DType f = DType::kF32;
    Result r = {Buffer(f, {B, T, HV, V}), Buffer(f, {B, T, H, K}), Buffer(f, {B, T, H, K}), Buffer(f, {B, T, HV, V})};
    Forward(ctx, in, options, {r.o.view(), {}});
    BackwardInputs all;
    static_cast<Inputs&>(all) = in;
    all.d_o = d_o.view();
    Gradients out;
    out.q = r.dq.view();
    out.k = r.dk.view();
    out.v = r.dv.view();
    Backward(ctx, all, options, out);
    return r;
  }

  uint64_t seed_ = 0;
  const Buffer q = Normal({B, T, H, K}), k = Normal({B, T, H, K}), v = Normal({B, T, HV, V}),
               d_o = Normal({B, T, HV, V}), mask{DType::kBool, {B, T}};
  Inputs in;
  Options options;
  Context ctx_{2};
};

TEST_F(EfficientAttentionTest, BitsDoNotDependOnThreads) {
  const Result one = Both(1), five = Both(5);
  EXPECT_TRUE(SameBits(one.o, five.o));
  EXPECT_TRUE(SameBits(one.dq, five.dq));
  EXPECT_TRUE(SameBits(one.dk, five.dk));
  EXPECT_TRUE(SameBits(one.dv, five.dv));
}

TEST_F(EfficientAttentionTest, WhatTheMaskLeavesOutMayHoldAnythingAndGetsNothing) {
  const Result before = Both(2);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int64_t t = 0; t < T; t += 3) {
    for (int64_t i = 0; i < H * K; ++i) k.view().as<float>()[t * H * K + i] = nan;
    for (int64_t i = 0; i < HV * V; ++i) v.view().as<float>()[t * HV * V + i] = nan;
  }
  const Result after = Both(2);
  EXPECT_TRUE(SameBits(before.o, after.o));
  EXPECT_TRUE(SameBits(before.dq, after.dq));
  EXPECT_TRUE(SameBits(before.dk, after.dk));
  EXPECT_TRUE(SameBits(before.dv, after.dv));
  EXPECT_EQ(after.dk.view().as<float>()[0], 0);
  EXPECT_EQ(after.dv.view().as<float>()[0], 0);
  EXPECT_NE(after.dk.view().as<float>()[H * K], 0);
}

TEST_F(EfficientAttentionTest, LargeKeysDoNotOverflow) {
  for (int64_t i = 0; i < B * T * H * K; ++i) k.view().as<float>()[i] *= 1000;
  const Result r = Both(2);
  for (int64_t i = 0; i < B * T * HV * V; ++i) {
    ASSERT_TRUE(std::isfinite(r.o.view().as<float>()[i]));
    ASSERT_TRUE(std::isfinite(r.dv.view().as<float>()[i]));
  }
}

TEST(EfficientAttention, OneChannelOfAQueryHasNoGradient) {  // the softmax over one channel is 1
  constexpr int64_t T = 70;
  const auto tensor = [](int64_t channels, uint64_t seed) {
    return Buffer(DType::kF32, {1, T, 1, channels}).FillNormal(seed);
  };
  const Buffer q = tensor(1, 1), k = tensor(1, 2), v = tensor(5, 3), d_o = tensor(5, 4), dq = tensor(1, 5);
  BackwardInputs in;
  in.q = q.view();
  in.k = k.view();
  in.v = v.view();
  in.d_o = d_o.view();
  Options options;
  options.scale = 0.4;
  Gradients out;
  out.q = dq.view();
  Context ctx(1);
  Backward(ctx, in, options, out);
  for (int64_t t = 0; t < T; ++t) ASSERT_EQ(dq.Get({0, t, 0, 0}), 0) << "token " << t;
}

TEST_F(EfficientAttentionTest, MemoryIsWhatTheFormulasSay) {
  const int64_t threads = ctx_.num_threads(), rows = 32;  // whole vectors of AVX-512
  EXPECT_LE(Workspace(ctx_, in, options), threads * 4 * (rows * rows + 64 * 4 * rows) + threads * 8192);
  EXPECT_LE(BackwardWorkspace(ctx_, in, options),
            threads * 4 * (3 * rows * rows + 2 * rows * (rows + 1) + 64 * 8 * rows) + threads * 8192 +
                2 * 4 * B * T * H * rows + 16384);
}

TEST_F(EfficientAttentionTest, BadInputIsNamedAndNothingIsWritten) {
  const Buffer o(DType::kF32, {B, T, HV, V});
  o.FillConstant(7);
  const auto message = [&](const Inputs& call, const Options& with, const TensorView& to) {
    try {
      Forward(ctx_, call, with, {to, {}});
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  Options reversed = options;
  reversed.reverse = true;
  EXPECT_THAT(message(in, reversed, o.view()),
              testing::HasSubstr("efficient_attention::Forward: reverse is true, expected false"));
  Inputs bad = in;
  const Buffer floats(DType::kF32, {B, T});
  bad.kv_mask = floats.view();
  EXPECT_THAT(message(bad, options, o.view()), testing::HasSubstr("kv_mask has dtype f32, expected bool"));
  bad.kv_mask = q.view();
  EXPECT_THAT(message(bad, options, o.view()),
              testing::HasSubstr("kv_mask has shape [2,150,2,24], expected rank 2: [B, T]"));
  bad.kv_mask = mask.view().Slice(1, 0, 7);
  EXPECT_THAT(message(bad, options, o.view()), testing::HasSubstr("kv_mask has shape [2,7], expected [2,150]"));
  EXPECT_THAT(message(in, options, TensorView(mask.view().data(), DType::kF32, o.view().sizes())),
              testing::HasSubstr("o overlaps kv_mask"));
  for (int64_t i = 0; i < B * T * HV * V; ++i) ASSERT_EQ(o.view().as<float>()[i], 7);
}

}  // namespace
}  // namespace heed::efficient_attention
