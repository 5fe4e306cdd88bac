// Certified attention of given keys: a sketch of them, a choice, and attention over what is chosen; and what the entry points
// share.
#include "heed/ops/sparse/certified_attention/certified_attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/os.h"
#include "heed/engines/softmax/skipping.h"
#include "heed/engines/softmax/visit.h"
#include "heed/ops/exact/attention/attention_internal.h"
#include "heed/ops/sparse/certified_attention/certified_internal.h"
#include "heed/ops/sparse/common/pattern.h"
#include "heed/state/sketch_internal.h"

namespace heed::certified_attention {
namespace {

float* FloatAt(const TensorView& t, int64_t b, int64_t h, int64_t i) {
  return t.as<float>() + b * t.stride(0) + h * t.stride(1) + i * t.stride(2);
}

using softmax::kSketchKeys;

// Blocks of the sketch of all keys, [B, Hkv, N], in ctx's staging memory.
class SketchOfKeys {
 public:
  SketchOfKeys(Context& ctx, const ConstTensorView& k, SketchedKeys& keys)
      : heads_(k.size(2)), blocks_(BlocksOf(k.size(1))), layout_(SketchLayout(k.size(3))) {
    const int64_t batch = k.size(0), size = static_cast<int64_t>(SizeOf(k.dtype()));
    ctx.ReserveStaging(static_cast<size_t>(batch * heads_ * blocks_ * layout_.block_stride));
    memory_ = static_cast<std::byte*>(ctx.Staging());
    std::vector<SketchWriter> writers(static_cast<size_t>(ctx.num_threads()), SketchWriter(k.dtype(), k.size(3)));
    ctx.ParallelFor(batch * heads_ * blocks_, [&](int64_t task, int worker) {
      const int64_t block = task % blocks_, h = task / blocks_ % heads_, b = task / blocks_ / heads_;
      const int64_t first = block * kSketchKeys;
      const int64_t end = std::min(first + kSketchKeys, keys.sequences[static_cast<size_t>(b)].keys);
      for (int64_t j = first; j < end; ++j) {
        const int64_t at = b * k.stride(0) + j * k.stride(1) + h * k.stride(2);
        SketchWriter& writer = writers[static_cast<size_t>(worker)];
        writer.WriteRow(k.as<std::byte>() + at * size, j - first, At(b, h, block));
        if (!keys.by_boxes || j - first != kSketchKeys - 1) continue;
        const std::byte* const keys_of_block = k.as<std::byte>() + (at - (j - first) * k.stride(1)) * size;
        writer.WriteStatistics(keys_of_block, k.stride(1) * size, At(b, h, block));
      }
    });
    keys.parts = {layout_.step, layout_.error};
    keys.boxes = {layout_.min, layout_.max, layout_.mean};
    keys.block = [this](int64_t b, int64_t h, int64_t block) { return At(b, h, block); };
  }
  SketchOfKeys(const SketchOfKeys&) = delete;
  SketchOfKeys& operator=(const SketchOfKeys&) = delete;

  std::byte* At(int64_t b, int64_t h, int64_t block) const {
    return memory_ + ((b * heads_ + h) * blocks_ + block) * layout_.block_stride;
  }

 private:
  int64_t heads_, blocks_;
  SketchBlocks layout_;
  std::byte* memory_;
};

// What is kept, by positions of rows, [B, Hkv, quotients of positions, N].
Pattern PatternOf(const SketchedKeys& keys, const Selection& selection, int64_t rows) {
  const int64_t batch = std::ssize(keys.sequences), heads = keys.heads, blocks = selection.blocks();
  int64_t positions = 0;
  for (const SketchedKeys::Sequence& s : keys.sequences) positions = std::max(positions, BlocksOf(s.start + rows));
  const auto keep = std::make_unique<bool[]>(static_cast<size_t>(batch * heads * positions * blocks));
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t start = keys.sequences[static_cast<size_t>(b)].start;
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t at = 0; at < positions; ++at) {
        const int64_t i = std::max<int64_t>(at * kSketchKeys - start, 0);  // the first row that stands there
        if (i >= rows || start + i >= (at + 1) * kSketchKeys) continue;
        const uint8_t* const from = selection.Kept(b, h, selection.SetOf(b, i));
        bool* const to = keep.get() + ((b * heads + h) * positions + at) * blocks;
        for (int64_t j = 0; j < blocks; ++j) to[j] = from[j] != 0;
      }
    }
  }
  return patterns::Blocks({keep.get(), DType::kBool, {batch, heads, positions, blocks}}, kSketchKeys);
}

// Of every sequence, from a problem that has been checked.
SketchedKeys KeysOf(const softmax::Problem& p, int64_t batch) {
  SketchedKeys keys;
  keys.heads = p.key_heads;
  keys.sequences.resize(static_cast<size_t>(batch));
  for (const softmax::Sequence& s : p.sequences) {
    keys.sequences[static_cast<size_t>(s.batch)] = {s.key_end, s.start, std::min(s.num_queries, s.query_end)};
  }
  return keys;
}

// Leaves heads to dense attention that would keep most of it.
void GiveUp(Context& ctx, int64_t batch, int64_t heads, Selection& selection) {
  constexpr double kMostKept = 0.7;
  const int64_t last = selection.sets() - 1;
  for (const int64_t set : {last, last / 2}) {
    selection.Choose(ctx, set, set + 1);
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        const Selection::Count count = selection.CountOf(b, h, set, set + 1);
        const bool paid = static_cast<double>(count.kept) <= kMostKept * static_cast<double>(count.visible);
        if (!paid && !selection.IsDense(b, h)) selection.SetDense(b, h);
      }
    }
  }
}

void CheckNumbers(const char* op, const Options& options) {
  using mechanism::Fail;
  if (!(options.epsilon >= 0 && options.epsilon < 1)) {
    Fail(op, "epsilon", "is " + mechanism::Text(options.epsilon), "a number from 0 on and below 1");
  }
  if (options.scale && !std::isfinite(*options.scale)) {
    Fail(op, "scale", "is " + mechanism::Text(*options.scale), "a finite number");
  }
}

// What attention itself takes.
void CheckInputs(const char* op, const ConstTensorView& q, const Options& options) {
  using mechanism::Fail;
  if (q.rank() != 4) Fail(op, "q", "has shape " + q.ShapeString(), "[B,T,H,D]");
  if (q.dtype() == DType::kF64) Fail(op, "q", "has dtype f64", "f32, bf16 or f16");
  CheckNumbers(op, options);
}

}  // namespace

void Skip(Context& ctx, const softmax::Problem& p, double epsilon, const Outputs& out) {
  softmax::Skips skips;
  skips.epsilon = epsilon;
  if (const TensorView& t = out.bound; t.present()) skips.bound = {t.data(), t.stride(0), t.stride(2), t.stride(1)};
  if (const TensorView& t = out.kept; t.present()) {
    skips.kept = {t.data(), DType::kBool, t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
    for (int64_t b = 0; b < t.size(0); ++b) {
      for (int64_t h = 0; h < t.size(1); ++h) {
        for (int64_t i = 0; i < t.size(2); ++i) {
          for (int64_t j = 0; j < t.size(3); ++j) {
            *(t.as<bool>() + b * t.stride(0) + h * t.stride(1) + i * t.stride(2) + j * t.stride(3)) = false;
          }
        }
      }
    }
  }
  softmax::ForwardSkipping(ctx, p, skips);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "certified_attention::Explain";
  const attention::Inputs inputs = {in.q, in.k, in.v};
  const softmax::Problem p = attention::CheckedProblem(kOp, inputs, ExactOptions(options), {}, attention::Use::kExplain);
  CheckInputs(kOp, in.q, options);
  Explanation e = attention::Explain(ctx, inputs, ExactOptions(options));
  if (options.epsilon < kLeastEpsilon) return e;
  if (options.level != Level::kSkip) {
    e.why += options.level == Level::kBox ? ", over the blocks that boxes around the keys do not rule out"
                                          : ", over the blocks that a sketch of the keys does not rule out";
    const int64_t blocks = in.k.size(0) * in.k.size(2) * BlocksOf(in.k.size(1));
    e.workspace_bytes += blocks * SketchLayout(in.k.size(3)).block_stride;
    return e;
  }
  const softmax::SkippingPlan plan = softmax::PlanSkipping(ctx, p);
  e.kernel = plan.kernel;
  e.target = plan.target;
  e.why = "all logits, and the values of tiles of " + std::to_string(plan.grid.tile) + " keys that weigh enough";
  e.workspace_bytes = plan.workspace_bytes;
  e.visited_pairs = softmax::VisitedPairs(p, plan.lanes, plan.grid);
  e.invariant = true;
  return e;
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  constexpr char kOp[] = "certified_attention::Forward";
  const os::ScopedFloatControl float_control;
  attention::Options exact = ExactOptions(options);
  const attention::Inputs inputs = {in.q, in.k, in.v};
  const softmax::Problem p =
      attention::CheckedProblem(kOp, inputs, exact, {out.o, out.lse}, attention::Use::kForward);
  CheckInputs(kOp, in.q, options);
  const int64_t batch = in.q.size(0), rows = in.q.size(1), heads = in.k.size(2);
  CheckCall(kOp, in, options, out, {batch, rows, heads, in.v.size(3), in.k.size(1)});
  if (options.level == Level::kSkip && options.epsilon >= kLeastEpsilon) return Skip(ctx, p, options.epsilon, out);
  SketchedKeys keys = KeysOf(p, batch);
  if (!options.causal) {  // where rows stand says nothing then, but patterns have no positions below 0
    for (SketchedKeys::Sequence& s : keys.sequences) s.start = 0;
    exact.align = attention::Align::kTopLeft;
    exact.query_starts = {};
  }
  const Lse lse(out, batch, in.q.size(2), rows);
  Selection selection(keys, in.q, p.scale, options.causal, options.epsilon, /*rows_share=*/true);
  if (options.epsilon < kLeastEpsilon) {
    for (int64_t i = 0; i < batch * heads; ++i) selection.SetDense(i / heads, i % heads);
  } else if (batch > 0 && rows > 0) {
    keys.by_boxes = options.level == Level::kBox;
    const SketchOfKeys sketch(ctx, in.k, keys);
    if (options.level == Level::kAuto) GiveUp(ctx, batch, heads, selection);
    selection.Choose(ctx);
    if (selection.drops()) exact.pattern = PatternOf(keys, selection, rows);
  }
  attention::Forward(ctx, inputs, exact, {out.o, lse.view()});
  WriteBounds(selection, lse.view(), out);
  if (out.kept.present()) WriteKept(selection, heads, out.kept);
}

void CheckCall(const char* op, const Inputs& in, const Options& options, const Outputs& out,
               const Sizes& sizes) {
  CheckNumbers(op, options);
  const ConstTensorView& q = in.q;
  const int64_t heads = q.size(2);
  mechanism::Apart apart;
  for (const auto& [name, view] : {std::pair{"q", in.q}, {"k", in.k}, {"v", in.v}}) apart.Reads(name, view);
  const auto rows = [&](const char* name, const TensorView& t, const mechanism::Axes& shape, DType dtype) {
    apart.Writes(op, name, t, shape, dtype);
  };
  rows("o", out.o, {sizes.batch, sizes.rows, heads, sizes.value_dim}, q.dtype());
  mechanism::CheckContiguousRows(op, "o", out.o);
  if (out.bound.present()) rows("bound", out.bound, {sizes.batch, heads, sizes.rows}, DType::kF32);
  if (out.lse.present()) rows("lse", out.lse, {sizes.batch, heads, sizes.rows}, DType::kF32);
  if (out.kept.present()) {
    const int64_t kept_heads = options.level == Level::kSkip ? heads : sizes.key_heads;
    rows("kept", out.kept, {sizes.batch, kept_heads, sizes.rows, BlocksOf(sizes.keys)}, DType::kBool);
  }
}

void WriteBounds(const Selection& selection, const TensorView& lse, const Outputs& out) {
  if (!out.bound.present()) return;
  for (int64_t b = 0; b < out.bound.size(0); ++b) {
    for (int64_t h = 0; h < out.bound.size(1); ++h) {
      for (int64_t i = 0; i < out.bound.size(2); ++i) {
        const float of_row = *FloatAt(lse, b, h, i), bound = selection.Bound(b, h, i);
        *FloatAt(out.bound, b, h, i) = std::isnan(of_row) && bound > 0 ? of_row : bound;
      }
    }
  }
}

void WriteKept(const Selection& selection, int64_t key_heads, const TensorView& kept) {
  for (int64_t b = 0; b < kept.size(0); ++b) {
    for (int64_t h = 0; h < kept.size(1); ++h) {
      for (int64_t i = 0; i < kept.size(2); ++i) {
        const uint8_t* const from = selection.Kept(b, h * key_heads / kept.size(1), selection.SetOf(b, i));
        for (int64_t j = 0; j < selection.blocks(); ++j) {
          *(kept.as<bool>() + b * kept.stride(0) + h * kept.stride(1) + i * kept.stride(2) + j * kept.stride(3)) =
              from[j] != 0;
        }
      }
    }
  }
}

}  // namespace heed::certified_attention
