// The register tiles of pair_tile-inl.h by BFMMLA: the same sums with the same bits, in half as many instructions.
//
// Compiled for targets with BFMMLA only, whose f32 vectors have four lanes. Its operands are quads: two words of one
// row or lane, then two of the next. What many tiles read is stored as quads: queries and P, but for a last row of
// words without a partner, and all that the backward pass accumulates. Keys and values of the forward pass are
// interleaved as they are read.
#if defined(HEED_SIMD_QUAD_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_QUAD_TILE_INL_H_
#undef HEED_SIMD_QUAD_TILE_INL_H_
#else
#define HEED_SIMD_QUAD_TILE_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "heed/core/dtype.h"
#include "heed/simd/pair_products-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HEED_QUAD_PRODUCTS

// The quad of two rows, given the two words of each, at any address.
template <class D, class Words = hn::Vec<hn::RebindToUnsigned<D>>>
HWY_INLINE Words QuadOf(D /*d*/, const void* first, const void* second) {
  const hn::Repartition<uint8_t, D> bytes;
  const hn::Half<decltype(bytes)> row;
  return hn::BitCast(hn::RebindToUnsigned<D>(), hn::Combine(bytes, hn::LoadU(row, static_cast<const uint8_t*>(second)),
                                                            hn::LoadU(row, static_cast<const uint8_t*>(first))));
}

// The quads of R rows r, whose words r are side by side: x[r] is the first of row r and y[r] the second.
template <int R, class D, class Words = hn::Vec<hn::RebindToUnsigned<D>>>
HWY_INLINE void QuadsOfColumns(D d, const uint32_t* HWY_RESTRICT x, const uint32_t* HWY_RESTRICT y,
                               Words* HWY_RESTRICT rows) {
  const hn::RebindToUnsigned<D> words;
  int r = 0;
  HWY_UNROLL(8)
  for (; r + 4 <= R; r += 4) {
    const LaneQuads<D> quads = QuadsOfLanes(d, hn::LoadU(words, x + r), hn::LoadU(words, y + r));
    rows[r / 2] = quads.lower;
    rows[r / 2 + 1] = quads.upper;
  }
  if constexpr (R % 4 >= 2) {
    const hn::Half<decltype(words)> two;
    const auto first = hn::LoadU(two, x + r), second = hn::LoadU(two, y + r);
    rows[r / 2] = hn::Combine(words, hn::InterleaveUpper(two, first, second), hn::InterleaveLower(two, first, second));
    r += 2;
  }
  if constexpr (R % 2 != 0) rows[r / 2] = hn::InterleaveLower(words, hn::Set(words, x[r]), hn::Set(words, y[r]));
}

// Makes quads of rows of words, in place: in a vector of row 2 m, the quads of its lower lanes, and in row 2 m + 1 of
// its upper ones. With kDescending, row 2 m + 1 comes first in a quad. A last row without a partner stays as it is.
template <bool kDescending = false, class D>
HWY_INLINE void ToQuads(D d, uint32_t* HWY_RESTRICT rows, size_t stride, size_t num_rows, size_t lanes) {
  const hn::RebindToUnsigned<D> words;
  for (; num_rows >= 2; num_rows -= 2, rows += 2 * stride) {
    for (size_t lane = 0; lane < lanes; lane += hn::MaxLanes(D())) {
      const auto lower = hn::Load(words, rows + lane), upper = hn::Load(words, rows + stride + lane);
      const LaneQuads<D> quads = kDescending ? QuadsOfLanes(d, upper, lower) : QuadsOfLanes(d, lower, upper);
      hn::Store(quads.lower, words, rows + lane);
      hn::Store(quads.upper, words, rows + stride + lane);
    }
  }
}

// The distance of the quads of upper lanes, given the step from quads to the next, down or up.
constexpr ptrdiff_t UpperQuads(ptrdiff_t step) { return (step < 0 ? -step : step) / 2; }

// Does what LogitPairTile does, for queries as quads.
template <int R, int C, class D, class F, class V = hn::Vec<D>>
HWY_INLINE void LogitQuadTile(D d, const uint32_t* HWY_RESTRICT q, size_t stride, const BF16* HWY_RESTRICT k,
                              ptrdiff_t k_stride, size_t depth, float* HWY_RESTRICT s, V* HWY_RESTRICT max,
                              const F& finish) {
  constexpr size_t N = hn::MaxLanes(D());
  constexpr int kRows = R + R % 2;  // a row without a partner is its own
  const hn::RebindToUnsigned<D> words;
  using Words = hn::Vec<decltype(words)>;
  QuadSums<kRows, C, D> sums;
  Words rows[kRows / 2];
  HWY_UNROLL(32)
  for (int r = 0; r < R; r += 2) {
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) sums.Set(r, c, hn::Zero(d), hn::Zero(d));
  }
  const auto second_of = [](int r) HWY_ATTR { return r + 1 < R ? r + 1 : r; };
  const auto lanes_at = [&](size_t e, int c) HWY_ATTR { return q + e / 2 * stride + static_cast<size_t>(c) * N; };
  const auto add = [&](size_t e) HWY_ATTR {
    sums.Add(rows, [&](int c) HWY_ATTR {
      return LaneQuads<D>{hn::Load(words, lanes_at(e, c)), hn::Load(words, lanes_at(e, c) + stride)};
    });
  };
  size_t e = 0;
  for (; e + 4 <= depth; e += 4) {
    HWY_UNROLL(32)
    for (int r = 0; r < R; r += 2) rows[r / 2] = QuadOf(d, k + r * k_stride + e, k + second_of(r) * k_stride + e);
    add(e);
  }
  if (e < depth) {
    const bool has_second = depth - e > 2;
    HWY_UNROLL(32)
    for (int r = 0; r < R; r += 2) {
      BF16 quad[2][4] = {};
      for (int i = 0; i < 2; ++i) {
        if (!has_second) std::memcpy(quad[i] + 2, &kNoPair, sizeof(kNoPair));
        std::memcpy(quad[i], k + (i == 0 ? r : second_of(r)) * k_stride + e, (depth - e) * sizeof(BF16));
      }
      rows[r / 2] = QuadOf(d, quad[0], quad[1]);
    }
    if (has_second) {
      add(e);
    } else {
      sums.Add(rows, [&](int c) HWY_ATTR { return QuadsOfLanes(d, hn::Load(words, lanes_at(e, c)), hn::Zero(words)); });
    }
  }
  HWY_UNROLL(32)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) {
      const V x = finish(sums.Get(r, c), r, c);
      hn::Store(x, d, s + static_cast<size_t>(r) * stride + static_cast<size_t>(c) * N);
      max[c] = hn::Max(x, max[c]);
    }
  }
}

// Does what ValuePairTile does, for P as quads.
template <int R, int C, class D, class V = hn::Vec<D>>
HWY_INLINE void ValueQuadTile(D d, const uint32_t* HWY_RESTRICT p, size_t stride, const uint32_t* HWY_RESTRICT v,
                              ptrdiff_t v_stride, size_t num_pairs, bool first, const V* HWY_RESTRICT rescale,
                              float* HWY_RESTRICT o) {
  constexpr size_t N = hn::MaxLanes(D());
  constexpr int kRows = R + R % 2;  // a row without a partner is its own
  const hn::RebindToUnsigned<D> words;
  using Words = hn::Vec<decltype(words)>;
  const auto at = [&](int r, int c)
                      HWY_ATTR { return o + static_cast<size_t>(r) * stride + static_cast<size_t>(c) * N; };
  const auto before = [&](int r, int c) HWY_ATTR {
    return first ? hn::Zero(d) : hn::Mul(hn::Load(d, at(HWY_MIN(r, R - 1), c)), rescale[c]);
  };
  QuadSums<kRows, C, D> sums;
  HWY_UNROLL(32)
  for (int r = 0; r < R; r += 2) {
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) sums.Set(r, c, before(r, c), before(r + 1, c));
  }
  const auto lanes = [&](size_t pair, int c)
                         HWY_ATTR { return hn::Load(words, p + pair * stride + static_cast<size_t>(c) * N); };
  const auto values = [&](size_t pair) HWY_ATTR { return v + static_cast<ptrdiff_t>(pair) * v_stride; };
  Words rows[kRows / 2];
  size_t j = 0;
  for (; j + 2 <= num_pairs; j += 2) {
    QuadsOfColumns<R>(d, values(j), values(j + 1), rows);
    sums.Add(rows, [&](int c) HWY_ATTR { return LaneQuads<D>{lanes(j, c), lanes(j + 1, c)}; });
  }
  if (j < num_pairs) {
    uint32_t none[R];
    std::fill_n(none, R, kNoPair);
    QuadsOfColumns<R>(d, values(j), none, rows);
    sums.Add(rows, [&](int c) HWY_ATTR { return QuadsOfLanes(d, lanes(j, c), hn::Zero(words)); });
  }
  HWY_UNROLL(32)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) hn::Store(sums.Get(r, c), d, at(r, c));
  }
}

// Adds to one row of out[r][c] what AccumulateQuadTile() does with kSkipMasked; `second` tells which of the two rows of
// a's quads. Lanes are masked per row, so that the quads of both rows are this row's.
template <int C, class D, class V = hn::Vec<D>>
HWY_INLINE void AccumulateMaskedQuads(D d, const uint32_t* HWY_RESTRICT a, bool second, ptrdiff_t a_step,
                                      const uint32_t* HWY_RESTRICT b, ptrdiff_t b_step, size_t count,
                                      float* HWY_RESTRICT out) {
  constexpr ptrdiff_t N = hn::MaxLanes(D());
  const hn::RebindToUnsigned<D> words;
  const hn::Repartition<uint16_t, D> halves;
  using Words = hn::Vec<decltype(words)>;
  QuadSums<2, C, D> sums;
  for (int c = 0; c < C; ++c) sums.Set(0, c, hn::Load(d, out + c * N), hn::Load(d, out + c * N));
  for (size_t i = 0; i < count; ++i, a += a_step, b += b_step) {
    const Words both = hn::Load(words, a);
    const Words row = second ? hn::ConcatUpperUpper(words, both, both) : hn::ConcatLowerLower(words, both, both);
    const auto masked = hn::BitCast(
        words, hn::VecFromMask(halves, hn::Eq(hn::BitCast(halves, row), hn::Set(halves, uint16_t{0x8000}))));
    sums.Add(&row, [&](int c) HWY_ATTR {
      const Words lower = hn::Load(words, b + c * N), upper = hn::Load(words, b + UpperQuads(b_step) + c * N);
      return LaneQuads<D>{hn::AndNot(masked, lower), hn::AndNot(masked, upper)};
    });
  }
  for (int c = 0; c < C; ++c) hn::Store(sums.Get(0, c), d, out + c * N);
}

// Does what AccumulatePairTile does, for operands in quads.
template <int R, int C, bool kSkipMasked, class D, class V = hn::Vec<D>>
HWY_INLINE void AccumulateQuadTile(D d, const uint32_t* HWY_RESTRICT a, ptrdiff_t a_row, ptrdiff_t a_step,
                                   const uint32_t* HWY_RESTRICT b, ptrdiff_t b_step, size_t count,
                                   float* HWY_RESTRICT out, ptrdiff_t out_row) {
  constexpr ptrdiff_t N = hn::MaxLanes(D());
  if constexpr (kSkipMasked) {
    for (int r = 0; r < R; ++r) {
      AccumulateMaskedQuads<C>(d, a + (r - r % 2) * a_row, r % 2 != 0, a_step, b, b_step, count, out + r * out_row);
    }
    return;
  }
  constexpr int kRows = R + R % 2;  // a row without a partner is its own
  const hn::RebindToUnsigned<D> words;
  QuadSums<kRows, C, D> sums;
  const auto at = [&](int r, int c) HWY_ATTR { return out + HWY_MIN(r, R - 1) * out_row + c * N; };
  HWY_UNROLL(32)
  for (int r = 0; r < R; r += 2) {
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) sums.Set(r, c, hn::Load(d, at(r, c)), hn::Load(d, at(r + 1, c)));
  }
  for (size_t i = 0; i < count; ++i, a += a_step, b += b_step) {
    hn::Vec<decltype(words)> rows[kRows / 2];
    HWY_UNROLL(32)
    for (int r = 0; r < R; r += 2) rows[r / 2] = hn::Load(words, a + r * a_row);
    sums.Add(rows, [&](int c) HWY_ATTR {
      return LaneQuads<D>{hn::Load(words, b + c * N), hn::Load(words, b + UpperQuads(b_step) + c * N)};
    });
  }
  HWY_UNROLL(32)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) hn::Store(sums.Get(r, c), d, at(r, c));
  }
}

#endif  // HEED_QUAD_PRODUCTS

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_QUAD_TILE_INL_H_
