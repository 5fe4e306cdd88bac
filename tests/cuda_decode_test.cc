// Attention of few queries over many keys on devices: segments of keys in blocks of their own add up to the rows of the
// reference, and to the bits that rows have in any other call.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "tests/cuda/attention_on_devices.h"

namespace heed {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A view of integers, in memory of the problem.
ConstTensorView Integers(Problem& p, const std::vector<int64_t>& values) {
  p.memory.emplace_back(DType::kI64, std::initializer_list<int64_t>{static_cast<int64_t>(values.size())});
  const Buffer& b = p.memory.back();
  for (size_t i = 0; i < values.size(); ++i) b.Set({static_cast<int64_t>(i)}, static_cast<double>(values[i]));
  return b.view();
}

// Of several segments of keys, with masks and whatever else logits may have.
Problem LongProblem(DType dtype, uint64_t seed) {
  Random random(seed, /*stream=*/77);
  Sizes n;
  n.B = random.Integer(1, 3);
  n.Tq = random.Pick<int64_t>({1, 1, 2, 5, 16, 40});
  n.Tk = random.Integer(500, 1700);
  n.Hkv = random.Integer(1, 2);
  n.Hq = n.Hkv * random.Pick<int64_t>({1, 2, 4, 8});
  n.D = random.Pick<int64_t>({16, 40, 64, 128, 130});
  n.Dv = random.Pick<int64_t>({8, 33, 64, 100, 200});
  Problem p = Plain(dtype, n, seed);
  Options& o = p.options;
  o.causal = random.Chance(0.6);
  if (random.Chance(0.3)) o.window = {random.Integer(0, 900), random.Integer(-1, 30)};
  if (random.Chance(0.3)) o.sink_tokens = random.Integer(1, 600);
  if (random.Chance(0.2)) o.chunk = random.Integer(1, 800);
  if (random.Chance(0.2)) o.softcap = 1.5;
  if (random.Chance(0.2)) o.dropout = 0.3;
  if (random.Chance(0.1)) o.scale = -0.1;
  o.seed = seed;
  const auto per_sequence = [&](int64_t low, int64_t high) {
    std::vector<int64_t> values;
    for (int64_t b = 0; b < n.B; ++b) values.push_back(random.Integer(low, high));
    return Integers(p, values);
  };
  if (random.Chance(0.3)) o.key_lengths = per_sequence(0, n.Tk);
  if (random.Chance(0.3)) o.key_starts = per_sequence(0, n.Tk / 2);
  if (random.Chance(0.3)) o.query_starts = per_sequence(-3, n.Tk);
  if (random.Chance(0.2)) o.query_lengths = per_sequence(0, n.Tq);
  if (random.Chance(0.2)) o.prefix = per_sequence(0, n.Tk);
  const auto random_tensor = [&](DType of, std::initializer_list<int64_t> sizes) {
    const Buffer b = p.memory.emplace_back(of, sizes);
    b.FillNormal(seed + p.memory.size());
    return b;
  };
  if (random.Chance(0.2)) o.alibi = random_tensor(DType::kF32, {n.Hq}).view();
  if (random.Chance(0.2)) o.sinks = random_tensor(DType::kF32, {n.Hq}).view();
  if (random.Chance(0.2)) o.bias = random_tensor(random.Pick({DType::kF32, dtype}), {n.Hq, n.Tq, n.Tk}).view();
  if (random.Chance(0.2)) {
    const Buffer mask = p.memory.emplace_back(DType::kBool, std::initializer_list<int64_t>{n.B, 1, n.Tq, n.Tk});
    std::vector<int64_t> index(4, 0);
    do {
      // A whole segment is masked, and single pairs.
      mask.Set({index[0], 0, index[2], index[3]}, index[3] / 512 != index[0] && random.Chance(0.7));
    } while (NextIndex(mask.view().sizes(), index));
    o.mask = mask.view();
  }
  return p;
}

class CudaDecodeTest : public CudaTest {
 protected:
  // Some queries and heads of one sequence of a problem, in a call of their own.
  Results RunPart(const Problem& all, int64_t b, int64_t begin, int64_t end, int64_t head, int64_t heads) {
    Problem some = all;
    const int64_t group = all.in.q.size(2) / all.in.k.size(2), start = all.in.k.size(1) - all.in.q.size(1);
    const auto part = [&](const ConstTensorView& t, int64_t from, int64_t to, int64_t first, int64_t count) {
      return t.Slice(0, b, b + 1).Slice(1, from, to).Slice(2, first, first + count);
    };
    const int64_t keys = all.in.k.size(1), key_heads = (heads + group - 1) / group;
    some.in = {part(all.in.q, begin, end, head, heads), part(all.in.k, 0, keys, head / group, key_heads),
               part(all.in.v, 0, keys, head / group, key_heads)};
    some.options.query_starts = Integers(some, {start + begin});
    if (all.options.key_starts.present()) {
      some.options.key_starts = Integers(some, {static_cast<int64_t>(GetElement(all.options.key_starts, {&b, 1}))});
    }
    DescribeOutputs(some);
    return Run(some);
  }
  void ExpectSameRows(const Results& all, int64_t b, int64_t begin, int64_t head, const Results& some) {
    const ConstTensorView o = some.o.view();
    for (int64_t i = 0; i < o.size(1); ++i) {
      for (int64_t h = 0; h < o.size(2); ++h) {
        ASSERT_EQ(some.lse.Get({0, h, i}), all.lse.Get({b, head + h, begin + i})) << b << " " << begin + i << " " << head + h;
        for (int64_t e = 0; e < o.size(3); ++e) {
          ASSERT_EQ(some.o.Get({0, i, h, e}), all.o.Get({b, begin + i, head + h, e})) << b << " " << begin + i << " " << head + h;
        }
      }
    }
  }
};

TEST_P(CudaDecodeTest, RandomProblemsAgreeWithTheReference) {
  const uint64_t first = FromEnvironment("HEED_TEST_FIRST_SEED", 1), count = FromEnvironment("HEED_TEST_SEEDS", 40);
  Comparison closest;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const DType dtype = seed % 2 == 0 ? DType::kF16 : DType::kBF16;
    const Problem p = LongProblem(dtype, seed);
    cuda::SetEmulatedSeed(seed);
    cuda::SetEmulatedMultiprocessors(seed % 3 == 0 ? 1 : 1000);
    const Comparison result = CompareWithReference(p, Run(p));
    ASSERT_TRUE(result.ok) << "seed " << seed << " " << Title(p) << ": " << result.message;
    if (result.worst_ratio > closest.worst_ratio) closest = result;
  }
  std::printf("%s: closest to its bound: %.3g of %.3g (%.0f %%)\n", GetParam()->name(), closest.error, closest.tolerance,
              100 * closest.worst_ratio);
}

TEST_P(CudaDecodeTest, AgreesWithTheReferenceAtBordersOfSegments) {
  std::vector<Options> all = MasksAndCap();
  all.emplace_back().window = {600, 0};
  all.back().sink_tokens = 5;
  for (const auto& [Tq, group, D, Dv] : {std::tuple{1, 8, 64, 64}, {4, 8, 128, 128}, {40, 1, 80, 40}, {3, 2, 256, 192}}) {
    for (const int64_t keys : {511, 512, 513, 1024, 1025}) {
      const Options& options = all[static_cast<size_t>(keys + Tq) % all.size()];
      Problem p = Plain(keys % 2 == 0 ? DType::kF16 : DType::kBF16, {2, Tq, keys, group, 1, D, Dv}, 7);
      p.options = options;
      cuda::SetEmulatedMultiprocessors(1000);
      const Comparison result = CompareWithReference(p, Run(p));
      ASSERT_TRUE(result.ok) << Tq << " " << keys << " " << D << ": " << result.message;
    }
  }
}

// Blocks of many rows that walk over all keys, those that leave parts, and blocks of few rows.
TEST_P(CudaDecodeTest, ARowHasTheSameBitsInEveryCall) {
  for (const auto& [dtype, D, Dv, general] : {std::tuple{DType::kBF16, 64, 64, false}, {DType::kF16, 128, 128, false},
                                              {DType::kBF16, 130, 100, true}, {DType::kF16, 64, 40, true}}) {
    Problem all = Plain(dtype, {2, 100, 1500, 4, 2, D, Dv}, 5);
    all.options.causal = true;
    if (general) {
      all.options.softcap = 3;
      all.options.alibi = all.memory.emplace_back(DType::kF32, std::initializer_list<int64_t>{2}).FillConstant(0.002).view();
      all.in.q = all.in.q.Slice(2, 0, 2);
      all.in.k = all.in.k.Slice(2, 0, 1);
      all.in.v = all.in.v.Slice(2, 0, 1);
      DescribeOutputs(all);
    } else {
      all.options.window = {1200, 0};
      all.options.sink_tokens = 100;
      all.options.key_starts = Integers(all, {75, 130});
    }
    cuda::SetEmulatedMultiprocessors(1);
    const Results whole = Run(all);
    cuda::SetEmulatedMultiprocessors(1000);
    const Results parts = Run(all);
    EXPECT_TRUE(SameBits(whole.o.view(), parts.o.view()));
    EXPECT_TRUE(SameBits(whole.lse.view(), parts.lse.view()));
    const int64_t last_head = all.in.q.size(2) - 2;
    for (const auto& [b, begin, end] : {std::tuple{0, 0, 1}, {1, 99, 100}, {0, 33, 37}, {1, 50, 66}, {0, 20, 60}}) {
      ExpectSameRows(whole, b, begin, last_head, RunPart(all, b, begin, end, last_head, 2));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(CudaDecodeTest, BitsDoNotDependOnTheOrderOfThreads) {
  Problem p = Plain(DType::kBF16, {1, 2, 700, 8, 1, 128, 128}, 3);
  p.options.causal = true;
  const Results first = Run(p);
  for (uint64_t seed = 2; seed < 6; ++seed) {
    cuda::SetEmulatedSeed(seed);
    const Results again = Run(p);
    EXPECT_TRUE(SameBits(first.o.view(), again.o.view()));
    EXPECT_TRUE(SameBits(first.lse.view(), again.lse.view()));
  }
}

TEST_P(CudaDecodeTest, RowsAndSegmentsWithoutAVisibleKeyAreEmpty) {
  for (const int64_t queries : {2, 40}) {
    Problem p = Plain(DType::kBF16, {2, queries, 1600, 2, 1, 64, 64}, 9);
    const Buffer mask = p.memory.emplace_back(DType::kBool, std::initializer_list<int64_t>{2, 1, queries, 1600});
    mask.FillConstant(0);
    // Row 1 of the second sequence sees a key of the second segment and two of the last; nobody sees anything else.
    for (const int64_t key : {700, 1536, 1599}) mask.Set({1, 0, 1, key}, 1);
    p.options.mask = mask.view();
    cuda::SetEmulatedMultiprocessors(1000);
    const Results results = Run(p);
    const Comparison result = CompareWithReference(p, results);
    EXPECT_TRUE(result.ok) << result.message;
    EXPECT_EQ(results.lse.Get({1, 1, 0}), -kInfinity);
    EXPECT_TRUE(std::isfinite(results.lse.Get({1, 1, 1})));
    // A window of keys that lie before the first.
    p.options.mask = {};
    p.options.window = {5, 0};
    p.options.query_starts = Integers(p, {-100, 1000});
    const Results windowed = Run(p);
    EXPECT_TRUE(CompareWithReference(p, windowed).ok);
    EXPECT_EQ(windowed.lse.Get({0, 0, 0}), -kInfinity);
    EXPECT_EQ(windowed.o.Get({0, 0, 0, 0}), 0);
  }
}

TEST_P(CudaDecodeTest, WhatIsNotFiniteReachesThoseWhoSeeItAlone) {
  for (const int64_t queries : {3, 40}) {
    for (const bool f16 : {false, true}) {
      Problem p = Plain(f16 ? DType::kF16 : DType::kBF16, {1, queries, 1200, 2, 1, 64, 64}, 9);
      p.options.causal = true;
      cuda::SetEmulatedMultiprocessors(1000);
      const Results expected = Run(p);
      // The last query alone sees the last key, in the last segment.
      for (const double value : {std::numeric_limits<double>::quiet_NaN(), kInfinity}) {
        for (const int tensor : {1, 2}) {
          Problem other = Plain(p.in.q.dtype(), {1, queries, 1200, 2, 1, 64, 64}, 9);
          other.options = p.options;
          for (int64_t e = 0; e < 64; e += 3) other.memory[static_cast<size_t>(tensor)].Set({0, 1199, 0, e}, value);
          const Results results = Run(other);
          for (int64_t i = 0; i < queries; ++i) {
            for (int64_t e = 0; e < 64; ++e) {
              const double got = results.o.Get({0, i, 1, e});
              if (i + 1 < queries) {
                ASSERT_EQ(got, expected.o.Get({0, i, 1, e})) << i << " " << e;
              } else if (tensor == 2 && e % 3 == 0) {
                EXPECT_TRUE(std::isnan(value) ? std::isnan(got) : got == value) << e;
              } else if (tensor == 2) {
                EXPECT_NEAR(got, expected.o.Get({0, i, 1, e}), 1e-6) << e;
              }
            }
          }
        }
      }
    }
  }
}

// Infinite logits: a row that has one of +infinity is NaN, one of -infinity alone is as if it were not there.
TEST_P(CudaDecodeTest, InfiniteLogitsAgreeWithTheReference) {
  for (const double sign : {-1.0, 1.0}) {
    Problem p = Plain(DType::kBF16, {1, 2, 1100, 2, 1, 16, 16}, 9);
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t i = 0; i < 2; ++i) p.memory[0].Set({0, i, h, 3}, 1);
    }
    p.memory[1].Set({0, 600, 0, 3}, sign * kInfinity);
    const Comparison result = CompareWithReference(p, Run(p));
    EXPECT_TRUE(result.ok) << sign << ": " << result.message;
  }
}

TEST_P(CudaDecodeTest, PackedSequencesOfAllLengthsShareACall) {
  Problem p = Plain(DType::kBF16, {1, 52, 2600, 4, 2, 64, 64}, 11);
  const int32_t q[] = {0, 1, 3, 3, 4, 9, 49}, k[] = {0, 1100, 1110, 1500, 1500, 2060, 2590};
  p.options.causal = true;
  p.options.cu_seqlens_q = ConstTensorView(q, DType::kI32, {7});
  p.options.cu_seqlens_k = ConstTensorView(k, DType::kI32, {7});
  p.lse.sizes = {4, 52};
  const Results results = Run(p);
  const Comparison result = CompareWithReference(p, results);
  EXPECT_TRUE(result.ok) << result.message;
  EXPECT_EQ(results.o.Get({0, 3, 1, 3}), 0);  // its sequence has no keys
  EXPECT_EQ(results.o.Get({0, 51, 1, 3}), 0);
  EXPECT_EQ(results.lse.Get({1, 51}), -kInfinity);
}

TEST_P(CudaDecodeTest, TakesMoreSequencesThanALaunch) {
  Problem p = Plain(DType::kF16, {35, 1, 600, 2, 1, 16, 16}, 3);
  std::vector<int64_t> lengths;
  for (int64_t b = 0; b < 35; ++b) lengths.push_back(600 - 17 * b);
  p.options.key_lengths = Integers(p, lengths);
  const Comparison result = CompareWithReference(p, Run(p));
  EXPECT_TRUE(result.ok) << result.message;
}

TEST_P(CudaDecodeTest, EachTensorMayBeginAnywhere) {
  for (const int unaligned : {0, 1, 2}) {
    Problem p = Plain(DType::kBF16, {1, 2, 600, 2, 1, 64, 64}, 9);
    ConstTensorView* const views[] = {&p.in.q, &p.in.k, &p.in.v};
    ConstTensorView& view = *views[unaligned];
    const Buffer moved(DType::kBF16, view.sizes(), view.strides(), Placement::kAligned, /*gap=*/1);
    moved.FillNormal(77);
    p.memory.push_back(moved);
    view = moved.view();
    EXPECT_TRUE(CompareWithReference(p, Run(p)).ok) << unaligned;
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, CudaDecodeTest, testing::ValuesIn(Devices()), NameOf);

}  // namespace
}  // namespace heed
