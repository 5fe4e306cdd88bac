// Selectors on caches that store statistics of their keys: selections equal those of the same keys in a tensor.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/ops/exact/attention/attend/attend.h"
#include "heed/patterns/pattern_internal.h"
#include "heed/ops/sparse/select/select.h"
#include "heed/ops/sparse/select/select_case.h"
#include "heed/state/kv_cache.h"

namespace heed::select {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

const patterns::Table& TableOf(const Pattern& pattern) { return std::get<patterns::Table>(pattern.node()->values[0]); }

// A cache of two sequences of different lengths, and its keys as a tensor, with NaN after the shorter one.
struct Cached {
  Buffer k, v, q, lengths, positions;
  KVCache cache;

  Cached(DType dtype, int64_t page, int64_t rows)
      : k(dtype, {2, 500, 2, 24}), v(dtype, {2, 500, 2, 16}), q(dtype, {2, rows, 4, 24}),
        cache(OptionsOf(dtype, page)) {
    k.FillNormal(1);
    v.FillNormal(2);
    q.FillNormal(3);
    k.Set({0, 70, 1, 3}, std::nan(""));
    const int64_t first[] = {300, 500 - rows}, last[] = {rows, rows};
    cache.Append(k.view().Slice(1, 0, 500 - rows), v.view().Slice(1, 0, 500 - rows), first);
    // The new rows of the first sequence begin at its position 300.
    const Buffer more_k(dtype, {2, rows, 2, 24}), more_v(dtype, {2, rows, 2, 16});
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t t = 0; t < rows; ++t) {
        for (int64_t h = 0; h < 2; ++h) {
          for (int64_t d = 0; d < 24; ++d) more_k.Set({b, t, h, d}, k.Get({b, first[b] + t, h, d}));
          for (int64_t d = 0; d < 16; ++d) more_v.Set({b, t, h, d}, v.Get({b, first[b] + t, h, d}));
        }
      }
    }
    cache.Append(more_k.view(), more_v.view(), last);
    lengths = Ints({300 + rows, 500});
    positions = Ints({300, 500 - rows});
  }
  static KVCache::Options OptionsOf(DType dtype, int64_t page) {
    KVCache::Options options;
    options.batch = 2;
    options.heads = 2;
    options.dim = 24;
    options.value_dim = 16;
    options.dtype = dtype;
    options.page = page;
    options.sketch = Sketch::kInt8;
    return options;
  }
  template <class Options>
  Options Placed(Options options) const {
    options.key_lengths = lengths.view();
    options.query_starts = positions.view();
    return options;
  }
};

TEST(SelectCacheTest, ChoicesAreThoseOfTheSameKeysInATensor) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const auto& [page, rows] : {std::pair<int64_t, int64_t>{64, 1}, {128, 3}, {192, 40}}) {
      const Cached x(dtype, page, rows);
      const Buffer starts = Ints({40, 70});
      Context ctx(2);
      for (const bool causal : {true, false}) {
        for (const Score score : {Score::kMean, Score::kBox}) {
          for (const bool padded : {false, true}) {
            TopBlocksOptions options;
            options.count = 2;
            options.causal = causal;
            options.score = score;
            options.share = Share::kHead;
            options.block = score == Score::kBox ? 128 : 64;  // means over several blocks of 64 are rounded twice
            if (padded) options.key_starts = starts.view();
            const patterns::Table a = TableOf(TopBlocks(ctx, x.q.view(), x.cache.view(), options));
            EXPECT_EQ(a.values, TableOf(TopBlocks(ctx, x.q.view(), x.k.view(), x.Placed(options))).values)
                << Name(dtype) << " " << rows << causal << padded << static_cast<int>(score);
          }
        }
        CumulativeOptions held;
        held.causal = causal;
        held.mass = 0.7;
        EXPECT_EQ(TableOf(Cumulative(ctx, x.q.view(), x.cache.view(), held)).values,
                  TableOf(Cumulative(ctx, x.q.view(), x.k.view(), x.Placed(held))).values);
      }
    }
  }
}

TEST(SelectCacheTest, AttendTakesTheChoice) {
  const Cached x(DType::kF32, 64, 2);
  TopBlocksOptions options;
  options.count = 3;
  Context ctx(1);
  attention::Options sparse;
  sparse.causal = true;
  sparse.pattern = TopBlocks(ctx, x.q.view(), x.cache.view(), options);
  const Buffer o(DType::kF32, {2, 2, 4, 16}), expected(DType::kF32, {2, 2, 4, 16});
  attention::Attend(ctx, x.cache.view(), x.q.view(), sparse, {o.view(), {}});
  sparse.key_lengths = x.lengths.view();
  sparse.query_starts = x.positions.view();
  attention::Forward(ctx, {x.q.view(), x.k.view(), x.v.view()}, sparse, {expected.view(), {}});
  for (int64_t i = 0; i < 2 * 2 * 4 * 16; ++i) ASSERT_NEAR(o.as<float>()[i], expected.as<float>()[i], 1e-5);
}

// Keys are rotated when appended, and so are the queries of a selection.
TEST(SelectCacheTest, QueriesAreRotatedWhereKeysAre) {
  KVCache::Options rotary = Cached::OptionsOf(DType::kF32, 64), plain = rotary;
  rotary.rotary = CacheRotary{RotaryPairs::kHalfSplit};
  KVCache rotated(rotary), unrotated(plain);
  const Buffer k(DType::kF32, {2, 400, 2, 24}), v(DType::kF32, {2, 400, 2, 16}), q(DType::kF32, {2, 1, 4, 24});
  k.FillNormal(1);
  v.FillNormal(2);
  q.FillNormal(3);
  const Buffer positions(DType::kI64, {400}), last = Ints({399});
  for (int64_t i = 0; i < 400; ++i) positions.as<int64_t>()[i] = i;
  const Buffer turned_k(DType::kF32, {2, 400, 2, 24}), turned_q(DType::kF32, {2, 1, 4, 24});
  Context ctx(1);
  Rotary(ctx, k.view(), positions.view(), RotaryPairs::kHalfSplit, {}, turned_k.view());
  Rotary(ctx, q.view(), last.view(), RotaryPairs::kHalfSplit, {}, turned_q.view());
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 399}, {399, 400}}) {
    rotated.Append(k.view().Slice(1, begin, end), v.view().Slice(1, begin, end));
    unrotated.Append(turned_k.view().Slice(1, begin, end), v.view().Slice(1, begin, end));
  }
  TopBlocksOptions options;
  options.count = 4;
  EXPECT_EQ(TableOf(TopBlocks(ctx, q.view(), rotated.view(), options)).values,
            TableOf(TopBlocks(ctx, turned_q.view(), unrotated.view(), options)).values);
}

TEST(SelectCacheTest, BadArgumentsAreNamed) {
  const Cached x(DType::kF32, 64, 2);
  Context ctx(1);
  const auto says = [&](const std::function<void(TopBlocksOptions&)>& change, const char* text) {
    TopBlocksOptions options;
    options.count = 2;
    change(options);
    EXPECT_THAT([&] { TopBlocks(ctx, x.q.view(), x.cache.view(), options); },
                ThrowsMessage<InvalidArgument>(HasSubstr(text)));
  };
  says([](auto& o) { o.block = 32; }, "select::TopBlocks: block is 32, expected a multiple of the 64 keys");
  says([](auto& o) { o.align = attention::Align::kTopLeft; },
       "select::TopBlocks: align is given, expected none: the cache knows it");
  says([&](auto& o) { o.key_lengths = x.lengths.view(); }, "select::TopBlocks: key_lengths is given, expected none");
  const Buffer late = Ints({303, 0});
  says([&](auto& o) { o.key_starts = late.view(); }, "select::TopBlocks: key_starts contains 303, expected 0 to 302");
  TopBlocksOptions two;
  two.count = 2;
  KVCache::Options options = Cached::OptionsOf(DType::kF32, 64);
  options.sketch = Sketch::kNone;
  const KVCache without(options);
  EXPECT_THAT([&] { TopBlocks(ctx, x.q.view(), without.view(), two); },
              ThrowsMessage<InvalidArgument>(
                  HasSubstr("select::TopBlocks: cache has no sketch, expected a cache that was made with one")));
  EXPECT_THAT([&] { Cumulative(ctx, x.q.view(), without.view(), {}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("select::Cumulative: cache has no sketch")));
  const Buffer wide(DType::kF64, {2, 2, 4, 24}), many(DType::kF32, {2, 3, 4, 24}), other(DType::kF32, {2, 2, 3, 24});
  EXPECT_THAT([&] { TopBlocks(ctx, wide.view(), x.cache.view(), two); },
              ThrowsMessage<InvalidArgument>(HasSubstr("q has dtype f64, expected f32 as the cache")));
  EXPECT_THAT([&] { TopBlocks(ctx, many.view(), x.cache.view(), two); },
              ThrowsMessage<InvalidArgument>(HasSubstr("q has 3 queries, expected at most 2")));
  EXPECT_THAT(
      [&] { TopBlocks(ctx, other.view(), x.cache.view(), two); },
      ThrowsMessage<InvalidArgument>(HasSubstr("q has shape [2,2,3,24], expected [2,T,H,24], H a multiple of 2")));
}

}  // namespace
}  // namespace heed::select
