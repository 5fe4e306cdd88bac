// Masses of blocks from their sketch, in ranges that fit in cache, then the selection for each set of rows.
#include "heed/ops/sparse/certified_attention/certified_selection_internal.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <optional>

#include "heed/core/carver.h"
#include "heed/engines/softmax/decays.h"
#include "heed/engines/softmax/seen_keys.h"

namespace heed::certified_attention {

using softmax::FloorDivide;
using softmax::Intersect;
using softmax::Interval;
using softmax::kSketchKeys;
using softmax::kSketchRows;
using softmax::Problem;
using softmax::Sequence;
using softmax::SketchMasses;
using softmax::SketchQueries;

namespace {

constexpr int64_t kRange = 64;                     // blocks per task: those of 64 channels are 340 KiB
constexpr int64_t kMostBytes = int64_t{32} << 20;  // masses held at a time
constexpr int64_t kSetRows = 64;
constexpr int64_t kMostPositions = 1024;  // blocks of positions beyond those that keys and rows need
constexpr float kInfinity = std::numeric_limits<float>::infinity();

bool AddsTerms(const Problem& p) { return p.biases() > 0 || !p.slopes.empty() || p.forgets; }

// F of a row and a key, from the cumulative sums of softmax/decays.h.
class RowDecay {
 public:
  RowDecay(const Problem& p, const Sequence& s, int64_t head, int64_t position)
      : p_(p), s_(s), head_(head), own_(std::clamp<int64_t>(position, s.key_begin - 1, s.key_end - 1)) {
    if (own_ < s.key_begin) return;
    const int64_t tile = s.key_begin + (own_ - s.key_begin) / softmax::kTileKeys * softmax::kTileKeys;
    sum_ = softmax::SumUntil(p, s, head, tile);
    for (int64_t key = std::max(tile, s.key_begin + 1); key <= own_; ++key)
      sum_.Add(softmax::LogDecay(p, s, head, key));
  }

  double At(int64_t key) const {
    if (key >= own_) return 0;
    const int64_t at = key - s_.key_begin;
    const int64_t end = s_.key_begin + (at / softmax::kTileKeys + 1) * softmax::kTileKeys;
    if (own_ >= end) {
      return p_.decays.in_tile[softmax::FirstDecay(s_, head_) + at] +
             softmax::Between(softmax::SumUntil(p_, s_, head_, end), sum_);
    }
    double sum = 0;
    for (int64_t j = own_; j > key; --j) sum += softmax::LogDecay(p_, s_, head_, j);
    return sum;
  }

 private:
  const Problem& p_;
  const Sequence& s_;
  const int64_t head_, own_;
  softmax::WideSum sum_;  // over all keys up to the row's own
};

SketchMasses From(const SketchMasses& masses, int64_t block) {
  return {masses.logit + block, masses.upper + block, masses.lower + block};
}

// Clears a block that has no visible key.
void Clear(const SketchMasses& masses, int64_t block) {
  masses.logit[block] = -kInfinity;
  masses.upper[block] = masses.lower[block] = 0;
}

// Calls f(begin, end, kind) for runs of blocks of one kind.
template <class Kind, class F>
void ForRuns(const Interval& range, const Kind& kind_of, const F& f) {
  for (int64_t begin = range.begin; begin < range.end;) {
    const auto kind = kind_of(begin);
    int64_t end = begin + 1;
    while (end < range.end && kind_of(end) == kind) ++end;
    f(begin, end, kind);
    begin = end;
  }
}

}  // namespace

Selection::Selection(const Problem& problem, const SketchedKeys& keys, double epsilon, bool rows_share)
    : problem_(problem), keys_(keys), epsilon_(epsilon), rows_share_(rows_share),
      group_(problem.key_heads == 0 ? 0 : problem.group()) {
  const int64_t sequences = std::ssize(problem.sequences), heads = problem.key_heads;
  int64_t positions = 0, longest = 0;
  for (const Sequence& s : problem.sequences) {
    rows_ = std::max(rows_, s.num_queries);
    longest = std::max(longest, s.num_keys);
    blocks_ = std::max(blocks_, BlocksOf(s.key_end));
    positions = std::max(positions, BlocksOf(s.start + s.num_queries));
  }
  positions_ = std::min(positions, BlocksOf(longest) + BlocksOf(rows_) + kMostPositions);
  for (int64_t n = 0; n < sequences; ++n) {
    if (SequenceOf(n).num_queries > 0) sets_ = std::max(sets_, SetOf(n, SequenceOf(n).num_queries - 1) + 1);
  }
  if (rows_share_) most_rows_ = std::min(rows_, kSetRows);
  kept_.resize(static_cast<size_t>(sequences * heads * sets_ * blocks_));
  counts_.resize(static_cast<size_t>(sequences * heads * sets_));
  bounds_.resize(static_cast<size_t>(sequences * problem.query_heads * rows_));
  dense_.resize(static_cast<size_t>(sequences * heads));
  for (int64_t n = 0; n < sequences; ++n) {
    for (int64_t set = 0; set < sets_; ++set) {
      const Rows rows = RowsOf(n, set);
      const bool elsewhere = IsElsewhere(n, set);
      for (int64_t h = 0; h < heads; ++h) {
        if (elsewhere) {
          KeepAll(n, h, set);
          continue;
        }
        uint8_t* const kept = kept_.data() + At(n, h, set);
        for (int64_t i = rows.begin; i < rows.end; ++i) {
          const Interval blocks = BlocksOfRow(n, i);
          if (!blocks.empty()) kept[blocks.begin] = kept[blocks.end - 1] = 1;
        }
      }
      elsewhere_ = elsewhere_ || (elsewhere && !BlocksOfSet(n, set).empty());
    }
  }
}

int64_t Selection::SetOf(int64_t n, int64_t i) const {
  if (!rows_share_) return i;
  const int64_t start = SequenceOf(n).start;  // below 0 where there are more rows than keys
  return FloorDivide(start + i, kSetRows) - FloorDivide(start, kSetRows);
}

bool Selection::IsElsewhere(int64_t n, int64_t set) const {
  if (!rows_share_) return false;
  const int64_t position = FloorDivide(SequenceOf(n).start, kSetRows) + set;
  return position < 0 || position >= positions_;
}

Selection::Rows Selection::RowsOf(int64_t n, int64_t set) const {
  const Sequence& s = SequenceOf(n);
  const int64_t valid = std::min(s.query_end, s.num_queries);
  if (!rows_share_) return {std::min(set, valid), std::min(set + 1, valid)};
  const int64_t shift = ((s.start % kSetRows) + kSetRows) % kSetRows;
  const int64_t begin = std::max<int64_t>(set * kSetRows - shift, 0);
  return {std::min(begin, valid), std::clamp<int64_t>((set + 1) * kSetRows - shift, 0, valid)};
}

Interval Selection::BlocksOfRow(int64_t n, int64_t i) const {
  const softmax::KeyRuns runs = softmax::VisibleKeys(problem_, SequenceOf(n), i);
  if (runs.size() == 0) return {};
  const Interval &first = runs.first.empty() ? runs.second : runs.first,
                 &last = runs.second.empty() ? runs.first : runs.second;
  return {first.begin / kSketchKeys, BlocksOf(last.end)};
}

Interval Selection::BlocksOfSet(int64_t n, int64_t set) const {
  const Rows rows = RowsOf(n, set);
  Interval all;
  for (int64_t i = rows.begin; i < rows.end; ++i) {
    const Interval own = BlocksOfRow(n, i);
    if (!own.empty()) all = all.empty() ? own : Interval{std::min(all.begin, own.begin), std::max(all.end, own.end)};
  }
  return all;
}

void Selection::KeepAll(int64_t n, int64_t h, int64_t set) {
  const Interval blocks = BlocksOfSet(n, set);
  std::fill_n(kept_.data() + At(n, h, set) + blocks.begin, blocks.size(), uint8_t{1});
}

void Selection::SetDense(int64_t n, int64_t h) {
  dense_[Head(n, h)] = 1;
  for (int64_t set = 0; set < sets_; ++set) KeepAll(n, h, set);
  std::fill_n(bounds_.begin() + (n * problem_.query_heads + h * group_) * rows_, group_ * rows_, 0.0f);
}

SketchMasses Selection::MassesOf(const Context& ctx, int64_t slot, int64_t row) const {
  float* const at = static_cast<float*>(ctx.Shared()) + (slot * group_ * most_rows_ + row) * 3 * blocks_;
  return {at, at + blocks_, at + 2 * blocks_};
}

int64_t Selection::Scratch::LayOut(const Problem& p, void* base) {
  Carver carver(base);
  carver.Next(words, SketchQueries::NumWords(p.depth, kSketchRows));
  carver.Next(scaled, p.depth);
  carver.Next(seen, kSketchRows * kRange);
  carver.Next(terms, AddsTerms(p) ? kSketchRows * kRange * kSketchKeys : 0);
  if (!AddsTerms(p)) terms = nullptr;
  return carver.bytes();
}

void Selection::Choose(Context& ctx, int64_t begin, int64_t end) {
  const int64_t key_heads = problem_.key_heads, heads = std::ssize(problem_.sequences) * key_heads;
  const bool all_dense = std::ranges::all_of(dense_, [](uint8_t dense) { return dense != 0; });
  if (all_dense || blocks_ == 0 || begin >= end) return;
  const softmax::SketchPasses passes = softmax::SketchPassesFor(ctx);
  passes_ = &passes;
  const int64_t of_set = group_ * most_rows_ * 3 * blocks_ * static_cast<int64_t>(sizeof(float));
  const int64_t slots = std::clamp<int64_t>(kMostBytes / of_set, 1, heads * (end - begin));
  ctx.ReserveShared(slots * of_set);
  const int64_t of_sinks = group_ * most_rows_ * static_cast<int64_t>(sizeof(double));
  ctx.ReserveScratch(std::max(Scratch().LayOut(problem_, nullptr), Chooser::Bytes(blocks_) + of_sinks));
  const int64_t ranges = (blocks_ + kRange - 1) / kRange;
  const auto at = [&](int64_t i, const auto& f) {  // set, then head, then sequence, which distributes the late sets
                                                   // over tasks
    const int64_t n = i % heads / key_heads, h = i % heads % key_heads, set = begin + i / heads;
    if (!IsDense(n, h) && !IsElsewhere(n, set)) f(n, h, set);
  };
  for (int64_t first = 0; first < heads * (end - begin); first += slots) {
    const int64_t count = std::min(slots, heads * (end - begin) - first);
    ctx.ParallelFor(count * ranges, [&](int64_t task, int worker) {
      const int64_t slot = task / ranges;
      at(first + slot, [&](int64_t n, int64_t h, int64_t set) { Score(ctx, n, h, set, task % ranges, slot, worker); });
    });
    ctx.ParallelFor(count, [&](int64_t slot, int worker) {
      at(first + slot, [&](int64_t n, int64_t h, int64_t set) { ChooseSet(ctx, n, h, set, slot, worker); });
    });
  }
}

void Selection::Score(Context& ctx, int64_t n, int64_t h, int64_t set, int64_t index, int64_t slot, int worker) const {
  const Rows rows = RowsOf(n, set);
  const int64_t count = rows.end - rows.begin;
  const Interval range = Intersect(BlocksOfSet(n, set), {index * kRange, (index + 1) * kRange});
  if (range.empty()) return;
  const std::byte* blocks[kRange];
  for (int64_t i = range.begin; i < range.end; ++i) blocks[i - range.begin] = keys_.block(n, h, i);
  Scratch scratch;
  scratch.LayOut(problem_, ctx.Scratch(worker));
  // Row r of a set is query head r / count of the group and query r % count of the set.
  const int64_t most = keys_.by_boxes ? 1 : kSketchRows;
  for (int64_t r = 0; r < group_ * count;) {
    SketchQueries queries;
    SketchMasses masses[kSketchRows];
    QueryRow row = {};
    queries.num_rows = static_cast<int>(std::min(most, group_ * count - r));
    queries.words = scratch.words;
    queries.softcap = static_cast<float>(problem_.softcap);
    for (int lane = 0; lane < queries.num_rows; ++lane, ++r) {
      row = {n, rows.begin + r % count, h * group_ + r / count};
      uint64_t* const seen = scratch.seen + lane * kRange;
      FindSeen(row, range, seen);
      if (scratch.terms != nullptr) {
        float* const terms = scratch.terms + lane * kRange * kSketchKeys;
        FindTerms(row, range, seen, terms);
        queries.terms[lane] = terms;
      }
      queries.seen[lane] = seen;
      masses[lane] = MassesOf(ctx, slot, r);
      if (keys_.by_boxes) continue;
      softmax::PackSketchQuery(problem_.dtype, QueryAt(row), problem_.depth, problem_.scale, lane, &queries);
    }
    if (keys_.by_boxes) {
      ScoreBoxes(row, queries, blocks, range, scratch.scaled, masses[0]);
      continue;
    }
    const auto any_sees = [&](int64_t block) {
      uint64_t any = 0;
      for (int lane = 0; lane < queries.num_rows; ++lane) any |= queries.seen[lane][block - range.begin];
      return any != 0;
    };
    ForRuns(range, any_sees, [&](int64_t begin, int64_t end, bool sees) {
      if (!sees) {
        for (int lane = 0; lane < queries.num_rows; ++lane) {
          for (int64_t block = begin; block < end; ++block) Clear(masses[lane], block);
        }
        return;
      }
      const int64_t skipped = begin - range.begin;
      SketchQueries part = queries;
      for (int lane = 0; lane < part.num_rows; ++lane) {
        part.seen[lane] += skipped;
        if (part.terms[lane] != nullptr) part.terms[lane] += skipped * kSketchKeys;
      }
      passes_->score(part, blocks + skipped, begin, end, keys_.parts, masses);
    });
  }
}

const std::byte* Selection::QueryAt(const QueryRow& row) const {
  const softmax::Rows& q = problem_.q;
  const Sequence& s = SequenceOf(row.n);
  const int64_t element = s.batch * q.batch_stride + (s.first_q + row.i) * q.token_stride + row.head * q.head_stride;
  return static_cast<const std::byte*>(q.data) + element * static_cast<int64_t>(SizeOf(problem_.dtype));
}

void Selection::FindSeen(const QueryRow& row, const Interval& range, uint64_t* seen) const {
  const Problem& p = problem_;
  const Sequence& s = SequenceOf(row.n);
  const softmax::KeyRuns runs = softmax::VisibleKeys(p, s, row.i);
  const bool by_runs = s.kept == nullptr && p.segments_q.empty() && p.mask.data == nullptr && p.biases() == 0;
  for (int64_t block = range.begin; block < range.end; ++block) {
    const Interval keys = {block * kSketchKeys, (block + 1) * kSketchKeys};
    const bool whole = by_runs && (runs.first.Contains(keys) || runs.second.Contains(keys));
    *seen++ = whole ? ~uint64_t{0} : softmax::SeenBits(p, s, row.head, row.i, runs, keys.begin);
  }
}

void Selection::FindTerms(const QueryRow& row, const Interval& range, uint64_t* seen, float* terms) const {
  const Problem& p = problem_;
  const Sequence& s = SequenceOf(row.n);
  const int64_t position = s.start + row.i;
  const double slope = p.slopes.empty() ? 0 : p.slopes[static_cast<size_t>(s.batch * p.slopes_stride + row.head)];
  std::optional<RowDecay> decay;
  if (p.forgets) decay.emplace(p, s, row.head, position);
  const softmax::Pairs& bias = p.bias;
  const int64_t of_row =
      s.batch * bias.batch_stride + row.head * bias.head_stride + (s.first_q + row.i) * bias.query_stride;
  for (int64_t block = range.begin; block < range.end; ++block, ++seen, terms += kSketchKeys) {
    std::fill_n(terms, kSketchKeys, 0.0f);
    for (uint64_t left = *seen; left != 0; left &= left - 1) {
      const int64_t at = std::countr_zero(left), key = block * kSketchKeys + at;
      double term = p.slopes.empty() ? 0 : -slope * std::abs(static_cast<double>(position - key));
      if (decay) term += decay->At(key);
      term += p.relative_bias.At(row.head, position - key);
      if (bias.data != nullptr) term += LoadAsDouble(bias.dtype, bias.data, of_row + key * bias.key_stride);
      terms[at] = static_cast<float>(term);
      if (terms[at] == -kInfinity) *seen &= ~(left & -left);  // -inf masks
    }
  }
}

void Selection::ScoreBoxes(const QueryRow& row, const SketchQueries& one, const std::byte* const* blocks,
                           const Interval& range, float* scaled, const SketchMasses& masses) const {
  const std::byte* const q = QueryAt(row);
  for (int64_t e = 0; e < problem_.depth; ++e) {
    const double x = problem_.scale * LoadAsDouble(problem_.dtype, q, e);
    // A product that f32 flushes to zero could still meet a key of 10^38.
    const bool lost = x != 0 && std::abs(x) < 0x1p-100;
    scaled[e] = lost ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(x);
  }
  const int64_t last = BlocksOfRow(row.n, row.i).end - 1;
  enum class Sees { kNone, kSome, kAll };
  const auto sees = [&](int64_t block) {
    const uint64_t bits = one.seen[0][block - range.begin];
    return bits == 0 ? Sees::kNone : ~bits != 0 || block == last ? Sees::kSome : Sees::kAll;
  };
  ForRuns(range, sees, [&](int64_t begin, int64_t end, Sees kind) {
    const int64_t skipped = begin - range.begin;
    const float* const terms = one.terms[0] == nullptr ? nullptr : one.terms[0] + skipped * kSketchKeys;
    if (kind == Sees::kNone) {
      for (int64_t block = begin; block < end; ++block) Clear(masses, block);
    } else if (kind == Sees::kAll) {
      passes_->box({scaled, problem_.depth, terms, one.softcap}, blocks + skipped, begin, end, keys_.boxes, masses);
    } else {
      SketchQueries part = one;
      softmax::PackSketchQuery(problem_.dtype, q, problem_.depth, problem_.scale, 0, &part);
      part.seen[0] += skipped;
      part.terms[0] = terms;
      passes_->score(part, blocks + skipped, begin, end, keys_.parts, &masses);
    }
  });
}

void Selection::ChooseSet(Context& ctx, int64_t n, int64_t h, int64_t set, int64_t slot, int worker) {
  const Rows rows = RowsOf(n, set);
  const int64_t count = rows.end - rows.begin;
  uint8_t* const kept = kept_.data() + At(n, h, set);
  Chooser chooser(ctx.Scratch(worker), blocks_);
  auto* const sinks = reinterpret_cast<double*>(static_cast<char*>(ctx.Scratch(worker)) + Chooser::Bytes(blocks_));
  const auto for_rows = [&](const auto& f) {
    for (int64_t r = 0; r < group_ * count; ++r) {
      const Interval blocks = BlocksOfRow(n, rows.begin + r % count);
      f(r, blocks, From(MassesOf(ctx, slot, r), blocks.begin));
    }
  };
  for_rows([&](int64_t r, const Interval& blocks, const SketchMasses& masses) {
    const auto most = static_cast<double>(passes_->level(masses, blocks.size()));
    sinks[r] =
        problem_.sinks.empty() ? 0 : std::exp(problem_.sinks[static_cast<size_t>(h * group_ + r / count)] - most);
    chooser.Keep({masses.upper, masses.lower, blocks.size(), masses.logit, sinks[r]}, epsilon_, kept + blocks.begin);
  });
  for_rows([&](int64_t r, const Interval& blocks, const SketchMasses& masses) {
    const int64_t head = h * group_ + r / count, i = rows.begin + r % count;
    bounds_[static_cast<size_t>((n * problem_.query_heads + head) * rows_ + i)] =
        BoundOf({masses.upper, masses.lower, blocks.size(), masses.logit, sinks[r]}, kept + blocks.begin);
  });
  // The masses are no longer needed, so their memory marks the blocks that any row sees.
  const Interval all = BlocksOfSet(n, set);
  float* const seen = MassesOf(ctx, slot, 0).upper;
  std::fill_n(seen + all.begin, all.size(), 0.0f);
  for_rows([&](int64_t, const Interval& blocks, const SketchMasses& masses) {
    for (int64_t i = 0; i < blocks.size(); ++i) {
      if (masses.logit[i] != -kInfinity) seen[blocks.begin + i] = 1;
    }
  });
  Count& count_of_set = counts_[List(n, h, set)] = {};
  for (int64_t block = all.begin; block < all.end; ++block) {
    count_of_set.visible += seen[block] != 0 ? 1 : 0;
    count_of_set.kept += seen[block] != 0 && kept[block] != 0 ? 1 : 0;
  }
}

Selection::Count Selection::CountOf(int64_t n, int64_t h, int64_t begin, int64_t end) const {
  Count count;
  for (int64_t set = begin; set < end; ++set) {
    count.visible += counts_[List(n, h, set)].visible;
    count.kept += counts_[List(n, h, set)].kept;
  }
  return count;
}

bool Selection::drops() const {
  return std::ranges::any_of(bounds_, [](float bound) { return bound != 0; });
}

}  // namespace heed::certified_attention
