// Every mechanism agrees with its reference: on every SIMD target that this CPU has, for every dtype, at sizes that are
// multiples of nothing; then every pair of options at one size. random_options_test.cc has random combinations.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/harness/case.h"

namespace heed {
namespace {

constexpr Sizes kSizes[] = {
    // B, Tq, Tk, Hq, Hkv, D, Dv
    {1, 1, 1, 1, 1, 1, 1},                                   // smallest
    {1, 1, 2, 2, 1, 3, 1},                                   //
    {2, 1, 97, 4, 1, 64, 64},                                // one decoding step, grouped heads
    {1, 1, 1025, 8, 1, 80, 40},                              // a decoding step past two segments of 512 keys
    {2, 7, 9, 3, 3, 20, 36},                                 // nothing is a multiple of a vector
    {1, 3, 5, 1, 1, 40, 3},      {1, 15, 16, 1, 1, 8, 8},    // a vector of f32, and one less
    {1, 16, 17, 1, 1, 16, 17},   {1, 17, 15, 1, 1, 17, 16},  // more queries than keys
    {1, 31, 63, 1, 1, 31, 33},                               // about a tile
    {1, 32, 64, 4, 2, 40, 40},   {1, 33, 65, 2, 2, 3, 40},    {1, 63, 127, 1, 1, 64, 1},
    {1, 64, 128, 1, 1, 1, 64},   {1, 65, 129, 1, 1, 13, 7},   {3, 19, 43, 5, 1, 11, 29},   // primes
    {1, 127, 127, 1, 1, 80, 80}, {1, 128, 64, 1, 1, 64, 64},  {1, 61, 511, 1, 1, 24, 24},  // about a segment
    {1, 64, 512, 1, 1, 16, 40},  {1, 13, 513, 4, 1, 40, 80},  {1, 66, 514, 1, 1, 7, 5},
    {1, 40, 1023, 1, 1, 9, 9},  // about two
    {1, 21, 1024, 1, 1, 12, 20}, {1, 22, 1025, 2, 1, 20, 12}, {1, 37, 70, 1, 1, 128, 128},
    {1, 20, 67, 8, 1, 192, 128},  // one key head for all
    {1, 35, 33, 1, 1, 256, 256}, {1, 9, 70, 2, 2, 192, 256},
};

constexpr Sizes kManyHeads = {5, 1, 3, 7, 7, 72, 72};  // each thread processes several steps in a row

constexpr const char* kVariants[] = {"", "causal", "mask", "causal+bias+bhtd"};
constexpr Sizes kGridSizes = {1, 70, 150, 4, 2, 40, 24};

// True if a mechanism has all words of a variant.
bool Knows(const OpEntry& op, const std::string& variant) {
  for (size_t begin = 0; begin < variant.size();) {
    const size_t end = std::min(variant.find('+', begin), variant.size());
    const std::string word = variant.substr(begin, end - begin);
    if (std::find(op.variants.begin(), op.variants.end(), word) == op.variants.end()) {
      return false;
    }
    begin = end + 1;
  }
  return true;
}

struct Combination {
  const OpEntry& op;
  DType dtype;
};

void PrintTo(const Combination& c, std::ostream* os) { *os << c.op.name << " " << Name(c.dtype); }

std::vector<Combination> Combinations(const std::string& pass = "forward") {
  std::vector<Combination> all;
  for (const OpEntry& op : AllOps()) {
    if (std::find(op.passes.begin(), op.passes.end(), pass) == op.passes.end()) continue;
    for (const DType dtype : op.dtypes) all.push_back({op, dtype});
  }
  return all;
}

class Conformance : public testing::TestWithParam<Combination> {
 protected:
  void Check(const Sizes& sizes, const std::string& variant, const std::string& pass = "forward") {
    const Case c = GetParam().op.make_case(
        {.sizes = sizes, .dtype = GetParam().dtype, .seed = 42, .pass = pass, .variant = variant});
    const Expected expected = ExpectedOf(c);  // computed once for all targets, because it takes longer than they do
    for (const std::string& target : AvailableTargets(GetParam().dtype)) {
      ctx_.set_isa(target);
      const Comparison result = Compare(c, ctx_, expected);
      EXPECT_TRUE(result.ok) << target << " " << sizes << " " << variant << ": " << result.message;
      Reached& reached = reached_[target];
      reached.max_error = std::max(reached.max_error, result.max_errors[0]);
      if (result.worst_ratio > reached.closest.worst_ratio) {
        reached.closest = result;
        reached.where = ToString(sizes) + " " + variant;
      }
    }
  }

  void Report(const char* what) {
    for (const auto& [target, reached] : reached_) {
      std::printf(
          "%s %s %s %s: largest error of the first output %.3g; closest to its bound: %.3g of %.3g (%.0f %%), %s of "
          "%s\n",
          GetParam().op.name.c_str(), Name(GetParam().dtype), target.c_str(), what, reached.max_error,
          reached.closest.error, reached.closest.tolerance, 100 * reached.closest.worst_ratio,
          reached.closest.where.c_str(), reached.where.c_str());
    }
  }

 private:
  struct Reached {
    double max_error = 0;
    Comparison closest;
    std::string where;  // sizes and variant
  };

  Context ctx_{2};
  std::map<std::string, Reached> reached_;  // by target
};

std::string NameOf(const testing::TestParamInfo<Combination>& info) {
  return info.param.op.name + "_" + Name(info.param.dtype);
}

INSTANTIATE_TEST_SUITE_P(AllOps, Conformance, testing::ValuesIn(Combinations()), NameOf);

class StepConformance : public Conformance {};

INSTANTIATE_TEST_SUITE_P(AllOps, StepConformance, testing::ValuesIn(Combinations("step")), NameOf);

TEST_P(StepConformance, AwkwardSizesAgreeWithTheReference) {
  for (const Sizes& sizes : kSizes) {
    for (const char* variant : kVariants) {
      if (Knows(GetParam().op, variant)) Check(sizes, variant, "step");
    }
  }
  Check(kManyHeads, "", "step");
  Report("steps");
}

TEST_P(Conformance, AwkwardSizesAgreeWithTheReference) {
  for (const Sizes& sizes : kSizes) {
    for (const char* variant : kVariants) {
      if (Knows(GetParam().op, variant)) Check(sizes, variant);
    }
  }
  Report("sizes");
}

TEST_P(Conformance, EveryPairOfOptionsAgreesWithTheReference) {
  const std::vector<std::string>& words = GetParam().op.variants;
  for (size_t i = 0; i < words.size(); ++i) {
    for (size_t j = i; j < words.size(); ++j) {
      Check(kGridSizes, i == j ? words[i] : words[i] + "+" + words[j]);
    }
  }
  Report("options");
}

}  // namespace
}  // namespace heed
