// Certified attention over a cache: selects blocks from the cache's sketch and attends to them.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "heed/core/os.h"
#include "heed/ops/exact/attention/attend/attend.h"
#include "heed/ops/exact/attention/attend/attend_internal.h"
#include "heed/ops/exact/attention/attend/attend_rotary_internal.h"
#include "heed/ops/exact/attention/attention_check_internal.h"
#include "heed/ops/exact/attention/attention_internal.h"
#include "heed/ops/sparse/certified_attention/certified_attention.h"
#include "heed/ops/sparse/certified_attention/certified_internal.h"
#include "heed/ops/sparse/certified_attention/certified_selection_internal.h"
#include "heed/patterns/pattern.h"

namespace heed::certified_attention {
namespace {

// With this many blocks or fewer, two of which are always kept, selection saves nothing.
constexpr int64_t kFewBlocks = 3;

// State of kAuto for one head, in one byte: the number of consecutive misses, then of dense calls.
class Memory {
 public:
  explicit Memory(uint8_t* byte) : byte_(*byte) {}

  // True if this call is dense; it is then counted as one.
  bool TakeDense() {
    const uint8_t now = byte_.load(std::memory_order_relaxed);
    if (now < kMisses) return false;
    const int next = now + 1;
    byte_.store(static_cast<uint8_t>(next < kMisses + kDenseCalls ? next : kMisses - 1), std::memory_order_relaxed);
    return true;
  }
  void Saw(const Selection::Count& count) {
    const bool paid = static_cast<double>(count.kept) <= kMostKept * static_cast<double>(count.visible);
    const uint8_t now = byte_.load(std::memory_order_relaxed);
    byte_.store(paid ? uint8_t{0} : static_cast<uint8_t>(std::min<int>(now + 1, kMisses)), std::memory_order_relaxed);
  }

 private:
  static constexpr uint8_t kMisses = 2, kDenseCalls = 30;
  static constexpr double kMostKept = 0.7;
  std::atomic_ref<uint8_t> byte_;
};

SketchedKeys KeysOf(const KVView& cache, Level level) {
  SketchedKeys keys;
  keys.parts = {cache.sketch.step, cache.sketch.error};
  keys.by_boxes = level == Level::kBox;
  keys.boxes = {cache.sketch.min, cache.sketch.max, cache.sketch.mean};
  keys.block = [&cache](int64_t b, int64_t h, int64_t block) {
    const int64_t token = block * softmax::kSketchKeys;
    return cache.sketch.At(cache.pages[b][token / cache.page_tokens], h, token % cache.page_tokens);
  };
  return keys;
}

// The pattern of each row's selected blocks.
Pattern PatternOf(const KVView& cache, const Selection& selection, int64_t rows) {
  const int64_t blocks = selection.blocks(), num_lists = cache.batch * rows * cache.heads;
  const auto list = [&](int64_t at) {
    return selection.Kept(at / cache.heads / rows, at % cache.heads, at / cache.heads % rows);
  };
  int64_t most = 0;
  for (int64_t at = 0; at < num_lists; ++at) most = std::max<int64_t>(most, std::count(list(at), list(at) + blocks, 1));
  std::vector<int32_t> index(static_cast<size_t>(num_lists * most), -1);
  for (int64_t at = 0; at < num_lists; ++at) {
    int32_t* to = index.data() + at * most;
    for (int64_t i = 0; i < blocks; ++i) {
      if (list(at)[i] != 0) *to++ = static_cast<int32_t>(i);
    }
  }
  return patterns::RowBlocks({index.data(), DType::kI32, {cache.batch, rows, cache.heads, most}}, softmax::kSketchKeys);
}

// These caches have no sketch, so they are refused at the other levels.
void CheckSkips(const char* op, const KVView& cache) {
  using mechanism::Fail;
  if (cache.dtype == DType::kF64) Fail(op, "cache", "has dtype f64", "f32, bf16 or f16 at level skip");
  if (cache.quantized) Fail(op, "cache", "keeps int8 rows", "rows of f32, bf16 or f16 at level skip");
  if (!cache.first_kept.empty()) Fail(op, "cache", "is a ring", "one that keeps all keys at level skip");
  if (cache.log_decay_heads > 0) Fail(op, "cache", "keeps log decays", "none at level skip");
}

}  // namespace

void Attend(Context& ctx, const KVView& cache, const ConstTensorView& q, const Options& options, const Outputs& out) {
  constexpr char kOp[] = "certified_attention::Attend";
  const os::ScopedFloatControl float_control;
  const bool skips = options.level == Level::kSkip;
  if (skips) {
    CheckSkips(kOp, cache);
  } else {
    attention::CheckSketch(kOp, cache);
  }
  attention::CheckCacheQueries(kOp, cache, q);
  attention::CheckCacheOptions(attention::Check(kOp, attention::Use::kForward), options);
  CheckCall(kOp, {q, {}, {}}, options, out, {cache.heads, cache.value_dim, LongestOf(cache)});
  KVView plain = cache;
  ConstTensorView rotated = q;
  if (cache.rotary != nullptr) {
    rotated = attention::RotatedQueries(ctx, cache, q);
    plain.rotary = nullptr;
  }
  const softmax::Problem p = attention::AttendProblem(kOp, plain, rotated, options, {out.o, out.lse});
  attention::RefuseSlowPairs(kOp, ctx, p);
  if (skips && options.epsilon >= kLeastEpsilon) return Skip(ctx, p, options.epsilon, out);
  const SketchedKeys keys = KeysOf(plain, options.level);
  Selection selection(p, keys, options.epsilon, /*rows_share=*/false);
  const auto memory_of = [&](int64_t b, int64_t h) { return Memory(cache.certified_memory + b * cache.heads + h); };
  const auto for_heads = [&](const auto& f) {
    for (int64_t b = 0; b < cache.batch; ++b) {
      for (int64_t h = 0; h < cache.heads; ++h) f(b, h);
    }
  };
  const bool remembers = options.level == Level::kAuto && options.epsilon >= kLeastEpsilon;
  std::vector<char> looked(static_cast<size_t>(cache.batch * cache.heads));
  for_heads([&](int64_t b, int64_t h) {
    const bool few = BlocksOf(cache.lengths[static_cast<size_t>(b)]) <= kFewBlocks || q.size(1) == 0;
    const bool dense = options.epsilon < kLeastEpsilon || few || (remembers && memory_of(b, h).TakeDense());
    if (dense) selection.SetDense(b, h);
    looked[static_cast<size_t>(b * cache.heads + h)] = dense ? 0 : 1;
  });
  selection.Choose(ctx);
  for_heads([&](int64_t b, int64_t h) {
    if (!remembers || looked[static_cast<size_t>(b * cache.heads + h)] == 0) return;
    if (const Selection::Count count = selection.CountOf(b, h); count.visible > 0) memory_of(b, h).Saw(count);
  });

  attention::Options exact = options;
  if (selection.drops()) {
    const Pattern kept = PatternOf(cache, selection, q.size(1));
    exact.pattern = exact.pattern.present() ? exact.pattern & kept : kept;
  }
  const Lse lse(out, q, /*packed=*/false);
  attention::Attend(ctx, plain, rotated, exact, {out.o, lse.view()});
  Write(p, selection, lse.view(), out);
}

}  // namespace heed::certified_attention
