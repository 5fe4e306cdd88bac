// Level skip of certified attention: a row drops the same keys and has the same bits wherever it is computed. The tests
// of all levels check that bounds hold.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/ops/exact/attention/attend/attend.h"
#include "heed/ops/sparse/certified_attention/certified_attention.h"
#include "heed/ops/sparse/certified_attention/certified_case.h"
#include "heed/patterns/pattern.h"
#include "heed/state/kv_cache.h"
#include "heed/state/ring_kv_cache.h"

namespace heed::certified_attention {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

struct Result {
  Buffer o, bound, lse, kept;

  Result(const ConstTensorView& q, int64_t keys, int64_t value_dim)
      : o(q.dtype(), {q.size(0), q.size(1), q.size(2), value_dim}),
        bound(DType::kF32, {q.size(0), q.size(2), q.size(1)}), lse(DType::kF32, {q.size(0), q.size(2), q.size(1)}),
        kept(DType::kBool, {q.size(0), q.size(2), q.size(1), (keys + 63) / 64}) {}
  Outputs outputs() const { return {o.view(), bound.view(), lse.view(), kept.view()}; }
  double Share() const {  // fraction of blocks kept
    double sum = 0;
    for (const uint8_t x : kept.bytes()) sum += x;
    return sum / static_cast<double>(kept.bytes().size());
  }
};

// Keys near one of eight directions, one of which a row's query has; keys of one direction come in runs of about 64.
struct Call {
  Buffer q, k, v;
  Options options = OptionsWith(0.05, Level::kSkip, /*causal=*/true);

  Call(uint64_t seed, DType dtype, int64_t batch, int64_t Tq, int64_t Tk, int64_t heads, int64_t group, int64_t dim)
      : q(dtype, {batch, Tq, heads * group, dim}), k(dtype, {batch, Tk, heads, dim}), v(dtype, {batch, Tk, heads, 20}) {
    Random random(seed);
    std::vector<std::vector<double>> centers(8, std::vector<double>(static_cast<size_t>(dim)));
    for (auto& center : centers) {
      for (double& x : center) x = 3 * random.Normal();
    }
    v.FillNormal(seed + 1);
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t h = 0; h < heads * group; ++h) {
        size_t of = 0;
        for (int64_t t = 0; t < std::max(Tq, Tk); ++t) {
          if (t % 64 == 0 || random.Chance(0.02)) of = static_cast<size_t>(random.Integer(0, 7));
          for (int64_t e = 0; e < dim; ++e) {
            const double x = centers[of][static_cast<size_t>(e)];
            if (t < Tk && h < heads) k.Set({b, t, h, e}, x + 0.3 * random.Normal());
            if (t < Tq) q.Set({b, t, h, e}, 0.4 * x + 0.3 * random.Normal());
          }
        }
      }
    }
  }
  Inputs inputs() const { return {q.view(), k.view(), v.view()}; }
};

Result Certified(Context& ctx, const Inputs& in, const Options& options) {
  const Result r(in.q, in.k.size(1), in.v.size(3));
  Forward(ctx, in, options, r.outputs());
  return r;
}

TEST(CertifiedSkip, IsAttentionOverWhatIsKept) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t rows : {3, 300}) {
      SCOPED_TRACE(std::string(Name(dtype)) + " " + std::to_string(rows));
      Context ctx(2);
      const Call call(1, dtype, 2, rows, 1300, 2, 1, 24);
      const Result r = Certified(ctx, call.inputs(), call.options);
      EXPECT_LT(r.Share(), 0.7);
      const Buffer index(DType::kI32, {2, rows, 2, 21});
      for (int64_t b = 0; b < 2; ++b) {
        for (int64_t i = 0; i < rows; ++i) {
          for (int64_t h = 0; h < 2; ++h) {
            for (int64_t j = 0; j < 21; ++j) {
              index.Set({b, i, h, j}, r.kept.Get({b, h, i, j}) != 0 ? static_cast<double>(j) : -1);
            }
          }
        }
      }
      attention::Options exact;
      exact.causal = true;
      exact.invariant = true;
      exact.pattern = patterns::RowBlocks(index.view(), 64);
      const Result expected(call.q.view(), 1300, 20);
      attention::Forward(ctx, {call.q.view(), call.k.view(), call.v.view()}, exact,
                         {expected.o.view(), expected.lse.view()});
      EXPECT_TRUE(SameBits(r.o.view(), expected.o.view()));
      EXPECT_TRUE(SameBits(r.lse.view(), expected.lse.view()));
    }
  }
}

TEST(CertifiedSkip, BitsOfARowAreItsOwn) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t group : {1, 3}) {
      Context one(1), three(3);
      Call call(2, dtype, 2, 200, 1000, 2, group, 24);
      const Result r = Certified(one, call.inputs(), call.options),
                   same = Certified(three, call.inputs(), call.options);
      EXPECT_LT(r.Share(), 0.7);
      for (const auto& [a, b] :
           {std::pair{&r.o, &same.o}, {&r.bound, &same.bound}, {&r.lse, &same.lse}, {&r.kept, &same.kept}}) {
        EXPECT_TRUE(SameBits(a->view(), b->view()));
      }
      // Takes some rows of the second sequence and second key head, with fewer keys, followed by NaN.
      for (const auto& [begin, end] : {std::pair{0, 1}, {5, 6}, {60, 130}, {131, 132}, {199, 200}}) {
        SCOPED_TRACE(begin);
        const int64_t keys = 800 + end;
        const auto part = [&](const Buffer& x, int64_t from, int64_t to, int64_t heads) {
          return ConstTensorView(x.view()).Slice(0, 1, 2).Slice(1, from, to).Slice(2, heads, 2 * heads);
        };
        const Buffer k(dtype, {1, 1000, 1, 24}), v(dtype, {1, 1000, 1, 20});
        for (int64_t t = 0; t < 1000; ++t) {
          for (int64_t e = 0; e < 24; ++e) k.Set({0, t, 0, e}, t < keys ? call.k.Get({1, t, 1, e}) : std::nan(""));
          for (int64_t e = 0; e < 20; ++e) v.Set({0, t, 0, e}, t < keys ? call.v.Get({1, t, 1, e}) : std::nan(""));
        }
        const Inputs in = {part(call.q, begin, end, group), k.view(), v.view()};
        Options options = call.options;
        const int64_t start = 800 + begin;
        options.query_starts = ConstTensorView(&start, DType::kI64, {1});
        options.key_lengths = ConstTensorView(&keys, DType::kI64, {1});
        const Result alone = Certified(three, in, options);
        const auto of = [&](const Buffer& x) {
          return ConstTensorView(x.view()).Slice(0, 1, 2).Slice(1, group, 2 * group).Slice(2, begin, end);
        };
        EXPECT_TRUE(SameBits(alone.o.view(), part(r.o, begin, end, group)));
        EXPECT_TRUE(SameBits(alone.bound.view(), of(r.bound)));
        EXPECT_TRUE(SameBits(alone.lse.view(), of(r.lse)));
        EXPECT_TRUE(SameBits(alone.kept.view(), of(r.kept)));
      }
    }
  }
}

// The rounding of logits decides what is kept if norms are large. With slopes each row has a norm of its own.
TEST(CertifiedSkip, EqualRowsKeepTheSame) {
  for (const double norm : {1.0, 100.0}) {
    SCOPED_TRACE(norm);
    const int64_t rows = 200, keys = 640;
    Call call(6, DType::kF32, 1, rows, keys, 1, 1, 24);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t e = 0; e < 24; ++e) call.q.Set({0, i, 0, e}, e == 0 ? 100 : 0);
    }
    for (int64_t j = 0; j < keys; ++j) {
      for (int64_t e = 0; e < 24; ++e) call.k.Set({0, j, 0, e}, e == 0 ? 0.05 * static_cast<double>(j / 64) : norm);
    }
    const double slope = 0;
    call.options.causal = false;
    call.options.alibi = ConstTensorView(&slope, DType::kF64, {1});
    Context ctx(1);
    const Result r = Certified(ctx, call.inputs(), call.options);
    for (int64_t i = 1; i < rows; ++i) {
      EXPECT_TRUE(SameBits(r.kept.view().Slice(2, i, i + 1), r.kept.view().Slice(2, 0, 1))) << i;
      EXPECT_TRUE(SameBits(r.o.view().Slice(1, i, i + 1), r.o.view().Slice(1, 0, 1))) << i;
    }
    EXPECT_EQ(r.Share() < 1, norm == 1);
  }
}

TEST(CertifiedSkip, CachesHaveTheBitsOfGivenKeys) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t page : {0, 64, 16}) {
      for (const int64_t rows : {1, 40}) {
        Context ctx(2);
        Call call(3, dtype, 2, rows, 1000, 2, 2, 24);
        KVCache cache(
            {.batch = 2, .heads = 2, .dim = 24, .value_dim = 20, .capacity = 1100, .page = page, .dtype = dtype});
        const auto append = [&](int64_t begin, int64_t end) {
          cache.Append(call.k.view().Slice(1, begin, end), call.v.view().Slice(1, begin, end));
        };
        append(0, 1000 - rows);
        append(1000 - rows, 1000);
        const Result given = Certified(ctx, call.inputs(), call.options), r(call.q.view(), 1000, 20);
        Attend(ctx, cache.view(), call.q.view(), call.options, r.outputs());
        EXPECT_LT(r.Share(), 0.8);
        EXPECT_TRUE(SameBits(r.o.view(), given.o.view()) && SameBits(r.bound.view(), given.bound.view()) &&
                    SameBits(r.lse.view(), given.lse.view()) && SameBits(r.kept.view(), given.kept.view()));
      }
    }
  }
}

// If a row keeps the values of a key that its neighbours drop, the neighbours do not see their NaN.
TEST(CertifiedSkip, ValuesThatAreLeftOutAreNotSeen) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t rows : {4, 150}) {
      Context ctx(2);
      Call call(4, dtype, 1, rows, 1500, 1, 1, 24);
      const Result before = Certified(ctx, call.inputs(), call.options);
      call.v.Set({0, 300, 0, 3}, std::nan(""));
      call.v.Set({0, 1001, 0, 3}, std::numeric_limits<double>::infinity());
      const Result after = Certified(ctx, call.inputs(), call.options);
      EXPECT_TRUE(SameBits(after.bound.view(), before.bound.view()) && SameBits(after.lse.view(), before.lse.view()));
      int64_t blind = 0, seeing = 0;
      for (int64_t i = 0; i < rows; ++i) {
        const bool sees = before.kept.Get({0, 0, i, 300 / 64}) != 0 || before.kept.Get({0, 0, i, 1001 / 64}) != 0;
        for (int64_t e = 0; e < 20; ++e) {
          const double x = after.o.Get({0, i, 0, e});
          if (sees && e == 3) {
            EXPECT_FALSE(std::isfinite(x)) << i;
          } else {
            EXPECT_EQ(x, before.o.Get({0, i, 0, e})) << i << " " << e;
          }
        }
        blind += sees ? 0 : 1;
        seeing += sees ? 1 : 0;
      }
      EXPECT_GT(blind, 0);
      EXPECT_TRUE(seeing > 0 || rows == 4);
    }
  }
}

// The last keys have the most mass: no earlier key is needed, which the last tile, processed first, shows from the
// start.
TEST(CertifiedSkip, TheEndOfTheKeysIsWeighedFirst) {
  Context ctx(1);
  const Buffer q(DType::kF32, {1, 1, 1, 8}), k(DType::kF32, {1, 2048, 1, 8}), v(DType::kF32, {1, 2048, 1, 8});
  v.FillNormal(1);
  for (int64_t e = 0; e < 8; ++e) {
    q.Set({0, 0, 0, e}, 1);
    for (int64_t t = 0; t < 2048; ++t) k.Set({0, t, 0, e}, static_cast<double>(t) / 100);
  }
  const Result r = Certified(ctx, {q.view(), k.view(), v.view()}, OptionsWith(0.02, Level::kSkip));
  for (int64_t block = 0; block < 32; ++block) EXPECT_EQ(r.kept.Get({0, 0, 0, block}) != 0, block >= 29) << block;
}

// Whole and partial vectors of rows that see no key.
TEST(CertifiedSkip, RowsThatSeeNothingAreZeros) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Context ctx(1);
    Call call(8, dtype, 1, 44, 672, 1, 2, 16);
    const int64_t rows = 9;
    call.options.query_lengths = ConstTensorView(&rows, DType::kI64, {1});
    const Result r = Certified(ctx, call.inputs(), call.options);
    for (int64_t i = 0; i < 44; ++i)
      EXPECT_EQ(r.o.Get({0, i, 0, 0}) == 0 && r.o.Get({0, i, 1, 3}) == 0, i >= rows) << i;
  }
}

// Sequences of different lengths: rows beyond a sequence's appended tokens keep nothing.
TEST(CertifiedSkip, RowsBeyondASequencesOwnSeeNothing) {
  Context ctx(2);
  const Call call(7, DType::kF32, 1, 2, 400, 1, 1, 8);
  Options options = call.options;
  const int64_t rows = 1;
  options.query_lengths = ConstTensorView(&rows, DType::kI64, {1});
  const Result r = Certified(ctx, call.inputs(), options);
  EXPECT_TRUE(std::isinf(r.lse.Get({0, 0, 1})) && !std::isinf(r.lse.Get({0, 0, 0})));
  EXPECT_EQ(r.bound.Get({0, 0, 1}), 0);
  for (int64_t block = 0; block < 7; ++block) EXPECT_EQ(r.kept.Get({0, 0, 1, block}), 0);
}

// A tile that would use most of epsilon precedes many that together use no more; epsilon is not spent on it.
TEST(CertifiedSkip, ABudgetIsSpentEvenly) {
  Context ctx(1);
  const Buffer q(DType::kF32, {1, 1, 1, 1}), k(DType::kF32, {1, 2048, 1, 1}), v(DType::kF32, {1, 2048, 1, 1});
  v.FillNormal(1);
  q.Set({0, 0, 0, 0}, 1);
  for (int64_t t = 0; t < 2048; ++t) {
    const double mass = t / 64 == 31 ? 0.967 : t / 64 == 1 ? 0.015 : 0.0006;
    k.Set({0, t, 0, 0}, std::log(mass / 64));
  }
  const Result r =
      Certified(ctx, {q.view(), k.view(), v.view()}, OptionsWith(0.02, Level::kSkip, /*causal=*/false, /*scale=*/1));
  for (int64_t block = 0; block < 32; ++block)
    EXPECT_EQ(r.kept.Get({0, 0, 0, block}) != 0, block == 1 || block == 31) << block;
  EXPECT_NEAR(r.bound.Get({0, 0, 0}), 0.018, 0.0005);
}

TEST(CertifiedSkip, CachesThatItCannotReadAreRefused) {
  Context ctx(1);
  const Call call(5, DType::kF32, 1, 2, 100, 1, 1, 8);
  const Result r(call.q.view(), 100, 20);
  const auto expect = [&](const KVCache::Options& o, const std::string& message) {
    KVCache cache(o);
    cache.Append(call.k.view(), call.v.view());
    EXPECT_THAT(
        [&] {
          Attend(ctx, cache.view(), call.q.view(), OptionsWith(0.02, Level::kSkip, /*causal=*/true), r.outputs());
        },
        ThrowsMessage<InvalidArgument>(HasSubstr("certified_attention::Attend: " + message)));
    EXPECT_TRUE(std::ranges::all_of(r.o.bytes(), [](uint8_t x) { return x == 0xFF; }));
  };
  expect({.heads = 1, .dim = 8, .value_dim = 20, .quantize = Quantize::kInt8},
         "cache keeps int8 rows, expected rows of f32, bf16 or f16");
  RingKVCache ring({.heads = 1, .dim = 8, .value_dim = 20, .window = 200});
  ring.Append(call.k.view(), call.v.view());
  EXPECT_THAT(
      [&] { Attend(ctx, ring.view(), call.q.view(), OptionsWith(0.02, Level::kSkip, /*causal=*/true), r.outputs()); },
      ThrowsMessage<InvalidArgument>(HasSubstr("cache is a ring, expected one that keeps all keys at level skip")));
  KVCache forgetting({.heads = 1, .dim = 8, .value_dim = 20, .log_decay_heads = 1});
  const Buffer decay(DType::kF32, {1, 100, 1});
  for (int64_t t = 0; t < 100; ++t) decay.Set({0, t, 0}, 0);
  forgetting.Append(call.k.view(), call.v.view(), {}, decay.view());
  EXPECT_THAT(
      [&] {
        Attend(ctx, forgetting.view(), call.q.view(), OptionsWith(0.02, Level::kSkip, /*causal=*/true), r.outputs());
      },
      ThrowsMessage<InvalidArgument>(HasSubstr("cache keeps log decays, expected none at level skip")));
  const Buffer kept(DType::kBool, {1, 1, 3, 2});
  KVCache cache({.heads = 1, .dim = 8, .value_dim = 20});
  cache.Append(call.k.view(), call.v.view());
  EXPECT_THAT(
      [&] {
        Attend(ctx, cache.view(), call.q.view(), OptionsWith(0.02, Level::kSkip), {r.o.view(), {}, {}, kept.view()});
      },
      ThrowsMessage<InvalidArgument>(HasSubstr("kept has shape [1,1,3,2], expected [1,1,2,2]")));
}

TEST(CertifiedSkip, ExplainSaysWhichKernel) {
  Context ctx(2);
  const Call call(6, DType::kF32, 1, 100, 1000, 2, 1, 16), row(6, DType::kF32, 1, 1, 1000, 2, 1, 16);
  const Explanation many = Explain(ctx, call.inputs(), call.options), few = Explain(ctx, row.inputs(), call.options);
  EXPECT_EQ(many.kernel, "skipping_lanes_f32");
  EXPECT_EQ(few.kernel, "skipping_decode_f32");
  EXPECT_THAT(many.why, HasSubstr("values of tiles"));
  EXPECT_GT(many.workspace_bytes, 0);
  EXPECT_GE(many.visited_pairs, many.flops / 2 / (16 + 20));
  EXPECT_TRUE(many.invariant);
  attention::Options exact;
  exact.causal = true;
  const auto dense = attention::Explain(ctx, {call.q.view(), call.k.view(), call.v.view()}, exact);
  EXPECT_EQ(many.flops, dense.flops);
  Options options = call.options;
  options.epsilon = 0;
  EXPECT_EQ(Explain(ctx, call.inputs(), options).kernel, dense.kernel);
  options = OptionsWith(0.02, Level::kSketch, /*causal=*/true);
  EXPECT_GT(Explain(ctx, call.inputs(), options).workspace_bytes, dense.workspace_bytes);
}

}  // namespace
}  // namespace heed::certified_attention
