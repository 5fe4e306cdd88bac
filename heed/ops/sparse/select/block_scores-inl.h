// Scores of blocks of keys: the features of each block times the features of 64 rows at a time.
//
// Compiled once per SIMD target and type. Both scores are linear in features of a row, which are summed first over the
// heads that select together: q for means; max(q, 0) and min(q, 0), times the channelwise maximum and minimum of the
// keys, for boxes. Blocks are in vector lanes, packed as panels with one feature after the other, so that a row's
// scores are contiguous. Each score is one chain of fused multiply-adds over the features, ascending.
#if defined(HEED_OPS_SPARSE_SELECT_BLOCK_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_OPS_SPARSE_SELECT_BLOCK_SCORES_INL_H_
#undef HEED_OPS_SPARSE_SELECT_BLOCK_SCORES_INL_H_
#else
#define HEED_OPS_SPARSE_SELECT_BLOCK_SCORES_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "heed/core/context.h"
#include "heed/engines/softmax/problem.h"
#include "heed/ops/sparse/select/select_internal.h"
#include "heed/simd/convert-inl.h"
#include "heed/simd/tile-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::select::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// The first n <= N elements of a row, widened.
template <class D, class S>
HWY_INLINE hn::Vec<D> LoadFirst(D d, const S* from, size_t n) {
  return n == hn::MaxLanes(d) ? hs::LoadWide(d, from) : hs::LoadWideN(d, from, n);
}

template <class S>
HWY_INLINE const S* RowAt(const softmax::Rows& x, int64_t b, int64_t token, int64_t head) {
  return static_cast<const S*>(x.data) + b * x.batch_stride + token * x.token_stride + head * x.head_stride;
}

// out[row][lane] = sum_e a[row][e] panel[e][lane], with e ascending, for the given lanes of a panel, in whole vectors.
template <class T>
HWY_NOINLINE void TimesPanel(const T* a, int64_t rows, int64_t depth, const T* panel, int64_t lanes, T* out,
                             int64_t stride) {
  const hn::ScalableTag<T> d;
  constexpr size_t N = hn::MaxLanes(d);
  const size_t vectors = (static_cast<size_t>(lanes) + N - 1) / N;
  for (int64_t r = 0; r < rows; ++r) std::memset(out + r * stride, 0, vectors * N * sizeof(T));
  hs::ForTiles<hs::kShapes.tile_vectors>(0, vectors, [&](auto c, size_t v) HWY_ATTR {
    hs::ForTiles<hs::TileRows<c.value>()>(0, static_cast<size_t>(rows), [&](auto r, size_t row) HWY_ATTR {
      const auto at = static_cast<int64_t>(row);
      hs::AccumulateTile<r.value, c.value, false>(d, a + at * depth, depth, 1, panel + v * N, kPanel,
                                                  static_cast<size_t>(depth), out + at * stride + v * N, stride);
    });
  });
}

// Accumulates channels of some keys: the mean of a block, summed in double and rounded once, as in a cache, and its
// minimum and maximum, which keep a NaN.
template <class T>
struct Keys {
  using D = hn::ScalableTag<T>;
  using DD = hn::ScalableTag<double>;
  static constexpr bool kWidens = sizeof(T) < sizeof(double);

  hn::Vec<D> smallest, largest;
  hn::Vec<DD> sums[2];  // lower and upper lanes

  HWY_INLINE Keys() {
    smallest = hn::Set(D(), std::numeric_limits<T>::infinity());
    largest = hn::Neg(smallest);
    sums[0] = sums[1] = hn::Zero(DD());
  }

  HWY_INLINE void Add(hn::Vec<D> x) { AddMany(x, x, x, 1); }

  HWY_INLINE void AddMany(hn::Vec<D> mean, hn::Vec<D> min, hn::Vec<D> max, int64_t count) {
    smallest = hn::IfThenElse(hn::Or(hn::Lt(min, smallest), hn::IsNaN(min)), min, smallest);
    largest = hn::IfThenElse(hn::Or(hn::Gt(max, largest), hn::IsNaN(max)), max, largest);
    const auto n = hn::Set(DD(), static_cast<double>(count));
    if constexpr (kWidens) {
      sums[0] = hn::MulAdd(hn::PromoteLowerTo(DD(), mean), n, sums[0]);
      sums[1] = hn::MulAdd(hn::PromoteUpperTo(DD(), mean), n, sums[1]);
    } else {
      sums[0] = hn::MulAdd(mean, n, sums[0]);
    }
  }
  HWY_INLINE hn::Vec<D> Mean(int64_t count) const {
    const auto n = hn::Set(DD(), static_cast<double>(count));
    if constexpr (kWidens) {
      const hn::Half<D> half;
      return hn::Combine(D(), hn::DemoteTo(half, hn::Div(sums[1], n)), hn::DemoteTo(half, hn::Div(sums[0], n)));
    } else {
      return hn::Div(sums[0], n);
    }
  }
};

// The features of the blocks of each sequence and key head.
template <class T>
class Described {
 public:
  explicit Described(const BlockCall& c) : c_(c), panels_(Panels(c.most_blocks)), panel_size_(c.features() * kPanel) {}

  int64_t Bytes() const {
    return std::ssize(c_.problem.sequences) * c_.problem.key_heads * panels_ * panel_size_ * int64_t{sizeof(T)};
  }

  // Reads all keys once.
  void Compute(Context& ctx, T* memory) {
    memory_ = memory;
    constexpr int64_t kBlocks = 16;  // blocks per task
    const int64_t parts = panels_ * kPanel / kBlocks, heads = c_.problem.key_heads;
    ctx.ParallelFor(std::ssize(c_.problem.sequences) * heads * parts, [&](int64_t task, int) HWY_ATTR {
      const int64_t part = task % parts, head = task / parts % heads, b = task / parts / heads;
      hs::WithStorage<T>(c_.problem.dtype, [&](auto stored) HWY_ATTR {
        for (int64_t i = part * kBlocks; i < (part + 1) * kBlocks; ++i) Describe<decltype(stored)>(b, head, i);
      });
    });
  }

  // scores[row][block] = <features of the row, features of the block> for blocks [0, blocks).
  void Scores(int64_t b, int64_t key_head, const T* features, int64_t rows, int64_t blocks, T* scores,
              int64_t stride) const {
    for (int64_t panel = 0; panel * kPanel < blocks; ++panel) {
      TimesPanel(features, rows, c_.features(), Panel(b, key_head, panel), std::min(kPanel, blocks - panel * kPanel),
                 scores + panel * kPanel, stride);
    }
  }

 private:
  T* Panel(int64_t b, int64_t head, int64_t panel) const {
    return memory_ + ((b * c_.problem.key_heads + head) * panels_ + panel) * panel_size_;
  }

  // Writes one lane of a panel; lanes beyond the last block are zero, and no row reads them.
  template <class S>
  HWY_INLINE void Describe(int64_t b, int64_t head, int64_t block) {
    const softmax::Sequence& s = c_.problem.sequences[static_cast<size_t>(b)];
    const int64_t depth = c_.problem.depth, at = c_.first[static_cast<size_t>(b)] + block;
    const int64_t begin = std::max(at * c_.block, s.key_begin), end = std::min((at + 1) * c_.block, s.key_end);
    T* to = Panel(b, head, block / kPanel) + block % kPanel;
    if (block >= c_.blocks[static_cast<size_t>(b)]) {
      for (int64_t f = 0; f < c_.features(); ++f) to[f * kPanel] = 0;
      return;
    }
    const hn::ScalableTag<T> d;
    constexpr int64_t N = hn::MaxLanes(d);
    for (int64_t e = 0; e < depth; e += N) {
      const auto n = static_cast<size_t>(std::min(N, depth - e));
      Keys<T> keys;
      for (int64_t j = begin; j < end;) {
        const std::byte* known = end - j < SketchBlocks::kTokens ? nullptr : c_.Known(b, j, head);
        if (known == nullptr) {
          keys.Add(LoadFirst(d, c_.Key<S>(b, j, head) + e, n));
          ++j;
          continue;
        }
        const auto floats = [&](int64_t offset) HWY_ATTR {
          return LoadFirst(d, reinterpret_cast<const KnownFloat*>(known + offset) + e, n);
        };
        const SketchBlocks& of = c_.cache->sketch;
        keys.AddMany(floats(of.mean), floats(of.min), floats(of.max), SketchBlocks::kTokens);
        j += SketchBlocks::kTokens;
      }
      Scatter(c_.box ? keys.largest : keys.Mean(end - begin), n, to + e * kPanel);
      if (c_.box) Scatter(keys.smallest, n, to + (depth + e) * kPanel);
    }
  }

  template <class V>
  static HWY_INLINE void Scatter(V x, size_t n, T* to) {
    const hn::ScalableTag<T> d;
    HWY_ALIGN T lanes[hn::MaxLanes(d)];
    hn::Store(x, d, lanes);
    for (size_t i = 0; i < n; ++i) to[i * kPanel] = lanes[i];
  }

  // The type of the statistics that caches store; no cache has f64 keys.
  using KnownFloat = std::conditional_t<sizeof(T) == sizeof(float), float, T>;

  const BlockCall& c_;
  int64_t panels_, panel_size_;
  T* memory_ = nullptr;
};

// Features of rows [row, row + rows), summed over `heads` query heads from `head` on.
template <class T>
void Features(const BlockCall& c, int64_t b, int64_t head, int64_t heads, int64_t row, int64_t rows, T* to) {
  const hn::ScalableTag<T> d;
  constexpr int64_t N = hn::MaxLanes(d);
  const auto zero = hn::Zero(d);
  const int64_t depth = c.problem.depth;
  hs::WithStorage<T>(c.problem.dtype, [&](auto stored) HWY_ATTR {
    for (int64_t r = 0; r < rows; ++r, to += c.features()) {
      for (int64_t e = 0; e < depth; e += N) {
        const auto n = static_cast<size_t>(std::min(N, depth - e));
        auto sum = zero, negative = zero;  // for boxes the sums of max(q, 0) and min(q, 0)
        for (int64_t h = head; h < head + heads; ++h) {
          const auto x = LoadFirst(d, RowAt<decltype(stored)>(c.problem.q, b, row + r, h) + e, n);
          sum = hn::Add(sum, c.box ? hn::IfThenZeroElse(hn::Lt(x, zero), x) : x);
          if (c.box) negative = hn::Add(negative, hn::IfThenZeroElse(hn::Gt(x, zero), x));
        }
        hs::StoreRounded(d, sum, to + e, n);
        if (c.box) hs::StoreRounded(d, negative, to + depth + e, n);
      }
    }
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::select::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_OPS_SPARSE_SELECT_BLOCK_SCORES_INL_H_
