// Attention over int8 caches: exact for the stored rows, and within the bound for the rows that were appended.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/ops/exact/attention/attend/attend.h"
#include "heed/ops/exact/attention/attend/attend_case.h"
#include "heed/state/kv_cache.h"

namespace heed::attention {
namespace {

struct Sizes {
  int64_t batch = 2, tokens = 1300, heads = 2, group = 4, dim = 64, value_dim = 24, queries = 1;
  int64_t page = 64;
  DType dtype = DType::kF32;
};

// A full cache whose last `queries` tokens are new, and the rows that were appended.
struct Filled {
  explicit Filled(const Sizes& n)
      : q(Normal(n.dtype, {n.batch, n.queries, n.heads * n.group, n.dim}, 1)),
        k(Normal(n.dtype, {n.batch, n.tokens, n.heads, n.dim}, 2)),
        v(Normal(n.dtype, {n.batch, n.tokens, n.heads, n.value_dim}, 3)),
        cache({n.batch, n.heads, n.dim, n.value_dim, -1, n.page, n.dtype, Quantize::kInt8}) {
    const int64_t old = n.tokens - n.queries;
    cache.Append(k.view().Slice(1, 0, old), v.view().Slice(1, 0, old));
    cache.Append(k.view().Slice(1, old, n.tokens), v.view().Slice(1, old, n.tokens));
  }
  Buffer q, k, v;
  KVCache cache;
};

// Address of row t of key head h, as kv_view.h defines it.
const std::byte* RowAt(const KVView& c, const PageRows& rows, int64_t b, int64_t t, int64_t h) {
  return c.pages[b][t / c.page_tokens] + rows.begin + h * rows.head_stride + t % c.page_tokens * rows.token_stride;
}

float ScaleAt(const KVView& c, const PageRows& rows, int64_t b, int64_t t, int64_t h) {
  return *reinterpret_cast<const float*>(RowAt(c, rows, b, t, h));
}

// The stored rows, dequantised exactly.
Buffer Stored(const KVView& c, const PageRows& rows, const PageRows& scales, int64_t channels) {
  const Buffer out(DType::kF64, {c.batch, c.lengths[0], c.heads, channels});
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t t = 0; t < c.lengths[0]; ++t) {
      for (int64_t h = 0; h < c.heads; ++h) {
        const auto* row = reinterpret_cast<const int8_t*>(RowAt(c, rows, b, t, h));
        const double scale = ScaleAt(c, scales, b, t, h);
        for (int64_t e = 0; e < channels; ++e) out.Set({b, t, h, e}, scale * row[e]);
      }
    }
  }
  return out;
}

Buffer Widened(const Buffer& x) {
  std::vector<int64_t> sizes;
  for (int i = 0; i < x.view().rank(); ++i) sizes.push_back(x.view().size(i));
  const Buffer out(DType::kF64, sizes);
  double* to = out.as<double>();
  for (int64_t i = 0; i < x.view().num_elements(); ++i) {
    to[i] = LoadAsDouble(x.view().dtype(), x.view().data(), i);
  }
  return out;
}

Buffer AttendTo(Context& ctx, const Filled& x, const Options& options) {
  return AttendTo(ctx, x.cache.view(), x.q.view(), options).o;
}

Buffer ReferenceOver(const Buffer& q, const Buffer& k, const Buffer& v, const Options& options) {
  const Buffer wide = Widened(q);
  Buffer o(DType::kF64, {q.view().size(0), q.view().size(1), q.view().size(2), v.view().size(3)});
  Reference({wide.view(), k.view(), v.view()}, options, {o.view(), {}});
  return o;
}

double LargestDifference(const Buffer& a, const Buffer& b) {
  double worst = 0;
  for (int64_t i = 0; i < a.view().num_elements(); ++i) {
    const double difference =
        LoadAsDouble(a.view().dtype(), a.view().data(), i) - LoadAsDouble(b.view().dtype(), b.view().data(), i);
    worst = std::max(worst, std::isnan(difference) ? HUGE_VAL : std::abs(difference));
  }
  return worst;
}

TEST(AttendQuantizedTest, IsRightForTheRowsThatAreStored) {
  Context ctx(2);
  for (const int64_t dim : {1, 40, 64, 100, 128}) {
    for (const int64_t group : {1, 2, 4, 8, 13}) {
      for (const int64_t queries : {1, 3}) {
        SCOPED_TRACE("dim " + std::to_string(dim) + " group " + std::to_string(group) + " queries " +
                     std::to_string(queries));
        Sizes n;
        n.dim = dim;
        n.group = group;
        n.queries = queries;
        n.page = dim == 40 ? 7 : 64;
        const Filled x(n);
        const KVView view = x.cache.view();
        const Buffer k = Stored(view, view.key, view.key_scale, n.dim);
        const Buffer v = Stored(view, view.value, view.value_scale, n.value_dim);
        // Logits of this size are right to some 2e-6, values are below 6.
        EXPECT_LE(LargestDifference(AttendTo(ctx, x, Causal()), ReferenceOver(x.q, k, v, Causal())), 1e-5);
      }
    }
  }
}

TEST(AttendQuantizedTest, IsRightOnEveryTarget) {
  std::vector<std::string> targets = AvailableTargets(DType::kF32);
  targets.push_back("emulated tiles");
  for (const std::string& target : targets) {
    Context ctx(1);
    std::optional<EmulateAmx> emulate;
    if (target == "emulated tiles") {
      emulate.emplace();
      ctx.set_isa("tiles");
    } else {
      ctx.set_isa(target);
    }
    for (const int64_t group : {1, 2, 8, 11, 20}) {
      SCOPED_TRACE(target + " group " + std::to_string(group));
      Sizes n;
      n.dim = 84;
      n.group = group;
      n.value_dim = 72;
      const Filled x(n);
      const KVView view = x.cache.view();
      const Buffer k = Stored(view, view.key, view.key_scale, n.dim);
      const Buffer v = Stored(view, view.value, view.value_scale, n.value_dim);
      EXPECT_LE(LargestDifference(AttendTo(ctx, x, Causal()), ReferenceOver(x.q, k, v, Causal())), 1e-5);
    }
  }
}

TEST(AttendQuantizedTest, TakesOptionsAndDTypes) {
  Context ctx(1);
  Sizes n;
  n.queries = 2;
  const Buffer sinks = Normal(DType::kF32, {n.heads * n.group}, 5);
  const Buffer mask = RandomMask(n.batch, n.tokens);
  Options options = Causal();
  options.sinks = sinks.view();
  options.mask = mask.view();
  options.softcap = 5;
  options.window = {700, 0};
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    n.dtype = dtype;
    const Filled x(n);
    const KVView view = x.cache.view();
    const Buffer k = Stored(view, view.key, view.key_scale, n.dim);
    const Buffer v = Stored(view, view.value, view.value_scale, n.value_dim);
    const double rounding = dtype == DType::kF32 ? 0 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
    EXPECT_LE(LargestDifference(AttendTo(ctx, x, options), ReferenceOver(x.q, k, v, options)), 1e-5 + rounding)
        << Name(dtype);
  }
}

TEST(AttendQuantizedTest, BitsDependOnNeitherPagesNorThreads) {
  Context one(1);
  for (const int64_t group : {4, 10}) {
    Sizes n;
    n.group = group;
    n.batch = 1;
    n.heads = 1;
    n.tokens = 5000;
    const Buffer expected = AttendTo(one, Filled(n), Causal());
    for (const int64_t page : {1, 16, 100, 8192}) {
      for (const int threads : {1, 2, 8}) {
        n.page = page;
        Context ctx(threads);
        EXPECT_TRUE(SameBits(AttendTo(ctx, Filled(n), Causal()).view(), expected.view()))
            << page << " " << threads << " group " << group;
      }
    }
  }
}

// Each query among several has the result that it has alone, whatever other rows share its block.
TEST(AttendQuantizedTest, AQueryHasTheBitsThatItHasAlone) {
  Context ctx(1);
  ctx.set_isa("tiles");
  for (const bool emulated : {false, true}) {
    std::optional<EmulateAmx> emulate;
    if (emulated) emulate.emplace();
    for (const int64_t group : {2, 8, 11}) {
      Sizes n;
      n.batch = 1;
      n.tokens = 700;
      n.queries = 5;
      n.group = group;
      const Filled x(n);
      const Buffer together = AttendTo(ctx, x, Causal());
      for (int64_t t = 0; t < n.queries; ++t) {
        KVCache cache({1, n.heads, n.dim, n.value_dim, -1, n.page, n.dtype, Quantize::kInt8});
        const int64_t tokens = n.tokens - n.queries + t;
        cache.Append(x.k.view().Slice(1, 0, tokens), x.v.view().Slice(1, 0, tokens));
        cache.Append(x.k.view().Slice(1, tokens, tokens + 1), x.v.view().Slice(1, tokens, tokens + 1));
        const Buffer alone = AttendTo(ctx, cache.view(), x.q.view().Slice(1, t, t + 1), Causal()).o;
        EXPECT_TRUE(SameBits(alone.view(), together.view().Slice(1, t, t + 1))) << group << " " << t << " " << emulated;
      }
    }
  }
}

// Page tables end before a guard page.
TEST(AttendQuantizedTest, ReadsNoPageEntryBeyondTheLength) {
  for (const int threads : {1, 2}) {
    for (const int64_t tokens : {1, 64, 128, 512, 1300}) {
      Context ctx(threads);
      Sizes n;
      n.batch = 1;
      n.tokens = tokens;
      const Filled x(n);
      const Buffer expected = AttendTo(ctx, x, Causal());
      KVView view = x.cache.view();
      const int64_t pages = (tokens + n.page - 1) / n.page;
      const Buffer table(DType::kI64, {pages}, Placement::kBeforeGuard);
      std::memcpy(table.view().data(), view.pages[0], static_cast<size_t>(pages) * sizeof(void*));
      const auto* entries = static_cast<const std::byte* const*>(table.view().data());
      view.pages = &entries;
      EXPECT_TRUE(SameBits(AttendTo(ctx, view, x.q.view(), Causal()).o.view(), expected.view())) << tokens;
    }
  }
}

// s - s^| <= |scale| |q|_1 s_k / 2 per logit, and (e^(2 delta) - 1) max |v| + max s_v / 2 per output, where delta is
// the largest of the logit bounds.
TEST(AttendQuantizedTest, ErrorIsWithinTheBound) {
  Context ctx(1);
  for (const double size : {0.1, 1.0, 4.0}) {
    Sizes n;
    n.batch = 1;
    n.tokens = 20;  // with many tokens the errors average out, while the bound adds them up
    Filled x(n);
    float* q = x.q.as<float>();
    for (int64_t i = 0; i < x.q.view().num_elements(); ++i) q[i] *= static_cast<float>(size);
    const Buffer k = Widened(x.k), v = Widened(x.v);
    const double error = LargestDifference(AttendTo(ctx, x, Causal()), ReferenceOver(x.q, k, v, Causal()));
    const Bound bound = QuantizationBound(ctx, x.cache.view(), x.q.view(), Causal());
    std::printf("queries times %g: error %.2g, bound %.2g\n", size, error, bound.output);
    EXPECT_LE(error, bound.output);
    EXPECT_GT(error, bound.output / 200);  // the bound is not vacuous
  }
}

// Kernels with int8 dot products quantise the query too, in units of its largest element over 127 * 65793. The error is
// at most half a unit per element, however much the largest element exceeds the others.
TEST(AttendQuantizedTest, AQueryIsRoundedByHalfAUnitAtMost) {
  constexpr int64_t kDim = 64;
  constexpr double kScale = 1.0 / 64, kLargest = 127 * 65793;
  const Buffer q(DType::kF32, {1, 1, 1, kDim});
  const Buffer k(DType::kF32, {1, 2, 1, kDim}), v(DType::kF32, {1, 2, 1, 1});
  for (int64_t e = 0; e < kDim; ++e) {
    q.Set({0, 0, 0, e}, e == 0 ? kLargest : 0.51);
    k.Set({0, 0, 0, e}, e == 0 ? 0 : 1);
    k.Set({0, 1, 0, e}, e == 0 ? 0 : -1);
  }
  v.Set({0, 0, 0, 0}, 1);
  v.Set({0, 1, 0, 0}, -1);
  KVCache cache({1, 1, kDim, 1, -1, 64, DType::kF32, Quantize::kInt8});
  cache.Append(k.view(), v.view());
  Context ctx(1);
  Options options;
  options.scale = kScale;
  const Buffer o = AttendTo(ctx, cache.view(), q.view(), options).o;
  // Logits x and -x with values 1 and -1 have the mean tanh x.
  const double error = std::abs(std::atanh(double{o.as<float>()[0]}) - kScale * double{0.51F} * (kDim - 1));
  EXPECT_LE(error, kScale * 0.5 * (kDim - 1) + 1e-6);
  EXPECT_LE(error, QuantizationBound(ctx, cache.view(), q.view(), options).logit / 1000);
}

TEST(AttendQuantizedTest, OnlyInt8HasABound) {
  const Context ctx(1);
  const KVCache plain({1, 1, 8, 8});
  const Buffer q = Normal(DType::kF32, {1, 1, 1, 8}, 1);
  EXPECT_THAT([&] { QuantizationBound(ctx, plain.view(), q.view(), Causal()); },
              testing::ThrowsMessage<InvalidArgument>(testing::HasSubstr("cache is not quantised")));
}

}  // namespace
}  // namespace heed::attention
