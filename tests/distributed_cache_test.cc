// Attention to caches that ranks hold, against one cache. Ranks are threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/distributed/distributed.h"
#include "heed/harness/buffer.h"
#include "heed/ops/exact/attention/attend/attend.h"
#include "heed/state/kv_cache.h"
#include "heed/state/latent_kv_cache.h"
#include "heed/state/ring_kv_cache.h"
#include "tests/local_transport.h"

namespace heed {
namespace {

using distributed::ExpectNone;
using distributed::Group;
using distributed::LocalRanks;

constexpr int64_t B = 2, T = 90, Hq = 4, Hkv = 2, D = 16, kRows = 5;

double Difference(const Buffer& a, const Buffer& b) {
  const std::vector<double> x = Elements(a.view()), y = Elements(b.view());
  double difference = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double apart = x[i] == y[i] ? 0 : std::abs(x[i] - y[i]);
    difference = std::max(difference, std::isnan(apart) ? HUGE_VAL : apart);
  }
  return difference;
}

// The keys of one rank: tokens [begin, end), the last kRows of them at last.
template <class Append>
void AppendTwice(int64_t begin, int64_t end, const Append& append) {
  const int64_t last = std::clamp(T - kRows, begin, end);
  if (last > begin) append(begin, last);
  if (end > last) append(last, end);
}

TEST(DistributedCaches, AreMergedIntoOne) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    for (const bool quantised : {false, true}) {
      if (quantised && dtype == DType::kF64) continue;
      const Buffer k = Buffer(dtype, {B, T, Hkv, D}).FillNormal(1), v = Buffer(dtype, {B, T, Hkv, D}).FillNormal(2);
      const Buffer q = Buffer(dtype, {B, kRows, Hq, D}).FillNormal(3);
      const Buffer sinks = Buffer(DType::kF64, {Hq}).FillNormal(4);
      KVCache::Options sizes{.batch = B, .heads = Hkv, .dim = D, .dtype = dtype};
      if (quantised) sizes.quantize = Quantize::kInt8;
      // The second sequence has one new token less.
      const auto append = [&](KVCache& cache) {
        return [&](int64_t begin, int64_t end) {
          const std::vector<int64_t> lengths = {end - begin, end - begin - (end == T ? 1 : 0)};
          cache.Append(k.view().Slice(1, begin, end), v.view().Slice(1, begin, end), lengths);
        };
      };
      KVCache whole(sizes);
      AppendTwice(0, T, append(whole));
      for (const bool has_sinks : {false, true}) {
        attention::Options options;
        options.scale = 0.3;
        options.causal = true;
        options.softcap = 4;
        if (has_sinks) options.sinks = sinks.view();
        const DType wide = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
        const Buffer o(dtype, {B, kRows, Hq, D}), lse(wide, {B, Hq, kRows});
        Context ctx(1);
        Attend(ctx, whole.view(), q.view(), options, {o.view(), lse.view()});
        // The second part has fewer keys than rows, the third none.
        for (const std::vector<int64_t>& borders : {std::vector<int64_t>{0, T}, {0, 40, T}, {0, 60, 62, 62, T}}) {
          LocalRanks ranks(static_cast<int>(borders.size()) - 1);
          ExpectNone(ranks.Run([&](const Group& group) {
            const auto rank = static_cast<size_t>(group.rank());
            KVCache own(sizes);
            AppendTwice(borders[rank], borders[rank + 1], append(own));
            const Buffer here(dtype, {B, kRows, Hq, D}), lse_here(wide, {B, Hq, kRows});
            Context one(1);
            distributed::Attend(one, group, own.view(), q.view(), options, {here.view(), lse_here.view()});
            const double tolerance = dtype == DType::kF64 ? 1e-13 : dtype == DType::kF32 ? 1e-5 : 3e-2;
            EXPECT_LE(Difference(here, o), tolerance) << Name(dtype) << quantised << " rank " << rank;
            EXPECT_LE(Difference(lse_here, lse), dtype == DType::kF64 ? 1e-13 : 1e-5) << Name(dtype) << quantised;
            const Buffer alone(dtype, {B, kRows, Hq, D});
            distributed::Attend(one, group, own.view(), q.view(), options, {alone.view(), {}});
            EXPECT_TRUE(SameBits(alone.view(), here.view()));
          }));
        }
      }
    }
  }
}

// Attend on two ranks, whose caches have ten tokens each; all throw.
void ExpectRefused(const std::function<void(int, attention::Options&, Buffer&)>& change, const std::string& what,
                   bool rotary = false) {
  LocalRanks ranks(2);
  const auto errors = ranks.Run([&](const Group& group) {
    KVCache::Options sizes{.batch = B, .heads = Hkv, .dim = D};
    if (rotary) sizes.rotary = CacheRotary{};
    KVCache own(sizes);
    const Buffer k = Buffer(DType::kF32, {B, 10, Hkv, D}).FillNormal(1);
    own.Append(k.view(), k.view());
    Buffer q = Buffer(DType::kF32, {B, kRows, Hq, D}).FillNormal(3);
    attention::Options options;
    options.causal = true;
    change(group.rank(), options, q);
    const Buffer o(DType::kF32, {B, kRows, Hq, D});
    Context ctx(1);
    distributed::Attend(ctx, group, own.view(), q.view(), options, {o.view(), {}});
  });
  for (const std::exception_ptr& error : errors) {
    ASSERT_TRUE(error) << what;
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& thrown) {
      EXPECT_NE(std::string(thrown.what()).find(what), std::string::npos) << thrown.what();
    }
  }
}

TEST(DistributedCaches, EveryRankRefuses) {
  using attention::Options;
  ExpectRefused([](int rank, Options& options, Buffer&) { options.softcap = 1 + rank; }, "rank 1 calls");
  ExpectRefused(
      [](int rank, Options& options, Buffer&) {
        if (rank == 1) options.scale = HUGE_VAL;
      },
      "scale is inf");
  ExpectRefused([](int, Options& options, Buffer&) { options.window.left = 3; }, "window is given with a group");
  ExpectRefused([](int, Options& options, Buffer&) { options.sink_tokens = 3; }, "sink_tokens is given with a group");
  ExpectRefused([](int, Options&, Buffer& q) { q = Buffer(DType::kF32, {B, 11, Hq, D}); }, "o has shape");
  ExpectRefused([](int, Options&, Buffer& q) { q = Buffer(DType::kF32, {B, kRows, 3, D}); }, "o has shape");
  ExpectRefused([](int, Options&, Buffer&) {}, "rotary encoding counts", true);
}

}  // namespace
}  // namespace heed
