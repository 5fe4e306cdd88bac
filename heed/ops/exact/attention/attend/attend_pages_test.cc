// Attention over pages of another library on the CPU: results are bitwise equal to a cache with the same rows, and
// wrong arguments throw. tests/cuda_decode_test.cc tests GPUs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/ops/exact/attention/attend/attend_case.h"
#include "heed/ops/exact/attention/attend/attend_pages.h"
#include "heed/state/kv_cache.h"

namespace heed::attention {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kHeads = 2, kHq = 6, kDim = 24, kPages = 20;

// Two sequences of 150 and 40 tokens, and an empty one between them, in pages of 16.
struct Paged {
  explicit Paged(DType dtype, bool heads_first = false)
      : k(dtype, heads_first ? std::vector<int64_t>{kPages, kHeads, 16, kDim}
                             : std::vector<int64_t>{kPages, 16, kHeads, kDim}),
        v(dtype, k.view().sizes()), first(heads_first) {
    k.FillNormal(1);
    v.FillNormal(2);
    // Pages that belong to no sequence are NaN.
    for (const int64_t page : {0, 7}) {
      for (const Buffer& pool : {k, v}) {
        std::vector<int64_t> index(4, 0);
        do {
          if (index[0] == page) SetElement(pool.view(), index, std::numeric_limits<double>::quiet_NaN());
        } while (NextIndex(pool.view().sizes(), index));
      }
    }
  }

  // Row t of head h of sequence b.
  ConstTensorView Row(const Buffer& pool, int64_t b, int64_t t, int64_t h) const {
    const int64_t page = indices[static_cast<size_t>(indptr[static_cast<size_t>(b)] + t / 16)], in_page = t % 16;
    const ConstTensorView of_page = pool.view().Slice(0, page, page + 1);
    const int64_t token_axis = first ? 2 : 1;
    return of_page.Slice(static_cast<int>(token_axis), in_page, in_page + 1)
        .Slice(static_cast<int>(3 - token_axis), h, h + 1);
  }
  // Rows [begin, end) of sequence b, [1, T, H, D].
  Buffer Rows(const Buffer& pool, int64_t b, int64_t begin, int64_t end) const {
    const Buffer rows(pool.view().dtype(), {1, end - begin, kHeads, kDim});
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < kHeads; ++h) {
        for (int64_t e = 0; e < kDim; ++e) {
          rows.Set({0, t - begin, h, e}, GetElement(Row(pool, b, t, h), std::vector<int64_t>{0, 0, 0, e}));
        }
      }
    }
    return rows;
  }
  KVCache::BlockTables Tables() const {
    const auto list = [](const std::vector<int64_t>& x) {
      return ConstTensorView(x.data(), DType::kI64, {static_cast<int64_t>(x.size())});
    };
    return {k.view(), v.view(), list(indptr), list(indices), list(last_page_len), first};
  }

  Buffer k, v;
  bool first;
  std::vector<int64_t> indptr = {0, 10, 10, 13}, indices = {3, 4, 5, 1, 2, 19, 18, 6, 8, 9, 10, 12, 11};
  std::vector<int64_t> last_page_len = {6, 0, 8}, lengths = {150, 0, 40};
};

// Attends with a cache of one sequence that holds these rows.
Result OfCache(Context& ctx, const Paged& x, int64_t b, const ConstTensorView& q, const Options& options) {
  KVCache::Options of_cache;
  of_cache.heads = kHeads;
  of_cache.dim = kDim;
  of_cache.dtype = q.dtype();
  KVCache cache(of_cache);
  const int64_t length = x.lengths[static_cast<size_t>(b)], start = length - q.size(1);
  cache.Append(x.Rows(x.k, b, 0, start).view(), x.Rows(x.v, b, 0, start).view());
  cache.Append(x.Rows(x.k, b, start, length).view(), x.Rows(x.v, b, start, length).view());
  return AttendTo(ctx, cache.view(), q, options);
}

TEST(AttendPagesTest, RowsHaveTheBitsOfACache) {
  Context ctx(2);
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
    for (const int64_t queries : {1, 5}) {
      for (const int kind : {0, 1, 2}) {
        const Paged x(dtype, kind == 1);
        const Buffer q = Normal(dtype, {3, queries, kHq, kDim}, 3);
        Options options = Causal();
        if (kind == 1) options.window = {60, 0};
        if (kind == 2) options.pattern = patterns::Strided(3);
        const Result r = ResultFor(q.view(), kDim);
        AttendPages(ctx, x.Tables(), q.view(), options, {r.o.view(), r.lse.view()});
        for (const int64_t b : {0, 2}) {
          const Result of_cache = OfCache(ctx, x, b, q.view().Slice(0, b, b + 1), options);
          EXPECT_TRUE(SameBits(of_cache.o.view(), r.o.view().Slice(0, b, b + 1)))
              << Name(dtype) << " " << kind << " " << b;
          EXPECT_TRUE(SameBits(of_cache.lse.view(), r.lse.view().Slice(0, b, b + 1)))
              << Name(dtype) << " " << kind << " " << b;
        }
        EXPECT_EQ(r.o.Get({1, 0, 0, 0}), 0);
        EXPECT_EQ(r.lse.Get({1, 0, 0}), -std::numeric_limits<double>::infinity());
      }
    }
  }
}

TEST(AttendPagesTest, QueriesOfEachSequenceMayBeFewer) {
  Context ctx(1);
  const Paged x(DType::kF32);
  const Buffer q = Normal(DType::kF32, {3, 4, kHq, kDim}, 3), counts = Integers({1, 0, 3});
  Options options = Causal();
  options.query_lengths = counts.view();
  const Result r = ResultFor(q.view(), kDim);
  AttendPages(ctx, x.Tables(), q.view(), options, {r.o.view(), r.lse.view()});
  for (const auto& [b, n] : {std::pair<int64_t, int64_t>{0, 1}, {2, 3}}) {
    const Result of_cache = OfCache(ctx, x, b, q.view().Slice(0, b, b + 1).Slice(1, 0, n), Causal());
    EXPECT_TRUE(SameBits(of_cache.o.view(), r.o.view().Slice(0, b, b + 1).Slice(1, 0, n)));
    EXPECT_EQ(r.o.Get({b, n, 0, 0}), 0);
  }
}

TEST(AttendPagesTest, PackedQueriesHaveTheBitsOfTheirSequences) {
  Context ctx(2);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Paged x(dtype);
    const Buffer q = Normal(dtype, {12, kHq, kDim}, 3), boundaries = Integers({0, 3, 4, 10});
    Options options = Causal();
    options.cu_seqlens_q = boundaries.view();
    const Buffer o(dtype, {12, kHq, kDim}), lse(DType::kF32, {kHq, 12});
    AttendPages(ctx, x.Tables(), q.view(), options, {o.view(), lse.view()});
    const auto rows = [](const ConstTensorView& t, int64_t begin, int64_t end) {
      const ConstTensorView some = t.Slice(0, begin, end);
      return ConstTensorView(some.data(), some.dtype(), {1, end - begin, kHq, kDim},
                             {0, some.stride(0), some.stride(1), 1});
    };
    EXPECT_TRUE(SameBits(OfCache(ctx, x, 0, rows(q.view(), 0, 3), Causal()).o.view(), rows(o.view(), 0, 3)));
    EXPECT_TRUE(SameBits(OfCache(ctx, x, 2, rows(q.view(), 4, 10), Causal()).o.view(), rows(o.view(), 4, 10)));
    for (const int64_t row : {3, 10, 11}) {  // rows of the empty sequence and beyond every sequence
      EXPECT_EQ(o.Get({row, 1, 2}), 0);
      EXPECT_EQ(lse.Get({1, row}), -std::numeric_limits<double>::infinity());
    }
  }
}

TEST(AttendPagesTest, NoPagesAtAllGiveEmptyRows) {
  Context ctx(1);
  Paged x(DType::kF32);
  x.indptr = {0, 0, 0, 0};
  x.indices = {};
  const Buffer q = Normal(DType::kF32, {3, 2, kHq, kDim}, 3);
  const Result r = ResultFor(q.view(), kDim);
  const int64_t none = 0;
  KVCache::BlockTables tables = x.Tables();
  tables.indices = ConstTensorView(&none, DType::kI64, {0});
  AttendPages(ctx, tables, q.view(), Causal(), {r.o.view(), r.lse.view()});
  EXPECT_EQ(r.o.Get({2, 1, 5, 3}), 0);
  EXPECT_EQ(r.lse.Get({2, 5, 1}), -std::numeric_limits<double>::infinity());
}

TEST(AttendPagesTest, MistakesAreNamed) {
  Context ctx(1);
  const auto refuses = [&](const auto& spoil, const std::string& message) {
    Paged x(DType::kF32);
    Buffer q = Normal(DType::kF32, {3, 2, kHq, kDim}, 3);
    Options options;
    spoil(x, q, options);
    const Buffer o(DType::kF32, {3, 2, kHq, kDim});
    EXPECT_THAT([&] { AttendPages(ctx, x.Tables(), q.view(), options, {o.view(), {}}); },
                ThrowsMessage<InvalidArgument>(HasSubstr("attention::AttendPages: " + message)));
    for (const uint8_t byte : o.bytes()) ASSERT_EQ(byte, 0xFF);
  };
  using P = Paged;
  using B = Buffer;
  using O = Options;
  refuses([](P& x, B&, O&) { x.indices[3] = kPages; }, "indices[3] is 20, expected 0 to 19");
  refuses([](P& x, B&, O&) { x.indptr[3] = 14; }, "indptr[3] is 14, expected 10 to 13");
  refuses([](P& x, B&, O&) { x.last_page_len[0] = 0; }, "last_page_len[0] is 0, expected 1 to 16");
  refuses([](P& x, B&, O&) { x.k = Buffer(DType::kF32, {kPages, 16, kHeads}); },
          "k_pool has shape [20,16,2], expected rank 4");
  refuses([](P& x, B&, O&) { x.v = Buffer(DType::kBF16, {kPages, 16, kHeads, kDim}); },
          "v_pool has dtype bf16, expected f32");
  refuses([](P& x, B&, O&) { x.v = Buffer(DType::kF32, {kPages, 16, kHeads, 8}); },
          "v_pool has pages 256 elements apart, expected 768 as k_pool");
  refuses([](P&, B& q, O&) { q = Buffer(DType::kF32, {3, 2, 5, kDim}); },
          "q has 5 heads, expected a multiple of the 2 heads of k");
  refuses([](P&, B& q, O&) { q = Buffer(DType::kF32, {2, 2, kHq, kDim}); }, "indptr has shape [4], expected [3]");
  refuses([](P&, B& q, O&) { q = Buffer(DType::kF32, {2, kHq, kDim}); }, "q has shape [2,6,24], expected [B, T, H, D]");
  refuses([](P&, B&, O& o) { o.align = Align::kTopLeft; }, "align is given, expected none");
  refuses([](P&, B&, O& o) { o.dropout = 0.5; }, "dropout is 0.5, expected 0");
  const Buffer counts = Integers({1, 2, 3});
  refuses([&](P&, B&, O& o) { o.query_lengths = counts.view(); }, "query_lengths contains 3, expected 0 to 2");
  refuses([&](P&, B&, O& o) { o.key_lengths = counts.view(); }, "key_lengths is given, expected none");
}

}  // namespace
}  // namespace heed::attention
