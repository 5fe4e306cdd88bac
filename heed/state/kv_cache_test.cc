// KVCache: the addresses of rows, sharing and copying, and each operation by itself.
#include "heed/state/kv_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <new>
#include <numeric>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/state/cache_model_case.h"
#include "heed/state/pages_internal.h"
#include "tests/sanitizers.h"

namespace heed {
namespace {

using testing::ElementsAre;

using List = std::vector<int64_t>;

constexpr DType kDTypes[] = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16};

// A cache and the rows that it should have.
struct Pair {
  explicit Pair(const KVCache::Options& options) : cache(options), model(options) {}
  Pair(KVCache c, CacheModel m) : cache(std::move(c)), model(std::move(m)) {}

  void Append(const List& counts) { AppendRandom(random, cache, model, counts); }
  void Trim(const List& lengths) {
    cache.Trim(lengths);
    model.Trim(lengths);
  }
  Pair Fork() const { return Pair(cache.Fork(), model); }
  std::string Difference() const { return heed::Difference(cache.view(), model); }
  const std::byte* Page(size_t b, size_t page) const { return cache.view().pages[b][page]; }

  KVCache cache;
  CacheModel model;
  Random random{7};
};

TEST(KVCacheTest, AnEmptyCacheHoldsNothing) {
  const KVCache cache({.batch = 3, .heads = 2, .dim = 5, .value_dim = 7});
  EXPECT_EQ(cache.kind(), CacheKind::kKV);
  EXPECT_EQ(cache.batch(), 3);
  EXPECT_EQ(cache.nbytes(), 0);
  EXPECT_EQ(cache.shared_prefix(), 0);
  EXPECT_THAT(cache.lengths(), ElementsAre(0, 0, 0));
  EXPECT_THAT(cache.appended(), ElementsAre(0, 0, 0));
  const KVView view = cache.view();
  EXPECT_EQ(view.batch, 3);
  EXPECT_EQ(view.heads, 2);
  EXPECT_EQ(view.dim, 5);
  EXPECT_EQ(view.value_dim, 7);
  EXPECT_EQ(view.page_tokens, 64);
  EXPECT_FALSE(view.quantized);
  EXPECT_TRUE(view.first_kept.empty());
}

TEST(KVCacheTest, OptionsComeBack) {
  const KVCache cache(
      {.batch = 3, .heads = 2, .dim = 5, .capacity = 99, .page = 0, .dtype = DType::kF16, .quantize = Quantize::kInt8});
  const KVCache::Options o = cache.options();
  EXPECT_EQ(o.batch, 3);
  EXPECT_EQ(o.heads, 2);
  EXPECT_EQ(o.dim, 5);
  EXPECT_EQ(o.value_dim, 5);
  EXPECT_EQ(o.capacity, 99);
  EXPECT_EQ(o.page, 0);
  EXPECT_EQ(o.dtype, DType::kF16);
  EXPECT_EQ(o.quantize, Quantize::kInt8);
  EXPECT_EQ(cache.view().page_tokens, 99);
}

int64_t RoundUp(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

// Bytes of a unit by the formula of kv_cache_base.h.
int64_t UnitBytes(const KVCache::Options& o) {
  const int64_t dim = std::max(o.dim, o.value_dim);
  if (o.quantize == Quantize::kNone) {
    return RoundUp(o.page * dim * static_cast<int64_t>(SizeOf(o.dtype)), 64);
  }
  return RoundUp(RoundUp(o.page * dim, 4) + 4 * o.page, 64);
}

TEST(KVCacheTest, PagesAreLaidOutAndCountedAsDocumented) {
  for (const int64_t page : {1, 7, 64, 1000}) {
    for (const DType dtype : kDTypes) {
      for (const Quantize quantize : {Quantize::kNone, Quantize::kInt8}) {
        if (dtype == DType::kF64 && quantize == Quantize::kInt8) continue;
        const bool int8 = quantize == Quantize::kInt8;
        const KVCache::Options options = {
            .heads = 3, .dim = page == 7 ? 5 : 10, .value_dim = 6, .page = page, .dtype = dtype, .quantize = quantize};
        Pair pair(options);
        pair.Append({3 * page});
        const KVView view = pair.cache.view();
        const int64_t size = int8 ? 1 : static_cast<int64_t>(SizeOf(dtype));
        const int64_t unit = UnitBytes(options);
        const int64_t lane = 4096 / page * unit;  // all lanes together have less than 4 MiB
        EXPECT_EQ(view.page_tokens, page);
        EXPECT_EQ(view.quantized, int8);
        EXPECT_EQ(view.dtype, dtype);
        EXPECT_EQ(view.key.token_stride, options.dim * size);
        EXPECT_EQ(view.value.token_stride, 6 * size);
        EXPECT_EQ(view.key.head_stride, lane);
        EXPECT_EQ(view.value.head_stride, lane);
        EXPECT_EQ(view.key.begin, 0);
        EXPECT_EQ(view.value.begin, 3 * lane);
        if (int8) {
          EXPECT_EQ(view.key_scale.begin, RoundUp(page * options.dim, 4));
          EXPECT_EQ(view.value_scale.begin, 3 * lane + RoundUp(page * 6, 4));
          EXPECT_EQ(view.key_scale.head_stride, lane);
          EXPECT_EQ(view.value_scale.head_stride, lane);
          EXPECT_EQ(view.key_scale.token_stride, 4);
          EXPECT_EQ(view.value_scale.token_stride, 4);
        }
        EXPECT_EQ(pair.cache.nbytes(), 3 * 2 * 3 * unit);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(pair.Page(0, 0)) % 64, 0u);
        EXPECT_EQ(pair.Page(0, 1) - pair.Page(0, 0), unit);
        EXPECT_EQ(pair.Page(0, 2) - pair.Page(0, 1), unit);
        EXPECT_EQ(pair.Difference(), "");
      }
    }
  }
}

TEST(KVCacheTest, SlabsHaveAsManyPagesAsDocumented) {
  const auto pages = [](const KVCache::Options& o) { return KVCache(o).view().key.head_stride / UnitBytes(o); };
  const auto i8 = Quantize::kInt8;
  EXPECT_EQ(pages({.heads = 8, .dim = 128}), 16);                  // 1024 tokens, 8 MiB
  EXPECT_EQ(pages({.heads = 32, .dim = 128}), 8);                  // 16 MiB
  EXPECT_EQ(pages({.heads = 2048, .dim = 128}), 1);                // 128 MiB
  EXPECT_EQ(pages({.heads = 4, .dim = 64}), 32);                   // 4 MiB
  EXPECT_EQ(pages({.heads = 8, .dim = 128, .quantize = i8}), 32);  // 31 pages are just below
  EXPECT_EQ(pages({.heads = 1, .dim = 16}), 64);                   // 4096 tokens
  EXPECT_EQ(pages({.heads = 1, .dim = 16, .page = 1}), 4096);
  EXPECT_EQ(pages({.heads = 8, .dim = 128, .page = 5000}), 1);
  EXPECT_EQ(pages({.batch = 9, .heads = 8, .dim = 128, .capacity = 129}), 3);
  EXPECT_EQ(pages({.heads = 8, .dim = 128, .capacity = 1 << 20}), 16);
}

// The rows are contiguous whatever other pages the sequence takes.
TEST(KVCacheTest, RowsOfAHeadAreContiguous) {
  Pair pair({.batch = 2, .heads = 2, .dim = 16});
  pair.Append({700, 700});
  const KVView view = pair.cache.view();
  for (const size_t b : {0, 1}) {
    for (size_t page = 1; page < 11; ++page) {
      EXPECT_EQ(pair.Page(b, page) - pair.Page(b, page - 1), 64 * view.key.token_stride);
    }
  }
}

TEST(KVCacheTest, ForksAndSharesHaveTheSameStrides) {
  Pair pair({.heads = 2, .dim = 16, .capacity = 200});
  pair.Append({100});
  const int64_t stride = pair.cache.view().value.head_stride;
  EXPECT_EQ(pair.cache.Fork().view().value.head_stride, stride);
  EXPECT_EQ(KVCache::Share(pair.cache, 40).view().value.head_stride, stride);
}

TEST(KVCacheTest, RowsOfAnyStridesAreCopied) {
  constexpr int64_t B = 2, T = 5, H = 3, D = 4;
  const List orders[] = {{60, 12, 4, 1}, {1, 2, 10, 30}, {-60, -12, -4, -1},
                         {0, 0, 0, 0},   {0, 12, 4, 1},  {500, 40, 9, 2}};
  for (const DType dtype : kDTypes) {
    for (const List& strides : orders) {
      for (const Placement place : {Placement::kBeforeGuard, Placement::kAfterGuard}) {
        const Buffer k(dtype, List{B, T, H, D}, strides, place);
        const Buffer v(dtype, List{B, T, H, D}, strides, place, 1);
        k.FillNormal(1);
        v.FillNormal(2);
        Pair pair({.batch = B, .heads = H, .dim = D, .page = 3, .dtype = dtype});
        pair.cache.Append(k.view(), v.view());
        pair.model.Append(k.view(), v.view(), List{T, T});
        EXPECT_EQ(pair.Difference(), "") << Name(dtype) << ShapeString(strides);
      }
    }
  }
}

// Rows beyond lengths[b] are behind a guard page.
TEST(KVCacheTest, RowsBeyondTheLengthsAreNotRead) {
  const Buffer k(DType::kF32, List{1, 2, 2, 4}, Placement::kBeforeGuard);
  k.FillNormal(1);
  const ConstTensorView longer(k.view().data(), DType::kF32, {1, 1000, 2, 4});
  Pair pair({.heads = 2, .dim = 4});
  pair.cache.Append(longer, longer, List{2});
  pair.model.Append(k.view(), k.view(), List{2});
  EXPECT_EQ(pair.Difference(), "");
  const ConstTensorView none(nullptr, DType::kF32, {1, 0, 2, 4});
  pair.cache.Append(none, none);
  EXPECT_THAT(pair.cache.lengths(), ElementsAre(2));
  EXPECT_THAT(pair.cache.appended(), ElementsAre(0));
}

TEST(KVCacheTest, SequencesGrowApart) {
  Pair pair({.batch = 3, .dim = 4, .page = 4});
  pair.Append({0, 3, 9});
  EXPECT_THAT(pair.cache.appended(), ElementsAre(0, 3, 9));
  pair.Append({5, 0, 1});
  EXPECT_THAT(pair.cache.lengths(), ElementsAre(5, 3, 10));
  EXPECT_THAT(pair.cache.appended(), ElementsAre(5, 0, 1));
  EXPECT_EQ(pair.Difference(), "");
}

TEST(KVCacheTest, GrowingMovesNoRow) {
  Pair pair({.batch = 2, .dim = 4, .page = 4});
  std::vector<const std::byte*> pages;
  for (size_t i = 0; i < 300; ++i) {
    pair.Append({4, 1});
    pages.push_back(pair.Page(0, i));
  }
  for (size_t i = 0; i < pages.size(); ++i) EXPECT_EQ(pair.Page(0, i), pages[i]);
  EXPECT_EQ(pair.Difference(), "");
}

TEST(KVCacheTest, AContiguousSequenceIsOnePage) {
  for (const Quantize quantize : {Quantize::kNone, Quantize::kInt8}) {
    Pair pair({.batch = 2, .heads = 2, .dim = 8, .capacity = 100, .page = 0, .quantize = quantize});
    pair.Append({60, 1});
    const int64_t bytes = pair.cache.nbytes();
    pair.Append({40, 2});
    EXPECT_EQ(pair.cache.nbytes(), bytes);
    EXPECT_EQ(pair.cache.view().page_tokens, 100);
    EXPECT_EQ(pair.Difference(), "");
  }
}

TEST(KVCacheTest, MemoryOfACapacityIsTakenWhenItIsNeeded) {
  const KVCache cache({.capacity = int64_t{1} << 50});
  EXPECT_EQ(cache.nbytes(), 0);
}

TEST(KVCacheTest, RowsOfTheCacheItselfMayBeAppended) {
  Pair pair({.dim = 4, .page = 8});
  pair.Append({7});
  for (int i = 0; i < 20; ++i) {
    const KVView view = pair.cache.view();
    const ConstTensorView rows(pair.Page(0, 0), DType::kF32, {1, 7, 1, 4});
    const ConstTensorView values(pair.Page(0, 0) + view.value.begin, DType::kF32, {1, 7, 1, 4});
    const auto fork = pair.Fork();  // makes the last page shared, so that it is copied too
    pair.model.Append(rows, values, List{7});
    pair.cache.Append(rows, values);
    EXPECT_EQ(pair.Difference(), "");
    EXPECT_EQ(heed::Difference(fork.cache.view(), fork.model), "");
  }
}

TEST(KVCacheTest, QuantisedRowsFollowTheRule) {
  Pair pair({.heads = 1, .dim = 4, .dtype = DType::kBF16, .quantize = Quantize::kInt8});
  const Buffer x(DType::kBF16, List{1, 2, 1, 4});
  const double values[] = {-127, 63.5, 0.5, 1.5, 0, 0, 0, 0};
  for (int64_t i = 0; i < 8; ++i) x.Set({0, i / 4, 0, i % 4}, values[i]);
  pair.cache.Append(x.view(), x.view());
  const KVView view = pair.cache.view();
  const int8_t* const q = reinterpret_cast<const int8_t*>(pair.Page(0, 0));
  EXPECT_THAT(std::vector<int>(q, q + 8), ElementsAre(-127, 64, 0, 2, 0, 0, 0, 0));
  const auto* scales = reinterpret_cast<const float*>(pair.Page(0, 0) + view.value_scale.begin);
  EXPECT_EQ(scales[0], 1);
  EXPECT_EQ(scales[1], 1);
}

TEST(KVCacheTest, AForkSharesEveryPageUntilOneIsWritten) {
  Pair pair({.batch = 2, .heads = 2, .dim = 4, .page = 4});
  pair.Append({10, 8});
  Pair fork = pair.Fork();
  EXPECT_THAT(fork.cache.appended(), ElementsAre(10, 8));
  for (size_t page = 0; page < 3; ++page) EXPECT_EQ(fork.Page(0, page), pair.Page(0, page));
  const std::byte* const tail = pair.Page(0, 2);
  fork.random = Random(8);
  fork.Append({1, 0});
  EXPECT_EQ(pair.Page(0, 2), tail);
  EXPECT_NE(fork.Page(0, 2), tail);
  EXPECT_EQ(fork.Page(0, 1), pair.Page(0, 1));
  EXPECT_EQ(fork.Page(1, 1), pair.Page(1, 1));
  pair.Append({1, 1});  // the only owner now writes in place
  EXPECT_EQ(pair.Page(0, 2), tail);
  EXPECT_EQ(pair.Difference(), "");
  EXPECT_EQ(fork.Difference(), "");
}

TEST(KVCacheTest, AFullLastPageIsNotCopied) {
  Pair pair({.dim = 4, .page = 4});
  pair.Append({8});
  Pair fork = pair.Fork();
  fork.Append({1});
  EXPECT_EQ(fork.Page(0, 1), pair.Page(0, 1));
}

TEST(KVCacheTest, AForkOutlivesItsOrigin) {
  auto origin = std::make_unique<Pair>(KVCache::Options{.dim = 4, .page = 4});
  origin->Append({10});
  Pair fork = origin->Fork();
  const std::byte* const tail = fork.Page(0, 2);
  origin.reset();
  fork.Append({1});
  EXPECT_EQ(fork.Page(0, 2), tail);  // the only owner
  EXPECT_EQ(fork.Difference(), "");
}

TEST(KVCacheTest, TrimGivesPagesBackAndMovesWhatWasAppended) {
  Pair pair({.batch = 3, .dim = 4, .page = 4});
  pair.Append({9, 9, 9});
  pair.Append({6, 6, 6});
  const int64_t page = pair.cache.nbytes() / 12;
  pair.Trim({15, 12, 4});
  EXPECT_THAT(pair.cache.lengths(), ElementsAre(15, 12, 4));
  EXPECT_THAT(pair.cache.appended(), ElementsAre(6, 3, 0));
  EXPECT_EQ(pair.cache.nbytes(), page * (4 + 3 + 1));
  EXPECT_EQ(pair.Difference(), "");
  pair.Append({1, 1, 1});
  EXPECT_EQ(pair.Difference(), "");
  pair.Trim({0, 0, 0});
  EXPECT_EQ(pair.cache.nbytes(), 0);
}

TEST(KVCacheTest, WhatAForkTrimmedAndWroteTheOriginDoesNotSee) {
  Pair pair({.dim = 4, .page = 4});
  pair.Append({10});
  Pair fork = pair.Fork();
  fork.random = Random(8);
  fork.Trim({5});
  fork.Append({3});
  EXPECT_EQ(pair.Difference(), "");
  EXPECT_EQ(fork.Difference(), "");
}

TEST(KVCacheTest, ReorderMakesForksOfSequences) {
  Pair pair({.batch = 3, .dim = 4, .page = 4});
  pair.Append({5, 10, 2});
  const std::byte* const first = pair.Page(1, 0);
  pair.cache.Reorder(List{1, 1, 0});
  pair.model.Reorder(List{1, 1, 0});
  EXPECT_THAT(pair.cache.lengths(), ElementsAre(10, 10, 5));
  EXPECT_THAT(pair.cache.appended(), ElementsAre(10, 10, 5));
  EXPECT_EQ(pair.Page(0, 0), first);
  EXPECT_EQ(pair.Page(1, 0), first);
  pair.Append({1, 1, 1});
  EXPECT_NE(pair.Page(0, 2), pair.Page(1, 2));
  EXPECT_EQ(pair.Difference(), "");
}

TEST(KVCacheTest, SequencesShareAPrefix) {
  Pair prefix({.dim = 4, .page = 4});
  prefix.Append({10});
  const int64_t bytes = prefix.cache.nbytes();
  Pair shared(KVCache::Share(prefix.cache, 3), prefix.model.Share(3));
  EXPECT_THAT(shared.cache.lengths(), ElementsAre(10, 10, 10));
  EXPECT_EQ(shared.cache.nbytes(), bytes);  // three pages, once
  EXPECT_EQ(shared.cache.shared_prefix(), 10);
  EXPECT_EQ(shared.Page(2, 2), prefix.Page(0, 2));
  shared.Append({1, 0, 2});
  EXPECT_EQ(shared.cache.shared_prefix(), 10);
  EXPECT_EQ(shared.cache.nbytes(), bytes / 3 * 5);  // two copies of the last page
  EXPECT_EQ(shared.Difference(), "");
  EXPECT_EQ(prefix.Difference(), "");
  EXPECT_EQ(prefix.cache.shared_prefix(), 0);
  EXPECT_EQ(shared.cache.Fork().shared_prefix(), 10);
  shared.cache.Reorder(List{2, 2, 0});
  EXPECT_EQ(shared.cache.shared_prefix(), 10);
  shared.cache.Trim(List{11, 7, 10});
  EXPECT_EQ(shared.cache.shared_prefix(), 7);
}

// Pools of pages of 3 tokens, whose unreferenced rows are not even finite.
class KVCacheImportTest : public testing::TestWithParam<std::tuple<bool, DType>> {};

TEST_P(KVCacheImportTest, CopiesTheRowsOfItsTables) {
  const auto [heads_first, ints] = GetParam();
  constexpr int64_t P = 6, N = 3, H = 2, D = 4, Dv = 5;
  const auto pool = [&](int64_t dim) {
    return heads_first ? Buffer(DType::kF32, List{P, H, N, dim}) : Buffer(DType::kF32, List{P, N, H, dim});
  };
  const Buffer k = pool(D), v = pool(Dv);
  const List indices = {4, 1, 5, 0, /*never read:*/ -7, 99};
  const List lengths = {8, 0, 3}, begins = {0, 3, 3}, indptr = {0, 3, 3, 4};
  const List last = {2, -5, 3};
  const Buffer rows_k(DType::kF32, List{3, 8, H, D});
  const Buffer rows_v(DType::kF32, List{3, 8, H, Dv});
  rows_k.FillNormal(1);
  rows_v.FillNormal(2);
  const auto fill = [&](const Buffer& to, const Buffer& from) {
    for (int64_t b = 0; b < 3; ++b) {
      for (int64_t t = 0; t < lengths[static_cast<size_t>(b)]; ++t) {
        const int64_t page = indices[static_cast<size_t>(begins[static_cast<size_t>(b)] + t / N)];
        for (int64_t h = 0; h < H; ++h) {
          for (int64_t d = 0; d < to.view().size(3); ++d) {
            const double x = from.Get({b, t, h, d});
            if (heads_first)
              to.Set({page, h, t % N, d}, x);
            else
              to.Set({page, t % N, h, d}, x);
          }
        }
      }
    }
  };
  fill(k, rows_k);
  fill(v, rows_v);
  const DType int_type = ints;
  const auto list = [&](const List& x) {
    const Buffer out(int_type, List{static_cast<int64_t>(x.size())});
    for (int64_t i = 0; i < out.view().size(0); ++i) {
      SetElement(out.view(), List{i}, static_cast<double>(x[static_cast<size_t>(i)]));
    }
    return out;
  };
  const Buffer p = list(indptr), i = list(indices), l = list(last);
  for (const Quantize quantize : {Quantize::kNone, Quantize::kInt8}) {
    const KVCache::Options options = {
        .batch = 3, .heads = H, .dim = D, .value_dim = Dv, .capacity = 8, .page = 4, .quantize = quantize};
    Pair pair(KVCache::Import(options, {k.view(), v.view(), p.view(), i.view(), l.view(), heads_first}),
              CacheModel(options));
    pair.model.Append(rows_k.view(), rows_v.view(), lengths);
    EXPECT_EQ(pair.Difference(), "");
  }
}

INSTANTIATE_TEST_SUITE_P(All, KVCacheImportTest,
                         testing::Combine(testing::Bool(), testing::Values(DType::kI32, DType::kI64)));

TEST(KVCacheTest, FailedAllocationLeavesEverythingAsItWas) {
  PagesOptions options;
  options.batch = 3;
  options.page = 4;
  Pages pages(options);
  Random random(3);
  const RandomRows rows(random, DType::kF32, true, {3, 9, 1, 1});
  pages.Append(rows.view(), rows.view(), List{6, 9, 0});
  const auto fork = pages.Fork();
  const int64_t in_use = pages.pool().pages_in_use();
  CacheModel model(KVCache::Options{.batch = 3});
  model.Append(rows.view(), rows.view(), List{6, 9, 0});
  const KVView before = pages.view();
  constexpr int64_t kNeeded = 9;  // pages: 2 + 1 copied, 2 + 1 copied, 3
  for (int64_t more = 0; more < kNeeded; ++more) {
    pages.pool().LimitPages(in_use + more);
    EXPECT_THROW(pages.Append(rows.view(), rows.view(), {}), std::bad_alloc);
    EXPECT_EQ(Difference(before, model), "");  // views stay valid
    ASSERT_EQ(pages.pool().pages_in_use(), in_use);
  }
  pages.pool().LimitPages(in_use + kNeeded);
  pages.Append(rows.view(), rows.view(), {});
  EXPECT_EQ(Difference(fork->view(), model), "");
  model.Append(rows.view(), rows.view(), List{9, 9, 9});
  EXPECT_EQ(Difference(pages.view(), model), "");
}

TEST(KVCacheTest, NoMemoryForAPageIsBadAlloc) {
  KVCache cache({.dim = 1 << 10, .capacity = int64_t{1} << 45, .page = 0});
  const Buffer row(DType::kF32, List{1, 1, 1, 1 << 10});
  row.FillConstant(1);
#if !HEED_ADDRESS_SANITIZER && !HEED_THREAD_SANITIZER
  EXPECT_THROW(cache.Append(row.view(), row.view()), std::bad_alloc);
#endif
  EXPECT_THAT(cache.lengths(), ElementsAre(0));
  EXPECT_EQ(cache.nbytes(), 0);
}

TEST(KVCacheTest, CachesMove) {
  Pair pair({.dim = 4, .page = 4});
  pair.Append({10});
  KVCache moved = std::move(pair.cache);
  EXPECT_EQ(Difference(moved.view(), pair.model), "");
  pair.cache = std::move(moved);
  EXPECT_EQ(pair.Difference(), "");
}

TEST(KVCacheTest, ForksWorkInThreadsOfTheirOwn) {
  Pair pair({.batch = 2, .heads = 2, .dim = 4, .page = 4});
  pair.Append({10, 7});
  const auto work = [](Pair mine, uint64_t seed) {
    mine.random = Random(seed);
    for (int64_t i = 0; i < 200; ++i) {
      mine.Append({i % 3, 1});
      const Pair fork = mine.Fork();
      if (i % 7 == 0) mine.Trim({mine.model.length(0) / 2, mine.model.length(1) / 2});
      mine.Append({1, 2});
      ASSERT_EQ(mine.Difference(), "");
      ASSERT_EQ(fork.Difference(), "");
    }
  };
  std::thread one(work, pair.Fork(), 1), two(work, pair.Fork(), 2);
  for (int i = 0; i < 50; ++i) pair.Append({1, 0});
  one.join();
  two.join();
  EXPECT_EQ(pair.Difference(), "");
}

}  // namespace
}  // namespace heed
