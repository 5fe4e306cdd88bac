// Attention over caches with rotary encoding. Over rotated keys it is bitwise equal to rotated queries without the
// option; over rings that rotate by index it matches a plain loop over all keys.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/ops/exact/attention/attend/attend.h"
#include "heed/state/kv_cache.h"
#include "heed/state/ring_kv_cache.h"

namespace heed::attention {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

using List = std::vector<int64_t>;

Buffer Normal(DType dtype, std::initializer_list<int64_t> sizes, uint64_t seed) {
  Buffer b(dtype, sizes);
  b.FillNormal(seed);
  return b;
}

struct Result {
  Buffer o, lse;
};

Result AttendTo(Context& ctx, const KVView& cache, const ConstTensorView& q, const Options& options) {
  const DType wide = q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32;
  const Result r = {Buffer(q.dtype(), {q.size(0), q.size(1), q.size(2), cache.value_dim}),
                    Buffer(wide, {q.size(0), q.size(2), q.size(1)})};
  Attend(ctx, cache, q, options, {r.o.view(), r.lse.view()});
  return r;
}

// Rotates row t of sequence b by first[b] + t.
Buffer Rotated(const CacheRotary& rotary, const Buffer& x, const List& first) {
  const Buffer y(x.view().dtype(), x.view().sizes());
  List positions;
  for (const int64_t p : first) {
    for (int64_t t = 0; t < x.view().size(1); ++t) positions.push_back(p + t);
  }
  Context ctx(1);
  Rotary(ctx, x.view(), ConstTensorView(positions.data(), DType::kI64, {x.view().size(0), x.view().size(1)}),
         rotary.pairs, rotary.options, y.view());
  return y;
}

TEST(AttendRotaryTest, HasTheBitsOfRotatedQueriesAndKeys) {
  Context ctx(2);
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
    for (const RotaryPairs pairs : {RotaryPairs::kHalfSplit, RotaryPairs::kInterleaved}) {
      for (const bool ring : {false, true}) {
        SCOPED_TRACE(std::string(Name(dtype)) + (ring ? " ring" : ""));
        CacheRotary rotary = {pairs};
        rotary.options.dim = 32;
        KVCache::Options kv = {.batch = 2, .heads = 2, .dim = 40, .value_dim = 24, .dtype = dtype};
        RingKVCache::Options of_ring = {
            .batch = 2, .heads = 2, .dim = 40, .value_dim = 24, .window = 100, .sink_tokens = 4, .dtype = dtype};
        KVCache plain(kv);
        RingKVCache plain_ring(of_ring);
        kv.rotary = of_ring.rotary = rotary;
        KVCache cache(kv);
        RingKVCache turning_ring(of_ring);
        Options options;
        options.causal = true;
        if (ring) options.window = {99, 0};
        uint64_t seed = 1;
        for (const List& counts : {List{90, 200}, {1, 1}, {5, 3}, {30, 0}}) {
          const int64_t T = *std::max_element(counts.begin(), counts.end());
          const Buffer k = Normal(dtype, {2, T, 2, 40}, seed++);
          const Buffer v = Normal(dtype, {2, T, 2, 24}, seed++);
          const Buffer q = Normal(dtype, {2, T, 6, 40}, seed++);
          const auto lengths = ring ? turning_ring.lengths() : cache.lengths();
          const List before(lengths.begin(), lengths.end());
          const Buffer rotated_k = Rotated(rotary, k, before);
          const Buffer rotated_q = Rotated(rotary, q, before);
          if (ring) {
            turning_ring.Append(k.view(), v.view(), counts);
            plain_ring.Append(rotated_k.view(), v.view(), counts);
          } else {
            cache.Append(k.view(), v.view(), counts);
            plain.Append(rotated_k.view(), v.view(), counts);
          }
          const Result r = AttendTo(ctx, ring ? turning_ring.view() : cache.view(), q.view(), options);
          const Result expected = AttendTo(ctx, ring ? plain_ring.view() : plain.view(), rotated_q.view(), options);
          EXPECT_TRUE(SameBits(r.o.view(), expected.o.view()));
          EXPECT_TRUE(SameBits(r.lse.view(), expected.lse.view()));
        }
      }
    }
  }
}

TEST(AttendRotaryTest, QuantisedKeysMeetRotatedQueries) {
  Context ctx(1);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    KVCache::Options o = {.batch = 2, .heads = 2, .dim = 64, .dtype = dtype};
    o.quantize = Quantize::kInt8;
    KVCache plain(o);
    const CacheRotary rotary = {RotaryPairs::kHalfSplit};
    o.rotary = rotary;
    KVCache cache(o);
    const Buffer k = Normal(dtype, {2, 300, 2, 64}, 1), v = Normal(dtype, {2, 300, 2, 64}, 2);
    const Buffer q = Normal(dtype, {2, 3, 4, 64}, 3);
    const Buffer rotated_k = Rotated(rotary, k, {0, 0}), rotated_q = Rotated(rotary, q, {297, 297});
    for (const auto& [begin, end] : {std::pair{0, 297}, {297, 300}}) {
      const ConstTensorView values = v.view().Slice(1, begin, end);
      cache.Append(k.view().Slice(1, begin, end), values);
      plain.Append(rotated_k.view().Slice(1, begin, end), values);
    }
    Options options;
    options.causal = true;
    const Result r = AttendTo(ctx, cache.view(), q.view(), options);
    const Result expected = AttendTo(ctx, plain.view(), rotated_q.view(), options);
    EXPECT_TRUE(SameBits(r.o.view(), expected.o.view()));
    const Bound bound = QuantizationBound(ctx, cache.view(), q.view(), options);
    const Bound same = QuantizationBound(ctx, plain.view(), rotated_q.view(), options);
    EXPECT_EQ(bound.logit, same.logit);
    EXPECT_EQ(bound.output, same.output);
  }
}

TEST(AttendRotaryTest, TreesAreRefused) {
  Context ctx(1);
  KVCache cache({.dim = 8, .rotary = CacheRotary{RotaryPairs::kHalfSplit}});
  const Buffer x = Normal(DType::kF32, {1, 2, 1, 8}, 1), o(DType::kF32, {1, 2, 1, 8});
  cache.Append(x.view(), x.view());
  const List tree = {-1, -1};
  EXPECT_THAT([&] { Attend(ctx, cache.view(), x.view(), {}, {o.view(), {}}, tree); },
              ThrowsMessage<InvalidArgument>(HasSubstr("tree is given, expected none")));
}

// Rotates a row of D numbers by the angles of position `place`, in double.
std::vector<double> TurnedRow(std::vector<double> x, int64_t place, RotaryPairs pairs, size_t dim) {
  const std::vector<double> old = x;
  for (size_t i = 0; i < dim / 2; ++i) {
    const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(dim);
    const double angle = static_cast<double>(place) * std::pow(10000.0, exponent);
    const size_t a = pairs == RotaryPairs::kHalfSplit ? i : 2 * i;
    const size_t b = pairs == RotaryPairs::kHalfSplit ? i + dim / 2 : 2 * i + 1;
    x[a] = old[a] * std::cos(angle) - old[b] * std::sin(angle);
    x[b] = old[b] * std::cos(angle) + old[a] * std::sin(angle);
  }
  return x;
}

// The whole history of one sequence and the keys that each row sees, from the formulas of ring_kv_cache.h alone.
struct Story {
  int64_t window, sinks, group;
  RotaryPairs pairs;
  size_t dim;
  std::vector<std::vector<std::vector<double>>> q, k, v;  // [token][head][element]

  int64_t Index(int64_t p, int64_t j) const { return j < sinks ? j : sinks + j - std::max(sinks, p - window + 1); }

  // o of one query head of the row at position p, which sees `left` tokens before itself and the first `seen_sinks`.
  std::vector<double> Row(int64_t p, size_t head, int64_t left, int64_t seen_sinks, double softcap,
                          double sink_logit) const {
    const size_t kv_head = head / static_cast<size_t>(group);
    const std::vector<double> query = TurnedRow(q[static_cast<size_t>(p)][head], Index(p, p), pairs, dim);
    std::vector<double> logits;
    List tokens;
    for (int64_t j = 0; j <= p; ++j) {
      if (j < p - left && j >= seen_sinks) continue;
      const std::vector<double> key = TurnedRow(k[static_cast<size_t>(j)][kv_head], Index(p, j), pairs, dim);
      double logit = 0;
      for (size_t e = 0; e < key.size(); ++e) logit += query[e] * key[e];
      logit /= std::sqrt(static_cast<double>(key.size()));
      logits.push_back(softcap > 0 ? softcap * std::tanh(logit / softcap) : logit);
      tokens.push_back(j);
    }
    double sum = std::isinf(sink_logit) ? 0 : std::exp(sink_logit);
    std::vector<double> o(v[0][0].size());
    for (size_t i = 0; i < logits.size(); ++i) {
      const double weight = std::exp(logits[i]);
      sum += weight;
      for (size_t e = 0; e < o.size(); ++e) {
        o[e] += weight * v[static_cast<size_t>(tokens[i])][kv_head][e];
      }
    }
    for (double& x : o) x /= sum;
    return o;
  }
};

std::vector<std::vector<double>> TokenOf(const Buffer& x, int64_t b, int64_t t) {
  std::vector<std::vector<double>> heads(static_cast<size_t>(x.view().size(2)));
  for (size_t h = 0; h < heads.size(); ++h) {
    for (int64_t e = 0; e < x.view().size(3); ++e) {
      heads[h].push_back(x.Get({b, t, static_cast<int64_t>(h), e}));
    }
  }
  return heads;
}

struct RingCase {
  int64_t window = 20, sinks = 3;
  RotaryPairs pairs = RotaryPairs::kHalfSplit;
  DType dtype = DType::kF64;
  int64_t left = -1, seen_sinks = -1;  // from the options; the ring's by default
  double softcap = 0;
  bool logit_sinks = false;
  bool trim = false;  // truncates half of every append before attending
};

// Attends after every append to two sequences that receive different numbers of tokens.
void ExpectTheLoop(const RingCase& n, const std::vector<List>& appends) {
  SCOPED_TRACE("sinks " + std::to_string(n.sinks) + " window " + std::to_string(n.window));
  constexpr int64_t kHeads = 2, kGroup = 3, kDim = 12, kRotated = 8, kValue = 5;
  const int64_t left = n.left < 0 ? n.window - 1 : n.left;
  const int64_t seen_sinks = n.seen_sinks < 0 ? n.sinks : n.seen_sinks;
  RingKVCache::Options o = {.batch = 2,
                            .heads = kHeads,
                            .dim = kDim,
                            .value_dim = kValue,
                            .window = n.window,
                            .sink_tokens = n.sinks,
                            .dtype = n.dtype};
  o.rotary = CacheRotary{n.pairs};
  o.rotary->options.dim = kRotated;
  o.positions = RingPositions::kCache;
  RingKVCache ring(o);
  std::vector<Story> stories(2, Story{n.window, n.sinks, kGroup, n.pairs, kRotated, {}, {}, {}});
  Context ctx(2);
  const Buffer sinks = Normal(n.dtype == DType::kF64 ? n.dtype : DType::kF32, {6}, 77);
  uint64_t seed = 100;
  for (List counts : appends) {
    const int64_t T = *std::max_element(counts.begin(), counts.end());
    const Buffer k = Normal(n.dtype, {2, T, kHeads, kDim}, seed++);
    const Buffer v = Normal(n.dtype, {2, T, kHeads, kValue}, seed++);
    const Buffer q = Normal(n.dtype, {2, T, kHeads * kGroup, kDim}, seed++);
    ring.Append(k.view(), v.view(), counts);
    if (n.trim) {
      List lengths(ring.lengths().begin(), ring.lengths().end());
      for (size_t b = 0; b < 2; ++b) {
        lengths[b] -= counts[b] / 2;
        counts[b] -= counts[b] / 2;
      }
      ring.Trim(lengths);
    }
    Options options;
    options.causal = true;
    options.window = {left, 0};
    options.sink_tokens = seen_sinks;
    options.softcap = n.softcap;
    if (n.logit_sinks) options.sinks = sinks.view();
    const int64_t rows = *std::max_element(counts.begin(), counts.end());
    const Result r = AttendTo(ctx, ring.view(), q.view().Slice(1, 0, rows), options);
    double largest = 0;
    for (int64_t b = 0; b < 2; ++b) {
      Story& story = stories[static_cast<size_t>(b)];
      for (int64_t t = 0; t < rows; ++t) {
        const bool there = t < counts[static_cast<size_t>(b)];
        if (there) {
          story.q.push_back(TokenOf(q, b, t));
          story.k.push_back(TokenOf(k, b, t));
          story.v.push_back(TokenOf(v, b, t));
        }
        for (int64_t h = 0; h < kHeads * kGroup; ++h) {
          const std::vector<double> expected =
              !there ? std::vector<double>(kValue)
                     : story.Row(static_cast<int64_t>(story.k.size()) - 1, static_cast<size_t>(h), left, seen_sinks,
                                 n.softcap, n.logit_sinks ? sinks.Get({h}) : -std::numeric_limits<double>::infinity());
          for (int64_t e = 0; e < kValue; ++e) {
            const double got = r.o.Get({b, t, h, e});
            ASSERT_FALSE(std::isnan(got));
            largest = std::max(largest, std::fabs(got - expected[static_cast<size_t>(e)]));
          }
        }
      }
    }
    ASSERT_LT(largest, n.dtype == DType::kF64 ? 1e-12 : 3e-6)
        << stories[0].k.size() << " and " << stories[1].k.size() << " tokens";
  }
}

const std::vector<List> kAppends = {{2, 1},  {1, 1}, {10, 30}, {1, 0},  {1, 1}, {1, 1},
                                    {30, 7}, {1, 1}, {0, 5},   {70, 4}, {3, 1}, {1, 1}};

TEST(AttendRotaryTest, ARingThatRotatesByItsPlacesIsThePlainLoop) {
  for (const int64_t sinks : {0, 1, 3, 30}) {
    for (const int64_t window : {1, 2, 20, 70, 500}) {
      for (const RotaryPairs pairs : {RotaryPairs::kHalfSplit, RotaryPairs::kInterleaved}) {
        RingCase n;
        n.sinks = sinks;
        n.window = window;
        n.pairs = pairs;
        ExpectTheLoop(n, kAppends);
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(AttendRotaryTest, ARingTakesTheOptionsThatHaveAMeaning) {
  ExpectTheLoop({.dtype = DType::kF32}, kAppends);
  ExpectTheLoop({.left = 7}, kAppends);
  ExpectTheLoop({.left = 0, .seen_sinks = 1}, kAppends);
  ExpectTheLoop({.seen_sinks = 0}, kAppends);
  ExpectTheLoop({.softcap = 2, .logit_sinks = true}, kAppends);
  ExpectTheLoop({.trim = true}, kAppends);
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  ExpectTheLoop({.window = kMax, .sinks = kMax, .left = kMax - 1, .seen_sinks = 0}, {{40, 3}, {1, 2}});
}

// Sinks and a window are attended to after many evictions, in a ring that never held other tokens, and rotated by hand
// in a cache without rotary encoding. All three are bitwise equal.
TEST(AttendRotaryTest, WhatIsGoneLeavesNoTrace) {
  constexpr int64_t kSinks = 4, kWindow = 30, kTokens = 1000, kDim = 16;
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    const Buffer k = Normal(dtype, {1, kTokens, 1, kDim}, 1);
    const Buffer v = Normal(dtype, {1, kTokens, 1, kDim}, 2);
    const Buffer q = Normal(dtype, {1, 1, 2, kDim}, 3);
    RingKVCache::Options o = {.dim = kDim, .window = kWindow, .sink_tokens = kSinks, .dtype = dtype};
    const CacheRotary rotary = {RotaryPairs::kInterleaved};
    o.rotary = rotary;
    o.positions = RingPositions::kCache;
    RingKVCache whole(o), part(o);
    const auto append = [&](auto& cache, int64_t begin, int64_t end) {
      cache.Append(k.view().Slice(1, begin, end), v.view().Slice(1, begin, end));
    };
    append(whole, 0, 700);
    for (int64_t t = 700; t < kTokens; ++t) append(whole, t, t + 1);
    append(part, 0, kSinks);
    append(part, kTokens - kWindow, kTokens - 1);
    append(part, kTokens - 1, kTokens);

    const Buffer kept(dtype, {1, kSinks + kWindow, 1, kDim});
    for (int64_t i = 0; i < kSinks + kWindow; ++i) {
      const int64_t token = i < kSinks ? i : kTokens - kWindow + i - kSinks;
      for (int64_t e = 0; e < kDim; ++e) kept.Set({0, i, 0, e}, k.Get({0, token, 0, e}));
    }
    const Buffer rotated = Rotated(rotary, kept, {0});
    KVCache plain({.dim = kDim, .dtype = dtype});
    plain.Append(rotated.view().Slice(1, 0, kSinks), v.view().Slice(1, 0, kSinks));
    const int64_t begin = kTokens - kWindow, last = kSinks + kWindow - 1;
    plain.Append(rotated.view().Slice(1, kSinks, last), v.view().Slice(1, begin, kTokens - 1));
    plain.Append(rotated.view().Slice(1, last, last + 1), v.view().Slice(1, kTokens - 1, kTokens));

    Options options;
    options.causal = true;
    options.window = {kWindow - 1, 0};
    options.sink_tokens = kSinks;
    Context ctx(1), many(3);
    const Result a = AttendTo(ctx, whole.view(), q.view(), options);
    const Buffer rotated_q = Rotated(rotary, q, {last});
    for (const Result& b :
         {AttendTo(ctx, part.view(), q.view(), options), AttendTo(ctx, whole.Fork().view(), q.view(), options),
          AttendTo(many, whole.view(), q.view(), options), AttendTo(ctx, plain.view(), rotated_q.view(), options)}) {
      EXPECT_TRUE(SameBits(a.o.view(), b.o.view())) << Name(dtype);
      EXPECT_TRUE(SameBits(a.lse.view(), b.lse.view()));
    }
  }
}

TEST(AttendRotaryTest, AnEmptyRingTakesNoQueries) {
  RingKVCache::Options o = {.dim = 8, .window = 4};
  o.rotary = CacheRotary{RotaryPairs::kHalfSplit};
  o.positions = RingPositions::kCache;
  const RingKVCache ring(o);
  Options options;
  options.causal = true;
  options.window = {3, 0};
  Context ctx(1);
  const Buffer q = Normal(DType::kF32, {1, 2, 1, 8}, 1);
  EXPECT_THROW(AttendTo(ctx, ring.view(), q.view(), options), InvalidArgument);
  AttendTo(ctx, ring.view(), q.view().Slice(1, 0, 0), options);
}

TEST(AttendRotaryTest, ExplainCountsRotations) {
  const Context ctx(1);
  KVCache::Options kv = {.heads = 2, .dim = 32};
  const Buffer x = Normal(DType::kF32, {1, 70, 2, 32}, 1);
  const Buffer q = Normal(DType::kF32, {1, 1, 4, 32}, 2);
  Options options;
  options.causal = true;
  options.window = {9, 0};
  const auto bytes = [&](auto&& cache) {
    cache.Append(x.view(), x.view());
    return ExplainAttend(ctx, cache.view(), q.view(), options).workspace_bytes;
  };
  const int64_t plain = bytes(KVCache(kv));
  kv.rotary = CacheRotary{RotaryPairs::kHalfSplit};
  EXPECT_EQ(bytes(KVCache(kv)), plain + 4 * 32 * 4);
  RingKVCache::Options ring = {.heads = 2, .dim = 32, .window = 10, .rotary = kv.rotary};
  ring.positions = RingPositions::kCache;
  EXPECT_EQ(bytes(RingKVCache(ring)), plain + (4 + 3 * 70 * 2) * 32 * 4);
}

TEST(AttendRotaryTest, OptionsWithoutAMeaningAreRefusedAndNothingIsWritten) {
  Context ctx(1);
  RingKVCache::Options o = {.dim = 8, .window = 4};
  o.rotary = CacheRotary{RotaryPairs::kHalfSplit};
  o.positions = RingPositions::kCache;
  RingKVCache ring(o);
  const Buffer x = Normal(DType::kF32, {1, 9, 1, 8}, 1);
  ring.Append(x.view(), x.view());
  const Buffer out(DType::kF32, {1, 9, 1, 8});
  const Buffer before(DType::kF32, {1, 9, 1, 8});
  const auto fails = [&](const std::function<void(Options&)>& set, const char* what) {
    Options options;
    options.causal = true;
    options.window = {3, 0};
    set(options);
    EXPECT_THAT([&] { Attend(ctx, ring.view(), x.view(), options, {out.view(), {}}); },
                ThrowsMessage<InvalidArgument>(HasSubstr(what)));
    EXPECT_TRUE(SameBits(out.view(), before.view()));
  };
  const Buffer list(DType::kI64, {1}), lists(DType::kI64, {1, 9});
  const Buffer mask(DType::kBool, {1, 1, 1, 9}), slopes = Normal(DType::kF32, {1}, 2);
  const Buffer bias = Normal(DType::kF32, {1, 1, 1, 9}, 2);
  fails([&](Options& p) { p.mask = mask.view(); }, "mask is given, expected none");
  fails([&](Options& p) { p.bias = bias.view(); }, "bias is given, expected none");
  fails([&](Options& p) { p.alibi = slopes.view(); }, "alibi is given, expected none");
  fails([&](Options& p) { p.prefix = list.view(); }, "prefix is given, expected none");
  fails([&](Options& p) { p.chunk = 4; }, "chunk is given, expected none");
  fails([&](Options& p) { p.key_starts = list.view(); }, "key_starts is given");
  fails([&](Options& p) { p.segments_q = lists.view(); }, "segments_q is given");
  fails([&](Options& p) { p.segments_k = lists.view(); }, "segments_k is given");
  fails([&](Options& p) { p.causal = false; }, "causal is false, expected true");
  fails([&](Options& p) { p.window = {}; }, "window is -1 to the left, expected 0 to 3");
  fails([&](Options& p) { p.window = {4, 0}; }, "window is 4 to the left, expected 0 to 3");
}

}  // namespace
}  // namespace heed::attention
