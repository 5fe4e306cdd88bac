// Selection of a row's best blocks by their scores, vectorised.
//
// Compiled once per SIMD target. Floats are compared as integers of the same order; the search for the last selected
// one bisects the range of integers, so its cost is bounded whatever the scores are.
#if defined(HEED_PATTERNS_TOP_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_PATTERNS_TOP_BLOCKS_INL_H_
#undef HEED_PATTERNS_TOP_BLOCKS_INL_H_
#else
#define HEED_PATTERNS_TOP_BLOCKS_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::patterns::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Maps floats to integers in the same order, with NaN as -inf and -0 as 0. No float maps to the smallest integer.
template <class D, class V = hn::Vec<D>, class DI = hn::RebindToSigned<D>>
HWY_INLINE hn::Vec<DI> OrderOf(D d, V x) {
  const DI di;
  const hn::RebindToUnsigned<D> du;
  x = hn::IfThenElse(hn::IsNaN(x), hn::Set(d, -std::numeric_limits<hn::TFromD<D>>::infinity()), x);
  x = hn::IfThenZeroElse(hn::Eq(x, hn::Zero(d)), x);
  const auto bits = hn::BitCast(di, x);
  const auto rest = hn::BitCast(di, hn::ShiftRight<1>(hn::BitCast(du, hn::BroadcastSignBit(bits))));
  return hn::Xor(bits, rest);  // flips all bits of negative floats except the sign
}

// The scores of a row as integers of the same order.
template <class D>
class Ranked {
  using T = hn::TFromD<D>;
  using DI = hn::RebindToSigned<D>;
  static constexpr size_t N = hn::MaxLanes(D());

 public:
  using Key = hn::TFromD<DI>;
  static constexpr Key kAbsent = std::numeric_limits<Key>::min(), kKept = std::numeric_limits<Key>::max();

  Ranked(T* scores, size_t n) : scores_(scores), n_(n) {
    auto largest = hn::Set(di_, kAbsent);
    for (size_t i = 0; i < n; i += N) {
      auto keys = OrderOf(d_, hn::LoadU(d_, scores + i));
      if (n - i < N) keys = hn::IfThenElse(hn::FirstN(di_, n - i), keys, hn::Set(di_, kAbsent));
      largest = hn::Max(largest, keys);
      hn::StoreU(hn::BitCast(d_, keys), d_, scores + i);
    }
    largest_ = hn::ReduceMax(di_, largest);
  }

  Key largest() const { return largest_; }
  Key operator[](size_t i) const { return std::bit_cast<Key>(scores_[i]); }
  void Set(size_t i, Key key) { scores_[i] = std::bit_cast<T>(key); }

  size_t NumFrom(Key least) const {
    const auto limit = hn::Set(di_, least);
    size_t count = 0;
    for (size_t i = 0; i < n_; i += N) count += hn::CountTrue(di_, hn::Ge(Load(i), limit));
    return count;
  }

  // Writes the indices of keys of at least `least`, ascending; returns their number.
  int64_t Write(Key least, int32_t* chosen) const {
    const hn::Rebind<int32_t, D> places;
    const auto limit = hn::Set(di_, least);
    size_t count = 0;
    for (size_t i = 0; i < n_; i += N) {
      const auto found = hn::Ge(Load(i), limit);
      const auto at = hn::Compress(hn::Iota(di_, static_cast<Key>(i)), found);
      if constexpr (sizeof(T) == sizeof(int32_t)) {
        hn::StoreU(at, places, chosen + count);
      } else {
        hn::StoreU(hn::DemoteTo(places, at), places, chosen + count);
      }
      count += hn::CountTrue(di_, found);
    }
    return static_cast<int64_t>(count);
  }

 private:
  HWY_INLINE auto Load(size_t i) const { return hn::BitCast(di_, hn::LoadU(d_, scores_ + i)); }

  static constexpr D d_ = {};
  static constexpr DI di_ = {};
  T* scores_;
  size_t n_;
  Key largest_;
};

// Midpoint, rounded down.
template <class Key>
HWY_INLINE Key Midpoint(Key low, Key high) {
  return (low & high) + ((low ^ high) >> 1);
}

// Implements TopBlocks of top_blocks_internal.h.
template <class T>
int64_t ChooseTop(T* scores, int64_t n, int64_t count, std::span<const int64_t> always, int32_t* chosen) {
  using Keys = Ranked<hn::ScalableTag<T>>;
  using Key = typename Keys::Key;
  Keys keys(scores, static_cast<size_t>(n));
  int64_t others = n;
  for (const int64_t block : always) {
    const auto at = static_cast<size_t>(block);
    others -= keys[at] != Keys::kAbsent;
    keys.Set(at, Keys::kAbsent);
  }
  Key least = Keys::kKept;  // smallest selected key
  if (count >= others) {
    least = Keys::kAbsent + 1;
  } else if (count > 0) {
    // Invariant: more than `count` keys are at least `low`, fewer are at least `high`.
    Key low = Keys::kAbsent + 1, high = keys.largest() + 1;
    int64_t above = 0;
    while (high - 1 > low) {
      const Key middle = Midpoint(low, high);
      const auto reach = static_cast<int64_t>(keys.NumFrom(middle));
      if (reach < count) {
        high = middle;
        above = reach;
        continue;
      }
      low = middle;
      if (reach == count) break;
    }
    least = low;
    // More keys than needed have this score: takes the first of them.
    if (high - 1 == low) {
      least = high;
      for (size_t at = 0; above < count; ++at) {
        if (keys[at] != low) continue;
        keys.Set(at, Keys::kKept);
        ++above;
      }
    }
  }
  for (const int64_t block : always) keys.Set(static_cast<size_t>(block), Keys::kKept);
  return keys.Write(least, chosen);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::patterns::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_PATTERNS_TOP_BLOCKS_INL_H_
