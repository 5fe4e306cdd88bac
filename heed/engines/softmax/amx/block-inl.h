// A block of rows with AMX products.
//
// Compiled once per SIMD target that has AMX or emulates it.
//
// Outputs that AMX accumulates cannot be rescaled on the way: a row's maximum stays that of the first tile of a segment
// that it saw, unless a later tile exceeds it by far.
#if defined(HEED_ENGINES_SOFTMAX_AMX_BLOCK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_AMX_BLOCK_INL_H_
#undef HEED_ENGINES_SOFTMAX_AMX_BLOCK_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_AMX_BLOCK_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "heed/engines/softmax/block/block-inl.h"
#include "heed/engines/softmax/block/exponentials-inl.h"
#include "heed/engines/softmax/block/outputs-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/amx/pipeline-inl.h"
#include "heed/engines/softmax/tile_list.h"
#include "heed/simd/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

template <class O, int C>
class AmxBlock : protected Block<O, C> {
  using Base = Block<O, C>;

 public:
  using Base::Base;

 protected:
  using typename Base::T;
  using typename Base::V;
  using Base::d_, Base::N, Base::W, Base::p_, Base::lanes_, Base::w_, Base::head_;

  // True if a tile may be pipelined with its neighbours: all pairs are kept, only the softmax is between its products,
  // and K and V are in tiles.
  HWY_INLINE bool CanPipe(const Tile& tile) const {
    return tile.full && this->raw_ && p_.dropout == 0 && !this->partial_ &&
           (!p_.forgets || this->decays_.IsPlain(this->s_, tile)) && tile.keys.size() == O::kGrid.tile &&
           head_.keys_at == Place::kHead && head_.values_at == Place::kHead &&
           (O::kInfinite || (this->queries_finite_ && w_.keys_finite));
  }

  // Whole tiles, pipelined if all rows have seen a key in this segment, else tile by tile; so also if m must be raised.
  // Rows with decay need that now and then, so they take a few tiles at a time. The tile that follows them has begun
  // already, and its masks are not theirs.
  HWY_NOINLINE void WholeTiles(const Interval& keys, V* m, V* l, T* outputs) {
    const bool masked = std::exchange(this->masked_, false), partly_kept = std::exchange(this->partly_kept_, false);
    const int64_t most = p_.forgets ? kTilesWithDecay * O::kGrid.tile : keys.size();
    for (int64_t at = keys.begin; at < keys.end; at += most) {
      PipeTiles({at, std::min(at + most, keys.end)}, m, l, outputs);
    }
    this->masked_ = masked;
    this->partly_kept_ = partly_kept;
  }

  // One tile. A row's m is the maximum of its first tile and stays: probabilities up to 2^32 do not hurt in bf16, which
  // has f32's exponents. If a later tile exceeds m by more, a growing sum shows it, and m is raised before outputs are
  // added to. A row's m depends on its own logits only.
  template <bool kFlagMasked>
  HWY_NOINLINE void OneTile(const Tile& tile, bool first, V* m, V* l, T* outputs) {
    Run runs[2 * C + 1];
    const int num_runs = this->SplitTile(tile, runs);
    const int64_t origin = tile.keys.begin;
    V unused[C];
    for (int c = 0; c < C; ++c) unused[c] = hn::Zero(d_);
    this->BeginLogits(tile);
    for (int r = 0; r < num_runs; ++r) {
      this->Logits(runs[r], tile, kFlagMasked, unused);
    }
    const bool raised = first || p_.dropout > 0 || AnyUnset(m);
    if (raised) Raise(runs, num_runs, origin, first, m, l, outputs);
    V before[C];
    for (int c = 0; c < C; ++c) before[c] = l[c];
    WeighRuns<kFlagMasked>(runs, num_runs, origin, m, l);
    if (!raised && AnyAbove(l)) {
      for (int c = 0; c < C; ++c) l[c] = before[c];
      Raise(runs, num_runs, origin, first, m, l, outputs);
      WeighRuns<kFlagMasked>(runs, num_runs, origin, m, l);
    }
    if (first && num_runs != 1) Layout().Clear(outputs);
    if (head_.values_at == Place::kTile) {
      O::CopyValues(head_.value_source, tile.keys.begin, tile.keys.end, p_.value_depth, w_.values);
      head_.values.first = tile.keys.begin;
    }
    for (int r = 0; r < num_runs; ++r) {
      const Run& run = runs[r];
      O::template AddValues<kFlagMasked>(AmxProbabilitiesAt(run, origin), W, head_.values, run.begin, run.end,
                                         p_.value_depth, first && num_runs == 1, outputs);
    }
  }

 private:
  HWY_INLINE void PipeTiles(const Interval& keys, V* m, V* l, T* outputs) {
    if (keys.size() > O::kGrid.tile && !AnyUnset(m)) {
      V before[C];
      for (int c = 0; c < C; ++c) before[c] = l[c];
      Layout().Copy(outputs, w_.spare);
      AmxPipeline<O> pipeline(w_, head_, p_.depth, p_.value_depth, outputs);
      if (p_.forgets) {
        pipeline.Run(keys, m, Exponent(), l, [&](int64_t key, V* shift) HWY_ATTR {
          this->BeginLogits(WholeTile(key));
          for (int c = 0; c < C; ++c) {
            shift[c] = this->WithoutRow(m[c], static_cast<size_t>(c));
          }
          return this->decays_.OfKeys();
        });
      } else {
        pipeline.Run(keys, m, Exponent(), l, nullptr);
      }
      if (!AnyAbove(l)) return;
      for (int c = 0; c < C; ++c) l[c] = before[c];
      Layout().Copy(w_.spare, outputs);
    }
    for (int64_t at = keys.begin; at < keys.end; at += O::kGrid.tile) {
      OneTile</*kFlagMasked=*/false>(WholeTile(at), /*first=*/false, m, l, outputs);
    }
  }

  static constexpr int64_t kTilesWithDecay = 8;
  static constexpr int kMaxExponent = 32;  // of a probability
  static constexpr int kMaxLift = 64;      // of m above a tile's maximum, as an exponent

  static Tile WholeTile(int64_t key) {
    Tile tile;
    tile.keys = {key, key + O::kGrid.tile};
    tile.grid = key;
    tile.full = true;
    return tile;
  }

  HWY_INLINE bool AnyUnset(const V* m) const {
    const V none = hn::Set(d_, -std::numeric_limits<T>::infinity());
    auto unset = hn::Eq(m[0], none);
    for (int c = 1; c < C; ++c) unset = hn::Or(unset, hn::Eq(m[c], none));
    return !hn::AllFalse(d_, unset);
  }

  // True if some sum has a probability that Raise() would have made smaller, or many that it would not.
  HWY_INLINE bool AnyAbove(const V* l) const {
    V most = l[0];
    for (int c = 1; c < C; ++c) most = hn::Max(most, l[c]);
    return !hn::AllFalse(d_, hn::Gt(most, hn::Set(d_, T{1u << (kMaxExponent - 1)})));
  }

  // Sets m of rows that had seen no key, and raises it where a tile exceeds it too far.
  HWY_NOINLINE void Raise(const Run* runs, int num_runs, int64_t origin, bool first, V* m, V* l, T* outputs) {
    const V none = hn::Set(d_, -std::numeric_limits<T>::infinity());
    V max[C], rescale[C];
    for (int c = 0; c < C; ++c) max[c] = none;
    for (int r = 0; r < num_runs; ++r) {
      const T* s = this->At(runs[r], origin);
      for (int64_t j = runs[r].begin; j < runs[r].end; ++j, s += W) {
        for (int c = 0; c < C; ++c) {
          max[c] = hn::Max(hn::Load(d_, s + static_cast<size_t>(c) * N), max[c]);
        }
      }
    }
    const V scale = hn::Set(d_, Exponent());
    for (int c = 0; c < C; ++c) {
      max[c] = this->WithRow(max[c], static_cast<size_t>(c));
      const V excess = hn::Mul(hn::Sub(max[c], m[c]), scale);  // NaN if both are -inf
      const auto raise = hn::Gt(excess, hn::Set(d_, static_cast<T>(kMaxExponent)));
      const V raised = hn::IfThenElse(raise, Lifted(max[c], static_cast<size_t>(c)), m[c]);
      rescale[c] = hn::IfThenElse(raise, hs::Exp2(d_, hn::Mul(hn::Sub(m[c], raised), scale)), hn::Set(d_, T{1}));
      m[c] = raised;
      l[c] = hn::Mul(l[c], rescale[c]);
    }
    if (!first) Layout().Scale(false, rescale, outputs);
  }

  // With decay, later keys have larger logits, by the decay since this tile. m anticipates that, so that it need not be
  // raised again and again, as long as probabilities of this tile stay far from the least normal number.
  HWY_INLINE V Lifted(V max, size_t c) const {
    if (!p_.forgets) return max;
    const V none = hn::Set(d_, -std::numeric_limits<T>::infinity());
    const V most = hn::Set(d_, static_cast<T>(kMaxLift) / Exponent());
    const V lift = hn::Min(hn::Neg(this->decays_.OfRow(c)), most);
    return hn::IfThenElse(hn::Eq(max, none), none, hn::Add(max, lift));
  }

  template <bool kFlagMasked>
  HWY_INLINE void WeighRuns(const Run* runs, int num_runs, int64_t origin, const V* m, V* l) {
    V shift[C];
    for (int c = 0; c < C; ++c) {
      shift[c] = this->WithoutRow(this->Shift(m[c]), static_cast<size_t>(c));
    }
    for (int r = 0; r < num_runs; ++r) {
      const Run& run = runs[r];
      T* s = this->At(run, origin);
      uint32_t* p = AmxProbabilitiesAt(run, origin);
      const size_t num_keys = static_cast<size_t>(run.end - run.begin);
      if (p_.dropout == 0) {
        O::template Weigh<W, C, kFlagMasked>(num_keys, s, shift, Exponent(), l, p);
        continue;
      }
      O::template WeighInPlace<W, C, kFlagMasked>(num_keys, s, shift, Exponent(), l);
      ApplyDropout<W>(d_, run, origin, p_, lanes_, w_.logits);
      O::template PutWeights<W, C>(num_keys, s, p);
    }
  }

  // The factor from a logit to the exponent of its probability.
  T Exponent() const { return static_cast<T>((this->raw_ ? this->factor_.of_logits : 1) * hs::kLog2E); }

  uint32_t* AmxProbabilitiesAt(const Run& run, int64_t origin) const {
    return w_.weights + static_cast<size_t>((run.begin - origin) / 2) * W;
  }

  LaneOutputs<O, C> Layout() const { return {static_cast<size_t>(p_.value_depth), this->num_rows_}; }
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_AMX_BLOCK_INL_H_
