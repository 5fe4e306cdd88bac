// The selection of blocks for each row: probabilities of compressed keys, for 64 rows of a key head at a time, are
// summed to importances of blocks, and the largest are selected.
//
// Rows are broadcast and compressed keys are in vector lanes, transposed once per 64 rows. The cost is bounded by 2 D
// flops and one exponential per pair. Each probability is one chain of operations, so a selection does not depend on
// the number or place of the rows.
#include "heed/core/targets.h"
// After targets.h:
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "heed/core/carver.h"
#include "heed/core/dispatch.h"
#include "heed/patterns/pattern_internal.h"
#include "heed/patterns/top_blocks_internal.h"
#include "heed/ops/sparse/nsa/nsa_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/sparse/nsa/nsa_choice.cc"  // this file
#include "hwy/foreach_target.h"                                 // IWYU pragma: keep
#include "hwy/highway.h"
// After highway.h:
#include "heed/patterns/top_blocks-inl.h"
#include "heed/simd/convert-inl.h"
#include "heed/simd/math-inl.h"
#include "heed/simd/tile-inl.h"
#include "heed/simd/transpose-inl.h"

#ifndef HEED_OPS_SPARSE_NSA_CHOICE_ONCE_
#define HEED_OPS_SPARSE_NSA_CHOICE_ONCE_
namespace heed::nsa {

inline constexpr int64_t kKeys = 64;  // compressed keys per tile
inline constexpr int64_t kRows = 64;  // approximate number of rows, over all heads of a group

// Rows of the call per task.
inline int64_t RowsOfTask(const Shape& s) { return std::max<int64_t>(kRows / s.group(), 1); }

// Memory of one thread: queries, keys by channel, their products, and the probabilities and importances of each row.
template <class T>
struct Scratch {
  T *queries, *keys, *products, *probabilities, *importances;
  int32_t* best;
  int64_t row;  // probabilities per row
  int64_t bytes;

  Scratch(void* base, const Shape& s) : row((s.windows + kKeys - 1) / kKeys * kKeys) {
    const int64_t rows = RowsOfTask(s);
    Carver carver(base);
    carver.Next(queries, rows * s.group() * s.D);
    carver.Next(keys, (s.D + 15) / 16 * 16 * kKeys);
    carver.Next(products, rows * s.group() * kKeys);
    carver.Next(probabilities, rows * row);
    carver.Next(importances, patterns::ScoreRoom(s.Tk / s.block + 1));
    carver.Next(best, patterns::ScoreRoom(std::max(s.Tk / s.block + 1, s.columns)));
    bytes = carver.bytes();
  }
};

// The sum of the probabilities of windows, each times the number of tokens that it shares with block b.
template <class T>
T Importance(const Shape& s, const T* probabilities, int64_t b) {
  const int64_t begin = b * s.block, end = begin + s.block;
  const int64_t first = begin < s.length ? 0 : (begin - s.length) / s.stride + 1;
  const int64_t last = std::min((end - 1) / s.stride, s.windows - 1);
  T sum = 0;
  for (int64_t w = first; w <= last; ++w) {
    const int64_t common = std::min(w * s.stride + s.length, end) - std::max(w * s.stride, begin);
    sum += static_cast<T>(common) * probabilities[w];
  }
  return sum;
}

}  // namespace heed::nsa
#endif  // HEED_OPS_SPARSE_NSA_CHOICE_ONCE_

HWY_BEFORE_NAMESPACE();
namespace heed::nsa::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// products[i][j] = sum_e queries[i][e] keys[e][j], e ascending.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void Multiply(D d, const T* queries, const T* keys, int64_t depth, int64_t rows, T* products) {
  constexpr size_t N = hn::MaxLanes(D());
  std::fill_n(products, rows * kKeys, T{0});
  hs::ForTiles<hs::kShapes.tile_vectors>(0, static_cast<size_t>(kKeys) / N, [&](auto c, size_t j) HWY_ATTR {
    hs::ForTiles<hs::TileRows<c.value>()>(0, static_cast<size_t>(rows), [&](auto r, size_t i) HWY_ATTR {
      const auto at = static_cast<int64_t>(i);
      hs::AccumulateTile<r.value, c.value, false>(d, queries + at * depth, depth, 1, keys + j * N, kKeys,
                                                  static_cast<size_t>(depth), products + at * kKeys + j * N, kKeys);
    });
  });
}

// Packs the queries of rows [first, first + rows) and of all heads of a group, scaled.
template <class D, class S, class T = hn::TFromD<D>>
HWY_INLINE void PackQueries(D d, S, const Shape& s, T scale, const ConstTensorView& q, int64_t b, int64_t head,
                            int64_t first, int64_t rows, T* to) {
  constexpr int64_t N = hn::MaxLanes(D());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t g = 0; g < s.group(); ++g, to += s.D) {
      const S* from = q.as<S>() + b * q.stride(0) + (first + i) * q.stride(1) + (head * s.group() + g) * q.stride(2);
      for (int64_t e = 0; e < s.D; e += N) {
        const auto n = static_cast<size_t>(std::min(N, s.D - e));
        hn::StoreN(hn::Mul(hs::LoadWideN(d, from + e, n), hn::Set(d, scale)), d, to + e, n);
      }
    }
  }
}

// Packs up to kKeys compressed keys from `first` on, by channel, with zeros after the last.
template <class D, class S, class T = hn::TFromD<D>>
HWY_INLINE void PackKeys(D d, S, const Shape& s, const ConstTensorView& k, int64_t b, int64_t head, int64_t first,
                         int64_t count, T* to) {
  constexpr int64_t N = hn::MaxLanes(D());
  const S* from = k.as<S>() + b * k.stride(0) + first * k.stride(1) + head * k.stride(2);
  for (int64_t key = 0; key < kKeys; key += N) {
    for (int64_t e = 0; e < s.D; e += N) {
      hn::Vec<D> v[hn::MaxLanes(D())];
      const auto n = static_cast<size_t>(std::min(N, s.D - e));
      for (int64_t i = 0; i < N; ++i) {
        v[i] = key + i < count ? hs::LoadWideN(d, from + (key + i) * k.stride(1) + e, n) : hn::Zero(d);
      }
      hs::Transpose(d, v);
      for (int64_t i = 0; i < N; ++i) hn::Store(v[i], d, to + (e + i) * kKeys + key);
    }
  }
}

// sums[j] += exp(logits[j] - lse) for the first `count` keys of a tile.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void AddProbabilities(D d, const T* HWY_RESTRICT logits, T lse, int64_t count, T* HWY_RESTRICT sums) {
  constexpr int64_t N = hn::MaxLanes(D());
  for (int64_t j = 0; j < count; j += N) {
    const auto p = hs::Exp(d, hn::Sub(hn::Load(d, logits + j), hn::Set(d, lse)));
    const auto n = static_cast<size_t>(std::min(N, count - j));
    hn::Store(hn::Add(hn::Load(d, sums + j), hn::IfThenElseZero(hn::FirstN(d, n), p)), d, sums + j);
  }
}

template <class T>
class Chooser {
 public:
  Chooser(const Shape& s, double scale, const ConstTensorView& q, const ConstTensorView& k_cmp,
          const ConstTensorView& lse, const TensorView& blocks)
      : s_(s), scale_(static_cast<T>(scale)), q_(q), k_(k_cmp), lse_(lse), blocks_(blocks) {}

  // Selects blocks for rows [first, first + rows) of a key head.
  void Run(int64_t b, int64_t head, int64_t first, int64_t rows, const Scratch<T>& w) const {
    const int64_t position = s_.starts[static_cast<size_t>(b)] + first;
    if (Wanted(position + rows - 1, w) > 0) {  // earlier rows need no more
      const int64_t visible = patterns::NumCompleteWindows(position + rows - 1, s_.length, s_.stride);
      hs::WithStorage<T>(q_.dtype(), [&](auto stored) HWY_ATTR { Sum(stored, b, head, first, rows, visible, w); });
    }
    for (int64_t i = 0; i < rows; ++i) Choose(b, head, first + i, position + i, w.probabilities + i * w.row, w);
  }

  void SelectNothing(int64_t b, int64_t head, int64_t row) const {
    Store(b, head, row, [](int64_t) { return -1; });
  }

 private:
  int64_t Wanted(int64_t position, const Scratch<T>& w) const { return FixedBlocks(s_, position, w.best); }

  // Probabilities of these rows, summed over the heads of the group; 0 for windows that a row does not see.
  template <class S>
  void Sum(S stored, int64_t b, int64_t head, int64_t first, int64_t rows, int64_t visible, const Scratch<T>& w) const {
    const hn::ScalableTag<T> d;
    PackQueries(d, stored, s_, scale_, q_, b, head, first, rows, w.queries);
    std::fill_n(w.probabilities, rows * w.row, T{0});
    for (int64_t tile = 0; tile < visible; tile += kKeys) {
      PackKeys(d, stored, s_, k_, b, head, tile, std::min(kKeys, visible - tile), w.keys);
      Multiply(d, w.queries, w.keys, s_.D, rows * s_.group(), w.products);
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t position = s_.starts[static_cast<size_t>(b)] + first + i;
        const int64_t count = std::min(patterns::NumCompleteWindows(position, s_.length, s_.stride) - tile, kKeys);
        for (int64_t g = 0; g < s_.group(); ++g) {
          const T lse = lse_.as<T>()[b * lse_.stride(0) + (head * s_.group() + g) * lse_.stride(1) +
                                     (first + i) * lse_.stride(2)];
          AddProbabilities(d, w.products + (i * s_.group() + g) * kKeys, lse, count,
                           w.probabilities + i * w.row + tile);
        }
      }
    }
  }

  void Choose(int64_t b, int64_t head, int64_t row, int64_t position, const T* probabilities,
              const Scratch<T>& w) const {
    int32_t* const all = w.best;
    const int64_t wanted = FixedBlocks(s_, position, all);
    if (wanted > 0) {
      const int64_t own = position / s_.block;
      const int64_t always[] = {0, own - 1, own};
      for (int64_t block = 0; block <= own; ++block) w.importances[block] = Importance(s_, probabilities, block);
      patterns::HWY_NAMESPACE::ChooseTop(w.importances, own + 1, wanted, std::span(always), all);
    }
    Store(b, head, row, [&](int64_t n) { return all[n]; });
  }

  template <class F>
  void Store(int64_t b, int64_t head, int64_t row, const F& block) const {
    int32_t* const to =
        blocks_.as<int32_t>() + b * blocks_.stride(0) + row * blocks_.stride(1) + head * blocks_.stride(2);
    for (int64_t n = 0; n < s_.columns; ++n) to[n * blocks_.stride(3)] = block(n);
  }

  const Shape& s_;
  T scale_;
  ConstTensorView q_, k_, lse_;
  TensorView blocks_;
};

template <class T>
void ChooseT(Context& ctx, const Shape& s, double scale, const ConstTensorView& q, const ConstTensorView& k_cmp,
             const ConstTensorView& lse, const TensorView& blocks) {
  ctx.ReserveScratch(Scratch<T>(nullptr, s).bytes);
  const Chooser<T> chooser(s, scale, q, k_cmp, lse, blocks);
  const int64_t rows = RowsOfTask(s), parts = (s.Tq + rows - 1) / rows;
  ctx.ParallelFor(s.B * s.Hkv * parts, [&](int64_t task, int worker) HWY_ATTR {
    const Scratch<T> w(ctx.Scratch(worker), s);
    const int64_t first = (parts - 1 - task / (s.B * s.Hkv)) * rows;  // longest tasks first
    const int64_t b = task / s.Hkv % s.B, head = task % s.Hkv;
    const int64_t end = std::min(first + rows, s.Tq), own_end = std::min(s.rows[static_cast<size_t>(b)], end);
    if (first < own_end) chooser.Run(b, head, first, own_end - first, w);
    for (int64_t i = std::max(first, own_end); i < end; ++i) chooser.SelectNothing(b, head, i);
  });
}

void ChooseImpl(Context& ctx, const Shape& s, double scale, const ConstTensorView& q, const ConstTensorView& k_cmp,
                const ConstTensorView& lse, const TensorView& blocks) {
  (q.dtype() == DType::kF64 ? &ChooseT<double> : &ChooseT<float>)(ctx, s, scale, q, k_cmp, lse, blocks);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::nsa::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::nsa {

HWY_EXPORT(ChooseImpl);

void ChooseBlocks(Context& ctx, const Shape& s, double scale, const ConstTensorView& q, const ConstTensorView& k_cmp,
                  const ConstTensorView& lse, const TensorView& blocks) {
  HWY_DISPATCH_TABLE(ChooseImpl)[TargetIndex(ctx.allowed_targets())](ctx, s, scale, q, k_cmp, lse, blocks);
}

int64_t ChoiceBytes(const Shape& s, DType dtype) {
  return dtype == DType::kF64 ? Scratch<double>(nullptr, s).bytes : Scratch<float>(nullptr, s).bytes;
}

int64_t FixedBlocks(const Shape& s, int64_t position, int32_t* row) {
  const auto own = static_cast<int32_t>(position / s.block);
  std::fill_n(row, s.columns, -1);
  if (own < s.columns) {
    for (int32_t b = 0; b <= own; ++b) row[b] = b;
    return 0;
  }
  row[0] = 0;
  row[1] = own - 1;
  row[2] = own;
  return s.columns - 3;
}

}  // namespace heed::nsa
#endif  // HWY_ONCE
