// The logits of a block of query rows, tile by tile: the first step of every pass of exact attention.
//
// Compiled once per SIMD target, operand type and number of vectors. Functions that are only declared here are defined
// in block_parts-inl.h. A tile of logits is S[key][lane] = K Q^T, in cache, with soft cap, biases and masks applied.
#if defined(HEED_ENGINES_SOFTMAX_BLOCK_BLOCK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BLOCK_BLOCK_INL_H_
#undef HEED_ENGINES_SOFTMAX_BLOCK_BLOCK_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BLOCK_BLOCK_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "heed/engines/softmax/block/block_rows-inl.h"
#include "heed/engines/softmax/block/lanes-inl.h"
#include "heed/engines/softmax/block/operands-inl.h"
#include "heed/engines/softmax/block/plan-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/tile_list.h"
#include "heed/simd/tile-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

template <class O, int C>
class Block : protected BlockRows<O, C> {
  using Base = BlockRows<O, C>;

 public:
  using Base::Base;
  using Base::Join;

 protected:
  using typename Base::D;
  using typename Base::T;
  using typename Base::V;
  using Base::d_, Base::N, Base::W, Base::p_, Base::s_, Base::head_, Base::w_, Base::num_rows_, Base::lanes_,
      Base::decays_, Base::keys_until_, Base::raw_, Base::queries_finite_, Base::factor_, Base::hull_, Base::masked_,
      Base::partly_kept_, Base::kept_, Base::vectors_;

  // Splits a tile into runs: ranges of keys that the same range of vectors sees, in ascending order. A vector outside
  // of a run sees none of its keys, so both products leave it out.
  HWY_INLINE int SplitTile(const Tile& tile, Run* runs) const {
    if (tile.full && !partly_kept_) {
      runs[0] = {tile.keys.begin, tile.keys.end, 0, vectors_};
      return 1;
    }
    // The ends of a run are on steps of keys, as the ends of the tile are.
    const auto up = [&](int64_t key) { return std::min(tile.keys.end, key + ((tile.grid - key) & (O::kKeyStep - 1))); };
    const auto down = [&](int64_t key) { return key - (key - tile.grid) % O::kKeyStep; };
    Interval seen[C];
    for (size_t c = 0; c < C; ++c) {
      Interval hull = hull_[c];
      if (partly_kept_) {
        const Interval kept = kept_.Hull(tile.keys, c);
        hull = {std::max(hull.begin, kept.begin), std::min(hull.end, kept.end)};
        if (hull.empty()) hull = {};
      }
      seen[c] = {down(std::max(hull.begin, tile.keys.begin)), up(std::max(hull.end, tile.keys.begin))};
    }
    if constexpr (Base::kParts > 1) {
      for (size_t c = 0; c < C; c += hs::kShapes.tile_vectors) JoinIntervals(seen + c);
    }
    int count = 0;
    for (int64_t at = tile.keys.begin; at < tile.keys.end;) {
      int64_t end = tile.keys.end;
      size_t c0 = C, c1 = 0;
      for (size_t c = 0; c < C; ++c) {
        if (seen[c].begin <= at && at < seen[c].end) {
          c0 = std::min(c0, c);
          c1 = c + 1;
        }
        if (seen[c].begin > at) end = std::min(end, seen[c].begin);
        if (seen[c].end > at) end = std::min(end, seen[c].end);
      }
      c0 = c0 / O::kLaneVectors * O::kLaneVectors;
      c1 = (c1 + O::kLaneVectors - 1) / O::kLaneVectors * O::kLaneVectors;
      if (c0 < c1) runs[count++] = {at, end, c0, c1};
      at = end;
    }
    return count;
  }

  // Gives all vectors of one register tile the union of the keys that any of them sees, so that runs stay long and a
  // register tile is computed as a whole.
  HWY_INLINE static void JoinIntervals(Interval* seen) {
    Interval all;
    for (int c = 0; c < hs::kShapes.tile_vectors; ++c) {
      if (seen[c].empty()) continue;
      all = all.empty() ? seen[c] : Interval{std::min(all.begin, seen[c].begin), std::max(all.end, seen[c].end)};
    }
    std::fill(seen, seen + hs::kShapes.tile_vectors, all);
  }

  // Returns whether these runs are the whole tile.
  HWY_INLINE bool IsWhole(const Tile& tile, const Run* runs, int num_runs) const {
    return num_runs == 1 && runs[0].c0 == 0 && runs[0].c1 == vectors_ && runs[0].begin == tile.keys.begin &&
           runs[0].end == tile.keys.end;
  }

  // Calls f(std::integral_constant<int, number of vectors>, part) for the parts of a run: as many as possible have the
  // vectors of a register tile, the last one has what is left.
  template <class F>
  HWY_INLINE static void ForParts(const Run& run, const F& f) {
    if constexpr (O::kLaneVectors == C) {
      f(std::integral_constant<int, C>(), run);
    } else {
      constexpr size_t kMost = std::min(C, hs::kShapes.tile_vectors);
      for (size_t c = run.c0; c < run.c1; c += kMost) {
        const size_t count = std::min(kMost, run.c1 - c);
        const Run part = {run.begin, run.end, c, c + count};
        if constexpr (kMost >= 4) {
          if (count == 4) {
            f(std::integral_constant<int, 4>(), part);
            continue;
          }
          if (count == 3) {
            f(std::integral_constant<int, 3>(), part);
            continue;
          }
        }
        if (count == 2) {
          f(std::integral_constant<int, 2>(), part);
        } else {
          f(std::integral_constant<int, 1>(), part);
        }
      }
    }
  }

  // Computes S of a run, with the terms in their normative order, and takes its maximum into max. With flag_masked,
  // pairs masked by a bias or a decay of -inf get -inf even if the logit is NaN or infinite.
  HWY_NOINLINE void Logits(const Run& run, const Tile& visited, bool flag_masked, V* max);

  // Must be called before the logits of a tile are computed.
  HWY_INLINE void BeginLogits(const Tile& tile) {
    if (p_.forgets) decays_.BeginTile(p_, s_, tile, raw_ ? 1 / factor_.of_logits : 1);
  }

  // Logits of a tile contain only the keys' part of the log decay (decays-inl.h). WithRow() adds the row's part to a
  // maximum of them, and WithoutRow() takes it off a number to subtract from them.
  HWY_INLINE V WithRow(V max, size_t c) const {
    if (!p_.forgets) return max;
    const V none = hn::Set(d_, -std::numeric_limits<T>::infinity());
    return hn::IfThenElse(hn::Eq(max, none), none, hn::Add(max, decays_.OfRow(c)));
  }
  HWY_INLINE V WithoutRow(V shift, size_t c) const { return p_.forgets ? hn::Sub(shift, decays_.OfRow(c)) : shift; }

  // Returns the number to subtract from logits: the maximum, or 0 while it is -inf.
  HWY_INLINE V Shift(V max) const {
    const V none = hn::Set(d_, -std::numeric_limits<T>::infinity());
    return hn::IfThenElse(hn::Eq(max, none), hn::Zero(d_), max);
  }

  T* At(const Run& run, int64_t origin) const {
    return w_.logits + static_cast<size_t>(run.begin - origin) * W + run.c0 * N;
  }

  // Computes out[key][lane] = f(sum_e rows[key][e] lanes[e][lane], key, vector) for a run. Calls before(j, count)
  // before the rows [j, j + count) of the run.
  template <int kVectors, class Before, class F>
  HWY_INLINE void Products(const Run& run, const typename O::Query* lanes, const Operand<typename O::Key>& rows,
                           int64_t depth, T* out, V* max, const Before& before, const F& f) {
    hs::ForTiles<hs::TileRows<kVectors>()>(
        0, static_cast<size_t>(run.end - run.begin), [&](auto count, size_t j) HWY_ATTR {
          const int64_t key = run.begin + static_cast<int64_t>(j);
          before(j, size_t{count.value});
          O::template Logits<count.value, kVectors>(lanes + run.c0 * N, W, rows, key, static_cast<size_t>(depth),
                                                    out + j * W, max,
                                                    [&](V x, int r, int c) HWY_ATTR { return f(x, key + r, c); });
        });
  }

  // Computes the same products with AMX tiles, without f.
  HWY_INLINE void AmxProducts(const typename O::Query* lanes, const Operand<typename O::Key>& rows, const Run& run,
                              int64_t depth, T* out, bool finite) {
    O::LogitTiles(lanes, W, rows, run.begin, run.end, depth, out);
    if (!O::kInfinite && !finite) {
      O::RepeatNaN(lanes, W, rows, run.begin, run.end, depth, W, out);
    }
  }

 private:
  template <int kVectors>
  HWY_INLINE void VectorLogits(const Run& run, const Tile& visited, bool flag_masked, V* m);
  template <int kVectors, class F>
  HWY_INLINE void LogitProducts(const Run& run, int64_t origin, V* max, const F& f);
  template <int kVectors>
  HWY_INLINE void AddBiasAndMasks(const Run& run, const Tile& visited, bool flag_masked, V* m);
  HWY_INLINE void PrefetchBias(size_t begin, size_t end, int64_t key) const;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BLOCK_BLOCK_INL_H_
