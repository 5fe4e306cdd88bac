// nsa over a cache against the rows of Forward over the whole sequence, in every dtype, and its errors.
#include "heed/ops/sparse/nsa/nsa_attend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"

namespace heed::nsa {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kTokens = 75;

struct Fixture {
  DType dtype;
  Options options;
  Buffer q, k, v, gates, whole;

  explicit Fixture(DType type) : dtype(type) {
    options.block = 4;
    options.stride = 2;
    options.length = 6;
    options.count = 5;
    options.window = 9;
    uint64_t seed = 0;
    for (const auto& [buffer, sizes] :
         std::vector<std::pair<Buffer*, std::vector<int64_t>>>{{&q, {1, kTokens, 4, 8}},
                                                               {&k, {1, kTokens, 2, 8}},
                                                               {&v, {1, kTokens, 2, 12}},
                                                               {&gates, {1, kTokens, 4, 3}},
                                                               {&whole, {1, kTokens, 4, 12}}}) {
      *buffer = Buffer(dtype, sizes);
      buffer->FillNormal(++seed);
    }
  }
  NSACache NewCache(int64_t batch = 1) const {
    NSACache::Options o;
    o.batch = batch;
    o.heads = 2;
    o.dim = 8;
    o.value_dim = 12;
    o.length = options.length;
    o.stride = options.stride;
    o.page = 16;
    o.dtype = dtype;
    return NSACache(o);
  }
  void Append(NSACache& cache, int64_t begin, int64_t end) const {
    cache.Append(k.view().Slice(1, begin, end), v.view().Slice(1, begin, end));
  }
};

TEST(NsaAttendTest, TokenByTokenAndInChunksItIsForward) {
  for (const auto& [dtype, tolerance] :
       {std::pair{DType::kF64, 1e-13}, {DType::kF32, 2e-6}, {DType::kBF16, 4e-2}, {DType::kF16, 5e-3}}) {
    const Fixture f(dtype);
    Context ctx(2);
    Forward(ctx, {f.q.view(), f.k.view(), f.v.view(), f.gates.view(), {}, {}}, f.options, {f.whole.view(), {}, {}, {}});
    for (const int64_t chunk : {int64_t{1}, int64_t{13}, kTokens}) {
      NSACache cache = f.NewCache();
      for (int64_t begin = 0; begin < kTokens; begin += chunk) {
        const int64_t end = std::min(begin + chunk, kTokens);
        f.Append(cache, begin, end);
        const Buffer o(dtype, {1, end - begin, 4, 12});
        Attend(ctx, cache.view(), f.q.view().Slice(1, begin, end), f.gates.view().Slice(1, begin, end), f.options,
               o.view());
        for (int64_t t = begin; t < end; ++t) {
          for (int64_t h = 0; h < 4; ++h) {
            for (int64_t e = 0; e < 12; ++e) {
              const double expected = f.whole.Get({0, t, h, e});
              ASSERT_NEAR(o.Get({0, t - begin, h, e}), expected, tolerance * (1 + std::abs(expected)))
                  << Name(dtype) << chunk << " " << t;
            }
          }
        }
      }
    }
  }
}

TEST(NsaAttendTest, WindowsOfACacheAreTheMeansOfForward) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    const Fixture f(dtype);
    NSACache cache = f.NewCache();
    for (int64_t t = 0; t < kTokens; ++t) f.Append(cache, t, t + 1);
    const NSAView view = cache.view();
    EXPECT_EQ(view.k_cmp.size(1), (kTokens - 6) / 2 + 1);
    // Passing the cache's compressed keys to Forward changes no bit.
    Context ctx(1);
    const Buffer given(dtype, {1, kTokens, 4, 12});
    Forward(ctx, {f.q.view(), f.k.view(), f.v.view(), f.gates.view(), {}, {}}, f.options, {f.whole.view(), {}, {}, {}});
    Forward(ctx, {f.q.view(), f.k.view(), f.v.view(), f.gates.view(), view.k_cmp, view.v_cmp}, f.options,
            {given.view(), {}, {}, {}});
    EXPECT_TRUE(SameBits(f.whole.view(), given.view())) << Name(dtype);
  }
}

TEST(NsaAttendTest, ACacheThatGrowsKeepsTheWindowsOfEverySequence) {
  const Fixture f(DType::kF32);
  const Buffer k(DType::kF32, {2, kTokens, 2, 8}), v(DType::kF32, {2, kTokens, 2, 12});
  k.FillNormal(11);
  v.FillNormal(12);
  NSACache both = f.NewCache(2);
  for (int64_t t = 0; t < kTokens; ++t) both.Append(k.view().Slice(1, t, t + 1), v.view().Slice(1, t, t + 1));
  for (int64_t b = 0; b < 2; ++b) {
    NSACache one = f.NewCache();
    one.Append(k.view().Slice(0, b, b + 1), v.view().Slice(0, b, b + 1));
    EXPECT_TRUE(SameBits(both.view().k_cmp.Slice(0, b, b + 1), one.view().k_cmp)) << b;
    EXPECT_TRUE(SameBits(both.view().v_cmp.Slice(0, b, b + 1), one.view().v_cmp)) << b;
  }
}

TEST(NsaAttendTest, WhatIsRefusedChangesNothing) {
  const Fixture f(DType::kF32);
  NSACache cache = f.NewCache();
  f.Append(cache, 0, 20);
  const Buffer wrong(DType::kF32, {1, 3, 2, 8});
  EXPECT_THAT([&] { cache.Append(wrong.view(), wrong.view()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("v has shape [1,3,2,8]")));
  EXPECT_THAT([&] { cache.Append(f.k.view().Slice(1, 20, 30), f.v.view().Slice(1, 20, 30), {}, wrong.view(), {}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("NSACache::Append: v_cmp is absent, expected both or none")));
  EXPECT_EQ(cache.lengths()[0], 20);
  EXPECT_EQ(cache.view().k_cmp.size(1), 8);
  Context ctx(1);
  const Buffer o(DType::kF32, {1, 2, 4, 12});
  Options options = f.options;
  options.stride = 3;
  EXPECT_THAT(
      [&] {
        Attend(ctx, cache.view(), f.q.view().Slice(1, 18, 20), f.gates.view().Slice(1, 18, 20), options, o.view());
      },
      ThrowsMessage<InvalidArgument>(HasSubstr("nsa::Attend: stride is 3, expected 2 as in the cache")));
  NSACache::Options bad;
  bad.length = 0;
  EXPECT_THAT([&] { NSACache{bad}; },
              ThrowsMessage<InvalidArgument>(HasSubstr("NSACache: length is 0, expected 1 or more")));
}

}  // namespace
}  // namespace heed::nsa
