// A build with HEED_TARGETS=native: which targets it names, and how it refuses others and CPUs that lack its own. The
// choice of a target is compiled into this program once more, for AVX2 alone; the rest of the library is that of the
// build.
#include "heed/core/targets.h"
// After targets.h:
#include "hwy/highway.h"

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "heed/core/context.h"
#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/core/os.h"

namespace heed {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

static_assert(HWY_TARGETS == HWY_AVX2 && HWY_STATIC_TARGET == HWY_AVX2);

class NativeTargetsTest : public testing::Test {
 protected:
  void SetUp() override {
    if ((hwy::SupportedTargets() & HWY_AVX2) == 0) GTEST_SKIP() << "this CPU lacks AVX2";
  }
};

TEST_F(NativeTargetsTest, AreTheOnlyOnesThatAreNamed) {
  EXPECT_STREQ(TargetsOption(), "native");
  EXPECT_THAT(CompiledTargets(), ElementsAre("AVX2"));
  EXPECT_THAT(AvailableTargets(DType::kF64), ElementsAre("AVX2"));
  EXPECT_FALSE(HasBF16Pairs(kAllTargets));
  EXPECT_FALSE(HasByteProducts(kAllTargets));
}

TEST_F(NativeTargetsTest, AreTheFirstOfATableWithoutOthers) {
  Context ctx(1);
  EXPECT_EQ(TargetIndex(ctx.allowed_targets()), 0u);
  ctx.set_isa("avx2");
  EXPECT_STREQ(TargetName(ctx.allowed_targets()), "AVX2");
  EXPECT_EQ(TargetIndex(ctx.allowed_targets()), 0u);
}

TEST_F(NativeTargetsTest, AreNamedWhereACapExcludesThem) {
  Context ctx(1);
  for (const char* other : {"sse2", "avx512", "AVX3_ZEN4"}) {
    EXPECT_THAT([&] { ctx.set_isa(other); },
                ThrowsMessage<Unsupported>(AllOf(HasSubstr("isa is '" + std::string(other) + "', available here: AVX2"),
                                                 HasSubstr("HEED_TARGETS=native"))));
  }
}

// The CPU is asked once per process, so this needs a process of its own.
TEST(NativeTargetsDeathTest, ACpuThatLacksThemIsRefused) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto refusal = [] {
    hwy::SetSupportedTargetsForTest(HWY_SSE2);
    try {
      Context ctx(1);
    } catch (const Unsupported& e) {
      std::fputs(e.what(), stderr);
      std::exit(3);
    }
  };
  EXPECT_EXIT(refusal(), testing::ExitedWithCode(3),
              "heed was built with HEED_TARGETS=native, for AVX2, which this CPU lacks");
}

}  // namespace
}  // namespace heed
