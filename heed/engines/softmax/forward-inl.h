// Exact attention forward: query rows in lanes, tiled online softmax.
//
// Compiled once per SIMD target and dtype. For W = C N rows at a time:
//
//   per segment of 512 keys, a fresh state (m, l, O):
//     per visited tile of 64 keys:
//       S[key][lane]  = K Q^T                register tiles, K read in place
//       S             = softcap, biases, masks; m' = max(m, max S)
//       P             = exp(S - m'), l = l exp(m - m') + sum P
//       O[dim][lane]  = O exp(m - m') + V^T P, V read in place
//     merge the segment into the row's totals
//   o = O / l, transposed back
//
// FMA is the bound: 2 (D + Dv) flops per pair against one exponential of about
// ten instructions. Rows in lanes need no horizontal sums and no packing of K and
// V; statistics are plain vectors, masks are lane masks.
//
// Canonical order: a logit is one chain over the depth, l and each output one
// chain over the keys of a segment, segments are merged ascending. Everything a
// row does not see is an exact no-op on it (S = -inf, P = 0, factors of 1), so
// its bits depend on nothing but its own keys and the grid they lie on.
#if defined(HEED_ENGINES_SOFTMAX_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_FORWARD_INL_H_
#undef HEED_ENGINES_SOFTMAX_FORWARD_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_FORWARD_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "heed/core/context.h"
#include "heed/engines/softmax/block-inl.h"
#include "heed/engines/softmax/forward.h"
#include "heed/engines/softmax/outputs-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/segments-inl.h"
#include "heed/engines/softmax/tile_pipeline-inl.h"
#include "heed/simd/convert-inl.h"
#include "heed/simd/tile-inl.h"
#include "hwy/highway.h"
// After highway.h:
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

// A block's row, by the block's index in a queue.
struct Owner {
  int64_t block;
  size_t lane;
};

// One block of rows, from queries to outputs.
template <class O, int C, class Outputs = LaneOutputs<O, C>>
class ForwardBlock : protected Block<O, C> {
  using Base = Block<O, C>;
  static constexpr int64_t kSegment = O::kGrid.segment;

 public:
  using Base::Join;

  ForwardBlock(const Problem& problem, const Sequence& sequence, const BlockGrid& grid,
               int64_t key_head, int64_t block, Workspace<O>& workspace, const Head<O>& head)
      : Base(problem, sequence, grid, key_head, block, workspace, head),
        layout_(static_cast<size_t>(problem.value_depth), num_rows_),
        outputs_(workspace.outputs), totals_(workspace.totals) {}

  HWY_ATTR void Compute() {
    Accumulate();
    Finish();
  }

  // One piece of the keys; the last one of the block merges them all. `index` is the
  // block's in `states`.
  HWY_ATTR void ComputePiece(const SegmentStates<O>& states, int64_t index, int64_t piece) {
    this->FindKeys();
    this->KeepKeys({s_.own_begin, s_.key_end});
    if (const int64_t count = states.segments_of_piece() * kSegment; count > 0) {
      this->KeepKeys({s_.key_begin + piece * count, s_.key_begin + (piece + 1) * count});
    } else {
      this->KeepKeys(Piece(piece, states.pieces()));
    }
    if (this->SeesAny()) {
      this->Prepare();
      Pass</*kFlagMasked=*/false>([&](int64_t segment, const V* m, const V* l) HWY_ATTR {
        Keep(states.At(index, segment), m, l);
      });
    }
    if (!states.IsLast(index)) return;
    MergePieces(states, index);
    if (any_tile_ && MaskedLeaked()) {
      this->FindKeys();
      this->Prepare();
      PassAndMerge</*kFlagMasked=*/true>();
    }
    if (!any_tile_) ClearTotals();
    Finish();
  }

  // Segments [begin, end) of joined rows; owner(sequence, row) is where the states of a row
  // go.
  template <class F>
  HWY_ATTR void ComputeShared(const SegmentStates<O>& states, int64_t begin, int64_t end,
                              const F& owner) {
    this->FindKeys();
    this->KeepKeys({s_.key_begin + begin * kSegment, s_.key_begin + end * kSegment});
    this->Prepare();
    Owner owners[W];
    for (size_t lane = 0; lane < num_rows_; ++lane) {
      owners[lane] = owner(*this->of_[lane], this->rows_[lane]);
    }
    int64_t next = begin;
    const auto skip_to = [&](int64_t segment) HWY_ATTR {  // nobody sees these
      for (; next < segment; ++next) {
        for (size_t lane = 0; lane < num_rows_; ++lane) {
          const Owner to = owners[lane];
          layout_.CopyRow(nullptr, lane, states.At(to.block, next).outputs, to.lane);
        }
      }
    };
    Pass</*kFlagMasked=*/false>([&](int64_t segment, const V* m, const V* l) HWY_ATTR {
      skip_to(segment);
      Store(m, l, max_, sum_);
      for (size_t lane = 0; lane < num_rows_; ++lane) {
        const Owner to = owners[lane];
        const auto state = states.At(to.block, segment);
        state.max[to.lane] = max_[lane];
        state.sum[to.lane] = sum_[lane];
        layout_.CopyRow(outputs_, lane, state.outputs, to.lane);
      }
      next = segment + 1;
    });
    skip_to(end);
  }

 protected:
  using typename Base::T;
  using typename Base::V;
  using Base::d_, Base::N, Base::W, Base::p_, Base::s_, Base::grid_, Base::block_,
      Base::key_head_, Base::num_rows_, Base::lanes_, Base::w_, Base::head_;

  // Un-normalised outputs, maxima and sums over all keys.
  HWY_INLINE void Accumulate() {
    this->FindKeys();
    this->Prepare();
    PassAndMerge</*kFlagMasked=*/false>();
    // A weight of 0 cannot hide a value of NaN or infinity, nor a bias of -inf such
    // a logit. If one came through, do it again with masked pairs told apart; all
    // other bits stay.
    if (any_tile_ && MaskedLeaked()) PassAndMerge</*kFlagMasked=*/true>();
    if (!any_tile_) ClearTotals();
  }

  // The log-sum-exp of the lanes from `lane` on.
  HWY_INLINE V LseOf(size_t lane) const {
    const V sum = hn::Load(d_, sum_ + lane);
    const V natural = hn::Add(hn::Load(d_, max_ + lane), hn::Log(d_, sum));
    const V none = hn::Set(d_, -std::numeric_limits<T>::infinity());
    const V nan = hn::Add(sum, sum);  // where the sum is NaN, so is its log
    return hn::IfThenElse(
        hn::IsNaN(sum), nan,
        hn::IfThenElse(hn::Eq(sum, hn::Zero(d_)), none, natural));
  }

 private:
  void ClearTotals() {
    layout_.Clear(totals_);
    std::fill(sum_, sum_ + W, T{0});
    std::fill(max_, max_ + W, T{0});
  }

  // Whole segments of the keys that the block's rows see between them, about as many in
  // each piece.
  Interval Piece(int64_t piece, int64_t pieces) const {
    Interval all;
    for (size_t lane = 0; lane < num_rows_; ++lane) {
      for (const Interval& run : {this->runs_[lane].first, this->runs_[lane].second}) {
        if (run.empty()) continue;
        all = all.empty() ? run
                          : Interval{std::min(all.begin, run.begin), std::max(all.end, run.end)};
      }
    }
    if (all.empty()) return {};
    const int64_t first = (all.begin - s_.key_begin) / kSegment;
    const int64_t count = (all.end - 1 - s_.key_begin) / kSegment + 1 - first;
    const auto border = [&](int64_t i) {
      return s_.key_begin + (first + count * i / pieces) * kSegment;
    };
    return {border(piece), border(piece + 1)};
  }

  // finish(segment, m, l) after the last tile of each, its outputs being in outputs_.
  template <bool kFlagMasked, class F>
  HWY_INLINE void Pass(const F& finish_segment) {
    V m[C], l[C];  // of the segment
    const auto finish = [&](int64_t segment, V* max, const V* sum) HWY_ATTR {
      if (this->raw_) {
        const V unit = hn::Set(d_, static_cast<T>(this->factor_.of_logits));
        for (int c = 0; c < C; ++c) max[c] = hn::Mul(max[c], unit);
      }
      finish_segment(segment, max, sum);
    };
    outputs_ = w_.outputs;
    totals_ = w_.totals;
    any_tile_ = false;
    int64_t segment = -1;
    bool first_tile = true;
    Interval piped;  // tiles that are left to be computed together
    const auto flush = [&]() HWY_ATTR {
      if constexpr (O::kMatrixTiles) WholeTiles(piped, m, l);
      piped = {};
    };
    this->ForTiles([&](const Tile& tile) HWY_ATTR {
      const bool pipes = !kFlagMasked && CanPipe(tile) && tile.segment == segment;
      if (pipes && (piped.empty() || piped.end == tile.keys.begin)) {
        piped = {piped.empty() ? tile.keys.begin : piped.begin, tile.keys.end};
        return;
      }
      flush();
      if (tile.segment != segment) {
        if (segment >= 0) finish(segment, m, l);
        segment = tile.segment;
        first_tile = true;
        for (int c = 0; c < C; ++c) {
          m[c] = hn::Set(d_, -std::numeric_limits<T>::infinity());
          l[c] = hn::Zero(d_);
        }
      }
      if constexpr (O::kMatrixTiles) {
        OneMatrixTile<kFlagMasked>(tile, first_tile, m, l);
      } else {
        OneTile<kFlagMasked>(tile, first_tile, m, l);
      }
      first_tile = false;
      any_tile_ = true;
    });
    flush();
    if (any_tile_) finish(segment, m, l);
  }

  // All visited tiles, into totals_: un-normalised outputs, maxima, sums. The first
  // segment is taken as it is, which is what merging it into an empty total gives, bit for
  // bit.
  template <bool kFlagMasked>
  HWY_INLINE void PassAndMerge() {
    bool first = true;
    Pass<kFlagMasked>([&](int64_t, const V* m, const V* l) HWY_ATTR {
      if (first) {
        std::swap(outputs_, totals_);
        Store(m, l, max_, sum_);
      } else {
        Merge(m, l, outputs_);
      }
      first = false;
    });
  }

  HWY_INLINE void Store(const V* m, const V* l, T* max, T* sum) const {
    for (int c = 0; c < C; ++c) {
      hn::Store(m[c], d_, max + static_cast<size_t>(c) * N);
      hn::Store(l[c], d_, sum + static_cast<size_t>(c) * N);
    }
  }

  HWY_INLINE void Keep(const typename SegmentStates<O>::State& state, const V* m,
                       const V* l) const {
    *state.visited = 1;
    Store(m, l, state.max, state.sum);
    layout_.Copy(outputs_, state.outputs);
  }

  // What all pieces kept, into the totals.
  HWY_INLINE void MergePieces(const SegmentStates<O>& states, int64_t index) {
    any_tile_ = false;
    for (int64_t segment = 0; segment < states.segments(); ++segment) {
      const auto state = states.At(index, segment);
      if (*state.visited == 0) continue;
      V m[C], l[C];
      for (int c = 0; c < C; ++c) {
        m[c] = hn::Load(d_, state.max + static_cast<size_t>(c) * N);
        l[c] = hn::Load(d_, state.sum + static_cast<size_t>(c) * N);
      }
      if (any_tile_) {
        Merge(m, l, state.outputs);
      } else {
        Store(m, l, max_, sum_);
        layout_.Copy(state.outputs, totals_);
      }
      any_tile_ = true;
    }
  }

  // A segment's state into the totals.
  HWY_INLINE void Merge(const V* m, const V* l, const T* outputs) {
    V keep[C], add[C];
    for (int c = 0; c < C; ++c) {
      const size_t at = static_cast<size_t>(c) * N;
      const V old = hn::Load(d_, max_ + at);
      const V max = hn::Max(old, m[c]);
      const V shift = this->Shift(max);
      keep[c] = Weight(d_, hn::Sub(old, shift));
      add[c] = Weight(d_, hn::Sub(m[c], shift));
      hn::Store(max, d_, max_ + at);
      hn::Store(hn::MulAdd(l[c], add[c],
                           hn::Mul(hn::Load(d_, sum_ + at), keep[c])),
                d_, sum_ + at);
    }
    layout_.Merge(keep, add, outputs, totals_);
  }

  template <bool kFlagMasked>
  HWY_INLINE void OneTile(const Tile& tile, bool first, V* m, V* l) {
    Run runs[2 * C + 1];
    const int num_runs = this->SplitTile(tile, runs);
    const int64_t origin = tile.keys.begin;
    V max[C];
    for (int c = 0; c < C; ++c) {
      max[c] = hn::Set(d_, -std::numeric_limits<T>::infinity());
    }
    for (int r = 0; r < num_runs; ++r) {
      this->template Logits<kFlagMasked>(runs[r], tile, max);
    }

    V shift[C], rescale[C];
    for (int c = 0; c < C; ++c) {
      max[c] = hn::Max(max[c], m[c]);
      shift[c] = this->Shift(max[c]);
      rescale[c] = Weight(d_, hn::Sub(m[c], shift[c]));
      m[c] = max[c];
      l[c] = hn::Mul(l[c], rescale[c]);
    }
    for (int r = 0; r < num_runs; ++r) {
      Weights<kFlagMasked>(runs[r], origin, shift, l);
    }

    // Where a tile falls apart, the outputs are rescaled beforehand, once.
    const bool whole = num_runs == 1 && runs[0].c0 == 0 && runs[0].c1 == C;
    if (!whole) {
      layout_.Scale(first, rescale, outputs_);
      for (int c = 0; c < C; ++c) rescale[c] = hn::Set(d_, T{1});
    }
    if (head_.values_at == Place::kTile) {
      O::CopyValues(head_.value_source, tile.keys.begin, tile.keys.end,
                    p_.value_depth, w_.values);
      head_.values.first = tile.keys.begin;
    }
    for (int r = 0; r < num_runs; ++r) {
      Values<kFlagMasked>(runs[r], origin, whole && first, rescale);
    }
  }

  // Whether a tile may be computed with those beside it: all of its pairs are kept, nothing
  // comes between its products but weights, and K and V are in tiles.
  HWY_INLINE bool CanPipe(const Tile& tile) const {
    if constexpr (!O::kMatrixTiles || C != O::kMostVectors) {
      (void)tile;
      return false;
    } else {
      return tile.full && this->raw_ && p_.dropout == 0 && !this->partial_ &&
             tile.keys.size() == O::kGrid.tile && head_.keys_at == Place::kHead &&
             head_.values_at == Place::kHead &&
             (O::kInfinite || (this->queries_finite_ && w_.keys_finite));
    }
  }

  // Whole tiles, of rows that have seen a key in this segment, or tile by tile where a row
  // had not or m must be raised.
  HWY_NOINLINE void WholeTiles(const Interval& keys, V* m, V* l) {
    if (keys.empty()) return;
    if constexpr (C == O::kMostVectors) {
      if (keys.size() > O::kGrid.tile && !AnyUnset(m)) {
        V before[C];
        for (int c = 0; c < C; ++c) before[c] = l[c];
        layout_.Copy(outputs_, w_.spare);
        TilePipeline<O>(w_, head_, p_.depth, p_.value_depth, outputs_)
            .Run(keys, m, Exponent(), l);
        if (!AnyAbove(l)) return;
        for (int c = 0; c < C; ++c) l[c] = before[c];
        layout_.Copy(w_.spare, outputs_);
      }
    }
    for (int64_t at = keys.begin; at < keys.end; at += O::kGrid.tile) {
      Tile tile;
      tile.keys = {at, at + O::kGrid.tile};
      tile.grid = at;
      tile.full = true;
      OneMatrixTile</*kFlagMasked=*/false>(tile, /*first=*/false, m, l);
    }
  }

  // OneTile where outputs are summed in matrix tiles, which cannot be rescaled on the way.
  // A row's m is the maximum of the first of its tiles, and stays: weights up to 2^32 do
  // not hurt a bf16, which has the exponents of f32. Where a later tile exceeds m by more,
  // m is raised, which is seen by a sum that grows and done before any output is added to.
  // Each row's m depends on nothing but its own logits.
  template <bool kFlagMasked>
  HWY_NOINLINE void OneMatrixTile(const Tile& tile, bool first, V* m, V* l) {
    Run runs[2 * C + 1];
    const int num_runs = this->SplitTile(tile, runs);
    const int64_t origin = tile.keys.begin;
    V unused[C];
    for (int c = 0; c < C; ++c) unused[c] = hn::Zero(d_);
    for (int r = 0; r < num_runs; ++r) {
      this->template Logits<kFlagMasked>(runs[r], tile, unused);
    }
    const bool raised = first || p_.dropout > 0 || AnyUnset(m);
    if (raised) Raise(runs, num_runs, origin, first, m, l);
    V before[C];
    for (int c = 0; c < C; ++c) before[c] = l[c];
    WeighRuns<kFlagMasked>(runs, num_runs, origin, m, l);
    if (!raised && AnyAbove(l)) {
      for (int c = 0; c < C; ++c) l[c] = before[c];
      Raise(runs, num_runs, origin, first, m, l);
      WeighRuns<kFlagMasked>(runs, num_runs, origin, m, l);
    }
    const bool whole = num_runs == 1 && runs[0].c0 == 0 && runs[0].c1 == C;
    if (first && !whole) layout_.Clear(outputs_);
    if (head_.values_at == Place::kTile) {
      O::CopyValues(head_.value_source, tile.keys.begin, tile.keys.end, p_.value_depth,
                    w_.values);
      head_.values.first = tile.keys.begin;
    }
    for (int r = 0; r < num_runs; ++r) {
      const Run& run = runs[r];
      this->WithVectors(run.c1 - run.c0, [&](auto vectors) HWY_ATTR {
        MatrixValues<vectors.value, kFlagMasked>(run, origin, first && whole);
      });
    }
  }

  template <int kVectors, bool kFlagMasked>
  HWY_INLINE void MatrixValues(const Run& run, int64_t origin, bool first) {
    if constexpr (kVectors % O::kLaneVectors == 0) {  // SplitTile leaves no other widths
      O::template AddValues<kVectors, kFlagMasked>(MatrixWeightsAt(run, origin), W,
                                                   head_.values, run.begin, run.end,
                                                   p_.value_depth, first, outputs_ + run.c0 * N);
    }
  }

  HWY_INLINE bool AnyUnset(const V* m) const {
    const V none = hn::Set(d_, -std::numeric_limits<T>::infinity());
    auto unset = hn::Eq(m[0], none);
    for (int c = 1; c < C; ++c) unset = hn::Or(unset, hn::Eq(m[c], none));
    return !hn::AllFalse(d_, unset);
  }

  // True if some sum has a weight that Raise() would have made smaller, or many that it
  // would not.
  HWY_INLINE bool AnyAbove(const V* l) const {
    V most = l[0];
    for (int c = 1; c < C; ++c) most = hn::Max(most, l[c]);
    return !hn::AllFalse(d_, hn::Gt(most, hn::Set(d_, T{1u << (kMaxExponent - 1)})));
  }

  // Sets m of the rows that had seen no key, and raises it where a tile exceeds it too far.
  HWY_NOINLINE void Raise(const Run* runs, int num_runs, int64_t origin, bool first, V* m,
                          V* l) {
    const V none = hn::Set(d_, -std::numeric_limits<T>::infinity());
    V max[C], rescale[C];
    for (int c = 0; c < C; ++c) max[c] = none;
    for (int r = 0; r < num_runs; ++r) {
      const T* s = this->At(runs[r], origin);
      for (int64_t j = runs[r].begin; j < runs[r].end; ++j, s += W) {
        for (size_t c = runs[r].c0; c < runs[r].c1; ++c) {
          max[c] = hn::Max(hn::Load(d_, s + (c - runs[r].c0) * N), max[c]);
        }
      }
    }
    const V scale = hn::Set(d_, Exponent());
    for (int c = 0; c < C; ++c) {
      const V excess = hn::Mul(hn::Sub(max[c], m[c]), scale);  // NaN where both are -inf
      const auto raise = hn::Gt(excess, hn::Set(d_, static_cast<T>(kMaxExponent)));
      const V raised = hn::IfThenElse(raise, max[c], m[c]);
      rescale[c] = hn::IfThenElse(
          raise, hs::Exp2(d_, hn::Mul(hn::Sub(m[c], raised), scale)), hn::Set(d_, T{1}));
      m[c] = raised;
      l[c] = hn::Mul(l[c], rescale[c]);
    }
    if (!first) layout_.Scale(false, rescale, outputs_);
  }

  template <bool kFlagMasked>
  HWY_INLINE void WeighRuns(const Run* runs, int num_runs, int64_t origin, const V* m, V* l) {
    V shift[C];
    for (int c = 0; c < C; ++c) shift[c] = this->Shift(m[c]);
    for (int r = 0; r < num_runs; ++r) {
      const Run& run = runs[r];
      T* s = this->At(run, origin);
      uint32_t* p = MatrixWeightsAt(run, origin);
      const size_t num_keys = static_cast<size_t>(run.end - run.begin);
      this->WithVectors(run.c1 - run.c0, [&](auto vectors) HWY_ATTR {
        constexpr int kVectors = vectors.value;
        if (p_.dropout == 0) {
          O::template Weigh<W, kVectors, kFlagMasked>(num_keys, s, shift + run.c0, Exponent(),
                                                      l + run.c0, p);
          return;
        }
        O::template WeighInPlace<W, kVectors, kFlagMasked>(num_keys, s, shift + run.c0,
                                                           Exponent(), l + run.c0);
        ApplyDropout<W>(d_, run, origin, p_, lanes_, w_.logits);
        O::template PutWeights<W, kVectors>(num_keys, s, p);
      });
    }
  }

  // What makes a logit the exponent of its weight.
  T Exponent() const {
    return static_cast<T>((this->raw_ ? this->factor_.of_logits : 1) * hs::kLog2E);
  }

  uint32_t* MatrixWeightsAt(const Run& run, int64_t origin) const {
    return w_.weights + static_cast<size_t>((run.begin - origin) / 2) * W + run.c0 * N;
  }

  // P of a run from its S, in the same place: the operands of the second product,
  // kKeyStep keys to a row.
  template <bool kFlagMasked>
  HWY_INLINE void Weights(const Run& run, int64_t origin, const V* shift, V* l) {
    T* s = this->At(run, origin);
    T* p = WeightsAt(run, origin);
    const size_t num_keys = static_cast<size_t>(run.end - run.begin);
    this->WithVectors(run.c1 - run.c0, [&](auto vectors) HWY_ATTR {
      constexpr int kVectors = vectors.value;
      const auto put = [&](const V* weights, size_t j, int c) HWY_ATTR {
        if constexpr (O::kQuantized) this->between_.Ask();
        O::PutWeights(weights, p + j / O::kKeyStep * W + static_cast<size_t>(c) * N);
      };
      if (p_.dropout == 0) {
        Exponentials<W, kVectors, O::kKeyStep, kFlagMasked>(
            d_, num_keys, s, shift + run.c0, l + run.c0, put);
        return;
      }
      Exponentials<W, kVectors, 1, kFlagMasked>(
          d_, num_keys, s, shift + run.c0, l + run.c0,
          [&](const V* weights, size_t j, int c) HWY_ATTR {
            hn::Store(weights[0], d_, s + j * W + static_cast<size_t>(c) * N);
          });
      ApplyDropout<W>(d_, run, origin, p_, lanes_, w_.logits);
      if constexpr (O::kKeyStep == 2) {
        for (size_t j = 0; j < num_keys; j += 2) {
          for (int c = 0; c < kVectors; ++c) {
            const T* at = s + j * W + static_cast<size_t>(c) * N;
            const V weights[2] = {
                hn::Load(d_, at),
                j + 1 < num_keys ? hn::Load(d_, at + W) : hn::Zero(d_)};
            put(weights, j, c);
          }
        }
      }
    });
  }

  T* WeightsAt(const Run& run, int64_t origin) const {
    return w_.logits +
           static_cast<size_t>((run.begin - origin) / O::kKeyStep) * W + run.c0 * N;
  }

  template <bool kFlagMasked>
  HWY_INLINE void Values(const Run& run, int64_t origin, bool first,
                         const V* rescale) {
    T* p = WeightsAt(run, origin);
    this->WithVectors(run.c1 - run.c0, [&](auto vectors) HWY_ATTR {
      layout_.template AddValues<vectors.value, kFlagMasked>(
          p, head_, run.begin, run.end, this->keys_until_, first, rescale + run.c0,
          outputs_ + run.c0 * N);
    });
  }

  // True if something that masks should have hidden may have come through: an
  // output that is not finite although the sum is, or with a bias, which may mask
  // a NaN among the logits, a sum that is not.
  HWY_INLINE bool MaskedLeaked() const {
    for (size_t lane = 0; lane < num_rows_; lane += N) {
      const V sum = hn::Load(d_, sum_ + lane);
      const V marks = layout_.NotFinite(totals_, lane);
      auto leaked = hn::And(hn::IsNaN(marks), hn::IsFinite(sum));
      if (p_.bias.data != nullptr) leaked = hn::Or(leaked, hn::IsNaN(sum));
      const auto present = hn::FirstN(d_, num_rows_ - lane);
      if (!hn::AllFalse(d_, hn::And(leaked, present))) return true;
    }
    return false;
  }

  HWY_INLINE void Finish() {
    void* o[W];
    HWY_ALIGN T factor[W];
    HWY_ALIGN T lse[W];
    const V undropped = hn::Set(d_, static_cast<T>(1 / (1 - p_.dropout)));
    for (size_t lane = 0; lane < W; lane += N) {
      const V sum = hn::Load(d_, sum_ + lane);
      const auto empty = hn::Eq(sum, hn::Zero(d_));
      hn::Store(hn::IfThenZeroElse(empty, hn::Div(undropped, sum)), d_,
                factor + lane);
      hn::Store(LseOf(lane), d_, lse + lane);
    }
    for (size_t lane = 0; lane < num_rows_; ++lane) {
      const BlockGrid::Row row = grid_.At(block_, static_cast<int64_t>(lane));
      const int64_t head = key_head_ * grid_.heads + row.head;
      const int64_t token = s_.first_q + row.query;
      o[lane] = const_cast<char*>(static_cast<const char*>(p_.o.data)) +
                (s_.batch * p_.o.batch_stride + token * p_.o.token_stride +
                 head * p_.o.head_stride) *
                    static_cast<int64_t>(SizeOf(p_.dtype));
      if (p_.lse.data != nullptr) {
        const_cast<T*>(static_cast<const T*>(
            p_.lse.data))[s_.batch * p_.lse.batch_stride +
                          token * p_.lse.token_stride +
                          head * p_.lse.head_stride] = lse[lane];
      }
      if (!p_.sinks.empty() && factor[lane] != 0) {
        const double sink = p_.sinks[static_cast<size_t>(head)];
        factor[lane] = static_cast<T>(
            static_cast<double>(factor[lane]) /
            (1 + std::exp(sink - static_cast<double>(lse[lane]))));
      }
    }
    hs::WithStorage<T>(p_.dtype, [&](auto stored) HWY_ATTR {
      using S = decltype(stored);
      layout_.Write(totals_, factor, reinterpret_cast<S* const*>(o), num_rows_);
    });
  }

  static constexpr int kMaxExponent = 32;

  const Outputs layout_;
  T* outputs_;  // of the current segment
  T* totals_;   // of all segments so far
  bool any_tile_ = false;
  HWY_ALIGN T max_[W], sum_[W];
};

template <class O>
Workspace<O>& WorkspaceOf(Context& ctx, int worker) {
  return *static_cast<Workspace<O>*>(ctx.Scratch(worker));
}

// Keys that sequences share: each segment of them once, for the queries of all.
template <class O, int C, class Outputs>
void RunShared(Context& ctx, const Problem& p, const Plan& plan, const BlockQueue& queue,
               const SegmentStates<O>& states, const SharedKeys& shared) {
  const Sequence* const members = &p.sequences[static_cast<size_t>(shared.first)];
  Sequence joined = *members;
  joined.num_queries *= shared.count;
  joined.key_end = shared.end;
  const BlockGrid grid(p, joined, plan.rows), own_grid(p, *members, plan.rows);
  const int64_t segments = (shared.end - members->key_begin) / O::kGrid.segment;
  for (int64_t i = 0; i < shared.count * p.key_heads * own_grid.blocks; ++i) {
    const int64_t block = i % own_grid.blocks, rest = i / own_grid.blocks;
    const int64_t own = queue.IndexOf({shared.first + rest / p.key_heads, rest % p.key_heads, block});
    for (int64_t segment = 0; segment < segments; ++segment) states.Expect(own, segment);
  }
  const int64_t blocks = p.key_heads * grid.blocks;
  const int64_t pieces =
      std::clamp<int64_t>(kTasksPerThread * ctx.num_threads() / blocks, 1, segments);
  ctx.ParallelFor(blocks * pieces, [&](int64_t index, int worker) HWY_ATTR {
    const int64_t piece = index % pieces, block = index / pieces % grid.blocks;
    const int64_t key_head = index / pieces / grid.blocks;
    Workspace<O>& w = WorkspaceOf<O>(ctx, worker);
    const Head<O> head = HeadOf(p, plan, shared.first, key_head, w);
    ForwardBlock<O, C, Outputs> joint(p, joined, grid, key_head, block, w, head);
    joint.Join(members, members->num_queries);
    joint.ComputeShared(
        states, segments * piece / pieces, segments * (piece + 1) / pieces,
        [&](const Sequence& sequence, const BlockGrid::Row& row) {
          const BlockGrid::Place place = own_grid.Find(row);
          return Owner{queue.IndexOf({&sequence - p.sequences.data(), key_head, place.block}),
                       static_cast<size_t>(place.lane)};
        });
  });
}

// What a task holds while it multiplies.
struct NoSession {};
template <class O>
struct SessionType {
  using Type = NoSession;
};
template <class O>
  requires O::kMatrixTiles
struct SessionType<O> {
  using Type = typename O::Tiles::Session;
};
template <class O>
using SessionOf = typename SessionType<O>::Type;

// Blocks that take the same keys while these are in L2, in the order of the queue.
template <class O>
struct BlockGroups {
  static constexpr int64_t kMostBlocks = 32, kFewestBlocks = 4;
  static constexpr int64_t kMostBytes = int64_t{16} << 20;  // of states

  BlockGroups(const Problem& p, const Plan& plan, int64_t num_blocks, int num_threads)
      : blocks(kFewestBlocks) {
    if constexpr (O::kMatrixTiles) {
      of_piece.count = O::KeysInL2(p) / O::kGrid.segment;
      const int64_t bytes = SegmentStates<O>(p, plan, 1, of_piece).Bytes();
      blocks = std::min({kMostBlocks, kMostBytes / bytes,
                         num_blocks / (kTasksPerThread * num_threads)});
      blocks = std::max(blocks, kFewestBlocks);
      const bool copied = plan.keys_at == Place::kHead && plan.values_at == Place::kHead;
      wanted = copied && SegmentStates<O>(p, plan, 1, of_piece).pieces() > 1;
    }
  }
  SegmentStates<O> States(const Problem& p, const Plan& plan) const {
    return {p, plan, blocks, of_piece};
  }
  int64_t Bytes(const Problem& p, const Plan& plan) const {
    return wanted ? States(p, plan).Bytes() : 0;
  }

  int64_t blocks;
  SegmentsOfPiece of_piece = {1};
  bool wanted = false;
};

// K and V of a head that do not stay in L2: a part of them that does, for all blocks of a
// group, then the next one.
template <class O, int C, class Outputs>
void RunGroups(Context& ctx, const Problem& p, const Plan& plan, const BlockQueue& queue,
               const BlockGroups<O>& groups) {
  const int64_t tasks = (queue.size() + groups.blocks - 1) / groups.blocks;
  ctx.ParallelFor(tasks, [&](int64_t group, int worker) HWY_ATTR {
    Workspace<O>& w = WorkspaceOf<O>(ctx, worker);
    [[maybe_unused]] const SessionOf<O> session;
    SegmentStates<O> states = groups.States(p, plan);
    int64_t index = group * groups.blocks;
    const int64_t last = std::min(index + groups.blocks, queue.size());
    while (index < last) {  // heads, of which a group may meet several
      const BlockQueue::Task head_of = queue.At(index);
      int64_t end = index + 1;
      while (end < last && queue.At(end).sequence == head_of.sequence &&
             queue.At(end).key_head == head_of.key_head) {
        ++end;
      }
      states.Begin(reinterpret_cast<char*>(&w) + Workspace<O>::Bytes(plan));
      const Sequence& s = p.sequences[static_cast<size_t>(head_of.sequence)];
      const Head<O> head = HeadOf(p, plan, head_of.sequence, head_of.key_head, w);
      const BlockGrid grid(p, s, plan.rows);
      for (int64_t piece = 0; piece < states.pieces(); ++piece) {
        for (int64_t i = index; i < end; ++i) {
          ForwardBlock<O, C, Outputs> block(p, s, grid, head_of.key_head, queue.At(i).block, w,
                                            head);
          block.ComputePiece(states, i - index, piece);
        }
      }
      index = end;
    }
  });
}

template <class O, int C, class Outputs = LaneOutputs<O, C>>
void RunBlocks(Context& ctx, const Problem& p, const Plan& plan) {
  const BlockQueue queue(p, plan.rows);
  SegmentStates<O> states(p, plan, queue.size(), ctx.num_threads());
  if constexpr (O::kMatrixTiles) {
    const BlockGroups<O> groups(p, plan, queue.size(), ctx.num_threads());
    if (groups.wanted && !states.kept()) return RunGroups<O, C, Outputs>(ctx, p, plan, queue, groups);
  }
  ctx.ReserveShared(static_cast<size_t>(states.Bytes()));
  states.Begin(ctx.Shared());
  if constexpr (!O::kMatrixTiles) {  // caches alone share keys, and take other kernels
    for (const SharedKeys& shared : p.shared) {
      RunShared<O, C, Outputs>(ctx, p, plan, queue, states, shared);
    }
  }
  const int64_t pieces = states.pieces();
  ctx.ParallelFor(queue.size() * pieces, [&](int64_t index, int worker) HWY_ATTR {
    const BlockQueue::Task task = queue.At(index / pieces);
    const Sequence& s = p.sequences[static_cast<size_t>(task.sequence)];
    Workspace<O>& w = WorkspaceOf<O>(ctx, worker);
    [[maybe_unused]] const SessionOf<O> session;
    const Head<O> head = HeadOf(p, plan, task.sequence, task.key_head, w);
    const BlockGrid grid(p, s, plan.rows);
    ForwardBlock<O, C, Outputs> block(p, s, grid, task.key_head, task.block, w, head);
    if (!states.kept()) return block.Compute();
    block.ComputePiece(states, index / pieces, index % pieces);
  });
}

// Per thread, with its share of what the threads share.
template <class O>
int64_t ScratchBytes(const Problem& p, const Plan& plan, int num_threads) {
  const BlockQueue queue(p, plan.rows);
  const SegmentStates<O> states(p, plan, queue.size(), num_threads);
  return Workspace<O>::Bytes(plan) + (states.Bytes() + num_threads - 1) / num_threads +
         BlockGroups<O>(p, plan, queue.size(), num_threads).Bytes(p, plan);
}

template <class O>
void ReserveWorkspaces(Context& ctx, const Plan& plan, int64_t more_bytes = 0) {
  ctx.ReserveScratch(static_cast<size_t>(Workspace<O>::Bytes(plan) + more_bytes));
  for (int worker = 0; worker < ctx.num_threads(); ++worker) {
    WorkspaceOf<O>(ctx, worker).Init(plan);
  }
}

template <class O>
void Forward(Context& ctx, const Problem& p) {
  const Plan plan = MakePlan<O>(p);
  const int64_t num_blocks = O::kMatrixTiles ? BlockQueue(p, plan.rows).size() : 0;
  const BlockGroups<O> groups(p, plan, num_blocks, ctx.num_threads());
  ReserveWorkspaces<O>(ctx, plan, groups.Bytes(p, plan));
  switch (plan.vectors) {
    case 1:
      if constexpr (O::kLaneVectors == 1) return RunBlocks<O, 1>(ctx, p, plan);
      [[fallthrough]];
    case 2: return RunBlocks<O, 2>(ctx, p, plan);
    default: return RunBlocks<O, O::kMostVectors>(ctx, p, plan);
  }
}

template <class O>
int64_t NumLanes(const Problem& p) {
  return MakePlan<O>(p).lanes;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_FORWARD_INL_H_
