// Forgetting attention over caches is bitwise equal to Forward(), whatever the append order and the memory of the log
// decays.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/ops/exact/attention/attend/attend.h"
#include "heed/ops/exact/attention/attend/attend_case.h"
#include "heed/ops/positions/rotary.h"
#include "heed/state/kv_cache.h"

namespace heed::attention {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kBatch = 2, kHeads = 2, kGroup = 3, kHq = kHeads * kGroup, kDim = 24, kValueDim = 16;

// Mixes strong and weak decays.
Buffer LogDecays(DType dtype, int64_t tokens, uint64_t seed) {
  const Buffer decays(dtype, {kBatch, tokens, kHq});
  Random random(seed);
  for (int64_t b = 0; b < kBatch; ++b) {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t h = 0; h < kHq; ++h) {
        decays.Set({b, t, h}, random.Chance(0.02) ? -1e4 : -0.1 * std::abs(random.Normal()));
      }
    }
  }
  return decays;
}

struct Tokens {
  explicit Tokens(DType dtype, int64_t count = 700)
      : q(Normal(dtype, {kBatch, count, kHq, kDim}, 1)), k(Normal(dtype, {kBatch, count, kHeads, kDim}, 2)),
        v(Normal(dtype, {kBatch, count, kHeads, kValueDim}, 3)), log_decay(LogDecays(dtype, count, 4)) {}

  KVCache::Options options() const {
    KVCache::Options o;
    o.batch = kBatch;
    o.heads = kHeads;
    o.dim = kDim;
    o.value_dim = kValueDim;
    o.dtype = q.view().dtype();
    o.log_decay_heads = kHq;
    return o;
  }
  void Append(KVCache& cache, int64_t begin, int64_t end) const {
    cache.Append(k.view().Slice(1, begin, end), v.view().Slice(1, begin, end), {},
                 log_decay.view().Slice(1, begin, end));
  }
  Result Attend(Context& ctx, const KVCache& cache, int64_t begin, int64_t end,
                const Options& options = Causal()) const {
    return AttendTo(ctx, cache.view(), q.view().Slice(1, begin, end), options);
  }
  Result Forward(Context& ctx, Options options = Causal()) const {
    options.log_decay = log_decay.view();
    options.invariant = true;
    const Result r = ResultFor(q.view(), kValueDim);
    attention::Forward(ctx, {q.view(), k.view(), v.view()}, options, {r.o.view(), r.lse.view()});
    return r;
  }
  Buffer q, k, v, log_decay;
};

void ExpectRows(const Result& whole, int64_t begin, int64_t end, const Result& part) {
  EXPECT_TRUE(SameBits(whole.o.view().Slice(1, begin, end), part.o.view()));
  EXPECT_TRUE(SameBits(whole.lse.view().Slice(2, begin, end), part.lse.view()));
}

TEST(AttendDecay, ChunksAndSingleTokensHaveTheBitsOfTheWhole) {
  Context ctx(2);
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
    for (const int64_t page : {0, 7, 64, 100}) {
      SCOPED_TRACE(std::string(Name(dtype)) + " page " + std::to_string(page));
      const Tokens x(dtype);
      const Result whole = x.Forward(ctx);
      KVCache::Options options = x.options();
      options.page = page;
      if (page == 0) options.capacity = 700;
      KVCache cache(options);
      int64_t begin = 0;
      for (const int64_t count : {1, 62, 1, 1, 300, 146, 1, 1, 127, 60}) {
        x.Append(cache, begin, begin + count);
        ExpectRows(whole, begin, begin + count, x.Attend(ctx, cache, begin, begin + count));
        begin += count;
      }
      ASSERT_EQ(begin, 700);
    }
  }
}

TEST(AttendDecay, OneHeadHasTheBitsOfForward) {
  Context ctx(1);
  const Buffer q = Normal(DType::kF32, {1, 100, 1, kDim}, 1), k = Normal(DType::kF32, {1, 100, 1, kDim}, 2);
  const Buffer v = Normal(DType::kF32, {1, 100, 1, kValueDim}, 3), log_decay(DType::kF32, {1, 100, 1});
  log_decay.FillConstant(-0.3);
  KVCache::Options one;
  one.batch = one.heads = one.log_decay_heads = 1;
  one.dim = kDim;
  one.value_dim = kValueDim;
  KVCache cache(one);
  cache.Append(k.view(), v.view(), {}, log_decay.view());
  Options options = Causal();
  options.invariant = true;
  options.log_decay = log_decay.view();
  const Result whole = ResultFor(q.view(), kValueDim);
  Forward(ctx, {q.view(), k.view(), v.view()}, options, {whole.o.view(), whole.lse.view()});
  ExpectRows(whole, 0, 100, AttendTo(ctx, cache.view(), q.view(), Causal()));
}

TEST(AttendDecay, TakesOtherOptions) {
  Context ctx(1);
  const Tokens x(DType::kF32);
  const Buffer slopes = Normal(DType::kF32, {kHq}, 7), sinks = Normal(DType::kF32, {kHq}, 8);
  Options options = Causal();
  options.alibi = slopes.view();
  options.sinks = sinks.view();
  options.softcap = 3;
  options.window = {200, 0};
  options.sink_tokens = 3;
  KVCache cache(x.options());
  x.Append(cache, 0, 690);
  x.Append(cache, 690, 700);
  ExpectRows(x.Forward(ctx, options), 690, 700, x.Attend(ctx, cache, 690, 700, options));
}

TEST(AttendDecay, QuantisedChunksHaveTheBitsOfSteps) {
  Context ctx(1);
  const Tokens x(DType::kF32);
  KVCache::Options options = x.options();
  options.quantize = Quantize::kInt8;
  KVCache whole(options), steps(options);
  x.Append(whole, 0, 600);
  x.Append(whole, 600, 700);
  const Result expected = x.Attend(ctx, whole, 600, 700), exact = x.Forward(ctx);
  x.Append(steps, 0, 600);
  for (int64_t t = 600; t < 700; ++t) {
    x.Append(steps, t, t + 1);
    const Result one = x.Attend(ctx, steps, t, t + 1);
    EXPECT_TRUE(SameBits(expected.o.view().Slice(1, t - 600, t - 599), one.o.view())) << t;
    EXPECT_NEAR(one.o.Get({1, 0, 5, 3}), exact.o.Get({1, t, 5, 3}), 0.05);
  }
}

TEST(AttendDecay, ForksAndTrimsKeepTheirOwn) {
  Context ctx(1);
  const Tokens x(DType::kF32);
  const Buffer other = LogDecays(DType::kF32, 300, 99);
  KVCache cache(x.options());
  x.Append(cache, 0, 140);
  KVCache fork = cache.Fork();
  fork.Append(x.k.view().Slice(1, 140, 300), x.v.view().Slice(1, 140, 300), {}, other.view().Slice(1, 140, 300));
  x.Append(cache, 140, 500);
  cache.Trim(std::vector<int64_t>{150, 150});
  x.Append(cache, 150, 160);
  ExpectRows(x.Forward(ctx), 150, 160, x.Attend(ctx, cache, 150, 160));
}

TEST(AttendDecay, ARowOfADraftHasTheBitsOfItsBranch) {
  Context ctx(2);
  const Tokens x(DType::kF32);
  KVCache cache(x.options());
  x.Append(cache, 0, 600);
  KVCache draft = cache.Fork();
  x.Append(draft, 600, 605);
  const std::vector<int64_t> tree = {-1, 0, 0, 2, -1};
  const Result all = AttendTo(ctx, draft.view(), x.q.view().Slice(1, 600, 605), Causal(), tree);
  const std::vector<std::vector<int64_t>> branches = {{0}, {0, 1}, {0, 2}, {0, 2, 3}, {4}};
  for (size_t i = 0; i < branches.size(); ++i) {
    KVCache alone = cache.Fork();
    for (const int64_t node : branches[i]) x.Append(alone, 600 + node, 601 + node);
    const int64_t row = 600 + branches[i].back();
    const Result one = x.Attend(ctx, alone, row, row + 1);
    const auto at = static_cast<int64_t>(i);
    EXPECT_TRUE(SameBits(all.o.view().Slice(1, at, at + 1), one.o.view())) << i;
    EXPECT_TRUE(SameBits(all.lse.view().Slice(2, at, at + 1), one.lse.view())) << i;
  }
}

TEST(AttendDecay, ASharedPrefixHasTheBitsOfItsCopies) {
  Context ctx(2);
  const Tokens x(DType::kF32);
  const auto one = [](const Buffer& b, int64_t begin, int64_t end) {
    return b.view().Slice(0, 0, 1).Slice(1, begin, end);
  };
  KVCache::Options options = x.options();
  KVCache copies(options);
  options.batch = 1;
  KVCache prefix(options);
  prefix.Append(one(x.k, 0, 600), one(x.v, 0, 600), {}, one(x.log_decay, 0, 600));
  KVCache shared = KVCache::Share(prefix, kBatch);
  const auto twice = [](const Buffer& b) {
    const ConstTensorView v = b.view().Slice(0, 0, 1).Slice(1, 0, 600);
    std::vector<int64_t> sizes(v.sizes().begin(), v.sizes().end()), strides(v.strides().begin(), v.strides().end());
    sizes[0] = kBatch;
    strides[0] = 0;
    return ConstTensorView(v.data(), v.dtype(), sizes, strides);
  };
  copies.Append(twice(x.k), twice(x.v), {}, twice(x.log_decay));
  x.Append(shared, 600, 603);
  x.Append(copies, 600, 603);
  ExpectSame(x.Attend(ctx, copies, 600, 603), x.Attend(ctx, shared, 600, 603));
}

TEST(AttendDecay, RotaryEmbeddingsApplyBesideIt) {
  Context ctx(1);
  const Tokens x(DType::kF32);
  KVCache::Options options = x.options();
  options.rotary = CacheRotary{RotaryPairs::kHalfSplit};
  KVCache cache(options);
  x.Append(cache, 0, 300);
  x.Append(cache, 300, 310);
  Tokens rotated = x;
  std::vector<int64_t> positions;
  for (int64_t t = 0; t < 700; ++t) positions.push_back(t);
  const ConstTensorView at(positions.data(), DType::kI64, {700});
  rotated.q = Buffer(DType::kF32, {kBatch, 700, kHq, kDim});
  rotated.k = Buffer(DType::kF32, {kBatch, 700, kHeads, kDim});
  Rotary(ctx, x.q.view(), at, options.rotary->pairs, options.rotary->options, rotated.q.view());
  Rotary(ctx, x.k.view(), at, options.rotary->pairs, options.rotary->options, rotated.k.view());
  ExpectRows(rotated.Forward(ctx), 300, 310, x.Attend(ctx, cache, 300, 310));
}

TEST(AttendDecay, AFileKeepsThem) {
  Context ctx(1);
  for (const DType dtype : {DType::kF64, DType::kBF16}) {
    const Tokens x(dtype);
    KVCache cache(x.options());
    x.Append(cache, 0, 130);
    x.Append(cache, 130, 140);
    const std::string path = testing::TempDir() + "heed_attend_decay.safetensors";
    cache.Save(path);
    const KVCache loaded = KVCache::Load(path);
    EXPECT_EQ(loaded.options().log_decay_heads, kHq);
    ExpectSame(x.Attend(ctx, cache, 130, 140), x.Attend(ctx, loaded, 130, 140));
    std::remove(path.c_str());
  }
}

TEST(AttendDecay, MistakesAreNamed) {
  Context ctx(1);
  const Tokens x(DType::kF32, 80);
  KVCache::Options options = x.options();
  options.log_decay_heads = 3;
  EXPECT_THAT([&] { KVCache{options}; }, ThrowsMessage<InvalidArgument>(HasSubstr(
                                             "KVCache: log_decay_heads is 3, expected a multiple of heads, 2, or 0")));
  options.log_decay_heads = kHq;
  KVCache cache(options);
  options.log_decay_heads = 0;
  KVCache plain(options);
  EXPECT_THAT([&] { cache.Append(x.k.view(), x.v.view()); },
              ThrowsMessage<InvalidArgument>(
                  HasSubstr("KVCache::Append: log_decay is absent, expected that of 6 query heads")));
  EXPECT_THAT(
      [&] { x.Append(plain, 0, 10); },
      ThrowsMessage<InvalidArgument>(HasSubstr("log_decay is given, expected none: the cache has no log_decay_heads")));
  EXPECT_THAT([&] { cache.Append(x.k.view(), x.v.view(), {}, x.log_decay.view().Slice(1, 0, 79)); },
              ThrowsMessage<InvalidArgument>(HasSubstr("log_decay has shape [2,79,6], expected [2,80,6]")));
  const Buffer counts(DType::kI32, {kBatch, 80, kHq});
  EXPECT_THAT([&] { cache.Append(x.k.view(), x.v.view(), {}, counts.view()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("log_decay has dtype i32, expected a float dtype")));
  EXPECT_EQ(cache.lengths()[0], 0);
  x.Append(cache, 0, 80);
  EXPECT_THAT([&] { x.Attend(ctx, cache, 70, 80, Options()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("causal is false, expected true")));
  Options again = Causal();
  again.log_decay = x.log_decay.view();
  EXPECT_THAT([&] { x.Attend(ctx, cache, 70, 80, again); },
              ThrowsMessage<InvalidArgument>(HasSubstr("log_decay is given, expected none")));
  EXPECT_THAT([&] { AttendTo(ctx, cache.view(), Normal(DType::kF32, {kBatch, 1, 2, kDim}, 1).view(), Causal()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("q has 2 heads, expected 6")));
}

}  // namespace
}  // namespace heed::attention
