// Decoding with attention: plain and int8 caches, ring caches for windows, and sketches for certified attention.
#include <algorithm>
#include <memory>
#include <optional>

#include "heed/advise/candidates_internal.h"
#include "heed/ops/exact/attention/attend/attend.h"
#include "heed/ops/sparse/certified_attention/certified_attention.h"
#include "heed/state/kv_cache.h"
#include "heed/state/ring_kv_cache.h"

namespace heed::advise {
namespace {

using certified_attention::Level;

// The kind of cache, and how queries attend to it.
struct Kind {
  Quantize quantize = Quantize::kNone;
  int64_t window = 0;  // tokens in a ring; 0: all tokens
  std::optional<Level> level = {};
  double epsilon = 0;
};

// A cache of either kind.
class Tokens {
 public:
  Tokens(const Kind& kind, const attention::Inputs& like) {
    const int64_t B = like.k.size(0), H = like.k.size(2), D = like.k.size(3), Dv = like.v.size(3);
    const DType dtype = like.k.dtype();
    if (kind.window > 0) {
      ring_.emplace(RingKVCache::Options{
          .batch = B, .heads = H, .dim = D, .value_dim = Dv, .window = kind.window, .dtype = dtype});
    } else {
      const bool sketches = kind.level.value_or(Level::kSkip) != Level::kSkip;
      all_.emplace(KVCache::Options{.batch = B,
                                    .heads = H,
                                    .dim = D,
                                    .value_dim = Dv,
                                    .dtype = dtype,
                                    .quantize = kind.quantize,
                                    .sketch = sketches ? Sketch::kInt8 : Sketch::kNone});
    }
  }

  // Appends rows [begin, end) of k and v.
  void Append(const attention::Inputs& in, int64_t begin, int64_t end) {
    const ConstTensorView k = in.k.Slice(1, begin, end), v = in.v.Slice(1, begin, end);
    ring_ ? ring_->Append(k, v) : all_->Append(k, v);
  }
  // Removes the last row; a ring cannot, and continues.
  void TakeBack(int64_t tokens) {
    if (all_) all_->Trim(std::vector<int64_t>(static_cast<size_t>(all_->batch()), tokens));
  }
  KVView view() const { return ring_ ? ring_->view() : all_->view(); }
  int64_t nbytes() const { return ring_ ? ring_->nbytes() : all_->nbytes(); }

 private:
  std::optional<KVCache> all_;
  std::optional<RingKVCache> ring_;
};

class Cached : public Candidate {
 public:
  Cached(const Question& question, const Kind& kind) : kind_(kind), with_(question.exact) {
    with_.causal = true;
    if (kind.window > 0) with_.window = {kind.window - 1, 0};
    is_causal = true;
    chooses = kind.level.has_value();
    mechanism = kind.level ? "certified_attention" : "attention";
    attention::Options said = with_;
    said.causal = false;
    options = ToString(said);
    if (options == "full") options = "cache";
    if (kind.window > 0) options = "ring, window " + std::to_string(kind.window);
    if (kind.quantize == Quantize::kInt8) options = "int8 cache";
    std::string arguments = OptionsPython(said);
    if (kind.level) {
      const std::string epsilon = NumberText(kind.epsilon), level = kind.level == Level::kSkip ? "skip" : "sketch";
      options = "epsilon " + epsilon + " " + level;
      arguments += ", epsilon=" + epsilon + ", level=\"" + level + "\"";
    }
    python = "cache.attend(q" + arguments + ")";
  }

  std::vector<Part> Parts(const Context&, const Sizes& s, double kept) const override {
    const double rows = static_cast<double>(s.B * s.Hq), tokens = static_cast<double>(TokensOf(s));
    const double D = static_cast<double>(s.D), Dv = static_cast<double>(s.Dv);
    const double key_heads = static_cast<double>(s.B * s.Hkv), pairs = rows * tokens, size = ElementBytes();
    Load load = {{"row", rows}, {"pair", pairs}};
    const char* name = "attention decode";
    if (kind_.level == Level::kSkip) {  // all keys, but only some values
      name = "certified_attention skip decode";
      AddBytes(key_heads * tokens * (D + kept * Dv) * size, load);
      load["flop"] = 2 * pairs * (D + kept * Dv);
    } else if (kind_.level) {
      name = "certified_attention sketch decode";
      AddBytes(key_heads * tokens * (D + 8 + kept * (D + Dv) * size), load);
      load["sketch_flop"] = 2 * pairs * D;
      load["flop"] = 2 * pairs * kept * (D + Dv);
    } else {
      if (kind_.quantize == Quantize::kInt8) name = "attention int8 decode";
      AddBytes(key_heads * tokens * (D + Dv) * size, load);
      load["flop"] = 2 * pairs * (D + Dv);
    }
    return {{{name, dtype, threads}, load}};
  }

  // The size of a page of the cache, times the number of pages for these tokens.
  Memory MemoryAt(const Context& ctx, const Sizes& s, double) const override {
    Tokens page(kind_, InputsOf(s, dtype));
    const std::vector<int64_t> sizes[2] = {{s.B, 1, s.Hkv, s.D}, {s.B, 1, s.Hkv, s.Dv}};
    const Buffer k(dtype, sizes[0]), v(dtype, sizes[1]);
    k.FillConstant(0);
    v.FillConstant(0);
    page.Append({{}, k.view(), v.view()}, 0, 1);
    constexpr int64_t kPage = 64;
    const int64_t kept = kind_.window > 0 ? std::min(s.Tk, kind_.window + kPage) : s.Tk;
    const double pages = static_cast<double>((kept + kPage - 1) / kPage);
    Sizes one = s;
    one.Tq = 1;
    const double queries = ArgumentBytes(one, dtype) - KeyValueBytes(s, dtype, s.Tk);
    const ConstTensorView q(nullptr, dtype, {s.B, 1, s.Hq, s.D});
    return {queries, static_cast<double>(attention::ExplainAttend(ctx, page.view(), q, with_).workspace_bytes),
            pages * static_cast<double>(page.nbytes())};
  }

  Call On(Context&, const TensorMap& tensors) const override {
    Call call;
    const attention::Inputs in = InputsOf(tensors);
    const int64_t B = in.q.size(0), T = in.q.size(1), H = in.q.size(2), rows = std::min(T, kDecodedRows);
    const auto cache = Keep(call, std::make_shared<Tokens>(kind_, in));
    const Buffer o(in.q.dtype(), {B, rows, H, in.v.size(3)}, Placement::kAligned);
    call.o = o.view();
    const auto attend = [cache, in, *this](Context& ctx, int64_t t, const TensorView& out) {
      cache->Append(in, t, t + 1);
      const ConstTensorView q = in.q.Slice(1, t, t + 1);
      if (!kind_.level) return attention::Attend(ctx, cache->view(), q, with_, {out, {}});
      certified_attention::Attend(ctx, cache->view(), q, CertifiedOptions(), {out, {}, {}, {}});
    };
    cache->Append(in, 0, T - rows);
    const int64_t timed = TimedToken(T);
    call.compute = [cache, attend, o, T, rows, timed](Context& ctx) {
      for (int64_t row = 0; row < rows; ++row) attend(ctx, T - rows + row, o.view().Slice(1, row, row + 1));
      cache->TakeBack(timed);
    };
    const Buffer again(in.q.dtype(), {B, 1, H, in.v.size(3)}, Placement::kAligned);
    call.stages.emplace_back([cache, attend, again, timed](Context& ctx) {
      attend(ctx, timed, again.view());
      cache->TakeBack(timed);
    });
    if (kind_.level) call.kept = [cache, in, o, *this] { return KeptShare(*cache, in); };
    return call;
  }

 private:
  // The last token, unless it completes a block of 64: then it would include the cost of the block's sketch, which only
  // one token in 64 has.
  static int64_t TimedToken(int64_t tokens) { return tokens > 1 && tokens % 64 == 0 ? tokens - 2 : tokens - 1; }

  int64_t TokensOf(const Sizes& s) const { return kind_.window > 0 ? std::min(s.Tk, kind_.window) : s.Tk; }
  double ElementBytes() const { return kind_.quantize == Quantize::kInt8 ? 1 : SizeIn(dtype); }

  certified_attention::Options CertifiedOptions() const {
    certified_attention::Options certified;
    certified.epsilon = kind_.epsilon;
    certified.level = *kind_.level;
    certified.causal = true;
    certified.scale = with_.scale;
    return certified;
  }

  // The fraction of blocks that the last query keeps.
  double KeptShare(Tokens& cache, const attention::Inputs& in) const {
    const int64_t B = in.q.size(0), t = TimedToken(in.q.size(1)), H = in.q.size(2), blocks = t / 64 + 1;
    const Buffer kept(DType::kBool, {B, kind_.level == Level::kSkip ? H : in.k.size(2), 1, blocks});
    const Buffer o(in.q.dtype(), {B, 1, H, in.v.size(3)});
    Context ctx(threads);
    cache.Append(in, t, t + 1);
    certified_attention::Attend(ctx, cache.view(), in.q.Slice(1, t, t + 1), CertifiedOptions(),
                                {o.view(), {}, {}, kept.view()});
    cache.TakeBack(t);
    const int64_t n = kept.view().num_elements();
    return n == 0
               ? 1
               : static_cast<double>(std::count(kept.as<bool>(), kept.as<bool>() + n, true)) / static_cast<double>(n);
  }

  Kind kind_;
  attention::Options with_;
};

}  // namespace

void AddCached(const Question& question, Candidates& candidates) {
  const auto add = [&](const Kind& kind, DType dtype, int threads) {
    auto candidate = std::make_unique<Cached>(question, kind);
    SetKind(question, dtype, threads, *candidate);
    candidates.push_back(std::move(candidate));
  };
  const attention::Options& exact = question.exact;
  const bool unrestricted = IsUnrestricted(exact);
  // Tokens outside the model's own window need not be stored.
  Kind all;
  if (exact.window.left >= 0 && !exact.pattern.present()) all.window = exact.window.left + 1;
  for (const DType dtype : question.dtypes) add(all, dtype, question.threads);
  for (const DType dtype : question.dtypes) {
    if (question.threads > 1) add(all, dtype, 1);
  }
  if (all.window == 0 && !std::ranges::count(question.dtypes, DType::kF64)) {
    add({.quantize = Quantize::kInt8}, question.dtypes[0], question.threads);
  }
  if (!unrestricted) return;
  for (const int64_t width : Widths(question.sizes.Tk)) {
    for (const DType dtype : question.dtypes) add({.window = width}, dtype, question.threads);
  }
  if (exact.softcap > 0 || !question.has_tensors) return;
  for (const Level level : {Level::kSketch, Level::kSkip}) {
    for (const DType dtype : question.dtypes) {
      if (dtype != DType::kF64) add({.level = level, .epsilon = question.epsilon}, dtype, question.threads);
    }
  }
}

}  // namespace heed::advise
