// The choice of a kernel: the right one, or an error that says why each declined.
#include "heed/engines/softmax/kernels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"

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

TEST(KernelsTest, EveryDTypeWithAKernelGetsItsOwn) {
  const Context ctx(1);
  EXPECT_STREQ(Choose("op", ctx, Small(DType::kF32)).name, "softmax_lanes_f32");
  EXPECT_STREQ(Choose("op", ctx, Small(DType::kF64)).name, "softmax_lanes_f64");
}

TEST(KernelsTest, ADTypeWithoutAKernelIsUnsupportedForReasonsThatAreNamed) {
  const Context ctx(1);
  EXPECT_THAT([&] { Choose("the::Op", ctx, Small(DType::kBF16)); },
              ThrowsMessage<Unsupported>(
                  AllOf(HasSubstr("the::Op: no kernel"),
                        HasSubstr("softmax_lanes_f32 computes f32, not bf16"),
                        HasSubstr("softmax_lanes_f64 computes f64, not bf16"))));
}

TEST(KernelsTest, TheTargetIsTheOneThatTheContextAllows) {
  for (const std::string& target : AvailableTargets()) {
    Context ctx(1);
    ctx.set_isa(target);
    for (const DType dtype : {DType::kF32, DType::kF64}) {
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
