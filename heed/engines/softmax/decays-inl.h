// What log decays add to a block's logits, tile by tile; decays.h says how they are summed.
//
// Compiled once per SIMD target and operand type. Of a tile that lies before a row, F = part of
// the row + part of the key: the latter is added to each logit, the former is one number for the
// row's logits of that tile, which joins their maximum and what is subtracted from them.
#if defined(HEED_ENGINES_SOFTMAX_DECAYS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_DECAYS_INL_H_
#undef HEED_ENGINES_SOFTMAX_DECAYS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_DECAYS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "heed/engines/softmax/decays.h"
#include "heed/engines/softmax/lanes-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/visit.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class O, int C>
class Decays {
  using T = typename O::Compute;
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;
  static constexpr size_t N = hn::MaxLanes(D()), W = C * N;
  static constexpr int64_t kTile = O::kGrid.tile;

 public:
  // The row of a lane; lanes in turn.
  void SetLane(const Problem& p, const Sequence& s, size_t lane, int64_t head, int64_t position) {
    of_[lane] = &s;
    head_[lane] = head;
    first_[lane] = FirstDecay(s, head);
    one_head_ = lane == 0 || (one_head_ && first_[lane] == first_[0]);
    // Beyond the last key nothing is forgotten, and before the first one there is nothing to be.
    const int64_t own = std::clamp<int64_t>(position, s.key_begin - 1, s.key_end - 1) - s.key_begin;
    own_[lane] = static_cast<double>(own);
    int64_t next = own / kTileKeys * kTileKeys;  // to be added
    const bool follows = lane > 0 && first_[lane] == first_[lane - 1] && own_[lane - 1] + 1 == own_[lane] && next < own;
    if (follows) next = own;
    sums_[lane] = follows ? sums_[lane - 1] : own < 0 ? WideSum() : SumUntil(p, s, head, s.key_begin + next);
    for (next = std::max<int64_t>(next, 1); next <= own; ++next) {
      sums_[lane].Add(LogDecay(p, s, head, s.key_begin + next));
    }
    countable_ = (lane == 0 || countable_) && sums_[lane].cuts == 0 && sums_[lane].broken == 0;
    high_[lane] = sums_[lane].high;
    low_[lane] = sums_[lane].low;
    num_rows_ = lane + 1;
  }

  // Lanes without a row stand after all keys, where nothing was forgotten.
  void EndLanes() {
    for (size_t lane = num_rows_; lane < W; ++lane) {
      own_[lane] = std::numeric_limits<double>::infinity();
    }
    first_row_ = *std::min_element(own_, own_ + W);
  }

  // Whether all rows, of one head, stand behind a whole tile, and all that they have forgotten are
  // numbers.
  bool IsPlain(const Sequence& s, const Tile& tile) const {
    return one_head_ && countable_ && tile.keys.size() == kTile &&
           first_row_ >= static_cast<double>(tile.grid - s.key_begin + kTile - 1);
  }

  // What does not depend on the pair. F is in multiples of 1 / unit.
  HWY_NOINLINE void BeginTile(const Problem& p, const Sequence& s, const Tile& tile, double unit);

  // Whether every row stands at the end of the tile or after it.
  bool BeforeRows() const { return before_rows_; }

  // The part of the rows of vector c.
  HWY_INLINE V OfRow(size_t c) const { return hn::Load(d_, of_row_ + c * N); }

  // Whether all rows are of one head, to which keys have the same part.
  bool OfOneHead() const { return one_head_; }
  // The part of a key, of one head.
  HWY_INLINE V OfKey(int64_t key) const { return hn::Set(d_, of_key_[key - grid_]); }
  // Those of the tile's keys.
  const T* OfKeys() const { return of_key_; }

  // x + the part of the key. Where F is -inf it is a mask and wins over NaN and infinities, as a
  // bias does.
  template <bool kFlagMasked>
  HWY_INLINE V Added(V x, V of_key, size_t c) const {
    const V sum = hn::Add(x, of_key);
    if constexpr (!kFlagMasked) return sum;
    const V none = hn::Set(d_, -std::numeric_limits<T>::infinity());
    return hn::IfThenElse(hn::Eq(hn::Add(of_key, OfRow(c)), none), none, sum);
  }

  // Adds the part of keys to logits in memory, where it is not the same to all rows (decay_logits-inl.h).
  template <int kVectors, bool kFlagMasked>
  HWY_NOINLINE void AddByRow(const Problem& p, const Run& run, int64_t origin, T* HWY_RESTRICT s,
                             V* HWY_RESTRICT max) const;

  // What a gradient needs to know of a lane: where its sums begin, and the row's position and a
  // tile's end, counted from the first valid key.
  int64_t First(size_t lane) const { return first_[lane]; }
  double Own(size_t lane) const { return own_[lane]; }
  int64_t TileEnd() const { return begin_ + kTile; }

 private:
  // The part of a key, by row of vector c.
  HWY_NOINLINE V OfKeyByRow(const Problem& p, int64_t key, size_t c) const {
    HWY_ALIGN T of_key[N];
    const int64_t i = key - grid_;
    for (size_t k = 0; k < N; ++k) {
      const size_t lane = c * N + k;
      of_key[k] = 0;
      if (lane >= num_rows_) continue;
      const double in_tile = p.decays.in_tile[first_[lane] + begin_ + i];
      of_key[k] = static_cast<T>((in_tile + (i < kTile - kTileKeys ? more_[lane] : 0)) * unit_);
    }
    return hn::Load(d_, of_key);
  }

  template <int kVectors, bool kFlagMasked>
  HWY_INLINE void AddNear(const Problem& p, const Run& run, int64_t origin, T* HWY_RESTRICT s,
                          V* HWY_RESTRICT max) const;

  // The log decays of a key, of rows that stand at it or after it.
  void OfRows(const Problem& p, int64_t key, double* HWY_RESTRICT decays) const {
    const auto at = static_cast<double>(key - grid_ + begin_);
    for (size_t lane = 0; lane < W; ++lane) {
      const bool counts = lane < num_rows_ && at <= own_[lane];
      decays[lane] = counts ? LogDecay(p, *of_[lane], head_[lane], key) : 0;
    }
  }

  template <class VW>
  static HWY_INLINE void StoreNarrow(VW x, T* to) {
    if constexpr (sizeof(T) == sizeof(double)) {
      hn::Store(x, d_, to);
    } else {
      const hn::Rebind<float, hn::ScalableTag<double>> narrow;
      hn::StoreU(hn::DemoteTo(narrow, x), narrow, to);
    }
  }

  static constexpr D d_{};
  size_t num_rows_ = 0;
  bool one_head_ = true;   // of one sequence: keys are the same to all lanes
  bool countable_ = true;  // no row has a log decay before it that cannot be added
  const Sequence* of_[W];
  int64_t head_[W], first_[W];
  WideSum sums_[W];  // up to the row
  HWY_ALIGN double own_[W], high_[W], low_[W], more_[W];
  double first_row_ = 0;

  int64_t grid_ = 0, begin_ = 0, end_ = 0;  // of the tile; begin_ from the first valid key
  double unit_ = 1;
  bool before_rows_ = true;
  const double* in_tile_ = nullptr;
  HWY_ALIGN T of_row_[W];
  HWY_ALIGN T of_key_[kTile];
  double decays_[kTile];
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_DECAYS_INL_H_
