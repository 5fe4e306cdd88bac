// Exact attention, forward: online softmax over tiles of keys, vectorised over queries (one query row per SIMD lane).
//
// Compiled once per SIMD target and dtype. A block has W = C N query rows: C vectors of N lanes (shapes-inl.h and
// plan-inl.h choose C). Per block:
//
//   per segment of 512 keys, a fresh state (m, l, O):
//     per tile of 64 keys in which some row sees a key:
//       S[key][lane]  = K Q^T                register tiles, K read in place
//       S             = soft cap, biases, masks; m' = max(m, max S)
//       P             = exp(S - m'), l = l exp(m - m') + sum P
//       O[dim][lane]  = O exp(m - m') + V^T P, V read in place
//     merge the segment's state into the row's totals
//   o = O / l, transposed back to rows
//
// The bound is FMA throughput: 2 (D + Dv) flops per pair of a query and a key, against one exponential of about ten
// instructions. With a query per lane there are no horizontal sums, K and V need no packing, the row statistics m and l
// are plain vectors, and masks are lane masks.
//
// The order of the sums is fixed. A logit is one chain of FMAs over the depth, l and each output are one chain over the
// keys of a segment, and segments are merged in ascending order. A key that a row does not see is an exact no-op for
// this row (S = -inf, P = 0, rescaling by 1), so the bits of a row depend only on its own keys and on the grid of tiles
// and segments that they lie on.
#if defined(HEED_ENGINES_SOFTMAX_FORWARD_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_FORWARD_FORWARD_INL_H_
#undef HEED_ENGINES_SOFTMAX_FORWARD_FORWARD_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_FORWARD_FORWARD_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "heed/engines/softmax/block/exponentials-inl.h"
#include "heed/engines/softmax/forward/forward.h"
#include "heed/engines/softmax/block/outputs-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/forward/segment_pass-inl.h"
#include "heed/engines/softmax/forward/segments-inl.h"
#include "heed/simd/convert-inl.h"
#include "hwy/highway.h"
// After highway.h:
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

// The place of a row in SegmentStates: the block's index in the queue, and the lane.
struct Owner {
  int64_t block;
  size_t lane;
};

// One block of query rows, from packing the queries to storing the outputs.
template <class O, int C, class Outputs = LaneOutputs<O, C>>
class ForwardBlock : protected SegmentPass<O, C, Outputs> {
  using Base = SegmentPass<O, C, Outputs>;
  static constexpr int64_t kSegment = O::kGrid.segment;

 public:
  using Base::Base;
  using Base::Join;

  HWY_ATTR void Compute() {
    Accumulate();
    Finish();
  }

  // Computes one split of the keys (split-KV). The last split of the block to finish merges the states of all splits.
  // `index` is the block's index in `states`.
  HWY_ATTR void ComputeSplit(const SegmentStates<O>& states, int64_t index, int64_t split) {
    this->FindKeys();
    this->KeepKeys({s_.own_begin, s_.key_end});
    if (const int64_t count = states.segments_per_split() * kSegment; count > 0) {
      this->KeepKeys({s_.key_begin + split * count, s_.key_begin + (split + 1) * count});
    } else {
      this->KeepKeys(KeysOfSplit(split, states.num_splits()));
    }
    if (this->SeesAny()) {
      this->Prepare();
      this->template Pass</*kFlagMasked=*/false>([&](int64_t segment, const V* m, const V* l)
                                                     HWY_ATTR { Keep(states.At(index, segment), m, l); });
    }
    if (!states.IsLast(index)) return;
    MergeSplits(states, index);
    if (any_tile_ && MaskedLeaked()) {
      this->FindKeys();
      this->Prepare();
      PassAgain();
    }
    if (!any_tile_) ClearTotals();
    Finish();
  }

  // Computes segments [begin, end) for the rows of all sequences that share them. owner(sequence, row) says where the
  // states of a row are stored.
  template <class F>
  HWY_ATTR void ComputeShared(const SegmentStates<O>& states, int64_t begin, int64_t end, const F& owner) {
    this->FindKeys();
    this->KeepKeys({s_.key_begin + begin * kSegment, s_.key_begin + end * kSegment});
    this->Prepare();
    Owner owners[W];
    for (size_t lane = 0; lane < num_rows_; ++lane) {
      owners[lane] = owner(*this->of_[lane], this->rows_[lane]);
    }
    int64_t next = begin;
    const auto skip_to = [&](int64_t segment) HWY_ATTR {  // no row sees a key of these segments
      for (; next < segment; ++next) {
        for (size_t lane = 0; lane < num_rows_; ++lane) {
          const Owner to = owners[lane];
          layout_.CopyRow(nullptr, lane, states.At(to.block, next).outputs, to.lane);
        }
      }
    };
    this->template Pass</*kFlagMasked=*/false>([&](int64_t segment, const V* m, const V* l) HWY_ATTR {
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
  using Base::d_, Base::N, Base::W, Base::p_, Base::s_, Base::grid_, Base::block_, Base::key_head_, Base::num_rows_,
      Base::lanes_, Base::w_, Base::head_, Base::layout_, Base::outputs_, Base::totals_, Base::any_tile_;

  // Computes the un-normalised outputs, maxima and sums over all keys.
  HWY_INLINE void Accumulate() {
    this->FindKeys();
    this->Prepare();
    PassAndMerge</*kFlagMasked=*/false>();
    // P = 0 does not hide a value that is NaN or infinite (0 * inf is NaN), and a bias of -inf does not hide a NaN
    // logit. If such a value has leaked into a row, the block is computed again with masked pairs flagged; the bits of
    // all other rows stay the same.
    if (any_tile_ && MaskedLeaked()) PassAgain();
    if (!any_tile_) ClearTotals();
  }

  // Returns the log-sum-exp of the N lanes from `lane` on.
  HWY_INLINE V LseOf(size_t lane) const {
    const V sum = hn::Load(d_, sum_ + lane);
    const V natural = hn::Add(hn::Load(d_, max_ + lane), hn::Log(d_, sum));
    const V none = hn::Set(d_, -std::numeric_limits<T>::infinity());
    const V nan = hn::Add(sum, sum);  // log-sum-exp is NaN where the sum is NaN
    return hn::IfThenElse(hn::IsNaN(sum), nan, hn::IfThenElse(hn::Eq(sum, hn::Zero(d_)), none, natural));
  }

  HWY_INLINE void Store(const V* m, const V* l, T* max, T* sum) const {
    for (int c = 0; c < C; ++c) {
      hn::Store(m[c], d_, max + static_cast<size_t>(c) * N);
      hn::Store(l[c], d_, sum + static_cast<size_t>(c) * N);
    }
  }

  void ClearTotals() {
    layout_.Clear(totals_);
    std::fill(sum_, sum_ + W, T{0});
    std::fill(max_, max_ + W, T{0});
  }

 private:
  // Returns the keys of a split: whole segments of the keys between the first and the last that a row of the block
  // sees, divided about evenly.
  Interval KeysOfSplit(int64_t split, int64_t num_splits) const {
    Interval all;
    for (size_t lane = 0; lane < num_rows_; ++lane) {
      for (const Interval& run : {this->runs_[lane].first, this->runs_[lane].second}) {
        if (run.empty()) continue;
        all = all.empty() ? run : Interval{std::min(all.begin, run.begin), std::max(all.end, run.end)};
      }
    }
    if (all.empty()) return {};
    const int64_t first = (all.begin - s_.key_begin) / kSegment;
    const int64_t count = (all.end - 1 - s_.key_begin) / kSegment + 1 - first;
    const auto boundary = [&](int64_t i) { return s_.key_begin + (first + count * i / num_splits) * kSegment; };
    return {boundary(split), boundary(split + 1)};
  }

  // Computes all tiles into totals_: un-normalised outputs, maxima, sums. The first segment is swapped in; merging it
  // into an empty total would give the same bits.
  template <bool kFlagMasked>
  HWY_INLINE void PassAndMerge() {
    bool first = true;
    this->template Pass<kFlagMasked>([&](int64_t, const V* m, const V* l) HWY_ATTR {
      if (first) {
        std::swap(outputs_, totals_);
        Store(m, l, max_, sum_);
      } else {
        Merge(m, l, outputs_);
      }
      first = false;
    });
  }

  HWY_NOINLINE void PassAgain() { PassAndMerge</*kFlagMasked=*/true>(); }

  HWY_INLINE void Keep(const typename SegmentStates<O>::State& state, const V* m, const V* l) const {
    *state.visited = 1;
    Store(m, l, state.max, state.sum);
    layout_.Copy(outputs_, state.outputs);
  }

  // Merges the segment states of all splits into the totals, in ascending order.
  HWY_INLINE void MergeSplits(const SegmentStates<O>& states, int64_t index) {
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

 protected:
  // Merges the state of a segment into the totals.
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
      hn::Store(hn::MulAdd(l[c], add[c], hn::Mul(hn::Load(d_, sum_ + at), keep[c])), d_, sum_ + at);
    }
    layout_.Merge(keep, add, outputs, totals_);
  }

  // Returns true if a value that a mask should have hidden may have leaked into an output: the output is not finite
  // although the sum l is, or l is NaN and there is a bias or log decay, which can mask a NaN logit.
  HWY_INLINE bool MaskedLeaked() const {
    for (size_t lane = 0; lane < num_rows_; lane += N) {
      const V sum = hn::Load(d_, sum_ + lane);
      const V marks = layout_.NotFinite(totals_, lane);
      auto leaked = hn::And(hn::IsNaN(marks), hn::IsFinite(sum));
      if (p_.biases() > 0 || p_.forgets) leaked = hn::Or(leaked, hn::IsNaN(sum));
      const auto present = hn::FirstN(d_, num_rows_ - lane);
      if (!hn::AllFalse(d_, hn::And(leaked, present))) return true;
    }
    return false;
  }

  // Stores outputs and log-sum-exps in the caller's tensors.
  HWY_NOINLINE void Finish();

  HWY_ALIGN T max_[W], sum_[W];
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_FORWARD_FORWARD_INL_H_
