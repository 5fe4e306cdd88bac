// Sets up log decays for a tile, and adds them row by row to logits in memory, where rows are of several heads or are
// inside the tile (the causal diagonal).
//
// Compiled once per SIMD target and operand type.
#if defined(HEED_ENGINES_SOFTMAX_BLOCK_DECAY_LOGITS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BLOCK_DECAY_LOGITS_INL_H_
#undef HEED_ENGINES_SOFTMAX_BLOCK_DECAY_LOGITS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BLOCK_DECAY_LOGITS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "heed/engines/softmax/block/decays-inl.h"
#include "heed/engines/softmax/decays.h"
#include "heed/engines/softmax/block/logits-inl.h"
#include "heed/engines/softmax/problem.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class O, int C>
void Decays<O, C>::BeginTile(const Problem& p, const Sequence& s, const Tile& tile, double unit) {
  grid_ = tile.grid;
  begin_ = tile.grid - s.key_begin;
  end_ = std::min(tile.grid + kTile, s.key_end);
  unit_ = unit;
  const auto last = static_cast<double>(begin_ + kTile - 1);
  before_rows_ = first_row_ >= last;

  std::fill(of_row_, of_row_ + W, T{0});
  WideSum until;
  for (size_t lane = 0; lane < num_rows_; ++lane) {
    if (lane == 0 || first_[lane] != first_[lane - 1]) {
      until = SumUntil(p, *of_[lane], head_[lane], tile.grid + kTile);
      more_[lane] = 0;
      if constexpr (kTile > kTileKeys) {
        static_assert(kTile == 2 * kTileKeys);
        more_[lane] = Between(SumUntil(p, *of_[lane], head_[lane], tile.grid + kTileKeys), until);
      }
      if (one_head_ && countable_) break;
    } else {
      more_[lane] = more_[lane - 1];
    }
    of_row_[lane] = static_cast<T>(Between(until, sums_[lane]) * unit);
  }
  if (one_head_ && countable_) {
    for (size_t lane = 0; lane < num_rows_; ++lane) {
      of_row_[lane] = static_cast<T>(((high_[lane] - until.high) + (low_[lane] - until.low)) * unit);
    }
  }
  if (!before_rows_) {
    for (size_t lane = 0; lane < num_rows_; ++lane) {
      if (own_[lane] < last) of_row_[lane] = 0;  // AddByRow() adds all of F
    }
  }
  if (!one_head_) return;
  in_tile_ = p.decays.in_tile + first_[0] + begin_;
  const int64_t count = std::min(kTile, DecayEntries(*of_[0]) - begin_);
  for (int64_t i = 0; i < count; ++i) {
    of_key_[i] = static_cast<T>((in_tile_[i] + (i < kTile - kTileKeys ? more_[0] : 0)) * unit);
  }
  if (before_rows_) return;
  for (int64_t key = std::max(grid_, s.key_begin + 1); key < end_; ++key) {
    decays_[key - grid_] = LogDecay(p, s, head_[0], key);
  }
}

// AddByRow() for a tile that has rows inside: these get all of F, summed backwards from the row's position.
template <class O, int C>
template <int kVectors, bool kFlagMasked>
HWY_INLINE void Decays<O, C>::AddNear(const Problem& p, const Run& run, int64_t origin, T* HWY_RESTRICT s,
                                      V* HWY_RESTRICT max) const {
  const hn::ScalableTag<double> wide;
  constexpr size_t kWide = hn::MaxLanes(wide);
  HWY_ALIGN double sums[W] = {};
  HWY_ALIGN T near[W];
  const V last = hn::Set(d_, static_cast<T>(kTile - 1));
  V from_begin[kVectors];  // each row's position from the start of the tile
  HWY_ALIGN T relative[W];
  for (size_t lane = 0; lane < W; ++lane) {
    relative[lane] =
        static_cast<T>(std::clamp<double>(own_[lane] - static_cast<double>(begin_), -1, static_cast<double>(kTile)));
  }
  for (int c = 0; c < kVectors; ++c) {
    from_begin[c] = hn::Load(d_, relative + (run.c0 + static_cast<size_t>(c)) * N);
    max[c] = hn::Set(d_, -std::numeric_limits<T>::infinity());
  }
  for (int64_t key = end_ - 1; key >= run.begin; --key) {
    HWY_ALIGN double decays[W];
    if (!one_head_ && key + 1 < end_) OfRows(p, key + 1, decays);
    const auto at = hn::Set(wide, static_cast<double>(key - grid_ + begin_));
    for (size_t lane = run.c0 * N; lane < run.c1 * N; lane += kWide) {
      auto sum = hn::Load(wide, sums + lane);
      if (key + 1 < end_) {
        const auto decay = one_head_ ? hn::Set(wide, decays_[key + 1 - grid_]) : hn::Load(wide, decays + lane);
        sum = hn::IfThenElseZero(hn::Lt(at, hn::Load(wide, own_ + lane)), hn::Add(sum, decay));
        hn::Store(sum, wide, sums + lane);
      }
      StoreNarrow(hn::Mul(sum, hn::Set(wide, unit_)), near + lane);
    }
    if (key >= run.end) continue;
    T* HWY_RESTRICT row = s + static_cast<size_t>(key - origin) * W + run.c0 * N;
    for (int c = 0; c < kVectors; ++c) {
      const size_t vector = run.c0 + static_cast<size_t>(c);
      const V forgotten =
          hn::IfThenElse(hn::Ge(from_begin[c], last), one_head_ ? OfKey(key) : OfKeyByRow(p, key, vector),
                         hn::Load(d_, near + vector * N));
      T* HWY_RESTRICT to = row + static_cast<size_t>(c) * N;
      const V x = Added<kFlagMasked>(hn::Load(d_, to), forgotten, vector);
      hn::Store(x, d_, to);
      max[c] = hn::Max(x, max[c]);
    }
  }
}

template <class O, int C>
template <int kVectors, bool kFlagMasked>
void Decays<O, C>::AddByRow(const Problem& p, const Run& run, int64_t origin, T* HWY_RESTRICT s,
                            V* HWY_RESTRICT max) const {
  if (!before_rows_) return AddNear<kVectors, kFlagMasked>(p, run, origin, s, max);
  Rewrite<W, kVectors>(d_, run, origin, s, max, [&](V x, int64_t key, int c) HWY_ATTR {
    const size_t vector = run.c0 + static_cast<size_t>(c);
    return Added<kFlagMasked>(x, OfKeyByRow(p, key, vector), vector);
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BLOCK_DECAY_LOGITS_INL_H_
