// Log decays of a block's logits, tile by tile; decays.h says how their sums F are split.
//
// Compiled once per SIMD target and operand type. For a tile that ends before a row, F = part of the row + part of the
// key. The part of the key is added to each logit. The part of the row is one number for all logits of the row in this
// tile, so it is added to their maximum and taken off the shift that is subtracted from them.
#if defined(HEED_ENGINES_SOFTMAX_BLOCK_DECAYS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BLOCK_DECAYS_INL_H_
#undef HEED_ENGINES_SOFTMAX_BLOCK_DECAYS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BLOCK_DECAYS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "heed/engines/softmax/decays.h"
#include "heed/engines/softmax/block/lanes-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/tile_list.h"
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
  // Sets the row of a lane; lanes must be set in ascending order.
  void SetLane(const Problem& p, const Sequence& s, size_t lane, int64_t head, int64_t position) {
    of_[lane] = &s;
    head_[lane] = head;
    first_[lane] = FirstDecay(s, head);
    one_head_ = lane == 0 || (one_head_ && first_[lane] == first_[0]);
    // Steps beyond the last key do not decay, and a position before the first key sees no key at all.
    const int64_t own = std::clamp<int64_t>(position, s.key_begin - 1, s.key_end - 1) - s.key_begin;
    own_[lane] = static_cast<double>(own);
    int64_t next = own / kTileKeys * kTileKeys;  // the first log decay to add
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

  // Lanes without a row count as after all keys, without decay.
  void EndLanes() {
    for (size_t lane = num_rows_; lane < W; ++lane) {
      own_[lane] = std::numeric_limits<double>::infinity();
    }
    first_row_ = *std::min_element(own_, own_ + W);
  }

  // Returns whether all rows are of one head and behind a whole tile, and all their sums are finite.
  bool IsPlain(const Sequence& s, const Tile& tile) const {
    return one_head_ && countable_ && tile.keys.size() == kTile &&
           first_row_ >= static_cast<double>(tile.grid - s.key_begin + kTile - 1);
  }

  // Sets up what does not depend on the pair. F is in multiples of 1 / unit.
  HWY_NOINLINE void BeginTile(const Problem& p, const Sequence& s, const Tile& tile, double unit);

  // Returns whether every row is at the end of the tile or after it.
  bool BeforeRows() const { return before_rows_; }

  // Returns the part of the rows of vector c.
  HWY_INLINE V OfRow(size_t c) const { return hn::Load(d_, of_row_ + c * N); }

  // Returns whether all rows are of one head, so that a key's part is the same for all.
  bool OfOneHead() const { return one_head_; }
  // Returns the part of a key, if all rows are of one head.
  HWY_INLINE V OfKey(int64_t key) const { return hn::Set(d_, of_key_[key - grid_]); }
  // Returns the parts of the tile's keys.
  const T* OfKeys() const { return of_key_; }

  // Returns x + the part of the key. F = -inf is a mask and wins over a NaN or infinite x, as a bias of -inf does.
  template <bool kFlagMasked>
  HWY_INLINE V Added(V x, V of_key, size_t c) const {
    const V sum = hn::Add(x, of_key);
    if constexpr (!kFlagMasked) return sum;
    const V none = hn::Set(d_, -std::numeric_limits<T>::infinity());
    return hn::IfThenElse(hn::Eq(hn::Add(of_key, OfRow(c)), none), none, sum);
  }

  // Adds the parts of keys to logits in memory, where they differ between rows (decay_logits-inl.h).
  template <int kVectors, bool kFlagMasked>
  HWY_NOINLINE void AddByRow(const Problem& p, const Run& run, int64_t origin, T* HWY_RESTRICT s,
                             V* HWY_RESTRICT max) const;

  // For the gradient: where a lane's sums begin in the tables, its row's position, and the end of the tile, both
  // counted from the first valid key.
  int64_t First(size_t lane) const { return first_[lane]; }
  double Own(size_t lane) const { return own_[lane]; }
  int64_t TileEnd() const { return begin_ + kTile; }

 private:
  // Returns the parts of a key for the rows of vector c.
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

  // Stores the log decay at a key for each row; 0 for rows before it.
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
  bool one_head_ = true;   // of one sequence too
  bool countable_ = true;  // no row has a log decay of -inf or NaN before it
  const Sequence* of_[W];
  int64_t head_[W], first_[W];
  WideSum sums_[W];  // sum up to the row
  HWY_ALIGN double own_[W], high_[W], low_[W], more_[W];
  double first_row_ = 0;

  int64_t grid_ = 0, begin_ = 0, end_ = 0;  // the current tile; begin_ from the first valid key
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

#endif  // HEED_ENGINES_SOFTMAX_BLOCK_DECAYS_INL_H_
