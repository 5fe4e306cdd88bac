// Choosing the best blocks of a row by their scores, on vectors.
//
// Compiled once per SIMD target. Floats whose bits are those of integers in the same order are compared as these; the
// search for the last one that is chosen halves the range of integers, whatever the scores are, so that its cost has a
// bound.
#if defined(HEED_OPS_SPARSE_COMMON_TOP_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_OPS_SPARSE_COMMON_TOP_BLOCKS_INL_H_
#undef HEED_OPS_SPARSE_COMMON_TOP_BLOCKS_INL_H_
#else
#define HEED_OPS_SPARSE_COMMON_TOP_BLOCKS_INL_H_
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

// Integers in the order of floats, NaN in the place of -inf and -0 in that of 0. The smallest integer is no float's.
template <class D, class V = hn::Vec<D>, class DI = hn::RebindToSigned<D>>
HWY_INLINE hn::Vec<DI> OrderOf(D d, V x) {
  const DI di;
  const hn::RebindToUnsigned<D> du;
  x = hn::IfThenElse(hn::IsNaN(x), hn::Set(d, -std::numeric_limits<hn::TFromD<D>>::infinity()), x);
  x = hn::IfThenZeroElse(hn::Eq(x, hn::Zero(d)), x);
  const auto bits = hn::BitCast(di, x);
  const auto rest = hn::BitCast(di, hn::ShiftRight<1>(hn::BitCast(du, hn::BroadcastSignBit(bits))));
  return hn::Xor(bits, rest);  // of negative floats all bits but the sign
}

// The scores of a row, each in the place of the float that it orders as.
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

  // Writes where keys are at least this, ascending; returns how many.
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

// Halfway, rounded down.
template <class Key>
HWY_INLINE Key Midpoint(Key low, Key high) {
  return (low & high) + ((low ^ high) >> 1);
}

// What TopBlocks of top_blocks_internal.h says.
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
  Key least = Keys::kKept;  // of the keys that are chosen
  if (count >= others) {
    least = Keys::kAbsent + 1;
  } else if (count > 0) {
    // More than `count` reach `low`, fewer `high`.
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
    // Fewer than have this score: the first of them.
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

#endif  // HEED_OPS_SPARSE_COMMON_TOP_BLOCKS_INL_H_
