// The part of a tile of keys that a pattern keeps for a block of rows, with a query per lane.
//
// Compiled once per SIMD target.
#if defined(HEED_ENGINES_SOFTMAX_BLOCK_KEPT_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BLOCK_KEPT_TILE_INL_H_
#undef HEED_ENGINES_SOFTMAX_BLOCK_KEPT_TILE_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BLOCK_KEPT_TILE_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "heed/engines/softmax/block/lanes-inl.h"
#include "heed/engines/softmax/tile_list.h"
#include "heed/engines/softmax/block_sparse_mask.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

// The kept bits of a tile of kTile keys for C vectors of N rows.
template <class T, int C, size_t N, int64_t kTile>
struct KeptTile {
  using TU = hwy::MakeUnsigned<T>;
  static constexpr size_t W = C * N, kWords = kTile / BlockSparseMask::kKeys;
  static constexpr int64_t kBits = 8 * sizeof(T);

  KeptKeys<W> lists;
  HWY_ALIGN TU bits[kTile / kBits][W] = {};  // a bit per key, by lane

  // Returns how much of a tile is kept. For kSome, the other functions tell which keys.
  HWY_INLINE Cover Find(const Interval& keys) {
    bool whole = true;
    for (int64_t key = keys.begin; whole && key < keys.end; key += BlockSparseMask::kKeys) whole = lists.KeepsAll(key);
    if (whole) return Cover::kAll;
    return Read(keys, [&](int64_t key, const auto& put) { lists.Words(key, put); });
  }

  // Does this from words of each row, whose bits are the keys from `begin` on.
  HWY_INLINE Cover FindWords(const Interval& keys, int64_t begin, const uint64_t (*words)[kWords], size_t num_rows) {
    bool whole = true;
    for (size_t lane = 0; lane < num_rows; ++lane) {
      for (const uint64_t word : words[lane]) whole = whole && ~word == 0;
    }
    if (whole) return Cover::kAll;
    return Read(keys, [&](int64_t key, const auto& put) {
      const auto word = static_cast<size_t>((key - begin) / BlockSparseMask::kKeys);
      const int64_t shift = (key - begin) % BlockSparseMask::kKeys;
      for (size_t lane = 0; lane < num_rows; ++lane) {
        uint64_t own = words[lane][word] >> shift;
        if (shift > 0 && word + 1 < kWords) own |= words[lane][word + 1] << (BlockSparseMask::kKeys - shift);
        put(lane, own);
      }
    });
  }

  // Stores the bits that read(key, put) passes to put(lane, bits): 64 keys from `key` on.
  template <class F>
  HWY_INLINE Cover Read(const Interval& keys, const F& read) {
    uint64_t some = 0, missing = 0;
    for (int64_t key = keys.begin; key < keys.end; key += BlockSparseMask::kKeys) {
      const int64_t beyond = std::max<int64_t>(key + BlockSparseMask::kKeys - keys.end, 0);
      const uint64_t valid = ~uint64_t{0} >> beyond;
      const auto word = static_cast<size_t>((key - keys.begin) / BlockSparseMask::kKeys);
      for (size_t c = 0; c < C; ++c) of_[c][word] = {0, valid};
      TU* at = bits[(key - keys.begin) / kBits];
      read(key, [&](size_t lane, uint64_t row) {
        Vector& of = of_[lane / N][word];
        of.some |= row & valid;
        of.all &= row;
        at[lane] = static_cast<TU>(row);
        if constexpr (kBits < BlockSparseMask::kKeys) at[W + lane] = static_cast<TU>(row >> kBits);
      });
      for (size_t c = 0; c < C; ++c) {
        some |= of_[c][word].some;
        missing |= of_[c][word].all ^ valid;
      }
    }
    return some == 0 ? Cover::kNone : missing == 0 ? Cover::kAll : Cover::kSome;
  }

  // Returns the interval from the first to the last of the tile's keys `keys` that some row of vector c keeps.
  HWY_INLINE Interval Hull(const Interval& keys, size_t c) const {
    Interval hull;
    for (size_t word = 0; word < kWords; ++word) {
      const int64_t begin = keys.begin + static_cast<int64_t>(word) * BlockSparseMask::kKeys;
      if (begin >= keys.end) break;
      const uint64_t some = of_[c][word].some;
      if (some == 0) continue;
      if (hull.empty()) hull.begin = begin + std::countr_zero(some);
      hull.end = begin + BlockSparseMask::kKeys - std::countl_zero(some);
    }
    return hull;
  }

  // Returns whether all of a run is kept, in the tile that begins at `origin`.
  HWY_INLINE bool KeepsAll(const Run& run, int64_t origin) const {
    for (size_t word = 0; word < kWords; ++word) {
      const int64_t begin = origin + static_cast<int64_t>(word) * BlockSparseMask::kKeys;
      const int64_t first = std::clamp<int64_t>(run.begin - begin, 0, BlockSparseMask::kKeys);
      const int64_t end = std::clamp<int64_t>(run.end - begin, 0, BlockSparseMask::kKeys);
      if (first >= end) continue;
      const uint64_t wanted = (~uint64_t{0} >> (BlockSparseMask::kKeys - (end - first))) << first;
      for (size_t c = run.c0; c < run.c1; ++c) {
        if ((of_[c][word].all & wanted) != wanted) return false;
      }
    }
    return true;
  }

 private:
  struct Vector {
    uint64_t some, all;  // any and all of the vector's rows, a bit per key
  };
  Vector of_[C][kWords];
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BLOCK_KEPT_TILE_INL_H_
