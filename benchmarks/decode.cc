// Decoding: the measured calls, and the checks of their results.
#include "benchmarks/decode.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cli/format.h"
#include "heed/core/context.h"
#include "heed/core/os.h"
#include "heed/harness/buffer.h"
#include "heed/harness/probe.h"
#include "heed/harness/timing.h"
#include "heed/ops/exact/attention/attend/attend.h"
#include "heed/state/kv_cache.h"
#include "heed/state/latent_kv_cache.h"

namespace heed::bench {
namespace {

constexpr int64_t kHeads = 8, kDim = 128, kChunk = 1024;
constexpr int64_t kBytes = int64_t{256} << 20;  // of K and V

// One new token of one sequence against a cache that is full.
class Step {
 public:
  // page 0 means a contiguous cache.
  Step(DType dtype, int64_t tokens, int64_t page, int64_t group, Quantize quantize = Quantize::kNone)
      : cache_({1, kHeads, kDim, kDim, page == 0 ? tokens : -1, page, dtype, quantize}),
        q_(dtype, {1, 1, kHeads * group, kDim}, Placement::kAligned),
        o_(dtype, {1, 1, kHeads * group, kDim}, Placement::kAligned) {
    const Buffer k(dtype, {1, kChunk, kHeads, kDim}, Placement::kAligned);
    const Buffer v(dtype, {1, kChunk, kHeads, kDim}, Placement::kAligned);
    for (int64_t at = 0; at < tokens; at += kChunk) {
      if (at < 2 * kChunk) {  // generating random numbers for all of it would take longer than all the rest
        k.FillNormal(static_cast<uint64_t>(at) + 1);
        v.FillNormal(static_cast<uint64_t>(at) + 2);
      }
      const int64_t n = std::min(kChunk, tokens - at);
      cache_.Append(k.view().Slice(1, 0, n), v.view().Slice(1, 0, n));
    }
    q_.FillNormal(3);
    options_.causal = true;
  }

  void Run(Context& ctx) { attention::Attend(ctx, View(), q_.view(), options_, {o_.view(), {}}); }

  // Seconds to read as many bytes with the threads of `ctx`, from the memory of the cache if it is contiguous.
  double ReadSeconds(Context& ctx) const {
    return Bytes() / probe::ReadBytesPerSecond(ctx, cache_.view().pages[0][0], static_cast<size_t>(Bytes()), 1);
  }

  double Bytes() const {
    const KVView view = cache_.view();
    const int64_t element = view.quantized ? 1 : static_cast<int64_t>(SizeOf(view.dtype));
    return static_cast<double>(2 * view.lengths[0] * kHeads * kDim * element);
  }

  // A bound of the error of outputs by quantisation.
  double Bound(const Context& ctx) const {
    return attention::QuantizationBound(ctx, View(), q_.view(), options_).output;
  }

  KVCache& cache() { return cache_; }
  const Buffer& q() const { return q_; }
  const Buffer& o() const { return o_; }

 private:
  // A view whose last append was one token, which sets the query's position.
  KVView View() const {
    static constexpr int64_t kOne[] = {1};
    KVView view = cache_.view();
    view.appended = kOne;
    return view;
  }

  KVCache cache_;
  Buffer q_, o_;
  attention::Options options_;
};

// Compares a short cache of the same kind with the float64 reference.
void Verify(DType dtype, int64_t page, int64_t group, Context& ctx, Quantize quantize = Quantize::kNone) {
  const int64_t tokens = 2 * kChunk - 100;
  Step step(dtype, tokens, page, group, quantize);
  step.Run(ctx);
  const Buffer k(dtype, {1, 2 * kChunk, kHeads, kDim}), v(dtype, {1, 2 * kChunk, kHeads, kDim});
  for (int64_t chunk = 0; chunk < 2; ++chunk) {
    const int64_t at = chunk * kChunk;
    k.As(k.view().Slice(1, at, at + kChunk)).FillNormal(static_cast<uint64_t>(at) + 1);
    v.As(v.view().Slice(1, at, at + kChunk)).FillNormal(static_cast<uint64_t>(at) + 2);
  }
  const Buffer expected(DType::kF64, {1, 1, kHeads * group, kDim});
  attention::Reference({step.q().view(), k.view().Slice(1, 0, tokens), v.view().Slice(1, 0, tokens)}, {},
                       {expected.view(), {}});
  double tolerance = dtype == DType::kF32 ? 1e-5 : 2e-2;
  if (quantize == Quantize::kInt8) tolerance = step.Bound(ctx);
  for (int64_t h = 0; h < kHeads * group; ++h) {
    for (int64_t e = 0; e < kDim; ++e) {
      const double error = std::abs(step.o().Get({0, 0, h, e}) - expected.Get({0, 0, h, e}));
      if (error <= tolerance) continue;
      throw std::runtime_error(Format("decode: {} page {} group {}: off by {}", Name(dtype), page, group, error));
    }
  }
}

Buffer Normal(std::initializer_list<int64_t> sizes, uint64_t seed) {
  Buffer b(DType::kF32, sizes, Placement::kAligned);
  b.FillNormal(seed);
  return b;
}

// One new token of eight sequences after equal tokens, which the sequences share or store separately.
class Batch {
 public:
  Batch(int64_t tokens, bool share)
      : cache_(Filled(tokens, share)), q_(DType::kF32, {kBatch, 1, kHeads, kDim}, Placement::kAligned),
        o_(DType::kF32, {kBatch, 1, kHeads, kDim}, Placement::kAligned) {
    q_.FillNormal(3);
    options_.causal = true;
    const Buffer k = Normal({kBatch, 1, kHeads, kDim}, 4), v = Normal({kBatch, 1, kHeads, kDim}, 5);
    cache_.Append(k.view(), v.view());
  }

  void Run(Context& ctx) { attention::Attend(ctx, cache_.view(), q_.view(), options_, {o_.view(), {}}); }
  const Buffer& o() const { return o_; }

 private:
  static constexpr int64_t kBatch = 8;

  static KVCache Filled(int64_t tokens, bool share) {
    const Buffer k = Normal({1, kChunk, kHeads, kDim}, 1), v = Normal({1, kChunk, kHeads, kDim}, 2);
    const int64_t batch = share ? 1 : kBatch;
    KVCache cache({batch, kHeads, kDim, kDim});
    const std::vector<int64_t> sizes = {batch, kChunk, kHeads, kDim}, strides = {0, kHeads * kDim, kDim, 1};
    for (int64_t at = 0; at < tokens; at += kChunk) {
      cache.Append({k.view().data(), DType::kF32, sizes, strides}, {v.view().data(), DType::kF32, sizes, strides});
    }
    return share ? KVCache::Share(cache, kBatch) : std::move(cache);
  }

  KVCache cache_;
  Buffer q_, o_;
  attention::Options options_;
};

// One token of multi-head latent attention with DeepSeek's sizes: over the latent rows, or over the keys of 192 and
// values of 128 channels per head to which they expand.
class Latent {
 public:
  static constexpr int64_t kLatent = 512, kRope = 64, kKey = 192, kValue = 128;

  Latent(int64_t tokens, int64_t heads, bool expanded) : heads_(heads), expanded_(expanded) {
    options_.causal = true;
    options_.scale = 1 / std::sqrt(double{kKey});
    if (expanded) {
      keys_.emplace(KVCache::Options{1, heads, kKey, kValue});
      const Buffer k = Normal({1, kRows, heads, kKey}, 1), v = Normal({1, kRows, heads, kValue}, 2);
      for (int64_t at = 0; at < tokens; at += kRows) keys_->Append(k.view(), v.view());
      q_ = Normal({1, 1, heads, kKey}, 3);
      o_ = Normal({1, 1, heads, kValue}, 4);
    } else {
      latent_.emplace(LatentKVCache::Options{1, kLatent, kRope});
      const Buffer rows = Normal({1, kRows, kLatent + kRope}, 1);
      for (int64_t at = 0; at < tokens; at += kRows) latent_->Append(rows.view());
      q_ = Normal({1, 1, heads, kLatent + kRope}, 3);
      o_ = Normal({1, 1, heads, kLatent}, 4);
    }
  }

  void Run(Context& ctx) {
    static constexpr int64_t kOne[] = {1};
    KVView view = expanded_ ? keys_->view() : latent_->view();
    view.appended = kOne;
    attention::Attend(ctx, view, q_.view(), options_, {o_.view(), {}});
  }

  double Bytes() const { return static_cast<double>(expanded_ ? keys_->nbytes() : latent_->nbytes()); }

 private:
  static constexpr int64_t kRows = 256;

  int64_t heads_;
  bool expanded_;
  std::optional<KVCache> keys_;
  std::optional<LatentKVCache> latent_;
  Buffer q_{DType::kF32, {0}}, o_{DType::kF32, {0}};
  attention::Options options_;
};

template <class Subject>
double Seconds(Subject& step, Context& ctx, bool* clean) {
  const Sample sample = TimeClean(ctx.num_threads(), [&] { step.Run(ctx); });
  *clean = *clean && sample.clean;
  return sample.seconds;
}

int64_t Tokens(int64_t element_bytes) { return kBytes / (2 * kHeads * kDim * element_bytes); }
int64_t Tokens(DType dtype) { return Tokens(static_cast<int64_t>(SizeOf(dtype))); }

}  // namespace

std::vector<GateResult> MeasureDecode(const Rows& rows) {
  const int threads = std::min(2, os::NumUsableCpus());
  Context ctx(threads);
  std::vector<GateResult> results;
  const auto add = [&](const std::string& name, const std::function<GateResult()>& measure) {
    AddRow(rows, name, measure, results);
  };
  struct OfRead {
    DType dtype;
    int64_t group;
    Goals goals;
    Quantize quantize = Quantize::kNone;
  };
  for (const OfRead& c :
       {OfRead{DType::kF32, 1, {.92, .87}}, OfRead{DType::kF32, 4, {.92, .84}}, OfRead{DType::kF32, 8, {.80, .78}},
        OfRead{DType::kBF16, 1, {.88, .91}}, OfRead{DType::kBF16, 4, {kNone, .80}},
        OfRead{DType::kBF16, 8, {kNone, .60}}, OfRead{DType::kF32, 1, {kNone, .94}, Quantize::kInt8},
        OfRead{DType::kF32, 4, {kNone, .70}, Quantize::kInt8}, OfRead{DType::kF32, 8, {kNone, .35}, Quantize::kInt8},
        OfRead{DType::kF32, 16, {kNone, .35}, Quantize::kInt8}}) {
    const bool int8 = c.quantize == Quantize::kInt8;
    const std::string name =
        Format("{} {} query heads per key head, of a raw read", int8 ? "int8" : Name(c.dtype), c.group);
    add(name, [&] {
      Verify(c.dtype, 0, c.group, ctx, c.quantize);
      Step step(c.dtype, int8 ? Tokens(int64_t{1}) : Tokens(c.dtype), 0, c.group, c.quantize);
      std::vector<double> reads;
      GateResult result = MeasureRatio(name, c.goals.OnThisCpu(), true, [&](bool* clean) {
        const double read = step.ReadSeconds(ctx);
        reads.push_back(step.Bytes() / read);
        return read / Seconds(step, ctx, clean);
      });
      result.name += Format(" ({:.1f} GB/s)", Summarize(reads).median / 1e9);
      return result;
    });
  }
  // The time of a step of float32 relative to one with a contiguous cache and one query head per key head.
  const auto relative = [&](const std::string& name, int64_t page, int64_t group, double goal) {
    add(name, [&] {
      Verify(DType::kF32, page, group, ctx);
      Step plain(DType::kF32, Tokens(DType::kF32), 0, 1), other(DType::kF32, Tokens(DType::kF32), page, group);
      return MeasureRatio(name, goal, false,
                          [&](bool* clean) { return Seconds(other, ctx, clean) / Seconds(plain, ctx, clean); });
    });
  };
  for (const int64_t page : {16, 64}) relative(Format("f32 pages of {} tokens / contiguous", page), page, 1, 1.05);
  relative("f32 8 query heads per key head / 1", 0, 8, 1.25);
  const std::string fork = "fork of 32768 tokens in pages of 64, microseconds";
  add(fork, [&] {
    Step paged(DType::kF32, 32768, 64, 1);
    return MeasureRatio(fork, 50, false, [&](bool* clean) {
      const Sample s = TimeClean(1, [&] { const KVCache copy = paged.cache().Fork(); });
      *clean = s.clean;
      return s.seconds * 1e6;
    });
  });
  const std::string append = "append of a token to 65536 tokens in pages of 64 / to 1024";
  add(append, [&] {
    Step brief(DType::kF32, 1024, 64, 1), lengthy(DType::kF32, 65536, 64, 1);
    const Buffer token(DType::kF32, {1, 1, kHeads, kDim});
    token.FillNormal(4);
    const auto seconds = [&](KVCache& cache, bool* clean) {
      const int64_t before[] = {cache.lengths()[0]};
      const Sample s = TimeClean(1, [&] {
        for (int i = 0; i < 256; ++i) cache.Append(token.view(), token.view());
      });
      cache.Trim(before);
      *clean = *clean && s.clean;
      return s.seconds;
    };
    return MeasureRatio(append, 1.25, false, [&](bool* clean) {
      *clean = true;
      const double few = seconds(brief.cache(), clean);
      return seconds(lengthy.cache(), clean) / few;
    });
  });
  const std::string sharing = "f32 8 sequences: 16384 tokens each / shared";
  add(sharing, [&] {
    Batch shared(16384, true), apart(16384, false);
    shared.Run(ctx);
    apart.Run(ctx);
    if (!SameBits(shared.o().view(), apart.o().view())) throw std::runtime_error("decode: sharing changes bits");
    return MeasureRatio(sharing, 4, true,
                        [&](bool* clean) { return Seconds(apart, ctx, clean) / Seconds(shared, ctx, clean); });
  });
  // The calls are so long that other processes interrupt them; with one thread, CPU time is reported.
  Context one(1);
  for (const int64_t heads : {16, 128}) {
    const std::string name = Format("f32 MLA {} heads, 8192 tokens, one thread: expanded / absorbed", heads);
    add(name, [&] {
      Latent absorbed(8192, heads, false), expanded(8192, heads, true);
      GateResult result = MeasureRatio(name, kNone, true, [&](bool* clean) {
        return Seconds(expanded, one, clean) / Seconds(absorbed, one, clean);
      });
      result.name += Format(", time (bytes {:.1f})", expanded.Bytes() / absorbed.Bytes());
      return result;
    });
  }
  return results;
}

}  // namespace heed::bench
