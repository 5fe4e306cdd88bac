// AMX kernels, emulated, agree with the reference. heed/simd/amx_test.cc tests that the emulation has the hardware's
// bits; between products the two are compiled for different targets, whose logarithms differ in the last bit.
#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>

#include "heed/core/context.h"
#include "heed/core/dispatch.h"
#include "heed/harness/case.h"

namespace heed {
namespace {

// Removes a cap of HEED_ISA, which would exclude AMX.
class UncappedContext : public Context {
 public:
  UncappedContext() : Context(2) { set_isa("tiles"); }
};

void ExpectTheReference(const char* name, std::initializer_list<DType> dtypes) {
  const EmulateAmx tiles;
  const OpEntry op = FindOp(name);
  UncappedContext ctx;
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    const DType dtype = dtypes.begin()[seed % dtypes.size()];
    const Comparison result = Compare(op.random_case(dtype, seed), ctx);
    ASSERT_TRUE(result.ok) << name << ", seed " << seed << ": " << result.message;
  }
}

TEST(EmulatedAmxTiles, AgreeWithTheReference) {
  ExpectTheReference("attention", {DType::kBF16, DType::kF32, DType::kF16});
}

TEST(EmulatedAmxTiles, ChunksAgreeWithTheReference) {
  for (const char* name : {"linear_attention", "retention", "simple_gla", "ssd"}) {
    ExpectTheReference(name, {DType::kBF16});
  }
}

// Sizes that take chunks on a CPU with AMX, which random cases seldom reach.
TEST(EmulatedAmxTiles, LargeChunksAgreeWithTheReferenceEmulatedOrNot) {
  for (const char* name : {"retention", "simple_gla", "ssd"}) {
    const OpEntry op = FindOp(name);
    for (const int64_t D : {64, 80, 128}) {
      for (const char* pass : {"forward", "backward"}) {
        const Case c = op.make_case({{1, 200, 200, 2, 2, D, D}, DType::kBF16, 7, pass, ""});
        UncappedContext ctx;
        Comparison result = Compare(c, ctx);
        EXPECT_TRUE(result.ok) << name << " " << D << " " << pass << ": " << result.message;
        const EmulateAmx tiles;
        result = Compare(c, ctx);
        EXPECT_TRUE(result.ok) << name << " " << D << " " << pass << ": " << result.message;
      }
    }
  }
}

// Several units of keys, as the AMX pipeline takes them.
TEST(EmulatedAmxTiles, PipelinesApplyDecays) {
  const EmulateAmx tiles;
  const OpEntry attention = FindOp("attention");
  for (const char* pass : {"forward", "backward"}) {
    for (const int64_t D : {64, 128}) {
      UncappedContext ctx;
      const Case c = attention.make_case({{1, 300, 300, 2, 2, D, D}, DType::kBF16, 7, pass, "causal+log_decay=0.05"});
      const Comparison result = Compare(c, ctx);
      EXPECT_TRUE(result.ok) << D << " " << pass << ": " << result.message;
    }
  }
}

}  // namespace
}  // namespace heed
