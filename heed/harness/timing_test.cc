// Timing and probes: properties that hold on any machine.
#include "heed/harness/timing.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/harness/probe.h"

namespace heed {
namespace {

TEST(TimingTest, QuartilesLieBetweenSortedValues) {
  const Quartiles q = Summarize({4, 1, 3, 2, 5});
  EXPECT_EQ(q.q1, 2);
  EXPECT_EQ(q.median, 3);
  EXPECT_EQ(q.q3, 4);
  EXPECT_EQ(Summarize({1, 2}).median, 1.5);
  EXPECT_EQ(Summarize({7}).q3, 7);
  EXPECT_TRUE(std::isnan(Summarize({}).median));
}

TEST(TimingTest, CpuTimeOfOneThreadIsAlwaysClean) {
  int calls = 0;
  const Sample sample = TimeClean(1, [&] { ++calls; });
  EXPECT_TRUE(sample.clean);
  EXPECT_GE(sample.seconds, 0);
  EXPECT_EQ(calls, 1);
}

TEST(TimingTest, WallTimeIsTakenAtMostSoManyTimes) {
  int calls = 0;
  const Sample sample = TimeClean(2, [&] { ++calls; }, 3);
  EXPECT_TRUE(std::isfinite(sample.seconds));
  EXPECT_GE(calls, 1);
  EXPECT_LE(calls, 3);
}

TEST(ProbeTest, EveryTargetHasARoof) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    for (const std::string& name : AvailableTargets(dtype)) {
      const int64_t targets = TargetsUpTo(name);
      EXPECT_GT(probe::PeakFlopsPerSecond(dtype, targets, 1), 1e7) << name;
      if (SizeOf(dtype) < 4) continue;
      EXPECT_GT(probe::Exp2PerSecond(dtype, targets, 1), 1e6) << name;
    }
  }
}

TEST(ProbeTest, ExponentialsOfSixteenBitsAreUnsupported) {
  EXPECT_THROW(probe::Exp2PerSecond(DType::kF16), Unsupported);
}

TEST(ProbeTest, ReadsWithAnyNumberOfThreadsAndOddSizes) {
  const std::vector<uint64_t> words((1 << 18) + 3, 1);
  for (const int threads : {1, 2, 5}) {
    Context ctx(threads);
    EXPECT_GT(probe::ReadBytesPerSecond(ctx, words.data(), 8 * words.size(), 1), 1e6);
  }
}

}  // namespace
}  // namespace heed
