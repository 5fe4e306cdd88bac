// Products of rows with panels of weights, compiled once per SIMD target.
//
// Kernels are vectorised over outputs: packed weights are loaded in order, elements of x are broadcast. A tile of R
// rows and C vectors keeps R C sums in registers, R C FMAs for R + C loads; a single row is bound by reading the
// weights. Each sum is one chain, inputs ascending, whatever R, C and the blocks of inputs are: between blocks it is
// stored in y, in f32 without rounding.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "heed/core/targets.h"
#include "heed/layers/linear_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/layers/linear_kernels.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After highway.h:
#include "heed/engines/export_passes.h"
#include "heed/simd/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::layers::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;

using D = hn::CappedTag<float, kPanel>;
using V = hn::Vec<D>;
constexpr size_t N = hn::MaxLanes(D());

// Inputs of a block: its weights, 64 KiB of f32, stay in L2 for all tiles of rows.
constexpr size_t kBlock = 256;
// Prefetch distance in bytes of weights, for the first rows that read them.
constexpr size_t kAhead = 8192;

constexpr int kMostRows = hs::kVectorRegisters == 32 ? 6 : 4;

// Vectors of outputs for R rows, a divisor of the vectors of a panel.
template <int R>
constexpr int TileVectors() {
  constexpr int kPanelVectors = kPanel / N;
  constexpr int kFit = (hs::kVectorRegisters - 2) / (R + 1);
  constexpr int kVectors = kFit >= 8 ? 8 : kFit >= 4 ? 4 : 2;
  return kVectors < kPanelVectors ? kVectors : kPanelVectors;
}

struct Tile {
  const float* x;
  ptrdiff_t x_stride;
  float* y;
  ptrdiff_t y_stride;
  size_t depth;       // number of inputs in this block
  size_t columns;     // outputs from the tile's first on, possibly more than a tile
  const float* bias;  // bias of the tile's outputs if this is the last block; else null
  bool first;         // true for the first block
};

// w points to the tile's first column of a panel, at the block's first input.
template <int R, bool kAsks, class S>
HWY_INLINE void MultiplyTile(const Tile& t, const S* HWY_RESTRICT w) {
  constexpr int C = TileVectors<R>();
  const D d;
  const hn::RebindToUnsigned<D> words;
  V acc[R][C];
  const bool whole = t.columns >= C * N;
  HWY_UNROLL(8)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(8)
    for (int c = 0; c < C; ++c) {
      const size_t at = static_cast<size_t>(c) * N;
      const float* from = t.y + r * t.y_stride + at;
      acc[r][c] = t.first           ? hn::Zero(d)
                  : whole           ? hn::LoadU(d, from)
                  : at >= t.columns ? hn::Zero(d)
                                    : hn::LoadN(d, from, t.columns - at);
    }
  }
  const float* HWY_RESTRICT x = t.x;
  const auto add = [&](size_t e, const V* HWY_RESTRICT lanes) HWY_ATTR {
    HWY_UNROLL(8)
    for (int r = 0; r < R; ++r) {
      const V factor = hn::Set(d, x[r * t.x_stride + static_cast<ptrdiff_t>(e)]);
      HWY_UNROLL(8)
      for (int c = 0; c < C; ++c) acc[r][c] = hn::MulAdd(factor, lanes[c], acc[r][c]);
    }
  };
  const auto ask = [&] HWY_ATTR {
    if constexpr (kAsks) {
      HWY_UNROLL(8)
      for (size_t line = 0; line < static_cast<size_t>(C) * N * sizeof(S); line += 64) {
        hs::PrefetchToL2(reinterpret_cast<const char*>(w) + kAhead + line);
      }
    }
  };
  if constexpr (std::is_same_v<S, float>) {
    for (size_t e = 0; e < t.depth; ++e, w += kPanel) {
      ask();
      V lanes[C];
      HWY_UNROLL(8)
      for (int c = 0; c < C; ++c) lanes[c] = hn::Load(d, w + static_cast<size_t>(c) * N);
      add(e, lanes);
    }
  } else {
    const auto pairs = [&](size_t e, bool both) HWY_ATTR {
      ask();
      V lanes[C];
      HWY_UNROLL(8)
      for (int c = 0; c < C; ++c) {
        lanes[c] = hn::BitCast(d, hn::ShiftLeft<16>(hn::Load(words, w + static_cast<size_t>(c) * N)));
      }
      add(e, lanes);
      if (!both) return;
      HWY_UNROLL(8)
      for (int c = 0; c < C; ++c) {
        lanes[c] =
            hn::BitCast(d, hn::And(hn::Load(words, w + static_cast<size_t>(c) * N), hn::Set(words, 0xFFFF0000u)));
      }
      add(e + 1, lanes);
    };
    size_t e = 0;
    for (; e + 2 <= t.depth; e += 2, w += kPanel) pairs(e, true);
    if (e < t.depth) pairs(e, false);
  }
  HWY_UNROLL(8)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(8)
    for (int c = 0; c < C; ++c) {
      const size_t at = static_cast<size_t>(c) * N;
      float* to = t.y + r * t.y_stride + at;
      V sum = acc[r][c];
      if (t.bias != nullptr) sum = hn::Add(sum, hn::LoadU(d, t.bias + at));
      if (whole) {
        hn::StoreU(sum, d, to);
      } else if (at < t.columns) {
        hn::StoreN(sum, d, to, t.columns - at);
      }
    }
  }
}

// R rows of a block of inputs, all columns of a panel.
template <int R, bool kAsks, class S>
HWY_NOINLINE void MultiplyRows(const PanelProduct& p, size_t row, size_t panel, size_t begin, size_t depth) {
  constexpr size_t kStep = static_cast<size_t>(TileVectors<R>()) * N;
  constexpr size_t kWord = std::is_same_v<S, float> ? 1 : 2;
  const size_t words = (p.inputs + kWord - 1) / kWord;
  const S* weights = static_cast<const S*>(p.weights) + (panel * words + begin / kWord) * kPanel;
  const size_t column = panel * kPanel, columns = std::min<size_t>(kPanel, p.outputs - column);
  const bool last = begin + depth == p.inputs;
  Tile t;
  t.x = p.x + static_cast<ptrdiff_t>(row) * p.x_stride + static_cast<ptrdiff_t>(begin);
  t.x_stride = p.x_stride;
  t.y_stride = p.y_stride;
  t.depth = depth;
  t.first = begin == 0;
  for (size_t c = 0; c < columns; c += kStep) {
    t.y = p.y + static_cast<ptrdiff_t>(row) * p.y_stride + static_cast<ptrdiff_t>(column + c);
    t.columns = columns - c;
    t.bias = last && p.bias != nullptr ? p.bias + column + c : nullptr;
    MultiplyTile<R, kAsks>(t, weights + c);
  }
}

template <class S>
void Multiply(const PanelProduct& p) {
  if (p.rows <= kMostRows) {  // the weights are read once, so blocks of inputs would not help
    for (size_t panel = p.first; panel < p.first + p.panels; ++panel) {
      hs::ForTiles<kMostRows>(0, p.rows, [&](auto rows, size_t row) HWY_ATTR {
        MultiplyRows<rows.value, true, S>(p, row, panel, 0, p.inputs);
      });
    }
    return;
  }
  for (size_t begin = 0; begin < p.inputs; begin += kBlock) {
    const size_t depth = std::min(kBlock, p.inputs - begin);
    for (size_t panel = p.first; panel < p.first + p.panels; ++panel) {
      hs::ForTiles<kMostRows>(0, p.rows, [&](auto rows, size_t row) HWY_ATTR {
        if (row == 0) {
          MultiplyRows<rows.value, true, S>(p, row, panel, begin, depth);
        } else {
          MultiplyRows<rows.value, false, S>(p, row, panel, begin, depth);
        }
      });
    }
  }
}

PanelKernels PanelKernelsOfTarget() { return {&Multiply<float>, &Multiply<uint32_t>}; }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::layers::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::layers {
HEED_EXPORT(PanelKernels, PanelKernelsOfTarget)

PanelKernels PanelKernelsFor(const Context& ctx) { return PanelKernelsOfTarget(ctx); }

}  // namespace heed::layers
#endif  // HWY_ONCE
