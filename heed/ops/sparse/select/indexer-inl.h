// The keys of DSA's indexer: scores of all keys for a few rows at a time, and the best of them.
//
// Compiled once per SIMD target and type. Keys are in vector lanes, packed as panels with one channel after the other.
// A head's products of some rows with a panel are one tile; its rectified elements are added to the sum over heads
// directly from the registers.
#if defined(HEED_OPS_SPARSE_SELECT_INDEXER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_OPS_SPARSE_SELECT_INDEXER_INL_H_
#undef HEED_OPS_SPARSE_SELECT_INDEXER_INL_H_
#else
#define HEED_OPS_SPARSE_SELECT_INDEXER_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "heed/core/carver.h"
#include "heed/patterns/top_blocks-inl.h"
#include "heed/ops/sparse/select/block_scores-inl.h"
#include "heed/simd/strided-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::select::HWY_NAMESPACE {
namespace hp = heed::patterns::HWY_NAMESPACE;

inline constexpr int64_t kIndexerRows = 8;  // rows per task

// Scratch memory of one thread.
template <class T>
struct IndexerScratch {
  T *queries, *weights;  // [head, row, channel] and [head, row]
  T *sums, *scores;      // for a panel, and for all keys
  int32_t* chosen;
  int64_t stride;

  IndexerScratch(const IndexerCall& c, void* memory) { LayOut(c, memory); }
  static int64_t Bytes(const IndexerCall& c) { return IndexerScratch(c, nullptr).bytes_; }

 private:
  void LayOut(const IndexerCall& c, void* memory) {
    stride = Panels(c.Tk) * kPanel;
    Carver carver(memory);
    carver.Next(queries, c.heads * kIndexerRows * c.depth);
    carver.Next(weights, c.heads * kIndexerRows);
    carver.Next(sums, kIndexerRows * kPanel);
    carver.Next(scores, kIndexerRows * stride);
    carver.Next(chosen, stride);
    bytes_ = carver.bytes();
  }
  int64_t bytes_;
};

// to[channel][key] for keys [0, n) of a panel, zeros beyond.
template <class T>
HWY_NOINLINE void PackPanel(const IndexerCall& c, int64_t b, int64_t first, int64_t n, T* to) {
  hs::WithStorage<T>(c.dtype, [&](auto stored) HWY_ATTR {
    for (int64_t j = 0; j < kPanel; ++j) {
      const auto* key = RowAt<decltype(stored)>(c.k, b, first + (j < n ? j : 0), 0);
      for (int64_t e = 0; e < c.depth; ++e) to[e * kPanel + j] = j < n ? hs::WideElement<T>(key[e]) : T{0};
    }
  });
}

template <class T>
HWY_NOINLINE void PackRows(const IndexerCall& c, int64_t b, int64_t row, int64_t rows, const IndexerScratch<T>& s) {
  hs::WithStorage<T>(c.dtype, [&](auto stored) HWY_ATTR {
    using S = decltype(stored);
    for (int64_t h = 0; h < c.heads; ++h) {
      for (int64_t r = 0; r < rows; ++r) {
        const S* from = RowAt<S>(c.q, b, row + r, h);
        T* to = s.queries + (h * kIndexerRows + r) * c.depth;
        for (int64_t e = 0; e < c.depth; ++e) to[e] = hs::WideElement<T>(from[e]);
        s.weights[h * kIndexerRows + r] = hs::WideElement<T>(*RowAt<S>(c.weights, b, row + r, h));
      }
    }
  });
}

// sums[row][key] = sum_h w[h][row] relu(<q[h][row], k[key]>) for a panel of keys, with h ascending.
template <class T>
HWY_NOINLINE void SumHeads(const IndexerCall& c, int64_t rows, const T* panel, const IndexerScratch<T>& s) {
  const hn::ScalableTag<T> d;
  constexpr size_t N = hn::MaxLanes(d);
  std::memset(s.sums, 0, kIndexerRows * kPanel * sizeof(T));
  for (int64_t h = 0; h < c.heads; ++h) {
    const T *queries = s.queries + h * kIndexerRows * c.depth, *weights = s.weights + h * kIndexerRows;
    hs::ForTiles<hs::kShapes.tile_vectors>(0, kPanel / N, [&](auto vectors, size_t v) HWY_ATTR {
      hs::ForTiles<hs::TileRows<vectors.value>()>(0, static_cast<size_t>(rows), [&](auto count, size_t row) HWY_ATTR {
        T* at = s.sums + row * kPanel + v * N;
        hn::Vec<decltype(d)> unused[vectors.value];
        for (auto& x : unused) x = hn::Zero(d);
        hs::LogitTile<count.value, vectors.value>(
            d, panel + v * N, kPanel, queries + static_cast<int64_t>(row) * c.depth, c.depth,
            static_cast<size_t>(c.depth), at, unused, [&](auto x, int r, int i) HWY_ATTR {
              const auto rectified = hn::IfThenZeroElse(hn::Lt(x, hn::Zero(d)), x);  // keeps a NaN
              const auto sum = hn::Load(d, at + static_cast<size_t>(r) * kPanel + static_cast<size_t>(i) * N);
              return hn::MulAdd(hn::Set(d, weights[row + static_cast<size_t>(r)]), rectified, sum);
            });
      });
    });
  }
}

template <class T>
void RunIndexer(Context& ctx, const IndexerCall& c, int64_t width, int64_t* index) {
  const int64_t panels = Panels(c.Tk), panel_size = c.depth * kPanel;
  ctx.ReserveShared(c.B * panels * panel_size * int64_t{sizeof(T)});
  ctx.ReserveScratch(IndexerScratch<T>::Bytes(c));
  T* keys = static_cast<T*>(ctx.Shared());
  ctx.ParallelFor(c.B * panels, [&](int64_t task, int) HWY_ATTR {
    const int64_t first = task % panels * kPanel;
    PackPanel(c, task / panels, first, std::min(kPanel, c.Tk - first), keys + task * panel_size);
  });
  const int64_t tiles = (c.Tq + kIndexerRows - 1) / kIndexerRows;
  ctx.ParallelFor(c.B * tiles, [&](int64_t task, int worker) HWY_ATTR {
    const IndexerScratch<T> s(c, ctx.Scratch(worker));
    const int64_t b = task / tiles, row = (tiles - 1 - task % tiles) * kIndexerRows;  // late rows see the most
    const int64_t rows = std::min(kIndexerRows, c.Tq - row);
    const auto seen = [&](int64_t r) {
      return c.causal ? std::clamp<int64_t>((c.start + row + r + 1) / c.ratio, 0, c.Tk) : c.Tk;
    };
    PackRows(c, b, row, rows, s);
    for (int64_t panel = 0; panel * kPanel < seen(rows - 1); ++panel) {
      SumHeads(c, rows, keys + (b * panels + panel) * panel_size, s);
      for (int64_t r = 0; r < rows; ++r) {
        std::memcpy(s.scores + r * s.stride + panel * kPanel, s.sums + r * kPanel, kPanel * sizeof(T));
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t n = hp::ChooseTop(s.scores + r * s.stride, seen(r), c.count, std::span<const int64_t>(), s.chosen);
      int64_t* to = index + (b * c.Tq + row + r) * width;
      for (int64_t i = n; i < width; ++i) *to++ = -1;
      for (int64_t i = 0; i < n; ++i) to[i] = s.chosen[i];
    }
  });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::select::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_OPS_SPARSE_SELECT_INDEXER_INL_H_
