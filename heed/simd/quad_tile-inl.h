// The register tiles of pair_tile-inl.h by BFMMLA: the same sums with the same bits, in half as many instructions.
//
// Compiled for targets with BFMMLA only, whose f32 vectors have four lanes. Its operands are quads: two words of one
// row or lane, then two of the next. Queries and P, which many tiles read, are stored as quads (ToQuads), but for a
// last row of words without a partner; other words are interleaved as they are read.
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
// its upper ones. A last row without a partner stays as it is.
template <class D>
HWY_INLINE void ToQuads(D d, uint32_t* HWY_RESTRICT rows, size_t stride, size_t num_rows, size_t lanes) {
  const hn::RebindToUnsigned<D> words;
  for (; num_rows >= 2; num_rows -= 2, rows += 2 * stride) {
    for (size_t lane = 0; lane < lanes; lane += hn::MaxLanes(D())) {
      const LaneQuads<D> quads = QuadsOfLanes(d, hn::Load(words, rows + lane), hn::Load(words, rows + stride + lane));
      hn::Store(quads.lower, words, rows + lane);
      hn::Store(quads.upper, words, rows + stride + lane);
    }
  }
}

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

// Does what AccumulatePairTile does, for an even number of rows. a_row is 1, or a_step is -1.
template <int R, int C, class D, class V = hn::Vec<D>>
HWY_INLINE void AccumulateQuadTile(D d, const uint32_t* HWY_RESTRICT a, ptrdiff_t a_row, ptrdiff_t a_step,
                                   const uint32_t* HWY_RESTRICT b, ptrdiff_t b_step, size_t count,
                                   float* HWY_RESTRICT out, ptrdiff_t out_row) {
  constexpr ptrdiff_t N = hn::MaxLanes(D());
  const hn::RebindToUnsigned<D> words;
  using Words = hn::Vec<decltype(words)>;
  QuadSums<R, C, D> sums;
  HWY_UNROLL(32)
  for (int r = 0; r < R; r += 2) {
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) {
      float* at = out + r * out_row + c * N;
      sums.Set(r, c, hn::Load(d, at), hn::Load(d, at + out_row));
    }
  }
  Words rows[R / 2];
  const auto add_two = [&] HWY_ATTR {
    sums.Add(rows, [&](int c) HWY_ATTR {
      return QuadsOfLanes(d, hn::Load(words, b + c * N), hn::Load(words, b + b_step + c * N));
    });
    a += 2 * a_step;
    b += 2 * b_step;
  };
  size_t i = 0;
  if (a_row == 1) {
    for (; i + 2 <= count; i += 2) {
      QuadsOfColumns<R>(d, a, a + a_step, rows);
      add_two();
    }
  } else {
    for (; i + 2 <= count; i += 2) {
      HWY_UNROLL(32)
      for (int r = 0; r < R; r += 2) {
        rows[r / 2] = hn::Reverse2(words, QuadOf(d, a + r * a_row - 1, a + (r + 1) * a_row - 1));
      }
      add_two();
    }
  }
  if (i < count) {
    uint32_t last[R], none[R];
    for (int r = 0; r < R; ++r) last[r] = a[r * a_row];
    std::fill_n(none, R, kNoPair);
    QuadsOfColumns<R>(d, last, none, rows);
    sums.Add(rows, [&](int c) HWY_ATTR { return QuadsOfLanes(d, hn::Load(words, b + c * N), hn::Zero(words)); });
  }
  HWY_UNROLL(32)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) hn::Store(sums.Get(r, c), d, out + r * out_row + c * N);
  }
}

#endif  // HEED_QUAD_PRODUCTS

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_QUAD_TILE_INL_H_
