// Masses of blocks from their sketch, in ranges that stay in a cache, then a choice for each set of rows.
#include "heed/ops/sparse/certified_attention/certified_selection_internal.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace heed::certified_attention {

using softmax::kSketchKeys;
using softmax::kSketchRows;
using softmax::SketchMasses;
using softmax::SketchQueries;

namespace {

constexpr int64_t kRange = 64;                     // blocks of a task: those of 64 channels are 340 KiB
constexpr int64_t kMostBytes = int64_t{32} << 20;  // of masses at a time
constexpr int64_t kSetRows = 64;

}  // namespace

Selection::Selection(const SketchedKeys& keys, const ConstTensorView& q, double scale, bool causal, double epsilon,
                     bool rows_share)
    : keys_(keys), q_(q), scale_(scale), epsilon_(epsilon), causal_(causal), rows_share_(rows_share), rows_(q.size(1)),
      query_heads_(q.size(2)), group_(keys.heads == 0 ? 0 : q.size(2) / keys.heads) {
  const int64_t batch = std::ssize(keys.sequences);
  for (int64_t b = 0; b < batch; ++b) {
    blocks_ = std::max(blocks_, BlocksOf(keys.sequences[static_cast<size_t>(b)].keys));
    if (rows_ > 0) sets_ = std::max(sets_, SetOf(b, rows_ - 1) + 1);
  }
  if (rows_share_) most_rows_ = std::min(rows_, kSetRows);
  kept_.resize(static_cast<size_t>(batch * keys.heads * sets_ * blocks_));
  bounds_.resize(static_cast<size_t>(batch * query_heads_ * rows_));
  dense_.resize(static_cast<size_t>(batch * keys.heads));
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t set = 0; set < sets_; ++set) {
      const Rows rows = RowsOf(b, set);
      for (int64_t h = 0; h < keys.heads; ++h) {
        uint8_t* const kept = kept_.data() + At(b, h, set);
        for (int64_t i = rows.begin; i < rows.end; ++i) {
          const int64_t visible = BlocksOf(Visible(b, i));
          if (visible > 0) kept[0] = kept[visible - 1] = 1;
        }
      }
    }
  }
}

int64_t Selection::SetOf(int64_t b, int64_t i) const {
  if (!rows_share_) return i;
  const int64_t start = keys_.sequences[static_cast<size_t>(b)].start;  // below 0 where there are more rows than keys
  const int64_t origin = start - ((start % kSetRows) + kSetRows) % kSetRows;
  return (start + i - origin) / kSetRows;
}

Selection::Rows Selection::RowsOf(int64_t b, int64_t set) const {
  const SketchedKeys::Sequence& s = keys_.sequences[static_cast<size_t>(b)];
  const int64_t valid = std::min(s.rows, rows_);
  if (!rows_share_) return {std::min(set, valid), std::min(set + 1, valid)};
  const int64_t shift = ((s.start % kSetRows) + kSetRows) % kSetRows;
  const int64_t begin = std::max<int64_t>(set * kSetRows - shift, 0);
  return {std::min(begin, valid), std::clamp<int64_t>((set + 1) * kSetRows - shift, 0, valid)};
}

int64_t Selection::Visible(int64_t b, int64_t i) const {
  const SketchedKeys::Sequence& s = keys_.sequences[static_cast<size_t>(b)];
  if (i >= s.rows) return 0;
  return causal_ ? std::clamp<int64_t>(s.start + i + 1, 0, s.keys) : s.keys;
}

void Selection::SetDense(int64_t b, int64_t h) {
  dense_[Head(b, h)] = 1;
  for (int64_t set = 0; set < sets_; ++set) {
    const Rows rows = RowsOf(b, set);
    for (int64_t i = rows.begin; i < rows.end; ++i) {
      std::fill_n(kept_.data() + At(b, h, set), BlocksOf(Visible(b, i)), uint8_t{1});
      for (int64_t g = 0; g < group_; ++g) {
        bounds_[static_cast<size_t>((b * query_heads_ + h * group_ + g) * rows_ + i)] = 0;
      }
    }
  }
}

SketchMasses Selection::MassesOf(const Context& ctx, int64_t slot, int64_t row) const {
  float* const at = static_cast<float*>(ctx.Shared()) + (slot * group_ * most_rows_ + row) * 3 * blocks_;
  return {at, at + blocks_, at + 2 * blocks_};
}

void Selection::Choose(Context& ctx, int64_t begin, int64_t end) {
  const int64_t heads = std::ssize(keys_.sequences) * keys_.heads;
  if (heads == 0 || blocks_ == 0 || begin >= end) return;
  const softmax::SketchPasses passes = softmax::SketchPassesFor(ctx);
  passes_ = &passes;
  const int64_t of_set = group_ * most_rows_ * 3 * blocks_ * static_cast<int64_t>(sizeof(float));
  const int64_t slots = std::clamp<int64_t>(kMostBytes / of_set, 1, heads * (end - begin));
  ctx.ReserveShared(static_cast<size_t>(slots * of_set));
  const int64_t words = SketchQueries::NumWords(q_.size(3), kSketchRows) * static_cast<int64_t>(sizeof(int32_t));
  const int64_t scaled = q_.size(3) * static_cast<int64_t>(sizeof(float));
  ctx.ReserveScratch(static_cast<size_t>(std::max({words, scaled, Chooser::Bytes(blocks_)})));
  const int64_t ranges = (blocks_ + kRange - 1) / kRange;
  const auto at = [&](int64_t i, const auto& f) {  // set, then head, then sequence, so that late sets are spread
    const int64_t head = i % heads;
    f(head / keys_.heads, head % keys_.heads, begin + i / heads);
  };
  for (int64_t first = 0; first < heads * (end - begin); first += slots) {
    const int64_t count = std::min(slots, heads * (end - begin) - first);
    ctx.ParallelFor(count * ranges, [&](int64_t task, int worker) {
      const int64_t slot = task / ranges;
      at(first + slot, [&](int64_t b, int64_t h, int64_t set) {
        if (!IsDense(b, h)) Score(ctx, b, h, set, task % ranges, slot, worker);
      });
    });
    ctx.ParallelFor(count, [&](int64_t slot, int worker) {
      at(first + slot, [&](int64_t b, int64_t h, int64_t set) {
        if (!IsDense(b, h)) ChooseSet(ctx, b, h, set, slot, worker);
      });
    });
  }
}

void Selection::Score(Context& ctx, int64_t b, int64_t h, int64_t set, int64_t range, int64_t slot, int worker) const {
  const Rows rows = RowsOf(b, set);
  const int64_t count = rows.end - rows.begin, begin = range * kRange;
  int64_t visible = 0;
  for (int64_t i = rows.begin; i < rows.end; ++i) visible = std::max(visible, BlocksOf(Visible(b, i)));
  const int64_t end = std::min(begin + kRange, visible);
  if (begin >= end) return;
  const std::byte* blocks[kRange];
  for (int64_t i = begin; i < end; ++i) blocks[i - begin] = keys_.block(b, h, i);
  if (keys_.by_boxes) {
    ScoreBoxes(ctx, b, h, set, begin, {blocks, static_cast<size_t>(end - begin)}, slot, worker);
    return;
  }
  // Row r of a set: query head r / count of the group, query r % count of the set.
  for (int64_t r = 0; r < group_ * count;) {
    SketchQueries queries;
    SketchMasses masses[kSketchRows];
    queries.num_rows = static_cast<int>(std::min<int64_t>(kSketchRows, group_ * count - r));
    queries.words = static_cast<int32_t*>(ctx.Scratch(worker));
    for (int lane = 0; lane < queries.num_rows; ++lane, ++r) {
      const int64_t head = h * group_ + r / count, i = rows.begin + r % count;
      softmax::PackSketchQuery(q_.dtype(), QueryAt(b, i, head), q_.size(3), scale_, Visible(b, i), lane, &queries);
      masses[lane] = MassesOf(ctx, slot, r);
    }
    passes_->score(queries, blocks, begin, end, keys_.parts, masses);
  }
}

const std::byte* Selection::QueryAt(int64_t b, int64_t i, int64_t head) const {
  const int64_t element = b * q_.stride(0) + i * q_.stride(1) + head * q_.stride(2);
  return q_.as<std::byte>() + element * static_cast<int64_t>(SizeOf(q_.dtype()));
}

void Selection::ScoreBoxes(Context& ctx, int64_t b, int64_t h, int64_t set, int64_t begin,
                           std::span<const std::byte* const> blocks, int64_t slot, int worker) const {
  const Rows rows = RowsOf(b, set);
  const int64_t count = rows.end - rows.begin, end = begin + std::ssize(blocks), depth = q_.size(3);
  for (int64_t r = 0; r < group_ * count; ++r) {
    const int64_t i = rows.begin + r % count, last = BlocksOf(Visible(b, i)) - 1;
    const std::byte* const q = QueryAt(b, i, h * group_ + r / count);
    const SketchMasses masses = MassesOf(ctx, slot, r);
    auto* const scaled = static_cast<float*>(ctx.Scratch(worker));
    for (int64_t e = 0; e < depth; ++e) {
      const double x = scale_ * LoadAsDouble(q_.dtype(), q, e);
      // What f32 would flush could still meet a key of 10^38.
      const bool lost = x != 0 && std::abs(x) < 0x1p-100;
      scaled[e] = lost ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(x);
    }
    passes_->box({scaled, depth}, blocks.data(), begin, std::min(end, last), keys_.boxes, masses);
    if (last < begin || last >= end) continue;
    SketchQueries queries;
    queries.num_rows = 1;
    queries.words = static_cast<int32_t*>(ctx.Scratch(worker));
    softmax::PackSketchQuery(q_.dtype(), q, depth, scale_, Visible(b, i), 0, &queries);
    passes_->score(queries, blocks.data() + (last - begin), last, last + 1, keys_.parts, &masses);
  }
}

void Selection::ChooseSet(Context& ctx, int64_t b, int64_t h, int64_t set, int64_t slot, int worker) {
  const Rows rows = RowsOf(b, set);
  const int64_t count = rows.end - rows.begin;
  uint8_t* const kept = kept_.data() + At(b, h, set);
  Chooser chooser(ctx.Scratch(worker), blocks_);
  const auto row_of = [&](int64_t r) {
    const SketchMasses masses = MassesOf(ctx, slot, r);
    return RowMasses{masses.upper, masses.lower, BlocksOf(Visible(b, rows.begin + r % count))};
  };
  for (int64_t r = 0; r < group_ * count; ++r) {
    passes_->level(MassesOf(ctx, slot, r), row_of(r).blocks);
    chooser.Keep(row_of(r), epsilon_, kept);
  }
  for (int64_t r = 0; r < group_ * count; ++r) {
    const int64_t head = h * group_ + r / count, i = rows.begin + r % count;
    bounds_[static_cast<size_t>((b * query_heads_ + head) * rows_ + i)] = BoundOf(row_of(r), kept);
  }
}

Selection::Count Selection::CountOf(int64_t b, int64_t h, int64_t begin, int64_t end) const {
  Count count;
  for (int64_t set = begin; set < end; ++set) {
    const Rows rows = RowsOf(b, set);
    int64_t visible = 0;
    for (int64_t i = rows.begin; i < rows.end; ++i) visible = std::max(visible, BlocksOf(Visible(b, i)));
    count.visible += visible;
    count.kept += std::count(Kept(b, h, set), Kept(b, h, set) + visible, 1);
  }
  return count;
}

bool Selection::drops() const {
  for (int64_t b = 0; b < std::ssize(keys_.sequences); ++b) {
    for (int64_t h = 0; h < keys_.heads; ++h) {
      const Count count = CountOf(b, h);
      if (count.kept < count.visible) return true;
    }
  }
  return false;
}

}  // namespace heed::certified_attention
