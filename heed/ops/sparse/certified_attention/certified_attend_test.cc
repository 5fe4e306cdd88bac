// Certified attention over caches: bounds hold, the kept blocks suffice and are not many more than necessary, and
// everything else equals attention. HEED_TEST_ROWS sets the number of rows, HEED_TEST_FIRST_SEED the first seed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/ops/exact/attention/attend/attend.h"
#include "heed/ops/sparse/certified_attention/certified_attention.h"
#include "heed/ops/sparse/certified_attention/certified_case.h"
#include "heed/patterns/pattern.h"
#include "heed/state/kv_cache.h"
#include "tests/environment.h"

namespace heed::certified_attention {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

// A cache with its own keys and values, and queries of its last rows.
struct Call {
  Buffer k, v, q;
  KVCache cache;
  int64_t appended;

  Call(Keys kind, Random& random, const KVCache::Options& o, int64_t tokens, int64_t rows, int64_t group)
      : k(o.dtype, {o.batch, tokens, o.heads, o.dim}), v(o.dtype, {o.batch, tokens, o.heads, o.value_dim}),
        q(o.dtype, {o.batch, rows, o.heads * group, o.dim}), cache(o), appended(rows) {
    FillKeys(kind, random, k);
    v.FillNormal(random.Word());
    FillQueries(random, k.view(), q);
    cache.Append(k.view().Slice(1, 0, tokens - rows), v.view().Slice(1, 0, tokens - rows));
    cache.Append(k.view().Slice(1, tokens - rows, tokens), v.view().Slice(1, tokens - rows, tokens));
  }
};

struct Result {
  Buffer o, bound, lse, kept;

  Result(const KVView& cache, const ConstTensorView& q, Level level = Level::kSketch)
      : o(q.dtype(), {q.size(0), q.size(1), q.size(2), cache.value_dim}),
        bound(DType::kF32, {q.size(0), q.size(2), q.size(1)}), lse(DType::kF32, {q.size(0), q.size(2), q.size(1)}),
        kept(DType::kBool, {q.size(0), level == Level::kSkip ? q.size(2) : cache.heads, q.size(1),
                            (*std::ranges::max_element(cache.lengths) + 63) / 64}) {}
  Outputs outputs() const { return {o.view(), bound.view(), lse.view(), kept.view()}; }
  bool Kept(int64_t b, int64_t h, int64_t i, int64_t block) const { return kept.Get({b, h, i, block}) != 0; }
};

Result Certified(Context& ctx, const Call& call, const Options& options) {
  const Result r(call.cache.view(), call.q.view(), options.level);
  Attend(ctx, call.cache.view(), call.q.view(), options, r.outputs());
  return r;
}

// Calls f(b, query head, row) for all rows.
template <class F>
void ForRows(const ConstTensorView& q, const F& f) {
  for (int64_t b = 0; b < q.size(0); ++b) {
    for (int64_t h = 0; h < q.size(2); ++h) {
      for (int64_t i = 0; i < q.size(1); ++i) f(b, h, i);
    }
  }
}

TEST(CertifiedAttend, NoBoundLies) {
  const int64_t rows = FromEnvironment("HEED_TEST_ROWS", 6000), first = FromEnvironment("HEED_TEST_FIRST_SEED", 1);
  int64_t seen = 0, dropping = 0, failures = 0;
  for (uint64_t seed = static_cast<uint64_t>(first); seen < rows && failures < 10; ++seed) {
    Random random(seed);
    const Keys kind = kAllKeys[seed % std::size(kAllKeys)];
    KVCache::Options o;
    o.batch = random.Integer(1, 2);
    o.heads = random.Integer(1, 2);
    o.dim = random.Pick<int64_t>({1, 5, 16, 32, 64});
    o.value_dim = 2;
    o.page = random.Pick<int64_t>({64, 128, 0});
    o.capacity = 3000;
    o.dtype = random.Pick({DType::kF32, DType::kF32, DType::kBF16, DType::kF16});
    Options options;
    options.level = random.Pick({Level::kSketch, Level::kSketch, Level::kSkip, Level::kSkip, Level::kBox});
    if (options.level != Level::kSkip) o.sketch = Sketch::kInt8;
    const int64_t group = random.Pick<int64_t>({1, 2, 3, 5}), count = random.Pick<int64_t>({1, 4, 20});
    Call call(kind, random, o, random.Integer(std::max<int64_t>(count, 100), 2000), count, group);
    options.epsilon = random.Pick({0.0005, 0.02, 0.1, 0.5, 0.999});
    options.causal = random.Chance(0.7);
    if (random.Chance(0.3)) options.scale = random.Pick({-0.3, 0.0, 1.0, 3.0});
    Context ctx(1);
    ctx.set_isa(TargetOf(o.dtype, seed));
    const Result r = Certified(ctx, call, options);
    const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(o.dim)));
    const int64_t tokens = call.k.view().size(1);
    ForRows(call.q.view(), [&](int64_t b, int64_t h, int64_t i) {
      ++seen;
      const int64_t visible = options.causal ? tokens - count + i + 1 : tokens;
      const std::vector<double> s = LogitsOf(call.q.view(), call.k.view(), b, i, h, visible, scale);
      const bool skips = options.level == Level::kSkip;
      const auto is_kept = [&](int64_t block) { return r.Kept(b, skips ? h : h / group, i, block); };
      const double mass = DroppedMass(s, is_kept), bound = r.bound.Get({b, h, i});
      bool drops = false, ok = true;
      for (int64_t block = 0; block * 64 < visible; ++block) drops = drops || !is_kept(block);
      dropping += drops ? 1 : 0;
      for (int64_t block = 0; block * 64 < visible; ++block) {
        for (int64_t j = block * 64; j < std::min(visible, block * 64 + 64); ++j) {
          ok = ok && (std::isfinite(s[static_cast<size_t>(j)]) || is_kept(block));
        }
      }
      ok = ok && (skips || is_kept(0)) && is_kept((visible - 1) / 64);
      bool query_is_number = true;
      for (int64_t e = 0; e < o.dim; ++e) query_is_number = query_is_number && !std::isnan(call.q.Get({b, i, h, e}));
      if (!query_is_number) ok = ok && !drops && bound == 0;
      if (!std::isnan(mass)) ok = ok && bound >= mass && bound <= options.epsilon && (drops ? bound > 0 : bound == 0);
      // A NaN makes the row and the bound NaN, unless all blocks are kept.
      if (std::isnan(mass)) ok = ok && (drops ? std::isnan(bound) : bound == 0);
      if (ok || ++failures > 10) return;
      ADD_FAILURE() << "seed " << seed << ", kind " << static_cast<int>(kind) << ", row " << b << " " << h << " " << i
                    << ": bound " << bound << ", mass " << mass << ", epsilon " << options.epsilon << ", drops "
                    << drops;
    });
  }
  EXPECT_GT(dropping, seen / 4) << "rows that leave something out";
  RecordProperty("rows", static_cast<int>(seen));
  RecordProperty("dropping", static_cast<int>(dropping));
}

// The smallest number of blocks that any selection needs, including the first and the last one.
int64_t Oracle(const std::vector<double>& s, double epsilon) {
  const auto blocks = static_cast<size_t>((s.size() + 63) / 64);
  const double most = *std::ranges::max_element(s);
  std::vector<double> mass(blocks);
  double all = 0;
  for (size_t j = 0; j < s.size(); ++j) {
    mass[j / 64] += std::exp(s[j] - most);
    all += std::exp(s[j] - most);
  }
  double left = all - mass.front() - mass.back();
  std::sort(mass.begin() + 1, mass.end() - 1, std::greater<>());
  int64_t kept = 2;
  for (size_t i = 1; i + 1 < blocks && left > epsilon * all; ++i, ++kept) left -= mass[i];
  return kept;
}

TEST(CertifiedAttend, KeepsLittleMoreThanItMust) {
  Random random(3);
  Context ctx(2);
  for (const Keys kind : {Keys::kClustered, Keys::kLowRank, Keys::kInTime, Keys::kNeedle}) {
    const KVCache::Options o = {.heads = 2, .dim = 64, .value_dim = 64, .sketch = Sketch::kInt8};
    Call call(kind, random, o, 8192, 4, 1);
    call.q.FillNormal(7, 2);
    const Result r = Certified(ctx, call, OptionsWith(0.05, Level::kSketch));
    int64_t kept = 0, oracle = 0;
    ForRows(call.q.view(), [&](int64_t b, int64_t h, int64_t i) {
      for (int64_t block = 0; block < 128; ++block) kept += r.Kept(b, h, i, block) ? 1 : 0;
      oracle += Oracle(LogitsOf(call.q.view(), call.k.view(), b, i, h, 8192, 0.125), 0.05);
    });
    EXPECT_LE(static_cast<double>(kept), 1.25 * static_cast<double>(oracle) + 5 * 8) << static_cast<int>(kind);
    EXPECT_LE(oracle, kept);
  }
}

attention::Options Plain(const Options& options) {
  attention::Options plain;
  plain.causal = options.causal;
  plain.scale = options.scale;
  return plain;
}

TEST(CertifiedAttend, IsAttentionOverWhatIsKept) {
  Random random(4);
  Context ctx(3), one(1);
  const KVCache::Options o = {.batch = 2, .heads = 2, .dim = 32, .value_dim = 20, .sketch = Sketch::kInt8};
  Call call(Keys::kLowRank, random, o, 1500, 3, 4);
  const Options options = OptionsWith(0.1, Level::kSketch, /*causal=*/true);
  const Result r = Certified(ctx, call, options), same = Certified(one, call, options);
  EXPECT_TRUE(SameBits(r.o.view(), same.o.view()) && SameBits(r.bound.view(), same.bound.view()));
  const Buffer index(DType::kI32, {2, 3, 2, 24});
  bool drops = false;
  for (int64_t row = 0; row < 12; ++row) {
    const int64_t b = row / 6, i = row / 2 % 3, h = row % 2;
    for (int64_t block = 0; block < 24; ++block) {
      index.Set({b, i, h, block}, r.Kept(b, h, i, block) ? static_cast<double>(block) : -1);
      drops = drops || !r.Kept(b, h, i, block);
    }
  }
  EXPECT_TRUE(drops);
  attention::Options exact = Plain(options);
  exact.pattern = patterns::RowBlocks(index.view(), 64);
  const Result expected(call.cache.view(), call.q.view());
  attention::Attend(ctx, call.cache.view(), call.q.view(), exact, {expected.o.view(), expected.lse.view()});
  EXPECT_TRUE(SameBits(r.o.view(), expected.o.view()) && SameBits(r.lse.view(), expected.lse.view()));
}

TEST(CertifiedAttend, AnEpsilonOfZeroIsDenseBitForBit) {
  Random random(5);
  Context ctx(2);
  const KVCache::Options o = {.batch = 2, .heads = 2, .dim = 16, .value_dim = 16, .sketch = Sketch::kInt8};
  Call call(Keys::kLowRank, random, o, 900, 2, 2);
  for (const Level level : {Level::kAuto, Level::kSketch, Level::kSkip}) {
    const Options options = OptionsWith(0, level, /*causal=*/true);
    const Result r = Certified(ctx, call, options);
    const Result dense(call.cache.view(), call.q.view());
    attention::Attend(ctx, call.cache.view(), call.q.view(), Plain(options), {dense.o.view(), dense.lse.view()});
    EXPECT_TRUE(SameBits(r.o.view(), dense.o.view()) && SameBits(r.lse.view(), dense.lse.view()));
    ForRows(call.q.view(), [&](int64_t b, int64_t h, int64_t i) { EXPECT_EQ(r.bound.Get({b, h, i}), 0); });
  }
}

TEST(CertifiedAttend, BitsDoNotDependOnNeighboursPagesOrStrides) {
  Random random(6);
  Context ctx(2);
  KVCache::Options o = {.batch = 2, .heads = 2, .dim = 24, .value_dim = 8, .sketch = Sketch::kInt8};
  const Options options = OptionsWith(0.2, Level::kSketch, /*causal=*/true);
  Call both(Keys::kClustered, random, o, 1000, 2, 2);
  const Result r = Certified(ctx, both, options);
  o.batch = 1;
  o.page = 0;
  o.capacity = 1200;
  KVCache alone(o);
  for (const auto& [begin, end] : {std::pair{0, 333}, {333, 998}, {998, 1000}}) {
    alone.Append(both.k.view().Slice(0, 1, 2).Slice(1, begin, end), both.v.view().Slice(0, 1, 2).Slice(1, begin, end));
  }
  const ConstTensorView q = both.q.view().Slice(0, 1, 2);
  const Result of_one(alone.view(), q);
  Attend(ctx, alone.view(), q, options, of_one.outputs());
  EXPECT_TRUE(SameBits(of_one.o.view(), r.o.view().Slice(0, 1, 2)));
  EXPECT_TRUE(SameBits(of_one.bound.view(), r.bound.view().Slice(0, 1, 2)));
}

// Sequences of different lengths: rows beyond a sequence's appended tokens see no key.
TEST(CertifiedAttend, RowsBeyondASequencesOwnSeeNothing) {
  Random random(8);
  Context ctx(2);
  KVCache cache({.batch = 3, .dim = 8, .sketch = Sketch::kInt8});
  const Buffer x(DType::kF32, {3, 400, 1, 8});
  FillKeys(Keys::kLowRank, random, x);
  cache.Append(x.view(), x.view(), std::vector<int64_t>{400, 0, 300});
  cache.Append(x.view().Slice(1, 0, 2), x.view().Slice(1, 0, 2), std::vector<int64_t>{2, 0, 1});
  const ConstTensorView q = x.view().Slice(1, 100, 102);
  const Result r(cache.view(), q);
  Attend(ctx, cache.view(), q, OptionsWith(0.5, Level::kSketch, /*causal=*/true), r.outputs());
  for (const auto& [b, i, sees] : {std::tuple{0, 1, true}, {1, 0, false}, {1, 1, false}, {2, 0, true}, {2, 1, false}}) {
    EXPECT_EQ(std::isinf(r.lse.Get({b, 0, i})), !sees);
    if (sees) continue;
    EXPECT_EQ(r.bound.Get({b, 0, i}), 0);
    for (int64_t block = 0; block < 7; ++block) EXPECT_FALSE(r.Kept(b, 0, i, block));
  }
}

TEST(CertifiedAttend, AutoGivesUpPerHeadAndTriesAgain) {
  Random random(9);
  Context ctx(1);
  const KVCache::Options o = {.heads = 2, .dim = 64, .value_dim = 64, .sketch = Sketch::kInt8};
  constexpr int64_t kTokens = 6400;  // each block has a hundredth of the mass, so one of them may be dropped
  Call call(Keys::kNormal, random, o, kTokens, 1, 1);
  KVCache cache(o);
  const Buffer k(DType::kF32, {1, kTokens, 2, 64});
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t e = 0; e < 64; ++e) {
      k.Set({0, t, 0, e}, 0.01 * call.k.Get({0, t, 0, e}));  // head 0: almost no block can be dropped
      k.Set({0, t, 1, e}, t == 777 ? e % 7 - 3 : 0.01 * call.k.Get({0, t, 1, e}));  // head 1: almost all blocks can be
                                                                                    // dropped
    }
  }
  cache.Append(k.view().Slice(1, 1, kTokens), call.v.view().Slice(1, 1, kTokens));
  cache.Append(k.view().Slice(1, 0, 1), call.v.view().Slice(1, 0, 1));
  for (int64_t e = 0; e < 64; ++e) {
    call.q.Set({0, 0, 0, e}, e % 7 - 3);
    call.q.Set({0, 0, 1, e}, 2 * (e % 7 - 3));
  }
  std::string gave_up, sketched;
  const auto next = [&](const KVCache& of, Level level) {
    const Result r(of.view(), call.q.view());
    Attend(ctx, of.view(), call.q.view(), OptionsWith(0.02, level, /*causal=*/true), r.outputs());
    EXPECT_GT(r.bound.Get({0, 1, 0}), 0);
    return r.bound.Get({0, 0, 0}) == 0 ? 'd' : 's';
  };
  for (int i = 0; i < 66; ++i) gave_up += next(cache, Level::kAuto);
  // Two misses, 30 dense calls, one more attempt, which is a miss too.
  const std::string pause(30, 'd');
  EXPECT_EQ(gave_up, "ss" + pause + "s" + pause + "sdd");
  KVCache fork = cache.Fork();
  for (int i = 0; i < 29; ++i) EXPECT_EQ(next(fork, Level::kAuto), i < 28 ? 'd' : 's') << i;
  EXPECT_EQ(next(cache, Level::kAuto), 'd');  // the fork has its own state
  EXPECT_EQ(next(cache, Level::kSketch), 's');
}

TEST(CertifiedAttend, TurnedKeysAreBoundedAsTheyAreStored) {
  Random random(10);
  Context ctx(2);
  KVCache::Options o = {
      .heads = 1, .dim = 32, .value_dim = 32, .rotary = CacheRotary{RotaryPairs::kHalfSplit}, .sketch = Sketch::kInt8};
  Call turning(Keys::kLowRank, random, o, 1000, 1, 2);
  o.rotary.reset();
  KVCache plain(o);
  Buffer k(DType::kF32, {1, 1000, 1, 32}), q(DType::kF32, {1, 1, 2, 32});
  std::vector<int64_t> positions(1000);
  for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int64_t>(i);
  Rotary(ctx, turning.k.view(), {positions.data(), DType::kI64, {1, 1000}}, RotaryPairs::kHalfSplit, {}, k.view());
  Rotary(ctx, turning.q.view(), {positions.data() + 999, DType::kI64, {1, 1}}, RotaryPairs::kHalfSplit, {}, q.view());
  plain.Append(k.view().Slice(1, 0, 999), turning.v.view().Slice(1, 0, 999));
  plain.Append(k.view().Slice(1, 999, 1000), turning.v.view().Slice(1, 999, 1000));
  const Options options = OptionsWith(0.1, Level::kSketch, /*causal=*/true);
  const Result a = Certified(ctx, turning, options), b(plain.view(), q.view());
  Attend(ctx, plain.view(), q.view(), options, b.outputs());
  EXPECT_TRUE(SameBits(a.o.view(), b.o.view()) && SameBits(a.bound.view(), b.bound.view()));
}

TEST(CertifiedAttend, BadInputNamesTheArgumentAndWritesNothing) {
  Random random(11);
  Context ctx(1);
  KVCache::Options o = {.heads = 2, .dim = 8, .value_dim = 8, .sketch = Sketch::kInt8};
  Call call(Keys::kNormal, random, o, 300, 2, 2);
  o.sketch = Sketch::kNone;
  KVCache bare(o);
  bare.Append(call.k.view(), call.v.view());
  const Result r(call.cache.view(), call.q.view());
  const auto expect = [&](const KVCache& cache, const ConstTensorView& q, const Options& options, const Outputs& out,
                          const std::string& message) {
    EXPECT_THAT([&] { Attend(ctx, cache.view(), q, options, out); },
                ThrowsMessage<InvalidArgument>(HasSubstr("certified_attention::Attend: " + message)));
    for (const Buffer* buffer : {&r.o, &r.bound, &r.lse, &r.kept}) {
      EXPECT_TRUE(std::ranges::all_of(buffer->bytes(), [](uint8_t x) { return x == 0xFF; }));
    }
  };
  const Outputs out = r.outputs();
  const ConstTensorView q = call.q.view();
  expect(bare, q, {}, out, "cache has no sketch, expected a cache that was made with one");
  for (const double epsilon : {-0.1, 1.0, 2.0, std::nan("")}) {
    expect(call.cache, q, OptionsWith(epsilon), out, "epsilon is ");
  }
  expect(call.cache, q, OptionsWith(0.02, Level::kAuto, false, INFINITY), out,
         "scale is inf, expected a finite number");
  expect(call.cache, {}, {}, out, "q is absent, expected a tensor");
  expect(call.cache, q.Slice(3, 0, 4), {}, out, "q has shape [1,2,4,4], expected [1,T,H,8], H a multiple of 2");
  expect(call.cache, q.Slice(2, 0, 3), {}, out, "q has shape [1,2,3,8], expected");
  const Buffer long_q(DType::kF32, {1, 3, 4, 8}), half(DType::kF16, {1, 2, 4, 8});
  expect(call.cache, long_q.view(), {}, out, "q has 3 queries, expected at most 2, the tokens");
  expect(call.cache, half.view(), {}, out, "q has dtype f16, expected f32 as the cache");
  expect(call.cache, q, {}, {r.o.view(), r.bound.view().Slice(2, 0, 1), {}, {}},
         "bound has shape [1,4,1], expected [1,4,2]");
  expect(call.cache, q, {}, {{}, r.bound.view(), {}, {}}, "o is absent, expected a tensor");
  expect(call.cache, q, {}, {r.o.view(), r.bound.view(), r.bound.view(), {}}, "lse overlaps bound");
  const Options options = OptionsWith(0.1);
  Attend(ctx, call.cache.view(), q, options, {r.o.view(), {}, {}, {}});
}

}  // namespace
}  // namespace heed::certified_attention
