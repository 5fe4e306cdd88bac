// Properties of attention that comparison with its Reference cannot show: Merge,
// options at the ends of their ranges. Agreement and the contract are in tests/.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/ops/exact/attention/cases/attention_variations_case.h"
#include "heed/ops/positions/alibi.h"

namespace heed::attention {
namespace {

using testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kMax64 = std::numeric_limits<int64_t>::max();

// Keys [begin, end) of a problem without options.
Problem SomeKeys(const Problem& problem, int64_t begin, int64_t end) {
  Problem p = problem;
  p.in.k = p.in.k.Slice(1, begin, end);
  p.in.v = p.in.v.Slice(1, begin, end);
  return p;
}

Problem Whole(DType dtype) {
  return MakeProblem(dtype, {.B = 2, .Tq = 9, .Tk = 77, .Hq = 4, .Hkv = 2, .D = 12, .Dv = 10});
}

// Merges the parts between the cuts.
Result MergeParts(Context& ctx, const Problem& whole, std::vector<int64_t> cuts, DType out,
                  const ConstTensorView& sinks = {}) {
  std::vector<Result> results;
  std::vector<Part> parts;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    results.push_back(RunForward(ctx, SomeKeys(whole, cuts[i], cuts[i + 1])));
    parts.push_back({results.back().o.view(), results.back().lse.view()});
  }
  const Result merged = {Buffer(out, whole.o.sizes), Buffer(out, whole.lse.sizes)};
  Merge(ctx, parts, sinks, {merged.o.view(), merged.lse.view()});
  return merged;
}

double LargestDifference(const ConstTensorView& a, const ConstTensorView& b) {
  double largest = 0;
  std::vector<int64_t> index(a.sizes().size());
  do {
    const double x = GetElement(a, index), y = GetElement(b, index);
    if (x != y) largest = std::max(largest, std::abs(x - y));
  } while (NextIndex(a.sizes(), index));
  return largest;
}

TEST(AttentionMerge, DisjointKeysGiveTheWhole) {
  Context ctx(2);
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    const double tolerance = dtype == DType::kF64 ? 1e-14 : 2e-6;
    const Problem whole = Whole(dtype);
    const Result expected = RunReference(whole);
    for (const std::vector<int64_t>& cuts :
         std::vector<std::vector<int64_t>>{{0, 77}, {0, 30, 77}, {0, 1, 2, 40, 76, 77}, {0, 0, 20, 20, 77, 77}}) {
      const Result merged = MergeParts(ctx, whole, cuts, dtype);
      EXPECT_LE(LargestDifference(merged.o.view(), expected.o.view()), tolerance);
      EXPECT_LE(LargestDifference(merged.lse.view(), expected.lse.view()), tolerance * 5);
    }
  }
}

TEST(AttentionMerge, SinksAreAppliedOnce) {
  Context ctx(1);
  Problem whole = Whole(DType::kF64);
  const ConstTensorView sinks = KeepFloats(whole, {0.5, -kInfinity, kInfinity, 3}, DType::kF64);
  const Result merged = MergeParts(ctx, whole, {0, 30, 50, 77}, DType::kF64, sinks);
  whole.options.sinks = sinks;
  const Result expected = RunReference(whole);
  EXPECT_LE(LargestDifference(merged.o.view(), expected.o.view()), 1e-14);
  EXPECT_LE(LargestDifference(merged.lse.view(), expected.lse.view()), 1e-13);
}

TEST(AttentionMerge, TheOutputMayHaveAnyFloatDType) {
  Context ctx(1);
  const Problem whole = Whole(DType::kF32);
  const Result expected = RunReference(whole);
  for (const auto& [dtype, tolerance] : {std::pair{DType::kF64, 2e-6}, {DType::kBF16, 0x1p-7}, {DType::kF16, 0x1p-9}}) {
    const Result merged = MergeParts(ctx, whole, {0, 40, 77}, dtype);
    EXPECT_LE(LargestDifference(merged.o.view(), expected.o.view()), tolerance);
  }
}

TEST(AttentionMerge, PartsWithoutAKeyChangeNothing) {
  Context ctx(1);
  const Problem p = Whole(DType::kF32);
  const Result one = RunForward(ctx, p);
  // o may hold anything where lse is -inf.
  const Buffer o(DType::kF32, p.o.sizes), lse(DType::kF32, p.lse.sizes);
  lse.FillConstant(-kInfinity);
  const Part empty = {o.view(), lse.view()};
  const std::vector<Part> parts = {empty, {one.o.view(), one.lse.view()}, empty};
  const Result merged = {Buffer(DType::kF32, p.o.sizes), Buffer(DType::kF32, p.lse.sizes)};
  Merge(ctx, parts, {}, {merged.o.view(), merged.lse.view()});
  EXPECT_EQ(Difference(merged, one), "");

  const std::vector<Part> nothing = {empty, empty};
  Merge(ctx, nothing, {}, {merged.o.view(), merged.lse.view()});
  EXPECT_EQ(merged.o.Get({1, 2, 3, 4}), 0);
  EXPECT_FALSE(std::signbit(merged.o.Get({1, 2, 3, 4})));
  EXPECT_EQ(merged.lse.Get({1, 3, 2}), -kInfinity);
}

TEST(AttentionMerge, ANanStaysInItsRow) {
  Context ctx(1);
  const Problem p = Whole(DType::kF64);
  const Result a = RunForward(ctx, SomeKeys(p, 0, 40));
  const Result b = RunForward(ctx, SomeKeys(p, 40, 77));
  a.lse.Set({0, 1, 2}, kNaN);
  const std::vector<Part> parts = {{b.o.view(), b.lse.view()}, {a.o.view(), a.lse.view()}};
  const Result merged = {Buffer(DType::kF64, p.o.sizes), Buffer(DType::kF64, p.lse.sizes)};
  Merge(ctx, parts, {}, {merged.o.view(), merged.lse.view()});
  EXPECT_TRUE(std::isnan(merged.o.Get({0, 2, 1, 0})));
  EXPECT_TRUE(std::isnan(merged.lse.Get({0, 1, 2})));
  EXPECT_FALSE(std::isnan(merged.o.Get({0, 2, 0, 0})));
  EXPECT_FALSE(std::isnan(merged.lse.Get({0, 1, 3})));
}

TEST(AttentionMerge, PackedPartsHaveNoBatch) {
  Context ctx(1);
  const Problem whole = MakeProblem(DType::kF64, {1, 5, 8, 2, 2, 4, 3});
  const Result expected = RunReference(whole);
  std::vector<Result> results;
  for (const auto& [begin, end] : {std::pair{0, 3}, {3, 8}}) {
    results.push_back(RunForward(ctx, SomeKeys(whole, begin, end)));
  }
  const auto packed = [](const Buffer& b, std::vector<int64_t> sizes) {
    return TensorView(b.view().data(), DType::kF64, sizes);
  };
  std::vector<Part> parts;
  for (const Result& r : results) {
    parts.push_back({packed(r.o, {5, 2, 3}), packed(r.lse, {2, 5})});
  }
  const Result merged = {Buffer(DType::kF64, whole.o.sizes), Buffer(DType::kF64, whole.lse.sizes)};
  Merge(ctx, parts, {}, {packed(merged.o, {5, 2, 3}), packed(merged.lse, {2, 5})});
  EXPECT_LE(LargestDifference(merged.o.view(), expected.o.view()), 1e-14);
  EXPECT_LE(LargestDifference(merged.lse.view(), expected.lse.view()), 1e-14);
}

struct MergeCall {
  std::vector<Part> parts;
  ConstTensorView sinks;
  Outputs out;
  std::vector<Buffer> memory;

  TensorView New(DType dtype, std::vector<int64_t> sizes) {
    memory.emplace_back(dtype, sizes);
    return memory.back().view();
  }
};

struct MergeMistake {
  std::string name;
  std::function<void(MergeCall&)> make;
  std::string message;
};

void PrintTo(const MergeMistake& mistake, std::ostream* os) { *os << mistake.name; }

std::vector<MergeMistake> MergeMistakes() {
  return {
      {"NoParts", [](MergeCall& c) { c.parts.clear(); }, "parts is empty, expected at least one part"},
      {"FirstPartIsAbsent", [](MergeCall& c) { c.parts[0].o = {}; },
       "parts[0].o has shape [], expected [B, T, H, D], or [T, H, D] packed"},
      {"PartIsAbsent", [](MergeCall& c) { c.parts[1].o = {}; }, "parts[1].o is absent, expected a tensor"},
      {"LseIsAbsent", [](MergeCall& c) { c.parts[1].lse = {}; }, "parts[1].lse is absent, expected a tensor"},
      {"PartHasAnotherShape", [](MergeCall& c) { c.parts[1].o = c.New(DType::kF32, {1, 2, 3, 5}); },
       "parts[1].o has shape [1,2,3,5], expected [1,2,3,4]"},
      {"LseHasAnotherShape", [](MergeCall& c) { c.parts[0].lse = c.New(DType::kF32, {1, 2, 3}); },
       "parts[0].lse has shape [1,2,3], expected [1,3,2]"},
      {"PartIsOfIntegers", [](MergeCall& c) { c.parts[1].o = c.New(DType::kI32, {1, 2, 3, 4}); },
       "parts[1].o has dtype i32, expected a float dtype"},
      {"SinksHaveAnotherShape", [](MergeCall& c) { c.sinks = c.New(DType::kF32, {2}); },
       "sinks has shape [2], expected [3]"},
      {"OHasAnotherShape", [](MergeCall& c) { c.out.o = c.New(DType::kF32, {2, 3, 4}); },
       "o has shape [2,3,4], expected [1,2,3,4]"},
      {"OIsAbsent", [](MergeCall& c) { c.out.o = {}; }, "o is absent, expected a tensor"},
      {"OutputLseHasAnotherShape", [](MergeCall& c) { c.out.lse = c.New(DType::kF32, {3, 2}); },
       "lse has shape [3,2], expected [1,3,2]"},
      {"OOverlapsAPart", [](MergeCall& c) { c.out.o = c.memory[0].view(); },
       "o overlaps an input, expected memory of its own"},
      {"LseOverlapsO", [](MergeCall& c) { c.out.lse = {c.out.o.data(), DType::kF32, {1, 3, 2}}; },
       "lse overlaps o, expected memory of its own"},
      {"OOverlapsItself", [](MergeCall& c) { c.out.o = {c.out.o.data(), DType::kF32, {1, 2, 3, 4}, {24, 0, 4, 1}}; },
       "o has strides [24,0,4,1], expected strides that reach every element "
       "once"},
      {"PartIsOnAnotherDevice",
       [](MergeCall& c) {
         c.parts[1].o = {c.parts[1].o.data(), DType::kF32, {1, 2, 3, 4}, Device{DeviceType::kCuda, 0}};
       },
       "parts[1].o is on a device, expected the CPU"},
      {"PartHasNoData", [](MergeCall& c) { c.parts[1].o = {nullptr, DType::kF32, {1, 2, 3, 4}}; },
       "parts[1].o has no data, expected a pointer"},
  };
}

class AttentionMergeMistake : public testing::TestWithParam<MergeMistake> {};

INSTANTIATE_TEST_SUITE_P(Arguments, AttentionMergeMistake, testing::ValuesIn(MergeMistakes()),
                         [](const auto& value) { return value.param.name; });

TEST_P(AttentionMergeMistake, IsNamedAndNothingIsWritten) {
  MergeCall c;
  for (int i = 0; i < 2; ++i) {
    const TensorView o = c.New(DType::kF32, {1, 2, 3, 4});
    const TensorView lse = c.New(DType::kF32, {1, 3, 2});
    c.parts.push_back({o, lse});
  }
  c.out.o = c.New(DType::kF32, {1, 2, 3, 4});
  c.out.lse = c.New(DType::kF32, {1, 3, 2});
  for (const Buffer& buffer : c.memory) buffer.FillConstant(0.25);
  GetParam().make(c);
  std::vector<std::vector<uint8_t>> before, after;
  for (const Buffer& b : c.memory) {
    before.emplace_back(b.bytes().begin(), b.bytes().end());
  }
  Context ctx(1);
  try {
    Merge(ctx, c.parts, c.sinks, c.out);
    ADD_FAILURE() << "did not throw";
  } catch (const InvalidArgument& e) {
    EXPECT_THAT(e.what(), HasSubstr("attention::Merge: " + GetParam().message));
  }
  for (const Buffer& b : c.memory) {
    after.emplace_back(b.bytes().begin(), b.bytes().end());
  }
  EXPECT_EQ(before, after);
}

// The largest values that the checks accept do not overflow.
TEST(AttentionTest, OptionsAtTheEndsOfTheirRangesAgreeWithTheReference) {
  const int64_t far = int64_t{1} << 61;
  const std::vector<std::function<void(Problem&)>> extremes = {
      [&](Problem& p) { p.options.window = {kMax64, kMax64}; },
      [&](Problem& p) { p.options.window = {kMax64, 0}; },
      [&](Problem& p) {
        p.options.window = {0, 0};
        p.options.sink_tokens = kMax64;
      },
      [&](Problem& p) { p.options.chunk = kMax64; },
      [&](Problem& p) {
        p.options.causal = true;
        p.options.prefix = KeepInts(p, {far, 0});
      },
      [&](Problem& p) {
        p.options.causal = true;
        p.options.query_starts = KeepInts(p, {far, -far});
      },
      [&](Problem& p) {
        p.options.window = {kMax64, kMax64};
        p.options.query_starts = KeepInts(p, {far, -far});
      },
      [&](Problem& p) {
        p.options.chunk = 1;
        p.options.query_starts = KeepInts(p, {far, -far});
      },
      [&](Problem& p) {
        p.options.chunk = kMax64;
        p.options.query_starts = KeepInts(p, {far, -1});
        p.options.key_starts = KeepInts(p, {3, 20});
      },
      [&](Problem& p) {
        p.options.key_starts = KeepInts(p, {20, 20});
        p.options.key_lengths = KeepInts(p, {20, 0});
      },
      [&](Problem& p) { p.options.softcap = 1e-30; },
      [&](Problem& p) { p.options.softcap = 1e30; },
      [&](Problem& p) { p.options.softcap = 1e36; },
      [&](Problem& p) { p.options.softcap = p.in.q.dtype() == DType::kF64 ? 1.7e308 : 3.4e38; },
      [&](Problem& p) { p.options.scale = -1e-30; },
      [&](Problem& p) {
        p.options.dropout = 1 - 0x1p-20;
        p.options.seed = ~uint64_t{0};
        p.options.dropout_offset = ~uint32_t{0};
      },
  };
  Context ctx(1);
  for (size_t i = 0; i < extremes.size(); ++i) {
    for (const DType dtype : {DType::kF32, DType::kF64}) {
      Problem p = MakeProblem(dtype, {2, 9, 20, 2, 1, 4, 4});
      extremes[i](p);
      const Comparison c = Compare(MakeCase(p), ctx);
      EXPECT_TRUE(c.ok) << i << ": " << c.message;
    }
  }
}

TEST(AttentionTest, SixteenBitsErrAtMostTwiceAsMuchAsPlainAttention) {
  Context ctx(1);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (uint64_t seed = 1; seed <= 300; ++seed) {
      const Problem p = RandomProblem(dtype, seed);
      const Comparison c = Compare(MakeCase(p), ctx);
      EXPECT_LE(c.max_errors[0], PlainBound(p)) << c.message;
    }
  }
}

TEST(AttentionTest, WorkspaceIsWhatExplainSaysAndGrowsWithThreads) {
  const Problem p = MakeProblem(DType::kF32, {1, 100, 100, 4, 4, 32, 32});
  Context one(1), three(3);
  const int64_t bytes = Workspace(one, p.in, p.options);
  EXPECT_GT(bytes, 0);
  EXPECT_EQ(Workspace(three, p.in, p.options), 3 * bytes);
  EXPECT_EQ(Explain(one, p.in, p.options).workspace_bytes, bytes);
}

TEST(AlibiSlopes, AreThoseOfTheAuthors) {
  EXPECT_EQ(AlibiSlopes(1), std::vector<double>{0x1p-8});
  EXPECT_EQ(AlibiSlopes(2), (std::vector<double>{0x1p-4, 0x1p-8}));
  EXPECT_EQ(AlibiSlopes(8), (std::vector<double>{0x1p-1, 0x1p-2, 0x1p-3, 0x1p-4, 0x1p-5, 0x1p-6, 0x1p-7, 0x1p-8}));
  const std::vector<double> twelve = AlibiSlopes(12);  // not a power of two
  ASSERT_EQ(twelve.size(), 12);
  for (size_t h = 0; h < 8; ++h) {
    EXPECT_DOUBLE_EQ(twelve[h], std::exp2(-static_cast<double>(h + 1)));
  }
  for (size_t t = 0; t < 4; ++t) {
    EXPECT_DOUBLE_EQ(twelve[8 + t], std::exp2(-0.5 - static_cast<double>(t)));
  }
  EXPECT_THROW(AlibiSlopes(0), InvalidArgument);
  EXPECT_THROW(AlibiSlopes(-3), InvalidArgument);
}

TEST(AttentionTest, StrictAcceptsWhatHasAKernel) {
  Context ctx(1);
  ctx.set_strict(true);
  const Problem p = MakeProblem(DType::kF32, {1, 3, 3, 1, 1, 4, 4});
  EXPECT_NO_THROW(RunForward(ctx, p));
}

}  // namespace
}  // namespace heed::attention
