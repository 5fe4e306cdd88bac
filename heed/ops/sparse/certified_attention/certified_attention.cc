// Certified attention over tensors of keys: sketches them, selects blocks, and attends to these; with functions that
// the entry points share.
#include "heed/ops/sparse/certified_attention/certified_attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/os.h"
#include "heed/engines/softmax/certified/skipping.h"
#include "heed/engines/softmax/tile_list.h"
#include "heed/ops/exact/attention/attention_internal.h"
#include "heed/ops/exact/attention/attention_options_internal.h"
#include "heed/ops/sparse/certified_attention/certified_internal.h"
#include "heed/patterns/pattern_internal.h"
#include "heed/state/sketch_internal.h"

namespace heed::certified_attention {
namespace {

using softmax::kSketchKeys;
using softmax::Problem;
using softmax::Sequence;

// Describes output rows: [B, H, T] or packed [H, T], and [B, H, T, N].
softmax::Rows BoundsAt(const Problem& p, const TensorView& t) {
  if (!t.present()) return {};
  const int r = t.rank();
  return {t.data(), p.packed ? 0 : t.stride(0), t.stride(r - 1), t.stride(r - 2)};
}
softmax::Pairs KeptAt(const Problem& p, const TensorView& t) {
  if (!t.present()) return {};
  const int r = t.rank();
  return {t.data(), DType::kBool, p.packed ? 0 : t.stride(0), t.stride(r - 3), t.stride(r - 2), t.stride(r - 1)};
}

// Fills the tensor with zeros, if it is present.
template <class T>
void Clear(const TensorView& t) {
  if (!t.present() || t.num_elements() == 0) return;
  const int last = t.rank() - 1;
  for (int64_t row = 0; row < t.num_elements() / t.size(last); ++row) {
    int64_t at = 0, left = row;
    for (int axis = last - 1; axis >= 0; left /= t.size(axis), --axis) at += left % t.size(axis) * t.stride(axis);
    for (int64_t i = 0; i < t.size(last); ++i) t.as<T>()[at + i * t.stride(last)] = T();
  }
}

// Sketch blocks of all keys, per sequence [Hkv, its blocks], in ctx's staging memory.
class SketchOfKeys {
 public:
  SketchOfKeys(Context& ctx, const Problem& p, SketchedKeys& keys)
      : heads_(p.key_heads), layout_(SketchLayout(p.depth)) {
    const int64_t size = static_cast<int64_t>(SizeOf(p.dtype));
    begins_.push_back(0);
    for (const Sequence& s : p.sequences) begins_.push_back(begins_.back() + BlocksOf(s.key_end));
    ctx.ReserveStaging(heads_ * begins_.back() * layout_.block_stride);
    memory_ = static_cast<std::byte*>(ctx.Staging());
    std::vector<SketchWriter> writers(static_cast<size_t>(ctx.num_threads()), SketchWriter(p.dtype, p.depth));
    ctx.ParallelFor(heads_ * begins_.back(), [&](int64_t task, int worker) {
      const int64_t n = std::ranges::upper_bound(begins_, task / heads_) - begins_.begin() - 1;
      const Sequence& s = p.sequences[static_cast<size_t>(n)];
      const int64_t h = task % heads_, block = task / heads_ - begins_[static_cast<size_t>(n)];
      const int64_t first = block * kSketchKeys, end = std::min(first + kSketchKeys, s.key_end);
      const auto* const of_head =
          static_cast<const std::byte*>(p.k.data) +
          (s.batch * p.k.batch_stride + s.first_k * p.k.token_stride + h * p.k.head_stride) * size;
      const int64_t stride = p.k.token_stride * size;
      SketchWriter& writer = writers[static_cast<size_t>(worker)];
      for (int64_t j = first; j < end; ++j) writer.WriteRow(of_head + j * stride, j - first, At(n, h, block));
      if (keys.by_boxes && end - first == kSketchKeys)
        writer.WriteStatistics(of_head + first * stride, stride, At(n, h, block));
    });
    keys.parts = {layout_.step, layout_.error};
    keys.boxes = {layout_.min, layout_.max, layout_.mean};
    keys.block = [this](int64_t n, int64_t h, int64_t block) { return At(n, h, block); };
  }
  SketchOfKeys(const SketchOfKeys&) = delete;
  SketchOfKeys& operator=(const SketchOfKeys&) = delete;

  static int64_t Bytes(const Problem& p) {
    int64_t blocks = 0;
    for (const Sequence& s : p.sequences) blocks += BlocksOf(s.key_end);
    return p.key_heads * blocks * SketchLayout(p.depth).block_stride;
  }

 private:
  std::byte* At(int64_t n, int64_t h, int64_t block) const {
    return memory_ + ((begins_[static_cast<size_t>(n)] + block) * heads_ + h) * layout_.block_stride;
  }

  int64_t heads_;
  SketchBlocks layout_;
  std::vector<int64_t> begins_;  // first block of each sequence
  std::byte* memory_;
};

// The kept blocks by position of the rows, [sequences, Hkv, position / 64, N]; rows beyond the table keep all blocks.
Pattern PatternOf(const Problem& p, const Selection& selection) {
  const int64_t sequences = std::ssize(p.sequences), heads = p.key_heads, blocks = selection.blocks();
  const int64_t positions = selection.positions();
  const auto keep = std::make_unique<bool[]>(static_cast<size_t>(sequences * heads * positions * blocks));
  for (int64_t n = 0; n < sequences; ++n) {
    const Sequence& s = p.sequences[static_cast<size_t>(n)];
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t at = 0; at < positions; ++at) {
        const int64_t i = std::max<int64_t>(at * kSketchKeys - s.start, 0);  // the first row at such a position
        if (i >= s.num_queries || s.start + i >= (at + 1) * kSketchKeys) continue;
        const uint8_t* const from = selection.Kept(n, h, selection.SetOf(n, i));
        bool* const to = keep.get() + ((n * heads + h) * positions + at) * blocks;
        for (int64_t j = 0; j < blocks; ++j) to[j] = from[j] != 0;
      }
    }
  }
  const Pattern kept = patterns::Blocks({keep.get(), DType::kBool, {sequences, heads, positions, blocks}}, kSketchKeys);
  if (!selection.has_rows_elsewhere()) return kept;
  patterns::Table here = {{positions * kSketchKeys},
                          std::vector<int64_t>(static_cast<size_t>(positions * kSketchKeys))};
  std::iota(here.values.begin(), here.values.end(), int64_t{0});
  return kept | patterns::OtherRows(here);
}

// True if an option depends on the positions of rows.
bool HasPositions(const Options& o) {
  const attention::Window none;
  return o.causal || o.window.left != none.left || o.window.right != none.right || o.chunk != 0 || o.alibi.present() ||
         o.relative_bias.present() || o.pattern.present();  // log decays need causal
}

// Switches heads that would keep most of their blocks to dense attention.
void GiveUp(Context& ctx, const Problem& p, Selection& selection) {
  constexpr double kMostKept = 0.7;
  const int64_t last = selection.sets() - 1;
  for (const int64_t set : {last, last / 2}) {
    selection.Choose(ctx, set, set + 1);
    for (int64_t n = 0; n < std::ssize(p.sequences); ++n) {
      for (int64_t h = 0; h < p.key_heads; ++h) {
        const Selection::Count count = selection.CountOf(n, h, set, set + 1);
        const bool paid = static_cast<double>(count.kept) <= kMostKept * static_cast<double>(count.visible);
        if (!paid && !selection.IsDense(n, h)) selection.SetDense(n, h);
      }
    }
  }
}

void CheckInputs(const char* op, const Inputs& in, const Options& options) {
  if (in.q.dtype() == DType::kF64) mechanism::Fail(op, "q", "has dtype f64", "f32, bf16 or f16");
  CheckOptions(op, options);
}

}  // namespace

void CheckOptions(const char* op, const Options& options) {
  using mechanism::Fail;
  if (!(options.epsilon >= 0 && options.epsilon < 1)) {
    Fail(op, "epsilon", "is " + mechanism::Text(options.epsilon), "a number from 0 on and below 1");
  }
  if (options.dropout != 0) {
    Fail(op, "dropout", "is " + mechanism::Text(options.dropout),
         "0: it drops pairs after the softmax, so that the remaining P are no longer fractions of the row");
  }
  if (options.log_decay.present() && options.level == Level::kSkip) {
    Fail(op, "log_decay", "is given",
         "none at level skip: in f32 a logit includes sums over all later keys, whose rounding a tile cannot bound");
  }
}

void Skip(Context& ctx, const Problem& p, double epsilon, const Outputs& out) {
  softmax::Skips skips;
  skips.epsilon = epsilon;
  skips.bound = BoundsAt(p, out.bound);
  skips.kept = KeptAt(p, out.kept);
  Clear<float>(out.bound);
  Clear<bool>(out.kept);
  softmax::ForwardSkipping(ctx, p, skips);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "certified_attention::Explain";
  const attention::Inputs inputs = {in.q, in.k, in.v};
  const Problem p = attention::CheckedProblem(kOp, inputs, options, {}, attention::Use::kExplain);
  CheckInputs(kOp, in, options);
  Explanation e = attention::Explain(ctx, inputs, options);
  if (options.epsilon < kLeastEpsilon) return e;
  if (options.level != Level::kSkip) {
    e.why += options.level == Level::kBox ? ", over the blocks that boxes around the keys do not rule out"
                                          : ", over the blocks that a sketch of the keys does not rule out";
    e.workspace_bytes += SketchOfKeys::Bytes(p);
    return e;
  }
  const softmax::SkippingPlan plan = softmax::PlanSkipping(ctx, p);
  e.kernel = plan.kernel;
  e.target = plan.target;
  e.why = "all logits, and the values of tiles of " + std::to_string(plan.grid.tile) + " keys with enough probability";
  e.workspace_bytes = plan.workspace_bytes;
  e.visited_pairs = softmax::VisitedPairs(p, plan.lanes, plan.grid);
  e.invariant = true;
  return e;
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  constexpr char kOp[] = "certified_attention::Forward";
  const os::ScopedFloatControl float_control;
  attention::Options exact = options;
  const attention::Inputs inputs = {in.q, in.k, in.v};
  Problem p = attention::CheckedProblem(kOp, inputs, exact, {out.o, out.lse}, attention::Use::kForward);
  CheckInputs(kOp, in, options);
  attention::RefuseSlowPairs(kOp, ctx, p);
  const int rank = in.q.rank();
  CheckCall(kOp, in, options, out, {p.key_heads, p.value_depth, in.k.size(rank - 3)});
  attention::PlacePattern(kOp, options.pattern, /*to_lengths=*/false, &p);
  if (options.level == Level::kSkip && options.epsilon >= kLeastEpsilon) {
    Skip(ctx, p, options.epsilon, out);
    if (p.packed) attention::FillSurplusRows(p, inputs.q, {out.o, out.lse});
    return;
  }
  if (!HasPositions(options)) {  // positions have no effect then, but patterns have none below 0
    for (Sequence& s : p.sequences) s.start = 0;
    exact.align = attention::Align::kTopLeft;
    exact.query_starts = {};
  }
  const Lse lse(out, in.q, p.packed);
  SketchedKeys keys;
  Selection selection(p, keys, options.epsilon, /*rows_share=*/true);
  if (options.epsilon < kLeastEpsilon) {
    for (int64_t n = 0; n < std::ssize(p.sequences); ++n) {
      for (int64_t h = 0; h < p.key_heads; ++h) selection.SetDense(n, h);
    }
  } else if (selection.sets() > 0) {
    keys.by_boxes = options.level == Level::kBox;
    const SketchOfKeys sketch(ctx, p, keys);
    attention::SumLogDecays(kOp, ctx, &p);
    if (options.level == Level::kAuto) GiveUp(ctx, p, selection);
    selection.Choose(ctx);
    if (selection.drops()) {
      const Pattern kept = PatternOf(p, selection);
      exact.pattern = exact.pattern.present() ? exact.pattern & kept : kept;
    }
  }
  attention::Forward(ctx, inputs, exact, {out.o, lse.view()});
  Write(p, selection, lse.view(), out);
}

void CheckCall(const char* op, const Inputs& in, const Options& options, const Outputs& out, const Sizes& sizes) {
  CheckOptions(op, options);
  const ConstTensorView& q = in.q;
  const int r = q.rank();
  const int64_t rows = q.size(r - 3), heads = q.size(r - 2);
  mechanism::Apart apart;
  for (const auto& [name, view] : {std::pair{"q", in.q}, {"k", in.k}, {"v", in.v}}) apart.Reads(name, view);
  attention::ForEachTensor(
      options, [&](const attention::OptionRow& row, const ConstTensorView& view) { apart.Reads(row.name, view); });
  const auto writes = [&](const char* name, const TensorView& t, bool has_batch, std::vector<int64_t> shape,
                          DType dtype) {
    if (has_batch) shape.insert(shape.begin(), q.size(0));
    apart.Writes(op, name, t, mechanism::Axes(shape), dtype);
  };
  const bool packed = options.cu_seqlens_q.present();
  writes("o", out.o, r == 4, {rows, heads, sizes.value_dim}, q.dtype());
  mechanism::CheckContiguousRows(op, "o", out.o);
  if (out.bound.present()) writes("bound", out.bound, !packed, {heads, rows}, DType::kF32);
  if (out.lse.present()) writes("lse", out.lse, !packed, {heads, rows}, DType::kF32);
  if (out.kept.present()) {
    const int64_t kept_heads = options.level == Level::kSkip ? heads : sizes.key_heads;
    writes("kept", out.kept, !packed, {kept_heads, rows, BlocksOf(sizes.keys)}, DType::kBool);
  }
}

void Write(const Problem& p, const Selection& selection, const TensorView& lse, const Outputs& out) {
  Clear<float>(out.bound);
  Clear<bool>(out.kept);
  const softmax::Rows bounds = BoundsAt(p, out.bound), lses = BoundsAt(p, lse);
  const softmax::Pairs kept = KeptAt(p, out.kept);
  const int64_t kept_heads = out.kept.present() ? out.kept.size(out.kept.rank() - 3) : 0;
  for (int64_t n = 0; n < std::ssize(p.sequences); ++n) {
    const Sequence& s = p.sequences[static_cast<size_t>(n)];
    for (int64_t i = 0; i < s.num_queries; ++i) {
      const int64_t row = s.first_q + i;
      for (int64_t h = 0; h < (out.bound.present() ? p.query_heads : 0); ++h) {
        const auto at = [&](const softmax::Rows& t) {
          return static_cast<float*>(const_cast<void*>(t.data)) + s.batch * t.batch_stride + row * t.token_stride +
                 h * t.head_stride;
        };
        const float of_row = *at(lses), bound = selection.Bound(n, h, i);
        *at(bounds) = std::isnan(of_row) && bound > 0 ? of_row : bound;
      }
      for (int64_t h = 0; h < kept_heads; ++h) {
        const uint8_t* const from = selection.Kept(n, h * p.key_heads / kept_heads, selection.SetOf(n, i));
        bool* const to = static_cast<bool*>(const_cast<void*>(kept.data)) + s.batch * kept.batch_stride +
                         row * kept.query_stride + h * kept.head_stride;
        for (int64_t j = 0; j < selection.blocks(); ++j) to[j * kept.key_stride] = from[j] != 0;
      }
    }
  }
}

}  // namespace heed::certified_attention
