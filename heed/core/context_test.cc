// Tests of Context's public interface. thread_pool_test.cc tests the pool behind it.
#include "heed/core/context.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/core/os.h"
#include "tests/environment.h"

namespace heed {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(ContextTest, ZeroThreadsMeansEveryUsableCpu) {
  EXPECT_EQ(Context().num_threads(), os::NumUsableCpus());
  EXPECT_EQ(Context(0).num_threads(), os::NumUsableCpus());
  EXPECT_EQ(Context(7).num_threads(), 7);
  EXPECT_EQ(Context(4096).num_threads(), 4096);
}

TEST(ContextTest, ThreadsOutsideTheRangeAreRejected) {
  for (const int threads : {-1, 4097, std::numeric_limits<int>::min()}) {
    EXPECT_THAT([&] { Context ctx(threads); },
                ThrowsMessage<InvalidArgument>("Context: threads is " + std::to_string(threads) +
                                               ", expected 0 (all CPUs) to 4096"));
  }
}

TEST(ContextTest, AnExecutorNeedsBothFunctions) {
  Executor executor = DefaultExecutor();
  executor.run = nullptr;
  EXPECT_THAT([&] { Context ctx(executor); },
              ThrowsMessage<InvalidArgument>(HasSubstr("executor lacks a function, expected num_threads and run")));
  executor = DefaultExecutor();
  executor.num_threads = nullptr;
  EXPECT_THROW(Context ctx(executor), InvalidArgument);
}

TEST(ContextTest, AnExecutorOfNoThreadsStillHasTheCaller) {
  Executor executor = DefaultExecutor();
  for (int (*threads)(void*) : {+[](void*) { return 0; }, +[](void*) { return -5; }}) {
    executor.num_threads = threads;
    EXPECT_EQ(Context(executor).num_threads(), 1);
  }
}

// The list of SIMD targets, AMX excluded.
std::vector<std::string> SimdTargets() {
  std::vector<std::string> names = AvailableTargets();
  std::erase(names, "tiles");
  return names;
}

TEST(ContextTest, EveryAvailableTargetCanBeTheCap) {
  Context ctx(1);
  for (const std::string& name : SimdTargets()) {
    ctx.set_isa(name);
    EXPECT_EQ(TargetName(ctx.allowed_targets()), name);
    const ScopedIsa isa(name.c_str());
    EXPECT_EQ(TargetName(Context(1).allowed_targets()), name);
    EXPECT_EQ(AmxOf(ctx.allowed_targets()), AmxUnit::kNone);
  }
  ctx.set_isa("tiles");
  EXPECT_EQ(ctx.allowed_targets(), kAllTargets);
  EXPECT_EQ(TargetName(ctx.allowed_targets()), SimdTargets().front());
  EXPECT_EQ(AmxOf(kAllTargets), os::HasAmx() ? AmxUnit::kHardware : AmxUnit::kNone);
  EXPECT_EQ(os::HasAmx(), os::WhyNoAmx().empty());
}

TEST(ContextTest, TargetsHaveTheNamesOfCompilersToo) {
  const std::vector<std::string> available = SimdTargets();
  Context ctx(1), other(1);
  for (const auto& [theirs, name] :
       {std::pair{"avx512", "AVX3"}, {"avx2", "AVX2"}, {"sse2", "SSE2"}, {"neon", "NEON"}}) {
    if (std::ranges::find(available, name) != available.end()) {
      ctx.set_isa(theirs);
      other.set_isa(name);
      EXPECT_EQ(ctx.allowed_targets(), other.allowed_targets());
    } else {
      EXPECT_THAT([&] { ctx.set_isa(theirs); },
                  ThrowsMessage<Unsupported>(HasSubstr("isa is '" + std::string(theirs) + "', available here")));
    }
  }
}

TEST(ContextTest, NoOrEmptyEnvironmentMeansNoCap) {
  for (const char* value : {static_cast<const char*>(nullptr), "", "tiles"}) {
    const ScopedIsa isa(value);
    EXPECT_EQ(Context(1).allowed_targets(), kAllTargets);
  }
}

TEST(ContextTest, ANameThatIsNoTargetIsRejectedWithTheList) {
  const std::string best = SimdTargets().front();
  Context ctx(1);
  ctx.set_isa(best);
  for (const char* name : {"avx999", "", "avx", "Avx2", " AVX2", "Unknown", "?"}) {
    const auto message = ThrowsMessage<InvalidArgument>(
        AllOf(HasSubstr("isa is '" + std::string(name) + "', expected one of: "), HasSubstr(best), HasSubstr("tiles")));
    EXPECT_THAT([&] { ctx.set_isa(name); }, message);
    if (*name != '\0') {
      const ScopedIsa isa(name);
      EXPECT_THAT([] { Context other(1); }, message);
      EXPECT_THAT([] { Context other(DefaultExecutor()); }, message);
    }
  }
  EXPECT_EQ(TargetName(ctx.allowed_targets()), best) << "kept after an error";
}

#if defined(__x86_64__)
TEST(ContextTest, ATargetThatThisBuildOrCpuLacksIsUnsupported) {
  const std::vector<std::string> available = AvailableTargets();
  Context ctx(1);
  for (const std::string name : {"SSSE3", "SSE4", "AVX3_SPR"}) {
    if (std::find(available.begin(), available.end(), name) != available.end()) {
      continue;
    }
    EXPECT_THAT([&] { ctx.set_isa(name); },
                ThrowsMessage<Unsupported>(
                    AllOf(HasSubstr("isa is '" + name + "', available here: "), HasSubstr(available.front()))));
    const ScopedIsa isa(name.c_str());
    EXPECT_THROW(Context(1), Unsupported);
  }
}
#endif

TEST(ContextTest, ScratchIsAlignedSeparateAndKept) {
  Context ctx(3);
  ctx.ReserveScratch(1000);
  std::vector<void*> memory;
  for (int worker = 0; worker < 3; ++worker) {
    memory.push_back(ctx.Scratch(worker));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.back()) % 128, 0u);
    std::memset(memory.back(), worker, 1000);
  }
  ctx.ReserveScratch(500);
  for (int worker = 0; worker < 3; ++worker) {
    EXPECT_EQ(ctx.Scratch(worker), memory[static_cast<size_t>(worker)]);
    for (int i = 0; i < 1000; ++i) {
      ASSERT_EQ(static_cast<char*>(ctx.Scratch(worker))[i], worker);
    }
  }
  ctx.ReserveScratch(100000);
  for (int worker = 0; worker < 3; ++worker) {
    std::memset(ctx.Scratch(worker), 1, 100000);
  }
}

TEST(ContextTest, NoScratchIsAlsoScratch) {
  Context ctx(2);
  ctx.ReserveScratch(0);
  EXPECT_NE(ctx.Scratch(0), nullptr);
  EXPECT_NE(ctx.Scratch(1), nullptr);
}

TEST(ContextTest, ScratchWorksAgainAfterItFailed) {
  Context ctx(2);
  EXPECT_THROW(ctx.ReserveScratch(INT64_MAX), std::bad_alloc);
  ctx.ReserveScratch(64);
  for (int worker = 0; worker < 2; ++worker) {
    ASSERT_NE(ctx.Scratch(worker), nullptr);
    std::memset(ctx.Scratch(worker), 1, 64);
  }
  EXPECT_THROW(ctx.ReserveScratch(INT64_MAX), std::bad_alloc);
  ctx.ReserveScratch(0);
  EXPECT_NE(ctx.Scratch(1), nullptr);
}

TEST(ContextTest, StrictIsOffByDefault) {
  Context ctx(1);
  EXPECT_FALSE(ctx.strict());
  ctx.set_strict(true);
  EXPECT_TRUE(ctx.strict());
}

}  // namespace
}  // namespace heed
