// Random combinations of sizes, layouts and options agree with the reference, on every SIMD target. HEED_TEST_SEEDS
// sets their number per mechanism, and HEED_TEST_FIRST_SEED the first seed; a failure prints the seed and the case.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/harness/case.h"
#include "tests/environment.h"

namespace heed {
namespace {

class RandomOptions : public testing::TestWithParam<OpEntry> {};

TEST_P(RandomOptions, AgreeWithTheReference) {
  const OpEntry& op = GetParam();
  const int64_t seeds = FromEnvironment("HEED_TEST_SEEDS", 600);
  const int64_t first = FromEnvironment("HEED_TEST_FIRST_SEED", 1);

  struct Worst {
    double max_error = 0;  // of the first output
    Comparison closest;    // to its tolerance
    int64_t seed = 0;
  };
  std::map<std::pair<std::string, std::string>, Worst> table;
  int failures = 0;
  for (int64_t n = 0; n < seeds && failures < 20; ++n) {
    // The best target comes first; each dtype is combined with each target.
    const uint64_t seed = static_cast<uint64_t>(first + n);
    const DType dtype = op.dtypes[seed % op.dtypes.size()];
    const std::vector<std::string> targets = AvailableTargets(dtype);
    const std::string& target = targets[seed / op.dtypes.size() % targets.size()];
    Context ctx(1 + static_cast<int>(seed / 7 % 3));
    ctx.set_isa(target);
    const Case c = op.random_case(dtype, seed);
    const Comparison result = Compare(c, ctx);
    if (!result.ok) {
      ++failures;
      ADD_FAILURE() << op.name << " " << Name(dtype) << " on " << target << " seed " << seed << ": " << result.message;
      continue;
    }
    Worst& worst = table[{Name(dtype), target}];
    worst.max_error = std::max(worst.max_error, result.max_errors[0]);
    if (result.worst_ratio > worst.closest.worst_ratio) {
      worst.closest = result;
      worst.seed = static_cast<int64_t>(seed);
    }
  }
  std::printf("%lld seeds of %s from %lld\n", static_cast<long long>(seeds), op.name.c_str(),
              static_cast<long long>(first));
  for (const auto& [key, worst] : table) {
    std::printf(
        "  %-4s %-8s largest error of the first output %.3g; closest to its "
        "bound: %.3g of %.3g (%.0f %%), %s, seed %lld\n",
        key.first.c_str(), key.second.c_str(), worst.max_error, worst.closest.error, worst.closest.tolerance,
        100 * worst.closest.worst_ratio, worst.closest.where.c_str(), static_cast<long long>(worst.seed));
    char ratio[32];
    std::snprintf(ratio, sizeof(ratio), "%.4f", worst.closest.worst_ratio);
    RecordProperty(key.first + "_" + key.second + "_of_bound", ratio);
  }
}

INSTANTIATE_TEST_SUITE_P(AllOps, RandomOptions, testing::ValuesIn(AllOps()),
                         [](const auto& value) { return value.param.name; });

}  // namespace

// Found by name lookup: prints the parameter of a test.
void PrintTo(const OpEntry& op, std::ostream* os) { *os << op.name; }

}  // namespace heed
