// Gradients of log decays: for each step s, the sum of dS over the pairs j < s <= p, for the rows of a block.
//
// Compiled once per SIMD target and operand type. Within a tile of keys, each step s gets the sums over the keys j of
// the tile before it. A row's sum over the whole tile counts for every s between the end of the tile and the row. It is
// added once at the tile's end and, later, subtracted once at the row's position: a difference array.
#if defined(HEED_ENGINES_SOFTMAX_BACKWARD_DECAY_GRADIENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BACKWARD_DECAY_GRADIENTS_INL_H_
#undef HEED_ENGINES_SOFTMAX_BACKWARD_DECAY_GRADIENTS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BACKWARD_DECAY_GRADIENTS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "heed/engines/softmax/block/decays-inl.h"
#include "heed/engines/softmax/problem.h"
#include "heed/engines/softmax/tile_list.h"
#include "heed/engines/softmax/wide_sum.h"
#include "heed/simd/transpose-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

template <class O, int C>
class DecayGradients {
  using T = typename O::Compute;
  using D = hn::ScalableTag<T>;
  using V = hn::Vec<D>;
  static constexpr D d_{};
  static constexpr size_t N = hn::MaxLanes(D()), W = C * N;
  static constexpr int64_t kTile = O::kGrid.tile;

 public:
  // `of_keys` and `of_tiles` are the tables of all keys and tiles; Add() adds to them.
  DecayGradients(const Decays<O, C>& decays, T* of_keys, WideSum* of_tiles)
      : decays_(decays), of_keys_(of_keys), of_tiles_(of_tiles) {}

  void Begin() { std::fill(of_rows_, of_rows_ + W, WideSum()); }

  // Returns the sum over all tiles that end before the row.
  const WideSum& OfRow(size_t lane) const { return of_rows_[lane]; }

  // Adds dS[key][lane] of a tile.
  HWY_INLINE void Add(const Tile& tile, const Sequence& s, const T* d_logits, size_t num_rows) {
    const bool all_after = decays_.BeforeRows();
    const int64_t first_key = tile.keys.begin - s.key_begin;
    const int64_t end = std::min(decays_.TileEnd(), s.key_end - s.key_begin);
    HWY_ALIGN T sums[W] = {}, own[W];
    for (size_t lane = 0; lane < W; ++lane) {
      const double from = lane < num_rows ? decays_.Own(lane) - static_cast<double>(first_key) : 0;
      own[lane] = static_cast<T>(std::clamp<double>(from, 0, static_cast<double>(kTile)));
    }
    for (int64_t key = first_key; key < end; key += int64_t{N}) {
      const auto count = static_cast<size_t>(std::min<int64_t>(N, end - 1 - key));  // steps s in the tile
      for (size_t c = 0; c * N < num_rows; ++c) {
        V sum = hn::Load(d_, sums + c * N), v[N];
        for (size_t i = 0; i < N; ++i) {
          const int64_t at = key - first_key + static_cast<int64_t>(i);
          if (at < tile.keys.size()) {
            sum = hn::Add(sum, hn::Load(d_, d_logits + static_cast<size_t>(at) * W + c * N));
          }
          v[i] = sum;
          if (all_after) continue;
          const auto stands = hn::Lt(hn::Set(d_, static_cast<T>(at)), hn::Load(d_, own + c * N));
          v[i] = hn::IfThenElseZero(stands, sum);
        }
        hn::Store(sum, d_, sums + c * N);
        hs::Transpose(d_, v);
        for (size_t i = 0; i < std::min(N, num_rows - c * N);) {  // rows of one head are added together
          const int64_t first = decays_.First(c * N + i);
          V of_head = v[i];
          while (++i < N && c * N + i < num_rows && decays_.First(c * N + i) == first) {
            of_head = hn::Add(of_head, v[i]);
          }
          T* to = of_keys_ + first + key + 1;
          hn::StoreN(hn::Add(hn::LoadN(d_, to, count), of_head), d_, to, count);
        }
      }
    }
    for (size_t lane = 0; lane < num_rows; ++lane) {
      if (decays_.Own(lane) >= static_cast<double>(decays_.TileEnd())) AddPassing(lane, sums[lane]);
    }
  }

  // Adds a whole tile that ends before all rows, which are of one head. key_sums has N partial sums of dS per key,
  // row_sums the sums by row.
  HWY_INLINE void AddPlain(const T* key_sums, const V* row_sums, size_t num_rows) {
    T* to = of_keys_ + decays_.First(0) + decays_.TileEnd() - kTile + 1;
    V sum = hn::Zero(d_);
    for (int64_t key = 0; key < kTile; key += int64_t{N}) {
      V v[N];
      for (size_t i = 0; i < N; ++i, key_sums += N) {
        v[i] = sum = hn::Add(sum, hn::Load(d_, key_sums));
      }
      hs::Transpose(d_, v);
      for (size_t i = 1; i < N; ++i) v[0] = hn::Add(v[0], v[i]);
      const auto count = static_cast<size_t>(std::min<int64_t>(N, kTile - 1 - key));
      hn::StoreN(hn::Add(hn::LoadN(d_, to + key, count), v[0]), d_, to + key, count);
    }
    HWY_ALIGN T sums[W];
    for (int c = 0; c < C; ++c) hn::Store(row_sums[c], d_, sums + static_cast<size_t>(c) * N);
    for (size_t lane = 0; lane < num_rows; ++lane) AddPassing(lane, sums[lane]);
  }

 private:
  // Adds a row's sum over a tile that ends before the row.
  void AddPassing(size_t lane, T of_tile) {
    const auto sum = static_cast<double>(of_tile);
    of_tiles_[(decays_.First(lane) + decays_.TileEnd()) / kTileKeys - 1].Add(sum);
    of_rows_[lane].Add(sum);
  }

  const Decays<O, C>& decays_;
  T* const of_keys_;
  WideSum* const of_tiles_;
  WideSum of_rows_[W];
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BACKWARD_DECAY_GRADIENTS_INL_H_
