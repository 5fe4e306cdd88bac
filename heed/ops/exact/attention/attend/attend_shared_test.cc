// Attention over caches whose sequences share a prefix, and draft trees: bitwise equal to every sequence, or branch,
// alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/ops/exact/attention/attend/attend.h"
#include "heed/ops/exact/attention/attend/attend_case.h"
#include "heed/state/kv_cache.h"
#include "heed/state/latent_kv_cache.h"
#include "heed/state/ring_kv_cache.h"

namespace heed::attention {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

struct Sizes {
  int64_t batch = 5, prefix = 1300, heads = 2, group = 4, dim = 40, value_dim = 24, queries = 1;
  int64_t page = 64;
  DType dtype = DType::kF32;
  Quantize quantize = Quantize::kNone;
};

// A prefix that `batch` sequences share, followed by each sequence's own tokens, some of them new; and the same cache
// without a declared prefix.
struct Shared {
  explicit Shared(const Sizes& n)
      : q(Normal(n.dtype, {n.batch, n.queries, n.heads * n.group, n.dim}, 1)), cache([&] {
          KVCache prefix({1, n.heads, n.dim, n.value_dim, -1, n.page, n.dtype, n.quantize});
          prefix.Append(Normal(n.dtype, {1, n.prefix, n.heads, n.dim}, 2).view(),
                        Normal(n.dtype, {1, n.prefix, n.heads, n.value_dim}, 3).view());
          return KVCache::Share(prefix, n.batch);
        }()) {
    std::vector<int64_t> own, last;
    for (int64_t b = 0; b < n.batch; ++b) own.push_back(b * 37 % 5 * 150);
    for (int64_t b = 0; b < n.batch; ++b) last.push_back(b == 1 ? n.queries - 1 : n.queries);
    cache.Append(Normal(n.dtype, {n.batch, 600, n.heads, n.dim}, 4).view(),
                 Normal(n.dtype, {n.batch, 600, n.heads, n.value_dim}, 5).view(), own);
    cache.Append(Normal(n.dtype, {n.batch, n.queries, n.heads, n.dim}, 6).view(),
                 Normal(n.dtype, {n.batch, n.queries, n.heads, n.value_dim}, 7).view(), last);
  }

  KVView Apart() const {
    KVView view = cache.view();
    view.shared_prefix = 0;
    return view;
  }

  Buffer q;
  KVCache cache;
};

TEST(AttendSharedTest, HasTheBitsOfSequencesApart) {
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
    for (const int64_t queries : {1, 3, 16, 17}) {
      for (const int64_t group : {1, 4, 9}) {
        SCOPED_TRACE(std::string(Name(dtype)) + " queries " + std::to_string(queries) + " group " +
                     std::to_string(group));
        Sizes n;
        n.dtype = dtype;
        n.queries = queries;
        n.group = group;
        n.page = queries == 3 ? 7 : 64;
        const Shared x(n);
        ASSERT_EQ(x.cache.view().shared_prefix, n.prefix);
        for (const int threads : {1, 2, 8}) {
          Context ctx(threads);
          ExpectSame(AttendTo(ctx, x.cache.view(), x.q.view(), Causal()),
                     AttendTo(ctx, x.Apart(), x.q.view(), Causal()));
        }
      }
    }
  }
}

TEST(AttendSharedTest, ReadsThePrefixOnceInEightRows) {
  // The prefix is read from the pages of the first sequence alone: the other copies are NaN and do not affect the
  // result.
  Context ctx(1);
  Sizes n;
  n.prefix = 1024;
  const Shared x(n);
  const Result expected = AttendTo(ctx, x.Apart(), x.q.view(), Causal());
  KVView view = x.cache.view();
  const int64_t reach = view.value.begin + n.heads * view.value.head_stride;
  const std::vector<std::byte> poison(static_cast<size_t>(reach), std::byte{0xFF});
  std::vector<std::vector<const std::byte*>> tables;
  std::vector<const std::byte* const*> pages;
  for (int64_t b = 0; b < n.batch; ++b) {
    const int64_t count = (view.lengths[static_cast<size_t>(b)] + n.page - 1) / n.page;
    tables.emplace_back(view.pages[b], view.pages[b] + count);
    if (b > 0) std::fill_n(tables.back().begin(), n.prefix / n.page, poison.data());
  }
  for (const auto& table : tables) pages.push_back(table.data());
  view.pages = pages.data();
  ExpectSame(AttendTo(ctx, view, x.q.view(), Causal()), expected);
}

TEST(AttendSharedTest, OptionsHaveTheBitsOfSequencesApart) {
  Context ctx(2);
  Sizes n;
  n.queries = 2;
  const Shared x(n);
  const int64_t Hq = n.heads * n.group, longest = n.prefix + 600 + 2;
  int64_t tokens = 0;
  for (const int64_t length : x.cache.lengths()) tokens = std::max(tokens, length);
  ASSERT_LE(tokens, longest);
  const Buffer alibi = Normal(DType::kF32, {Hq}, 4), sinks = Normal(DType::kF32, {Hq}, 5);
  const Buffer bias = Normal(DType::kF32, {n.batch, 1, n.queries, tokens}, 6);
  const Buffer mask = RandomMask(n.batch, tokens);
  for (int64_t j = 0; j < 512; ++j) mask.Set({0, 0, 0, j}, j < 256);  // whole masked tiles, in this sequence alone
  const Buffer segments_q(DType::kI64, {n.batch, n.queries});
  const Buffer segments_k(DType::kI64, {n.batch, tokens});
  for (int64_t b = 0; b < n.batch; ++b) {
    for (int64_t i = 0; i < n.queries; ++i) segments_q.Set({b, i}, 0);
    for (int64_t j = 0; j < tokens; ++j) segments_k.Set({b, j}, b > 0 && j % 7 < b ? 1 : 0);
  }
  const Buffer starts = Integers({0, 5, 700, 0, 0}), prefix = Integers({0, 3, 5, 0, 900});
  const Buffer relative = Normal(DType::kF32, {Hq, 90}, 7);
  std::vector<Options> all(12, Causal());
  all[11].relative_bias = relative.view();
  all[0].causal = false;
  all[1].window = {900, 0};
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
  all[10].segments_q = segments_q.view();
  all[10].segments_k = segments_k.view();
  for (size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(i);
    ExpectSame(AttendTo(ctx, x.cache.view(), x.q.view(), all[i]), AttendTo(ctx, x.Apart(), x.q.view(), all[i]));
  }
}

TEST(AttendSharedTest, ValuesThatAreNotFiniteStayWhereTheyAreSeen) {
  Context ctx(1);
  Sizes n;
  n.batch = 3;
  n.prefix = 600;
  KVCache prefix({1, n.heads, n.dim, n.value_dim, -1, n.page, n.dtype});
  const Buffer k = Normal(n.dtype, {1, n.prefix, n.heads, n.dim}, 2);
  const Buffer v = Normal(n.dtype, {1, n.prefix, n.heads, n.value_dim}, 3);
  v.Set({0, 100, 1, 3}, std::numeric_limits<double>::infinity());
  prefix.Append(k.view(), v.view());
  KVCache cache = KVCache::Share(prefix, n.batch);
  const std::vector<int64_t> own = {0, 50, 500};
  const Buffer more_k = Normal(n.dtype, {n.batch, 500, n.heads, n.dim}, 4);
  const Buffer more_v = Normal(n.dtype, {n.batch, 500, n.heads, n.value_dim}, 5);
  cache.Append(more_k.view(), more_v.view(), own);
  cache.Append(more_k.view().Slice(1, 0, 1), more_v.view().Slice(1, 0, 1));
  const Buffer q = Normal(n.dtype, {n.batch, 1, n.heads * n.group, n.dim}, 6);
  Options options = Causal();
  options.window = {520, 0};  // two of the three sequences see the infinity
  KVView apart = cache.view();
  apart.shared_prefix = 0;
  ExpectSame(AttendTo(ctx, cache.view(), q.view(), options), AttendTo(ctx, apart, q.view(), options));
}

TEST(AttendSharedTest, NoRowsAreNoWork) {
  constexpr int64_t kBatch = 3, kTokens = 600, kHeads = 2, kDim = 8;
  const std::vector<int64_t> tree = {-1, 0};
  const auto expect_none = [&](const KVView& view, const Options& options) {
    Context ctx(2);
    const Buffer q = Normal(view.dtype, {kBatch, 2, kHeads, kDim}, 1);
    const ConstTensorView no_queries = q.view().Slice(1, 0, 0), no_heads = q.view().Slice(2, 0, 0);
    EXPECT_EQ(AttendTo(ctx, view, no_queries, options).o.view().num_elements(), 0);
    EXPECT_EQ(AttendTo(ctx, view, no_heads, options).o.view().num_elements(), 0);
    ExplainAttend(ctx, view, no_queries, options);
    ExplainAttend(ctx, view, no_heads, options);
    if (view.rotary != nullptr) return;
    AttendTo(ctx, view, no_heads, options, tree);
    ExplainAttend(ctx, view, no_heads, options, tree);
  };
  const auto expect_none_of = [&](auto prefix, const auto& append, const Options& options) {
    append(prefix, kTokens);
    auto shared = prefix.Share(prefix, kBatch);
    expect_none(shared.view(), options);
    append(shared, 2);
    expect_none(shared.view(), options);
  };
  const auto append_rows = [&](KVCache& cache, int64_t tokens) {
    const KVCache::Options o = cache.options();
    const Buffer rows = Normal(o.dtype, {o.batch, tokens, kHeads, kDim}, 2);
    cache.Append(rows.view(), rows.view());
  };
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
    KVCache::Options o = {.heads = kHeads, .dim = kDim, .dtype = dtype};
    expect_none_of(KVCache(o), append_rows, Causal());
    o.rotary = CacheRotary{RotaryPairs::kHalfSplit};
    expect_none_of(KVCache(o), append_rows, Causal());
    if (dtype == DType::kF64) continue;
    o.quantize = Quantize::kInt8;
    expect_none_of(KVCache(o), append_rows, Causal());
    o.rotary.reset();
    expect_none_of(KVCache(o), append_rows, Causal());
  }
  const auto append_latent = [&](LatentKVCache& cache, int64_t tokens) {
    const Buffer rows = Normal(DType::kF32, {cache.options().batch, tokens, kDim}, 2);
    cache.Append(rows.view());
  };
  Options scaled = Causal();
  scaled.scale = 1;
  expect_none_of(LatentKVCache({.latent = kDim - 2, .rope = 2}), append_latent, scaled);
  RingKVCache ring({.batch = kBatch, .heads = kHeads, .dim = kDim, .window = kTokens});
  const Buffer rows = Normal(DType::kF32, {kBatch, kTokens, kHeads, kDim}, 2);
  ring.Append(rows.view(), rows.view());
  expect_none(ring.view(), Causal());
}

// Compares a draft tree with each branch decoded in a cache of its own.
void ExpectBranches(const Sizes& n, int64_t prefix, const std::vector<int64_t>& tree, const Options& options,
                    int threads) {
  Context ctx(threads);
  const auto nodes = static_cast<int64_t>(tree.size());
  const int64_t most = std::max<int64_t>(prefix, 1);
  const Buffer k = Normal(n.dtype, {n.batch, most, n.heads, n.dim}, 2);
  const Buffer v = Normal(n.dtype, {n.batch, most, n.heads, n.value_dim}, 3);
  const Buffer draft_k = Normal(n.dtype, {n.batch, nodes, n.heads, n.dim}, 4);
  const Buffer draft_v = Normal(n.dtype, {n.batch, nodes, n.heads, n.value_dim}, 5);
  const Buffer q = Normal(n.dtype, {n.batch, nodes, n.heads * n.group, n.dim}, 6);
  std::vector<int64_t> lengths;
  for (int64_t b = 0; b < n.batch; ++b) lengths.push_back(std::max<int64_t>(prefix - 3 * b, 0));
  KVCache cache({n.batch, n.heads, n.dim, n.value_dim, -1, n.page, n.dtype, n.quantize});
  cache.Append(k.view(), v.view(), lengths);
  KVCache before = cache.Fork();
  cache.Append(draft_k.view(), draft_v.view());
  const Result r = AttendTo(ctx, cache.view(), q.view(), options, tree);
  for (int64_t i = 0; i < nodes; ++i) {
    SCOPED_TRACE("node " + std::to_string(i));
    std::vector<int64_t> branch;
    for (int64_t at = i; at >= 0; at = tree[static_cast<size_t>(at)]) branch.push_back(at);
    KVCache alone = before.Fork();
    for (auto at = branch.rbegin(); at != branch.rend(); ++at) {
      alone.Append(draft_k.view().Slice(1, *at, *at + 1), draft_v.view().Slice(1, *at, *at + 1));
    }
    const Result expected = AttendTo(ctx, alone.view(), q.view().Slice(1, i, i + 1), options);
    EXPECT_TRUE(SameBits(r.o.view().Slice(1, i, i + 1), expected.o.view()));
    EXPECT_TRUE(SameBits(r.lse.view().Slice(2, i, i + 1), expected.lse.view()));
  }
}

TEST(AttendTreeTest, ARowHasTheBitsOfItsBranchAlone) {
  const std::vector<int64_t> chain = {-1, 0, 1, 2}, forest = {-1, -1, 0, 1, 2, 2, 1, -1, 5};
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16}) {
    for (const int64_t prefix : {0, 1, 509, 512, 1300}) {
      for (const int64_t group : {1, 4, 16}) {
        SCOPED_TRACE(std::string(Name(dtype)) + " prefix " + std::to_string(prefix) + " group " +
                     std::to_string(group));
        Sizes n;
        n.batch = 2;
        n.dtype = dtype;
        n.group = group;
        n.page = prefix == 509 ? 7 : 64;
        ExpectBranches(n, prefix, forest, Causal(), 2);
        ExpectBranches(n, prefix, chain, Causal(), 1);
      }
    }
  }
}

TEST(AttendTreeTest, PositionsAreThoseOfBranches) {
  Sizes n;
  n.batch = 2;
  const std::vector<int64_t> tree = {-1, 0, 0, 1, 1, 2};
  const Buffer alibi = Normal(DType::kF32, {n.heads * n.group}, 4);
  Options options = Causal();
  options.alibi = alibi.view();
  ExpectBranches(n, 700, tree, options, 1);
  const Buffer relative = Normal(DType::kF32, {n.heads * n.group, 5}, 5);
  options = Causal();
  options.relative_bias = relative.view();
  ExpectBranches(n, 700, tree, options, 1);
  options = Causal();
  options.window = {2, 0};
  options.sink_tokens = 3;
  ExpectBranches(n, 700, tree, options, 1);
  n.quantize = Quantize::kInt8;
  n.batch = 1;
  ExpectBranches(n, 700, tree, options, 2);
}

TEST(AttendTreeTest, ANodeThatWasNotAppendedSeesNothing) {
  Context ctx(1);
  Sizes n;
  n.batch = 2;
  n.queries = 3;
  const Shared x(n);  // the second sequence has one row fewer
  const std::vector<int64_t> tree = {-1, 0, 0};
  const Result r = AttendTo(ctx, x.cache.view(), x.q.view(), Causal(), tree);
  EXPECT_NE(r.o.Get({0, 2, 0, 0}), 0);
  EXPECT_EQ(r.o.Get({1, 2, 0, 0}), 0);
  EXPECT_EQ(r.lse.Get({1, 0, 2}), -std::numeric_limits<double>::infinity());
}

TEST(AttendTreeTest, MistakesAreNamed) {
  Context ctx(1);
  Sizes n;
  n.queries = 3;
  const Shared x(n);
  const auto fails = [&](const std::vector<int64_t>& tree, const char* what) {
    EXPECT_THAT([&] { AttendTo(ctx, x.cache.view(), x.q.view(), Causal(), tree); },
                ThrowsMessage<InvalidArgument>(HasSubstr(what)));
  };
  fails({-1, 0}, "tree has 2 nodes, expected 3 as q");
  fails({-1, 1, 0}, "tree has parent 1 of node 1, expected an earlier node, or -1");
  fails({-1, 0, -2}, "tree has parent -2 of node 2");
}

}  // namespace
}  // namespace heed::attention
