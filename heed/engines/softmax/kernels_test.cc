// The choice of a kernel: the best one that takes the problem, or an error that says why each one declines.
#include "heed/engines/softmax/kernels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/engines/softmax/forward/forward.h"

namespace heed::softmax {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

Problem Small(DType dtype) {
  Problem p;
  p.dtype = dtype;
  p.query_heads = p.key_heads = p.depth = p.value_depth = 1;
  return p;
}

TEST(KernelsTest, EveryDTypeButF64GetsMatrixTilesWhereTheseAre) {
  const EmulateAmx tiles;
  Context ctx(1);
  ctx.set_isa("tiles");  // lifts the cap of HEED_ISA
  if (kAmx.forward_passes(ctx).forward == nullptr) GTEST_SKIP() << "built without AMX";
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    Problem p = Small(dtype);
    EXPECT_EQ(Choose("op", ctx, p).name, std::string("softmax_tiles"));
    p.invariant = true;
    EXPECT_NE(Choose("op", ctx, p).name, std::string("softmax_tiles"));
  }
  EXPECT_EQ(Choose("op", ctx, Small(DType::kF64)).name, std::string("softmax_lanes_f64"));
}

// Restricts the context to the best SIMD target, without AMX.
Context& WithoutAmx(Context& ctx) {
  std::vector<std::string> targets = AvailableTargets(DType::kBF16);
  std::erase(targets, "tiles");
  ctx.set_isa(targets.front());
  return ctx;
}

TEST(KernelsTest, EveryDTypeGetsTheBestKernelThatTheContextAllows) {
  Context context(1);
  Context& ctx = WithoutAmx(context);
  const auto chosen = [&](DType dtype) { return std::string(Choose("op", ctx, Small(dtype)).name); };
  EXPECT_EQ(chosen(DType::kF64), "softmax_lanes_f64");
  EXPECT_EQ(chosen(DType::kF32), "softmax_lanes_f32");
  EXPECT_EQ(chosen(DType::kF16), "softmax_lanes_f32");
  EXPECT_EQ(chosen(DType::kBF16), HasBF16Pairs(kAllTargets) ? "softmax_pairs_bf16" : "softmax_lanes_f32");
  for (const std::string& target : AvailableTargets(DType::kF32)) {
    if (target == "tiles" || target == "AVX3_ZEN4" || target == "AVX3_SPR") continue;
    ctx.set_isa(target);
    EXPECT_EQ(chosen(DType::kBF16), "softmax_lanes_f32") << target;
  }
}

TEST(KernelsTest, Int8KeysGetProductsOfBytesWhereTheCPUHasThem) {
  Context ctx(1);
  ctx.set_isa("tiles");
  Problem p = Small(DType::kF32);
  p.quantized = true;
  const auto chosen = [&] { return std::string(Choose("op", ctx, p).name); };
  EXPECT_EQ(chosen(), HasByteProducts(kAllTargets) ? "softmax_decode_int8_bytes" : "softmax_decode_int8");
  p.depth = kMostByteChannels + 1;
  EXPECT_EQ(chosen(), "softmax_decode_int8");
  p.depth = 1;
  {
    const EmulateAmx tiles;
    p.query_heads = kFewestAmxHeads;
    const bool compiled = kAmx.forward_passes(ctx).forward != nullptr;  // AMX is emulated on x86 alone
    EXPECT_EQ(chosen() == "softmax_decode_int8_tiles", compiled);
    p.query_heads = kFewestAmxHeads - 1;
    EXPECT_NE(chosen(), "softmax_decode_int8_tiles");
  }
  for (const std::string& target : AvailableTargets(DType::kF32)) {
    if (target == "tiles" || target == "AVX3_DL" || target == "AVX3_ZEN4" || target == "AVX3_SPR") continue;
    ctx.set_isa(target);
    EXPECT_EQ(chosen(), "softmax_decode_int8") << target;
  }
}

TEST(KernelsTest, FewRowsOfAKeyHeadAreDecoded) {
  Context context(1);
  Context& ctx = WithoutAmx(context);
  const auto chosen = [&](int64_t num_queries, int64_t group) {
    Problem p = Small(DType::kF32);
    p.query_heads = group;
    Sequence s;
    s.num_queries = s.query_end = num_queries;
    s.num_keys = s.key_end = 100;
    p.sequences = {s, s};
    p.sequences[0].num_queries = 1;
    return std::string(Choose("op", ctx, p).name);
  };
  const int64_t most = std::min<int64_t>(kDecodeRows, kDecodeF32.lanes(ctx, Small(DType::kF32)));
  EXPECT_EQ(chosen(1, 1), "softmax_decode_f32");
  EXPECT_EQ(chosen(1, most), "softmax_decode_f32");
  EXPECT_EQ(chosen(most, 1), "softmax_decode_f32");
  EXPECT_EQ(chosen(most, 2), "softmax_lanes_f32");
  EXPECT_EQ(chosen(most + 1, 1), "softmax_lanes_f32");
}

TEST(KernelsTest, ADTypeWithoutAKernelIsUnsupportedForReasonsThatAreNamed) {
  const Context ctx(1);
  EXPECT_THAT([&] { Choose("the::Op", ctx, Small(DType::kI32)); },
              ThrowsMessage<Unsupported>(AllOf(HasSubstr("the::Op: no kernel"),
                                               HasSubstr("softmax_pairs_bf16 computes bf16, not i32"),
                                               HasSubstr("softmax_lanes_f32 computes f32, bf16 and f16, not i32"),
                                               HasSubstr("softmax_lanes_f64 computes f64, not i32"))));
}

TEST(KernelsTest, TheTargetIsTheOneThatTheContextAllows) {
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
    for (const std::string& target : AvailableTargets(dtype)) {
      Context ctx(1);
      ctx.set_isa(target);
      const Problem p = Small(dtype);
      const Kernel& kernel = Choose("op", ctx, p);
      EXPECT_EQ(kernel.target(ctx), target);
      EXPECT_GE(kernel.lanes(ctx, p), 1);
      EXPECT_GT(kernel.workspace(ctx, p), 0);
      EXPECT_EQ(kernel.declines(ctx, p), "");
    }
  }
}

}  // namespace
}  // namespace heed::softmax
