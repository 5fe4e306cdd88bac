// Attention of few queries over many keys on devices (split-KV): rows agree with the reference and have the bits of any
// other call.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <exception>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "heed/core/error.h"
#include "heed/ops/exact/attention/attend/attend_pages.h"
#include "tests/cuda/attention_on_devices.h"

namespace heed {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// F32 takes six products each, which are slow here.
constexpr DType kDTypes[] = {DType::kF16, DType::kBF16, DType::kF32};

// A view of integers, stored in the problem.
ConstTensorView Integers(Problem& p, const std::vector<int64_t>& values) {
  p.memory.emplace_back(DType::kI64, std::initializer_list<int64_t>{static_cast<int64_t>(values.size())});
  const Buffer& b = p.memory.back();
  for (size_t i = 0; i < values.size(); ++i) b.Set({static_cast<int64_t>(i)}, static_cast<double>(values[i]));
  return b.view();
}

// A problem with several segments of keys, masks and every other option of logits.
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
      // Masks a whole segment and single pairs.
      mask.Set({index[0], 0, index[2], index[3]}, index[3] / 512 != index[0] && random.Chance(0.7));
    } while (NextIndex(mask.view().sizes(), index));
    o.mask = mask.view();
  }
  return p;
}

class CudaDecodeTest : public CudaTest {
 protected:
  // Computes some queries and heads of one sequence in a call of their own.
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
        ASSERT_EQ(some.lse.Get({0, h, i}), all.lse.Get({b, head + h, begin + i}))
            << b << " " << begin + i << " " << head + h;
        for (int64_t e = 0; e < o.size(3); ++e) {
          ASSERT_EQ(some.o.Get({0, i, h, e}), all.o.Get({b, begin + i, head + h, e}))
              << b << " " << begin + i << " " << head + h;
        }
      }
    }
  }
};

TEST_P(CudaDecodeTest, RandomProblemsAgreeWithTheReference) {
  AgreesOnSeeds("few rows", SeedsOf(25, 5), [&](uint64_t seed) {
    const Problem p = LongProblem(seed % 5 == 0 ? DType::kF32 : kDTypes[seed % 2], seed);
    cuda::SetEmulatedSms(seed % 4 == 0 ? 1 : 1000);
    return CompareWithReference(p, Run(p));
  });
}

TEST_P(CudaDecodeTest, AgreesWithTheReferenceAtSegmentBoundaries) {
  std::vector<Options> all = MasksAndCap();
  all.emplace_back().window = {600, 0};
  all.back().sink_tokens = 5;
  for (const auto& [Tq, group, D, Dv] :
       {std::tuple{1, 8, 64, 64}, {4, 8, 128, 128}, {40, 1, 80, 40}, {3, 2, 256, 192}}) {
    for (const int64_t keys : {511, 512, 513, 1024, 1025}) {
      if (LeavesOut(4)) continue;
      const Options& options = all[static_cast<size_t>(keys + Tq) % all.size()];
      Problem p = Plain(kDTypes[(keys + Tq) % (D <= 128 ? 3 : 2)], {2, Tq, keys, group, 1, D, Dv}, 7);
      p.options = options;
      cuda::SetEmulatedSms(1000);
      const Comparison result = CompareWithReference(p, Run(p));
      ASSERT_TRUE(result.ok) << Tq << " " << keys << " " << D << ": " << result.message;
    }
  }
}

// Tests with large-M blocks too, which are other kernels on Hopper.
class CudaManyAndFewRowsTest : public CudaDecodeTest {};

// Compares large-M blocks that sweep all keys, large-M blocks that split them, and small-M blocks.
TEST_P(CudaManyAndFewRowsTest, ARowHasTheSameBitsInEveryCall) {
  for (const auto& [dtype, D, Dv, general] : {std::tuple{DType::kBF16, 64, 64, false},
                                              {DType::kF16, 128, 128, false},
                                              {DType::kBF16, 130, 100, true},
                                              {DType::kF16, 64, 40, true},
                                              {DType::kF32, 40, 64, true},
                                              {DType::kF32, 128, 128, false}}) {
    if (IsRepeated(dtype, D) || LeavesOut(4)) continue;
    const bool f32 = dtype == DType::kF32;
    Problem all = Plain(dtype, {2, 100, f32 ? 560 : 1500, f32 ? 2 : 4, f32 ? 1 : 2, D, Dv}, 5);
    all.options.causal = true;
    if (general) {
      all.options.softcap = 3;
      all.options.alibi =
          all.memory.emplace_back(DType::kF32, std::initializer_list<int64_t>{2}).FillConstant(0.002).view();
      all.in.q = all.in.q.Slice(2, 0, 2);
      all.in.k = all.in.k.Slice(2, 0, 1);
      all.in.v = all.in.v.Slice(2, 0, 1);
      DescribeOutputs(all);
    } else {
      all.options.window = {f32 ? 450 : 1200, 0};
      all.options.sink_tokens = f32 ? 10 : 100;
      all.options.key_starts = Integers(all, {75, f32 ? 5 : 130});
    }
    cuda::SetEmulatedSms(1);
    const Results whole = Run(all);
    cuda::SetEmulatedSms(1000);
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
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    Problem p = Plain(dtype, {1, 2, 700, 8, 1, 128, 128}, 3);
    p.options.causal = true;
    ExpectSameBitsInAnyOrder(p);
  }
}

TEST_P(CudaManyAndFewRowsTest, RowsAndSegmentsWithoutAVisibleKeyAreEmpty) {
  for (const int64_t queries : {2, 40}) {
    Problem p = Plain(DType::kBF16, {2, queries, 1600, 2, 1, 64, 64}, 9);
    const Buffer mask = p.memory.emplace_back(DType::kBool, std::initializer_list<int64_t>{2, 1, queries, 1600});
    mask.FillConstant(0);
    // Row 1 of the second sequence sees a key of the second segment and two of the last; all other rows see none.
    for (const int64_t key : {700, 1536, 1599}) mask.Set({1, 0, 1, key}, 1);
    p.options.mask = mask.view();
    cuda::SetEmulatedSms(1000);
    const Results results = Run(p);
    const Comparison result = CompareWithReference(p, results);
    EXPECT_TRUE(result.ok) << result.message;
    EXPECT_EQ(results.lse.Get({1, 1, 0}), -kInfinity);
    EXPECT_TRUE(std::isfinite(results.lse.Get({1, 1, 1})));
    // The window has only keys before the first.
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
    for (const DType dtype : kDTypes) {
      if (LeavesOut(4)) continue;
      Problem p = Plain(dtype, {1, queries, 1200, 2, 1, 64, 64}, 9);
      p.options.causal = true;
      cuda::SetEmulatedSms(1000);
      const Results expected = Run(p);
      // Only the last query sees the last key, in the last segment.
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

// Infinite logits: a row with +infinity is NaN, a key with -infinity counts as masked.
TEST_P(CudaDecodeTest, InfiniteLogitsAgreeWithTheReference) {
  for (const DType dtype : kDTypes) {
    for (const double sign : {-1.0, 1.0}) {
      Problem p = Plain(dtype, {1, 2, 1100, 2, 1, 16, 16}, 9);
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t i = 0; i < 2; ++i) p.memory[0].Set({0, i, h, 3}, 1);
      }
      p.memory[1].Set({0, 600, 0, 3}, sign * kInfinity);
      const Comparison result = CompareWithReference(p, Run(p));
      EXPECT_TRUE(result.ok) << Name(dtype) << " " << sign << ": " << result.message;
    }
  }
}

TEST_P(CudaManyAndFewRowsTest, PackedSequencesOfAllLengthsShareACall) {
  Problem p = Plain(DType::kBF16, {1, 52, 2600, 4, 2, 64, 64}, 11);
  const int32_t q[] = {0, 1, 3, 3, 4, 9, 49}, k[] = {0, 1100, 1110, 1500, 1500, 2060, 2590};
  p.options.causal = true;
  p.options.cu_seqlens_q = ConstTensorView(q, DType::kI32, {7});
  p.options.cu_seqlens_k = ConstTensorView(k, DType::kI32, {7});
  p.lse.sizes = {4, 52};
  const Results results = Run(p);
  const Comparison result = CompareWithReference(p, results);
  EXPECT_TRUE(result.ok) << result.message;
  EXPECT_EQ(results.o.Get({0, 3, 1, 3}), 0);  // the sequence has no keys
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

// Keys and values of a problem in pages of pools, permuted, with NaN pages in between.
struct PagedProblem {
  Buffer k_pool, v_pool;
  std::vector<int64_t> indptr = {0}, indices, last_page_len;
  bool heads_first;

  // Sequence b has the first lengths[b] keys of p, or of packed sequence b.
  PagedProblem(const Problem& p, const std::vector<int64_t>& firsts, const std::vector<int64_t>& lengths,
               int64_t tokens, bool with_heads_first, uint64_t seed, int gap = 0, int k_shift = 0, int v_shift = 0)
      : heads_first(with_heads_first) {
    Random random(seed, /*stream=*/5);
    for (const int64_t length : lengths) {
      indptr.push_back(indptr.back() + (length + tokens - 1) / tokens);
      last_page_len.push_back(length == 0 ? 0 : (length - 1) % tokens + 1);
    }
    const int64_t used = indptr.back(), pages = used + 3, H = p.in.k.size(2);
    std::vector<int64_t> order;
    for (int64_t i = 0; i < pages; ++i) order.insert(order.begin() + random.Integer(0, i), i);
    indices.assign(order.begin(), order.begin() + used);
    const int64_t D = p.in.k.size(3), Dv = p.in.v.size(3);
    // Keys and values have the same row stride, that of the larger rows.
    const int64_t row = std::max(D, Dv) + gap, page = tokens * H * row;
    const auto pool = [&](int64_t channels, int shift) {
      return heads_first ? Buffer(p.in.k.dtype(), std::vector<int64_t>{pages, H, tokens, channels},
                                  std::vector<int64_t>{page, tokens * row, row, 1}, Placement::kAligned, shift)
                         : Buffer(p.in.k.dtype(), std::vector<int64_t>{pages, tokens, H, channels},
                                  std::vector<int64_t>{page, H * row, row, 1}, Placement::kAligned, shift);
    };
    k_pool = pool(D, k_shift);
    v_pool = pool(Dv, v_shift);
    const bool packed = p.options.cu_seqlens_q.present();
    for (size_t b = 0; b < lengths.size(); ++b) {
      for (int64_t t = 0; t < lengths[b]; ++t) {
        const int64_t number = indices[static_cast<size_t>(indptr[b] + t / tokens)], in_page = t % tokens;
        for (int64_t h = 0; h < H; ++h) {
          for (const auto& [from, to] : {std::pair{p.in.k, &k_pool}, {p.in.v, &v_pool}}) {
            for (int64_t e = 0; e < from.size(3); ++e) {
              const std::vector<int64_t> at = heads_first ? std::vector<int64_t>{number, h, in_page, e}
                                                          : std::vector<int64_t>{number, in_page, h, e};
              SetElement(
                  to->view(), at,
                  GetElement(from, std::vector<int64_t>{packed ? 0 : static_cast<int64_t>(b), firsts[b] + t, h, e}));
            }
          }
        }
      }
    }
  }

  KVCache::BlockTables Tables(const ConstTensorView& k, const ConstTensorView& v) const {
    const auto list = [](const std::vector<int64_t>& x) {
      return ConstTensorView(x.data(), DType::kI64, {static_cast<int64_t>(x.size())});
    };
    return {k, v, list(indptr), list(indices), list(last_page_len), heads_first};
  }
};

class CudaPagesTest : public CudaDecodeTest {
 protected:
  // A problem's queries, outputs and options on the device.
  Results RunPages(const Problem& p, const PagedProblem& pages, const Options& options) {
    const DeviceTensor q(*GetParam(), p.in.q), k(*GetParam(), pages.k_pool.view()), v(*GetParam(), pages.v_pool.view());
    Results results = {Buffer(p.o.dtype, p.o.sizes), Buffer(p.lse.dtype, p.lse.sizes)};
    const DeviceTensor o(*GetParam(), results.o.view()), lse(*GetParam(), results.lse.view());
    const DeviceTensor bias(*GetParam(), options.bias), mask(*GetParam(), options.mask);
    Options on_device = options;
    on_device.bias = bias.view();
    on_device.mask = mask.view();
    attention::AttendPages(ctx_, pages.Tables(k.view(), v.view()), q.view(), on_device, {o.view(), lse.view()});
    o.Download(results.o.view());
    lse.Download(results.lse.view());
    return results;
  }
};

TEST_P(CudaPagesTest, RowsHaveTheBitsOfForward) {
  uint64_t seed = 1;
  for (const auto& [queries, group, D, Dv] :
       {std::tuple{1, 8, 64, 64}, {5, 2, 128, 128}, {60, 2, 64, 40}, {2, 1, 200, 256}}) {
    if (IsRepeated(DType::kBF16, D, queries * group)) continue;
    for (const int64_t tokens : {1, 16, 48, 100, 2000}) {
      if (LeavesOut(9)) continue;
      SCOPED_TRACE(std::to_string(queries) + " " + std::to_string(tokens));
      Problem p = Plain(kDTypes[seed % (D <= 64 ? 3 : 2)], {3, queries, 1200, 2 * group, 2, D, Dv}, seed);
      const std::vector<int64_t> lengths = {1200, 0, 700 + queries}, counts = {queries, queries, queries / 2};
      p.options.causal = true;
      if (seed % 4 == 0) p.options.window = {300, 0};
      if (seed % 4 == 1) p.options.softcap = 2;
      p.options.query_lengths = Integers(p, counts);
      const PagedProblem pages(p, {0, 0, 0}, lengths, tokens, seed % 4 < 2, seed);
      cuda::SetEmulatedSeed(seed++);
      cuda::SetEmulatedSms(seed % 5 == 0 ? 1 : 1000);
      const Results paged = RunPages(p, pages, p.options);
      p.options.key_lengths = Integers(p, lengths);
      p.options.query_starts = Integers(p, {lengths[0] - counts[0], lengths[1] - counts[1], lengths[2] - counts[2]});
      const Results whole = Run(p);
      EXPECT_TRUE(SameBits(paged.o.view(), whole.o.view()));
      EXPECT_TRUE(SameBits(paged.lse.view(), whole.lse.view()));
      const Comparison result = CompareWithReference(p, paged);
      EXPECT_TRUE(result.ok) << result.message;
    }
  }
}

TEST_P(CudaPagesTest, PackedQueriesOfAllLengths) {
  Problem p = Plain(DType::kBF16, {1, 60, 2300, 4, 2, 64, 64}, 11);
  const int32_t q[] = {0, 1, 3, 3, 4, 50}, k[] = {0, 1100, 1110, 1500, 1500, 2260};
  p.options.causal = true;
  p.options.cu_seqlens_q = ConstTensorView(q, DType::kI32, {6});
  p.lse.sizes = {4, 60};
  const PagedProblem pages(p, {0, 1100, 1110, 1500, 1500}, {1100, 10, 390, 0, 760}, 16, false, 3);
  const Results paged = RunPages(p, pages, p.options);
  p.options.cu_seqlens_k = ConstTensorView(k, DType::kI32, {6});
  const Results whole = Run(p);
  EXPECT_TRUE(SameBits(paged.o.view(), whole.o.view()));
  EXPECT_TRUE(SameBits(paged.lse.view(), whole.lse.view()));
  EXPECT_TRUE(CompareWithReference(p, paged).ok);
  EXPECT_EQ(paged.o.Get({0, 59, 1, 3}), 0);
}

TEST_P(CudaPagesTest, MoreSequencesThanALaunchAndMoreOptions) {
  Problem p = Plain(DType::kF16, {35, 2, 90, 2, 1, 16, 16}, 3);
  std::vector<int64_t> lengths, firsts(35, 0);
  for (int64_t b = 0; b < 35; ++b) lengths.push_back(90 - 2 * b);
  const Buffer bias(DType::kF16, {35, 2, 2, 90}), mask(DType::kBool, {2, 90}), slopes(DType::kF32, {2}),
      sinks(DType::kF32, {2});
  bias.FillNormal(5);
  slopes.FillConstant(0.1);
  sinks.FillConstant(0.5);
  mask.FillConstant(1);
  mask.Set({0, 3}, 0);
  p.options.bias = bias.view();
  p.options.mask = mask.view();
  p.options.alibi = slopes.view();
  p.options.sinks = sinks.view();
  p.options.prefix = Integers(p, std::vector<int64_t>(35, 4));
  p.options.key_starts = Integers(p, std::vector<int64_t>(35, 2));
  p.options.chunk = 30;
  const PagedProblem pages(p, firsts, lengths, 5, true, 3, /*gap=*/1);  // rows are not aligned
  const Results paged = RunPages(p, pages, p.options);
  p.options.key_lengths = Integers(p, lengths);
  std::vector<int64_t> starts;
  for (const int64_t length : lengths) starts.push_back(length - 2);
  p.options.query_starts = Integers(p, starts);
  const Results whole = Run(p);
  EXPECT_TRUE(SameBits(paged.o.view(), whole.o.view()));
  EXPECT_TRUE(SameBits(paged.lse.view(), whole.lse.view()));
  EXPECT_TRUE(CompareWithReference(p, paged).ok);
}

TEST_P(CudaPagesTest, PoolsMayBeginAnywhere) {
  Problem p = Plain(DType::kBF16, {2, 2, 90, 2, 1, 64, 64}, 3);
  for (const int shifted : {0, 1, 2}) {
    const PagedProblem pages(p, {0, 0}, {90, 90}, 16, false, 3, /*gap=*/0, shifted == 1 ? 1 : 0, shifted == 2 ? 1 : 0);
    EXPECT_TRUE(SameBits(RunPages(p, pages, p.options).o.view(), Run(p).o.view())) << shifted;
  }
}

TEST_P(CudaPagesTest, PatternsHaveTheBitsOfForward) {
  for (const int64_t queries : {3, 70}) {
    Problem p = Plain(DType::kBF16, {2, queries, 700, 4, 2, 64, 64}, 9);
    p.options.pattern = patterns::Strided(64) | patterns::SlidingWindow(90);
    const PagedProblem pages(p, {0, 0}, {700, 700}, 16, false, 3);
    const Results results = RunPages(p, pages, p.options);
    EXPECT_TRUE(CompareWithReference(p, results).ok);
    EXPECT_TRUE(SameBits(results.o.view(), Run(p).o.view())) << queries;
  }
}

TEST_P(CudaPagesTest, NoPagesAtAllGiveEmptyRows) {
  const Problem p = Plain(DType::kBF16, {2, 2, 0, 2, 1, 64, 64}, 3);
  const PagedProblem pages(p, {0, 0}, {0, 0}, 16, false, 3);
  const Results results = RunPages(p, pages, p.options);
  EXPECT_EQ(results.o.Get({1, 1, 1, 3}), 0);
  EXPECT_EQ(results.lse.Get({1, 1, 1}), -kInfinity);
}

TEST_P(CudaPagesTest, UnsupportedInputsAreNamed) {
  const Problem p = Plain(DType::kBF16, {2, 1, 40, 2, 1, 16, 16}, 3);
  const PagedProblem pages(p, {0, 0}, {40, 20}, 16, false, 3);
  const DeviceTensor q(*GetParam(), p.in.q), k(*GetParam(), pages.k_pool.view()), v(*GetParam(), pages.v_pool.view());
  const Buffer host(DType::kBF16, p.o.sizes);
  const DeviceTensor o(*GetParam(), host.view());
  const auto refusal = [&](const auto& spoil) {
    PagedProblem spoilt = pages;
    KVCache::BlockTables tables = spoilt.Tables(k.view(), v.view());
    Options options;
    ConstTensorView queries = q.view();
    spoil(spoilt, tables, options, queries);
    std::string what;
    try {
      attention::AttendPages(ctx_, tables, queries, options, {o.view(), {}});
    } catch (const std::exception& error) {
      what = error.what();
    }
    o.Download(host.view());
    for (const uint8_t byte : host.bytes()) EXPECT_EQ(byte, 0xFF);
    return what;
  };
  using P = PagedProblem;
  using T = KVCache::BlockTables;
  using O = Options;
  using Q = ConstTensorView;
  using testing::HasSubstr;
  EXPECT_THAT(refusal([](P& x, T&, O&, Q&) { x.indices[2] = 9999; }),
              HasSubstr("AttendPages: indices[2] is 9999, expected 0 to"));
  EXPECT_THAT(refusal([](P& x, T&, O&, Q&) { x.indices[4] = -1; }), HasSubstr("indices[4] is -1, expected 0 to"));
  EXPECT_THAT(refusal([](P& x, T&, O&, Q&) { x.indptr[1] = 7; }), HasSubstr("indptr[1] is 7, expected 0 to 5"));
  EXPECT_THAT(refusal([](P& x, T&, O&, Q&) { x.last_page_len[0] = 17; }),
              HasSubstr("last_page_len[0] is 17, expected 1 to 16"));
  EXPECT_THAT(refusal([&](P&, T& t, O&, Q&) { t.k_pool = pages.k_pool.view(); }),
              HasSubstr("k_pool is on the CPU, expected cuda:0"));
  EXPECT_THAT(refusal([&](P&, T& t, O&, Q&) { t.indices = k.view(); }),
              HasSubstr("indices has dtype bf16, expected i32 or i64"));
  EXPECT_THAT(refusal([&](P&, T& t, O&, Q&) {
                t.indptr = ConstTensorView(t.indptr.data(), DType::kI64, {3}, {DeviceType::kCuda, 0});
              }),
              HasSubstr("indptr is on cuda:0, expected the CPU"));
  EXPECT_THAT(refusal([&](P&, T& t, O&, Q&) { t.v_pool = {}; }), HasSubstr("v_pool is absent"));
  EXPECT_THAT(refusal([&](P&, T& t, O&, Q&) {
                t.v_pool = ConstTensorView(t.v_pool.data(), DType::kBF16, t.v_pool.sizes(),
                                           std::vector<int64_t>{1024, 16, 16, 1}, {DeviceType::kCuda, 0});
              }),
              HasSubstr("v_pool has pages 1024 elements apart, expected 256 as k_pool"));
  EXPECT_THAT(refusal([&](P&, T& t, O&, Q&) { t.k_pool = t.k_pool.Slice(3, 0, 8); }),
              HasSubstr("k_pool has shape [8,16,1,8], expected [pages,tokens,1,16]"));
  EXPECT_THAT(refusal([&](P&, T&, O& options, Q&) { options.dropout = 0.5; }), HasSubstr("dropout is 0.5, expected 0"));
  const int64_t counts[] = {1, 2};
  EXPECT_THAT(
      refusal([&](P&, T&, O& options, Q&) { options.query_lengths = ConstTensorView(counts, DType::kI64, {2}); }),
      HasSubstr("query_lengths contains 2, expected 0 to 1"));
  EXPECT_THAT(refusal([&](P&, T&, O& options, Q&) { options.key_lengths = ConstTensorView(counts, DType::kI64, {2}); }),
              HasSubstr("key_lengths is given, expected none"));
  EXPECT_THAT(refusal([&](P&, T&, O&, Q& queries) { queries = p.in.q; }), HasSubstr("is on cuda:0, expected the CPU"));
  const KVCache::BlockTables tables = pages.Tables(k.view(), v.view());
  for (const auto& [name, pool] : {std::pair{"k_pool", &k}, {"v_pool", &v}}) {
    const TensorView inside(static_cast<uint16_t*>(pool->view().data()) + 16, DType::kBF16, p.o.sizes,
                            {DeviceType::kCuda, 0});
    try {
      attention::AttendPages(ctx_, tables, q.view(), {}, {inside, {}});
      ADD_FAILURE() << "nothing is thrown";
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(), HasSubstr(std::string("o overlaps ") + name));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, CudaPagesTest, testing::ValuesIn(DevicesOfAttention()), NameOf);
INSTANTIATE_TEST_SUITE_P(Devices, CudaDecodeTest, testing::ValuesIn(Devices()), NameOf);
INSTANTIATE_TEST_SUITE_P(Devices, CudaManyAndFewRowsTest, testing::ValuesIn(DevicesOfAttention()), NameOf);

}  // namespace
}  // namespace heed
