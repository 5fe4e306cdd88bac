// Products of a few rows with many, each of the many read once, in place and as it is
// stored: what decoding does with a cache.
//
// Compiled once per SIMD target. Where tile-inl.h has the few in lanes, and most lanes
// empty when they are very few, here the many stand in lanes: for dot products they are
// transposed in registers, for sums their columns stand in lanes as they lie. With R rows
// an element costs R products and about one shuffle; memory is the bound as long as that
// takes less time than reading it.
//
// Each output is the same chain of fused products, in ascending order, as in tile-inl.h:
// bits do not tell the two apart.
#if defined(HEED_SIMD_ROW_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_ROW_TILE_INL_H_
#undef HEED_SIMD_ROW_TILE_INL_H_
#else
#define HEED_SIMD_ROW_TILE_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "heed/simd/convert-inl.h"
#include "heed/simd/tile-inl.h"
#include "heed/simd/transpose-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// One row after the other of many that are stored as S, `stride` elements apart; where
// `page` is given, `page_rows` of them in each of its pieces, `offset` bytes from where it
// begins. A piece is looked up when its first row is. With `chosen`, row i is instead row
// chosen[i] of all pieces, `page` being the first, and TakeChosen() finds it.
template <class S>
struct RowCursor {
  const S* row;
  ptrdiff_t stride;
  size_t left;                             // rows from `row` on in this piece
  const std::byte* const* page = nullptr;  // the next one
  ptrdiff_t offset = 0;
  size_t page_rows = 0;
  const int64_t* chosen = nullptr;

  // Where the next `count` rows are.
  HWY_INLINE void Take(size_t count, const S** HWY_RESTRICT rows) {
    for (size_t done = 0; done < count;) {
      if (left == 0) {
        row = reinterpret_cast<const S*>(*page++ + offset);
        left = page_rows;
      }
      const size_t n = std::min(left, count - done);
      for (size_t i = 0; i < n; ++i) rows[done + i] = row + static_cast<ptrdiff_t>(i) * stride;
      row += static_cast<ptrdiff_t>(n) * stride;
      left -= n;
      done += n;
    }
  }

  // The next rows of one piece, `most` at most and at least one: where they begin.
  HWY_INLINE const S* TakeRun(size_t most, size_t* count) {
    if (left == 0) {
      row = reinterpret_cast<const S*>(*page++ + offset);
      left = page_rows;
    }
    const S* begin = row;
    *count = std::min(left, most);
    row += static_cast<ptrdiff_t>(*count) * stride;
    left -= *count;
    return begin;
  }

  // Goes on `count` rows later.
  HWY_INLINE void Skip(size_t count) {
    while (count != 0) {
      size_t n;
      TakeRun(count, &n);
      count -= n;
    }
  }

  // Does what Take() does for chosen rows, which are too rare to be looked for there. Without pages they count from
  // `row`.
  HWY_NOINLINE void TakeChosen(size_t count, const S** HWY_RESTRICT rows) {
    if (page == nullptr) {
      for (size_t i = 0; i < count; ++i) rows[i] = row + static_cast<ptrdiff_t>(*chosen++) * stride;
      return;
    }
    for (size_t i = 0; i < count; ++i) {
      const auto at = static_cast<size_t>(*chosen++);
      rows[i] =
          reinterpret_cast<const S*>(page[at / page_rows] + offset) + static_cast<ptrdiff_t>(at % page_rows) * stride;
    }
  }
};

// Rows of int8 are read so fast that memory would have nothing to do between the products.
// Three of four lines of them are asked for as others are read; the lines of a quarter of
// the rows are left for that time.
template <class S>
inline constexpr bool kLeavesLines = std::is_same_v<S, int8_t>;

// `count` rows to multiply, kMostRows at most, and `ahead` more that come next: none where
// rows are chosen. The first `asked` of these are asked for elsewhere.
inline constexpr size_t kMostRows = 128;
template <class S>
struct StoredRows {
  RowCursor<S> cursor;
  size_t count, ahead, asked = 0;
};

// Rows that come next, asked for line by line as others are computed: row by row, since
// hardware follows such an order and goes on by itself.
template <class S>
class LinesAhead {
 public:
  LinesAhead() = default;  // none

  // `count` rows from the cursor on.
  LinesAhead(const RowCursor<S>& cursor, size_t count, size_t columns)
      : cursor_(cursor), ahead_(count), row_bytes_(columns * sizeof(S)),
        most_(cursor_.stride == static_cast<ptrdiff_t>(columns) ? ahead_ : 1) {}

  // False if none is left.
  HWY_INLINE bool AskForALine() {
    if (at_ == end_) {
      if (ahead_ == 0) return false;
      NextRun();
    }
    PrefetchToL2(at_);
    at_ += 64;
    return true;
  }

 protected:
  // What follows: rows without gaps between them, or one.
  HWY_INLINE void NextRun() {
    size_t count;
    at_ = reinterpret_cast<const char*>(cursor_.TakeRun(std::min(ahead_, most_), &count));
    end_ = at_ + (count * row_bytes_ + 63) / 64 * 64;
    ahead_ -= count;
  }

  RowCursor<S> cursor_ = {};
  size_t ahead_ = 0, row_bytes_ = 0, most_ = 0;
  const char *at_ = nullptr, *end_ = nullptr;
};

// The rows to multiply, and those ahead.
template <class S>
class RowsInHand : public LinesAhead<S> {
 public:
  RowsInHand(const StoredRows<S>& rows, size_t columns)
      : LinesAhead<S>(rows.cursor, std::min(rows.count, rows.ahead), columns) {
    if (this->cursor_.chosen != nullptr) {
      this->cursor_.TakeChosen(rows.count, rows_);
    } else {
      this->cursor_.Take(rows.count, rows_);
    }
    if constexpr (kLeavesLines<S>) {
      this->ahead_ -= std::min(this->ahead_, rows.asked);
      this->cursor_.Skip(rows.asked);
    }
  }

  HWY_INLINE const S* operator[](size_t j) const { return rows_[j]; }

  // Asks for as many lines as vectors of N rows are.
  template <class D>
  HWY_INLINE void AskForVectors(D) {
    constexpr size_t N = hn::MaxLanes(D());
    constexpr size_t kLines = kLeavesLines<S> ? N * 3 / 4 : N;
    for (size_t i = 0; i < kLines; ++i) this->AskForALine();
  }

 private:
  const S* rows_[kMostRows];
};

// Columns that N rows are transposed by: words of a vector, of which bf16 has two each and
// int8 four.
template <class D, class S>
constexpr size_t kColumns = hn::MaxLanes(D()) * (std::is_same_v<S, BF16>     ? 2
                                                 : std::is_same_v<S, int8_t> ? 4
                                                                             : 1);

// Block b of 128 bits of the vector is that of row 4 b + i: what is put into its place as it is loaded needs no
// shuffle, which transposes have too many of.
template <class D, class Row>
HWY_INLINE hn::Vec<D> LoadBlocks(D d, const Row& row, size_t i) {
  constexpr size_t kBlocks = hn::MaxLanes(D()) / 4;
  const hn::Repartition<uint8_t, D> bytes;
  const hn::CappedTag<uint8_t, 16> of_block;
  const auto block = [&](size_t b)
                         HWY_ATTR { return hn::LoadU(of_block, reinterpret_cast<const uint8_t*>(row(4 * b + i))); };
  if constexpr (kBlocks == 1) {
    return hn::BitCast(d, block(0));
  } else if constexpr (kBlocks == 2) {
    return hn::BitCast(d, hn::Combine(bytes, block(1), block(0)));
  } else {
    static_assert(kBlocks == 4);
    const hn::Half<decltype(bytes)> half;
    return hn::BitCast(
        d, hn::Combine(bytes, hn::Combine(half, block(3), block(2)), hn::Combine(half, block(1), block(0))));
  }
}

// v[i] becomes column i of four, of words, row(j) being where they begin in row j of N.
template <class D, class Row, class V = hn::Vec<D>>
HWY_INLINE void LoadFourColumns(D d, const Row& row, V* HWY_RESTRICT v) {
  const hn::Repartition<double, D> wide;
  const V a = LoadBlocks(d, row, 0), b = LoadBlocks(d, row, 1);
  const V c = LoadBlocks(d, row, 2), e = LoadBlocks(d, row, 3);
  const auto ab0 = hn::BitCast(wide, hn::InterleaveLower(d, a, b));
  const auto ab1 = hn::BitCast(wide, hn::InterleaveUpper(d, a, b));
  const auto ce0 = hn::BitCast(wide, hn::InterleaveLower(d, c, e));
  const auto ce1 = hn::BitCast(wide, hn::InterleaveUpper(d, c, e));
  v[0] = hn::BitCast(d, hn::InterleaveLower(wide, ab0, ce0));
  v[1] = hn::BitCast(d, hn::InterleaveUpper(wide, ab0, ce0));
  v[2] = hn::BitCast(d, hn::InterleaveLower(wide, ab1, ce1));
  v[3] = hn::BitCast(d, hn::InterleaveUpper(wide, ab1, ce1));
}

// f(i, column i) of N rows of N words of 32 bits, row(j) being where row j begins: of four columns after the other, or
// once all of them are there. Measured: for one to four products of a column the former is 6 to 10 % faster, for
// eight the latter 15 %.
template <bool kAllAtOnce, class D, class Row, class F, class V = hn::Vec<D>>
HWY_INLINE void ForWordColumns(D d, const Row& row, const F& f) {
  constexpr size_t N = hn::MaxLanes(D()), kFour = 16 / sizeof(*row(0));
  V v[N];
  HWY_UNROLL(4)
  for (size_t i = 0; i < N; i += 4) {
    LoadFourColumns(d, [&](size_t j) HWY_ATTR { return row(j) + i / 4 * kFour; }, v + i);
    HWY_UNROLL(4)
    for (size_t k = i; !kAllAtOnce && k < i + 4; ++k) f(k, v[k]);
  }
  HWY_UNROLL(32)
  for (size_t i = 0; kAllAtOnce && i < N; ++i) f(i, v[i]);
}

// f(column, vector), widened, for kColumns of N rows, row(j) being where row j begins; R products of each follow.
template <int R, class D, class S, class Row, class F, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE void ForColumns(D d, const Row& row, const F& f) {
  constexpr size_t N = hn::MaxLanes(D());
  const hn::RebindToUnsigned<D> words;
  const hn::RebindToSigned<D> integers;
  const auto widened = [&](size_t i, V v) HWY_ATTR {
    if constexpr (std::is_same_v<S, BF16>) {
      const auto both = hn::BitCast(words, v);
      f(2 * i, hn::BitCast(d, hn::ShiftLeft<16>(both)));
      f(2 * i + 1, hn::BitCast(d, hn::And(both, hn::Set(words, 0xFFFF0000u))));
    } else if constexpr (std::is_same_v<S, int8_t>) {
      const auto all = hn::BitCast(integers, v);
      f(4 * i, hn::ConvertTo(d, hn::ShiftRight<24>(hn::ShiftLeft<24>(all))));
      f(4 * i + 1, hn::ConvertTo(d, hn::ShiftRight<24>(hn::ShiftLeft<16>(all))));
      f(4 * i + 2, hn::ConvertTo(d, hn::ShiftRight<24>(hn::ShiftLeft<8>(all))));
      f(4 * i + 3, hn::ConvertTo(d, hn::ShiftRight<24>(all)));
    } else {
      f(i, v);
    }
  };
  if constexpr (sizeof(T) == 4 && N >= 4 && (std::is_same_v<S, T> || kColumns<D, S> > N)) {
    ForWordColumns<(R > 4)>(d, row, widened);
  } else {
    V v[N];
    HWY_UNROLL(32)
    for (size_t i = 0; i < N; ++i) v[i] = LoadWide(d, row(i));
    Transpose(d, v);
    HWY_UNROLL(32)
    for (size_t i = 0; i < N; ++i) widened(i, v[i]);
  }
}

// out[j][r] = columns[r][j] of `count` rows of N columns, of which R are asked for.
template <int R, class D, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE void StoreColumns(D d, const V* HWY_RESTRICT columns, size_t count, T* HWY_RESTRICT out) {
  constexpr size_t N = hn::MaxLanes(D());
  if constexpr (R == 1) {  // in all columns alike: no shuffle is spent on it
    HWY_ALIGN T column[N];
    hn::Store(columns[0], d, column);
    for (size_t i = 0; i < N && i < count; ++i) {
      hn::Store(hn::Set(d, column[i]), d, out + i * N);
    }
    return;
  }
  V rows[N];
  HWY_UNROLL(32)
  for (size_t r = 0; r < N; ++r) rows[r] = r < R ? columns[r] : hn::Zero(d);
  Transpose(d, rows);
  for (size_t i = 0; i < N && i < count; ++i) hn::Store(rows[i], d, out + i * N);
}

// sums[r][j] += sum_e rows_j[e] x[e][r] of N rows and what is left of them, e ascending. It is called, not inlined: few
// rows leave anything, and it would be as much code as all the rest.
template <int R, class D, class S, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_NOINLINE void DotRest(D d, const S* const* rows, size_t left, const T* HWY_RESTRICT x, T* HWY_RESTRICT sums) {
  constexpr size_t N = hn::MaxLanes(D());
  V sum[R];
  for (int r = 0; r < R; ++r) sum[r] = hn::Load(d, sums + static_cast<size_t>(r) * N);
  for (size_t e = 0; e < left; e += N) {
    const size_t count = std::min(N, left - e);
    HWY_ALIGN T columns[N * N];
    V v[N];
    for (size_t i = 0; i < N; ++i) v[i] = LoadWideN(d, rows[i] + e, count);
    Transpose(d, v);
    for (size_t i = 0; i < N; ++i) hn::Store(v[i], d, columns + i * N);
    for (size_t i = 0; i < count; ++i, x += N) {
      const V column = hn::Load(d, columns + i * N);
      HWY_UNROLL(8)
      for (int r = 0; r < R; ++r) sum[r] = hn::MulAdd(column, hn::Set(d, x[r]), sum[r]);
    }
  }
  for (int r = 0; r < R; ++r) hn::Store(sum[r], d, sums + static_cast<size_t>(r) * N);
}

// out[j][r] = sum_e rows_j[e] x[e][r] of B N rows from `begin` on, or of those that there
// are, for R columns of x, e ascending. x and out have N columns, all written. B R chains
// are under way at once: fewer than eight wait for each other's results.
template <int R, int B, bool kWhole, class D, class S, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE void DotTile(D d, RowsInHand<S>& rows, size_t begin, size_t count, size_t depth, const T* HWY_RESTRICT x,
                        T* HWY_RESTRICT out) {
  constexpr size_t N = hn::MaxLanes(D());
  static_assert(R <= N);
  if constexpr (kWhole) count = B * N;
  // Lanes beyond the last row have it once more.
  const auto row = [&](size_t i) HWY_ATTR { return rows[begin + (kWhole ? i : std::min(i, count - 1))]; };
  V sum[B][R];
  HWY_UNROLL(8)
  for (int b = 0; b < B; ++b) {
    HWY_UNROLL(8)
    for (int r = 0; r < R; ++r) sum[b][r] = hn::Zero(d);
  }
  const auto add = [&](int b, size_t i, V column) HWY_ATTR {
    HWY_UNROLL(8)
    for (int r = 0; r < R; ++r) {
      sum[b][r] = hn::MulAdd(column, hn::Set(d, x[i * N + static_cast<size_t>(r)]), sum[b][r]);
    }
  };
  constexpr size_t kStep = kColumns<D, S>;
  size_t e = 0;
  for (; e + kStep <= depth; e += kStep, x += kStep * N) {
    HWY_UNROLL(8)
    for (int b = 0; b < B; ++b) {
      rows.AskForVectors(d);
      ForColumns<R, D, S>(
          d, [&](size_t i) HWY_ATTR { return row(static_cast<size_t>(b) * N + i) + e; },
          [&](size_t i, V column) HWY_ATTR { add(b, i, column); });
    }
  }
  if (e < depth) {
    HWY_ALIGN T sums[B][R * N];
    const S* left[B * N];
    for (size_t i = 0; i < B * N; ++i) left[i] = row(i) + e;
    HWY_UNROLL(8)
    for (int b = 0; b < B; ++b) {
      HWY_UNROLL(8)
      for (int r = 0; r < R; ++r) hn::Store(sum[b][r], d, sums[b] + static_cast<size_t>(r) * N);
    }
    for (int b = 0; b < B; ++b) DotRest<R>(d, left + static_cast<size_t>(b) * N, depth - e, x, sums[b]);
    HWY_UNROLL(8)
    for (int b = 0; b < B; ++b) {
      HWY_UNROLL(8)
      for (int r = 0; r < R; ++r) sum[b][r] = hn::Load(d, sums[b] + static_cast<size_t>(r) * N);
    }
  }
  HWY_UNROLL(8)
  for (int b = 0; b < B; ++b) {
    const size_t first = static_cast<size_t>(b) * N;
    StoreColumns<R>(d, sum[b], kWhole ? N : count - first, out + (begin + first) * N);
  }
}

template <int R, class D, class S, class T = hn::TFromD<D>>
HWY_NOINLINE void DotRows(D d, const StoredRows<S>& rows, size_t depth, const T* HWY_RESTRICT x, T* HWY_RESTRICT out) {
  constexpr size_t N = hn::MaxLanes(D());
  // Measured: four blocks at once are slower than two, of bf16 by a tenth.
  constexpr int B = R <= 4 ? 2 : 1;
  RowsInHand<S> in_hand(rows, depth);
  size_t begin = 0;
  for (; begin + B * N <= rows.count; begin += B * N) {
    DotTile<R, B, true>(d, in_hand, begin, B * N, depth, x, out);
  }
  for (; begin < rows.count; begin += N) {
    DotTile<R, 1, false>(d, in_hand, begin, std::min(N, rows.count - begin), depth, x, out);
  }
}

// out[r][e] = out[r][e] factor[r] + sum_j weights[j][r] rows_j[e], j ascending, and from
// zero if `clear`, for R rows r and `C` vectors of columns, or the first `columns` < N of
// one. With kSkipMasked, a weight of -0 leaves out as it is even where a row is not finite.
template <int R, int C, bool kWhole, bool kSkipMasked, class D, class S, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE void SumTile(D d, RowsInHand<S>& rows, size_t count, size_t column, size_t columns,
                        const T* HWY_RESTRICT weights, bool clear, const T* HWY_RESTRICT factor, T* HWY_RESTRICT out,
                        ptrdiff_t out_row) {
  static_assert(kWhole || C == 1);
  constexpr size_t N = hn::MaxLanes(D());
  V acc[R][C];
  HWY_UNROLL(8)
  for (int r = 0; r < R; ++r) {
    const V f = hn::Set(d, factor[r]);
    HWY_UNROLL(8)
    for (int c = 0; c < C; ++c) {
      const T* at = out + r * out_row + static_cast<size_t>(c) * N;
      acc[r][c] = clear ? hn::Zero(d) : hn::Mul(hn::Load(d, at), f);
    }
  }
  for (size_t j = 0; j < count; ++j, weights += N) {
    const S* HWY_RESTRICT row = rows[j] + column;
    V values[C];
    HWY_UNROLL(8)
    for (int c = 0; c < C; ++c) {
      const bool asks = !kLeavesLines<S> || j % 4 != 3;
      if (asks && static_cast<size_t>(c) * N * sizeof(S) % 64 == 0) rows.AskForALine();
      values[c] = kWhole ? LoadWide(d, row + static_cast<size_t>(c) * N) : LoadWideN(d, row, columns);
    }
    HWY_UNROLL(8)
    for (int r = 0; r < R; ++r) {
      const V weight = hn::Set(d, weights[r]);
      HWY_UNROLL(8)
      for (int c = 0; c < C; ++c) {
        if constexpr (kSkipMasked) {
          const hn::RebindToSigned<D> di;
          const auto masked = hn::MaskFromVec(hn::BitCast(d, hn::BroadcastSignBit(hn::BitCast(di, weight))));
          acc[r][c] = hn::MulAdd(hn::IfThenZeroElse(masked, values[c]), weight, acc[r][c]);
        } else {
          acc[r][c] = hn::MulAdd(values[c], weight, acc[r][c]);
        }
      }
    }
  }
  HWY_UNROLL(8)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(8)
    for (int c = 0; c < C; ++c) {
      hn::Store(acc[r][c], d, out + r * out_row + static_cast<size_t>(c) * N);
    }
  }
}

// Does so for all `columns`; rows of `out` are whole vectors.
template <int R, bool kSkipMasked, class D, class S, class T = hn::TFromD<D>>
HWY_NOINLINE void SumRows(D d, const StoredRows<S>& rows, size_t columns, const T* HWY_RESTRICT weights, bool clear,
                          const T* HWY_RESTRICT factor, T* HWY_RESTRICT out, ptrdiff_t out_row) {
  constexpr size_t N = hn::MaxLanes(D());
  constexpr int kSums = kVectorRegisters / 2;
  constexpr int kVectors = kSkipMasked ? 1 : HWY_MAX(1, HWY_MIN(8, kSums / R));
  RowsInHand<S> in_hand(rows, columns);
  ForTiles<kVectors>(0, columns / N, [&](auto vectors, size_t c) HWY_ATTR {
    SumTile<R, vectors.value, true, kSkipMasked>(d, in_hand, rows.count, c * N, 0, weights, clear, factor, out + c * N,
                                                 out_row);
  });
  const size_t whole = columns / N * N;
  if (whole == columns) return;
  SumTile<R, 1, false, kSkipMasked>(d, in_hand, rows.count, whole, columns - whole, weights, clear, factor, out + whole,
                                    out_row);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_ROW_TILE_INL_H_
