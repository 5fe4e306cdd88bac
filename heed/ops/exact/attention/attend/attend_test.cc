// Attention over caches is bitwise equal to attention over the same rows, whatever the cache, its pages, the threads
// and the number of queries; errors name the argument.
#include "heed/ops/exact/attention/attend/attend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/ops/exact/attention/attend/attend_case.h"
#include "heed/state/kv_cache.h"
#include "heed/state/latent_kv_cache.h"
#include "heed/state/ring_kv_cache.h"

namespace heed::attention {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kPage = 64;

// Forward over tokens [0, longest) of k and v, with the lengths of the cache.
Result ForwardOver(Context& ctx, const KVView& cache, const ConstTensorView& q, const ConstTensorView& k,
                   const ConstTensorView& v, Options options) {
  const int64_t longest = *std::max_element(cache.lengths.begin(), cache.lengths.end());
  std::vector<int64_t> starts, lengths(cache.lengths.begin(), cache.lengths.end()), rows;
  for (size_t b = 0; b < lengths.size(); ++b) {
    starts.push_back(lengths[b] - cache.appended[b]);
    rows.push_back(std::min(q.size(1), cache.appended[b]));
  }
  const Buffer query_starts = Integers(starts), key_lengths = Integers(lengths), query_lengths = Integers(rows);
  options.query_starts = query_starts.view();
  options.key_lengths = key_lengths.view();
  options.query_lengths = query_lengths.view();
  options.invariant = true;  // the path that caches use
  const Result r = ResultFor(q, v.size(3));
  Forward(ctx, {q, k.Slice(1, 0, longest), v.Slice(1, 0, longest)}, options, {r.o.view(), r.lse.view()});
  return r;
}

struct Sizes {
  int64_t batch = 2, tokens = 1300, heads = 2, group = 4, dim = 40, value_dim = 24, queries = 1;
  int64_t page = kPage;
  DType dtype = DType::kF32;
};

// A cache whose sequences hold all tokens, the last one 77 fewer, appended in two steps; the second step has `queries`
// rows, and one fewer for the last sequence.
struct Filled {
  explicit Filled(const Sizes& n)
      : q(Normal(n.dtype, {n.batch, n.queries, n.heads * n.group, n.dim}, 1)),
        k(Normal(n.dtype, {n.batch, n.tokens, n.heads, n.dim}, 2)),
        v(Normal(n.dtype, {n.batch, n.tokens, n.heads, n.value_dim}, 3)),
        cache({n.batch, n.heads, n.dim, n.value_dim, n.page == 0 ? n.tokens : -1, n.page, n.dtype}) {
    std::vector<int64_t> first, second;
    for (int64_t b = 0; b < n.batch; ++b) {
      const bool last = b + 1 == n.batch && b > 0;
      second.push_back(n.queries - (last ? 1 : 0));
      first.push_back(n.tokens - n.queries - (last ? 77 : 0));
    }
    cache.Append(k.view(), v.view(), first);
    // The rows of the second append begin at a different token in each sequence, so they are gathered.
    const Buffer more_k(n.dtype, {n.batch, n.queries, n.heads, n.dim});
    const Buffer more_v(n.dtype, {n.batch, n.queries, n.heads, n.value_dim});
    for (int64_t b = 0; b < n.batch; ++b) {
      const int64_t at = first[static_cast<size_t>(b)];
      CopyRows(k, b, at, more_k);
      CopyRows(v, b, at, more_v);
    }
    cache.Append(more_k.view(), more_v.view(), second);
  }

  static void CopyRows(const Buffer& from, int64_t b, int64_t first, const Buffer& to) {
    for (int64_t t = 0; t < to.view().size(1); ++t) {
      for (int64_t h = 0; h < to.view().size(2); ++h) {
        for (int64_t e = 0; e < to.view().size(3); ++e) {
          to.Set({b, t, h, e}, from.Get({b, first + t, h, e}));
        }
      }
    }
  }

  Buffer q, k, v;
  KVCache cache;
};

TEST(AttendTest, HasTheBitsOfForwardWhateverThePages) {
  Context ctx(2);
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
    for (const int64_t page : {0, 1, 7, 16, 48, 64, 100}) {
      for (const int64_t queries : {1, 2, 5, 30}) {
        SCOPED_TRACE(std::string(Name(dtype)) + " page " + std::to_string(page) + " queries " +
                     std::to_string(queries));
        Sizes n;
        n.dtype = dtype;
        n.page = page;
        n.queries = queries;
        n.dim = page == 7 ? 32 : 40;
        n.group = page == 16 ? 1 : 4;
        const Filled x(n);
        ExpectSame(AttendTo(ctx, x.cache.view(), x.q.view(), Causal()),
                   ForwardOver(ctx, x.cache.view(), x.q.view(), x.k.view(), x.v.view(), Causal()));
      }
    }
  }
}

TEST(AttendTest, TakesTheOptionsOfForward) {
  Context ctx(1);
  Sizes n;
  n.queries = 3;
  n.batch = 3;
  const Filled x(n);
  const int64_t Hq = n.heads * n.group;
  const Buffer alibi = Normal(DType::kF32, {Hq}, 4), sinks = Normal(DType::kF32, {Hq}, 5);
  const Buffer bias = Normal(DType::kF32, {n.batch, 1, n.queries, n.tokens}, 6);
  const Buffer mask = RandomMask(n.batch, n.tokens);
  const Buffer starts = Integers({0, 5, 700}), prefix = Integers({0, 3, 5});
  const Buffer relative = Normal(DType::kF32, {Hq, 90}, 7);
  std::vector<Options> all(12, Causal());
  all[11].relative_bias = relative.view();
  all[0].causal = false;
  all[1].window = {100, 0};
  all[2].window = {100, 0};
  all[2].sink_tokens = 4;
  all[3].softcap = 3;
  all[4].alibi = alibi.view();
  all[5].sinks = sinks.view();
  all[6].bias = bias.view();
  all[7].mask = mask.view();
  all[8].key_starts = starts.view();
  all[9].chunk = 256;
  all[9].prefix = prefix.view();
  all[10].scale = 0.3;
  all[10].softcap = 20;
  all[10].alibi = alibi.view();
  all[10].sinks = sinks.view();
  all[10].mask = mask.view();
  all[10].window = {700, 0};
  for (size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(i);
    ExpectSame(AttendTo(ctx, x.cache.view(), x.q.view(), all[i]),
               ForwardOver(ctx, x.cache.view(), x.q.view(), x.k.view(), x.v.view(), all[i]));
  }
}

TEST(AttendTest, KeysThatThreadsShareHaveTheSameBits) {
  Sizes n;
  n.batch = 1;
  n.heads = 1;
  n.tokens = 5000;
  for (const int64_t group : {1, 8, 16, 64}) {
    n.group = group;
    const Filled x = [&] {
      Sizes two = n;
      two.queries = 2;
      return Filled(two);
    }();
    Context one(1);
    const Result expected = AttendTo(one, x.cache.view(), x.q.view(), Causal());
    for (const int threads : {2, 3, 8, 40}) {
      SCOPED_TRACE(std::to_string(group) + " rows, threads " + std::to_string(threads));
      Context ctx(threads);
      ExpectSame(AttendTo(ctx, x.cache.view(), x.q.view(), Causal()), expected);
    }
  }
}

TEST(AttendTest, NothingThatIsNotSeenMatters) {
  Context ctx(2);
  Sizes n;
  n.queries = 2;
  Filled x(n);
  const ConstTensorView q = x.q.view().Slice(1, 0, 1);
  const Result expected = AttendTo(ctx, x.cache.view(), q, Causal());
  // Appends one more token with NaN, which the first new row does not see.
  const Buffer k = Normal(n.dtype, {n.batch, 1, n.heads, n.dim}, 8);
  const Buffer v = Normal(n.dtype, {n.batch, 1, n.heads, n.value_dim}, 9);
  k.FillConstant(std::numeric_limits<double>::quiet_NaN());
  v.FillConstant(std::numeric_limits<double>::infinity());
  x.cache.Append(k.view(), v.view());
  KVView view = x.cache.view();
  const std::vector<int64_t> appended = {3, 2};  // as if both had been appended at once
  view.appended = appended;
  ExpectSame(AttendTo(ctx, view, q, Causal()), expected);
}

TEST(AttendTest, ARingIsAWindow) {
  Context ctx(2);
  const int64_t heads = 2, dim = 32, window = 150, sinks = 5, tokens = 1700;
  const Buffer k = Normal(DType::kF32, {1, tokens, heads, dim}, 1);
  const Buffer v = Normal(DType::kF32, {1, tokens, heads, dim}, 2);
  const Buffer q = Normal(DType::kF32, {1, tokens, 4 * heads, dim}, 3);
  RingKVCache ring({1, heads, dim, dim, window, sinks, DType::kF32});
  Options options = Causal();
  options.window = {window - 1, 0};
  options.sink_tokens = sinks;
  Random random(4);
  for (int64_t at = 0; at < tokens;) {
    const int64_t n = std::min(tokens - at, random.Pick<int64_t>({1, 1, 2, 40, 200}));
    ring.Append(k.view().Slice(1, at, at + n), v.view().Slice(1, at, at + n));
    SCOPED_TRACE("tokens " + std::to_string(at) + " and " + std::to_string(n));
    const ConstTensorView queries = q.view().Slice(1, at, at + n);
    ExpectSame(AttendTo(ctx, ring.view(), queries, options),
               ForwardOver(ctx, ring.view(), queries, k.view(), v.view(), options));
    if (testing::Test::HasFailure()) return;
    at += n;
  }
  const ConstTensorView last = q.view().Slice(1, 0, 1);
  options.window = {2 * window, 0};
  EXPECT_THAT([&] { AttendTo(ctx, ring.view(), last, options); },
              ThrowsMessage<InvalidArgument>(HasSubstr("window lets row 0")));
  options.window = {window - 1, 0};
  options.sink_tokens = sinks + 1;
  EXPECT_THAT([&] { AttendTo(ctx, ring.view(), last, options); },
              ThrowsMessage<InvalidArgument>(HasSubstr("see token 5")));
}

TEST(AttendTest, LatentRowsAreKeysAndTheirBeginningsValues) {
  Context ctx(2);
  const int64_t latent = 64, rope = 16, tokens = 900;
  for (const int64_t heads : {1, 8, 16, 128}) {
    const Buffer rows = Normal(DType::kF32, {2, tokens, 1, latent + rope}, 1);
    const Buffer q = Normal(DType::kF32, {2, 1, heads, latent + rope}, 2);
    LatentKVCache cache({2, latent, rope});
    const int64_t sizes[] = {2, tokens, latent + rope};
    cache.Append(ConstTensorView(rows.view().data(), DType::kF32, sizes));
    KVView view = cache.view();
    const std::vector<int64_t> one = {1, 1};
    view.appended = one;
    Options options = Causal();
    options.scale = 0.1;
    ExpectSame(AttendTo(ctx, view, q.view(), options),
               ForwardOver(ctx, view, q.view(), rows.view(), rows.view().Slice(3, 0, latent), options));
  }
}

TEST(AttendTest, RowsBeyondWhatWasAppendedAreZero) {
  Context ctx(1);
  Sizes n;
  n.queries = 3;
  const Filled x(n);
  const Result r = AttendTo(ctx, x.cache.view(), x.q.view(), Causal());
  for (int64_t e = 0; e < n.value_dim; ++e) {
    EXPECT_NE(r.o.Get({0, 2, 0, e}), 0);
    EXPECT_EQ(r.o.Get({1, 2, 0, e}), 0);
  }
  EXPECT_EQ(r.lse.Get({1, 0, 2}), -std::numeric_limits<double>::infinity());
}

TEST(AttendTest, ExplainNamesTheKernelAndCountsBytes) {
  const Context ctx(1);
  Sizes n;
  n.batch = 1;
  n.queries = 1;
  Filled x(n);
  const Explanation e = ExplainAttend(ctx, x.cache.view(), x.q.view(), Causal());
  EXPECT_THAT(e.kernel, HasSubstr("softmax_"));
  EXPECT_TRUE(e.invariant);
  const auto rows = static_cast<double>(x.cache.lengths()[0] * n.heads * (n.dim + n.value_dim));
  const auto own = static_cast<double>(n.heads * n.group * (n.dim + n.value_dim));
  EXPECT_EQ(e.bytes, 4 * (rows + own));
}

TEST(AttendTest, RowsThatNoSequenceWasGivenAreRefused) {
  Context ctx(1);
  Sizes n;
  n.queries = 3;
  Filled x(n);  // the last sequence has two new rows
  const auto rows = [&](int64_t count) { return Normal(n.dtype, {n.batch, count, n.heads * n.group, n.dim}, 1); };
  const Buffer three = rows(3), four = rows(4), one = rows(1);
  AttendTo(ctx, x.cache.view(), three.view(), Causal());
  const auto refused = [&](const Buffer& q, const char* got) {
    const Result r = ResultFor(q.view(), n.value_dim);
    r.o.FillConstant(5);
    EXPECT_THAT([&] { Attend(ctx, x.cache.view(), q.view(), Causal(), {r.o.view(), r.lse.view()}); },
                ThrowsMessage<InvalidArgument>(HasSubstr(got)));
    EXPECT_EQ(r.o.Get({0, 0, 0, 0}), 5);
  };
  refused(four, "q has 4 queries, expected at most 3, the tokens that a sequence was given last");
  std::vector<int64_t> lengths(x.cache.lengths().begin(), x.cache.lengths().end());
  for (int64_t& length : lengths) length -= 2;
  x.cache.Trim(lengths);
  refused(three, "q has 3 queries, expected at most 1");
  AttendTo(ctx, x.cache.view(), one.view(), Causal());
  x.cache.Trim(std::vector<int64_t>(static_cast<size_t>(n.batch), 0));
  refused(one, "q has 1 query, expected at most 0");
  AttendTo(ctx, x.cache.view(), one.view().Slice(1, 0, 0), Causal());
}

TEST(AttendTest, MistakesAreNamed) {
  Context ctx(1);
  const Filled x({});
  const auto fails = [&](const ConstTensorView& q, const Options& options, const char* what) {
    EXPECT_THAT([&] { AttendTo(ctx, x.cache.view(), q, options); }, ThrowsMessage<InvalidArgument>(HasSubstr(what)));
  };
  const Options causal = Causal();
  fails(Normal(DType::kF64, {2, 1, 8, 40}, 1).view(), causal, "q has dtype f64, expected f32");
  fails(Normal(DType::kF32, {2, 1, 7, 40}, 1).view(), causal, "q has 7 heads, expected a multiple");
  fails(Normal(DType::kF32, {2, 1, 8, 41}, 1).view(), causal, "q has shape [2,1,8,41]");
  fails(Normal(DType::kF32, {3, 1, 8, 40}, 1).view(), causal, "q has shape [3,1,8,40]");
  fails(Normal(DType::kF32, {2, 8, 40}, 1).view(), causal, "q has shape [2,8,40]");
  const Buffer two = Integers({1, 1});
  Options options = causal;
  options.key_lengths = two.view();
  fails(x.q.view(), options, "key_lengths is given");
  options = causal;
  options.query_starts = two.view();
  fails(x.q.view(), options, "query_starts is given");
  options = causal;
  options.align = Align::kTopLeft;
  fails(x.q.view(), options, "align is given");
  options = causal;
  options.dropout = 0.5;
  fails(x.q.view(), options, "dropout is 0.5");
}

}  // namespace
}  // namespace heed::attention
