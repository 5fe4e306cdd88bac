// Products of a few rows with many rows (small M), each of the many read once, in place and in its storage type: the
// products of decoding with a cache.
//
// Compiled once per SIMD target. tile-inl.h has the few rows in lanes, most of which would be empty here. So the many
// are in lanes: for dot products they are transposed in registers; for sums their columns are in lanes as stored. With
// R rows, an element costs R FMAs and about one shuffle. The bound is memory as long as that takes less time than
// reading the element.
//
// Each output is the same chain of FMAs, in the same ascending order, as in tile-inl.h, so both have the same bits.
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

// A cursor over rows that are stored as S, `stride` elements apart. With `page`, each page has `page_rows` rows,
// `offset` bytes from its start; a page's address is read when its first row is reached. With `chosen`, row i is row
// chosen[i] of all pages, `page` is the first page, and TakeChosen() must be used.
template <class S>
struct RowCursor {
  const S* row;
  ptrdiff_t stride;
  size_t left;                             // rows from `row` on in this page
  const std::byte* const* page = nullptr;  // the next page
  ptrdiff_t offset = 0;
  size_t page_rows = 0;
  const int64_t* chosen = nullptr;

  // Stores pointers to the next `count` rows, and advances.
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

  // Returns the start of the next contiguous rows: `most` at most, at least one, all in one page.
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

  // Advances by `count` rows.
  HWY_INLINE void Skip(size_t count) {
    while (count != 0) {
      size_t n;
      TakeRun(count, &n);
      count -= n;
    }
  }

  // Take() for chosen rows. It is a function of its own because they are too rare for a test in Take(). Without pages,
  // rows count from `row`.
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

// Multiplying int8 rows takes so little of the time per tile that prefetches during the products alone would leave
// memory idle between them. Three quarters of the lines are prefetched during the products, and the lines of a quarter
// of the rows between them.
template <class S>
inline constexpr bool kLeavesLines = std::is_same_v<S, int8_t>;

// `count` rows to multiply, kMostRows at most, and `ahead` more rows to prefetch: none if rows are chosen. The first
// `prefetched` of these are prefetched elsewhere.
inline constexpr size_t kMostRows = 128;
template <class S>
struct StoredRows {
  RowCursor<S> cursor;
  size_t count, ahead, prefetched = 0;
};

// Prefetches the rows that come next, line by line, while others are computed. It goes row by row, because the hardware
// prefetcher follows this order and continues on its own.
template <class S>
class LinesAhead {
 public:
  LinesAhead() = default;  // nothing to prefetch

  // Prefetches `count` rows from the cursor on.
  LinesAhead(const RowCursor<S>& cursor, size_t count, size_t columns)
      : cursor_(cursor), ahead_(count), row_bytes_(columns * sizeof(S)),
        most_(cursor_.stride == static_cast<ptrdiff_t>(columns) ? ahead_ : 1) {}

  // Prefetches one line. Returns false if none is left.
  HWY_INLINE bool PrefetchLine() {
    if (at_ == end_) {
      if (ahead_ == 0) return false;
      NextRun();
    }
    PrefetchToL2(at_);
    at_ += 64;
    return true;
  }

 protected:
  // Moves to the next lines: several rows if there are no gaps between them, else one row.
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

// The rows to multiply, with prefetches of those that come next.
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
      this->ahead_ -= std::min(this->ahead_, rows.prefetched);
      this->cursor_.Skip(rows.prefetched);
    }
  }

  HWY_INLINE const S* operator[](size_t j) const { return rows_[j]; }

  // Prefetches as many lines as N rows of one vector have.
  template <class D>
  HWY_INLINE void PrefetchVectors(D) {
    constexpr size_t N = hn::MaxLanes(D());
    constexpr size_t kLines = kLeavesLines<S> ? N * 3 / 4 : N;
    for (size_t i = 0; i < kLines; ++i) this->PrefetchLine();
  }

 private:
  const S* rows_[kMostRows];
};

// Columns per transpose of N rows: one vector of each row, as 32-bit words of two bf16 or four int8.
template <class D, class S>
constexpr size_t kColumns = hn::MaxLanes(D()) * (std::is_same_v<S, BF16>     ? 2
                                                 : std::is_same_v<S, int8_t> ? 4
                                                                             : 1);

// Returns a vector whose 128-bit block b is block 0 of row 4 b + i. Loading a block into its place needs no shuffle,
// and shuffles are what limits a transpose.
template <class D, class Row>
HWY_INLINE hn::Vec<D> LoadBlocks(D d, const Row& row, size_t i) {
  constexpr size_t kBlocks = hn::MaxLanes(D()) / 4;
  const hn::Repartition<uint8_t, D> bytes;
  const hn::CappedTag<uint8_t, 16> byte_tag;
  const auto block = [&](size_t b)
                         HWY_ATTR { return hn::LoadU(byte_tag, reinterpret_cast<const uint8_t*>(row(4 * b + i))); };
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

// Stores column i of four columns of words in v[i]; row(j) is the address of the columns in row j of N.
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

// Calls f(i, column i) for N rows of N 32-bit words; row(j) is the start of row j. The calls come after every four
// columns, or after all of them. Measured: for one to four products per column the former is 6 to 10 % faster, for
// eight products the latter 15 %.
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

// Calls f(column, vector), widened, for kColumns columns of N rows; row(j) is the start of row j. The caller computes R
// products of each column.
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

// Stores out[j][r] = columns[r][j] for `count` rows of N columns, of which the first R are needed.
template <int R, class D, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE void StoreColumns(D d, const V* HWY_RESTRICT columns, size_t count, T* HWY_RESTRICT out) {
  constexpr size_t N = hn::MaxLanes(D());
  if constexpr (R == 1) {  // the value fills all columns, which saves the shuffles
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

// Computes sums[r][j] += sum_e rows_j[e] x[e][r] for N rows and the elements left over, with ascending e. It is called
// and not inlined, because few depths leave a rest and it would double the code.
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

// Computes out[j][r] = sum_e rows_j[e] x[e][r] for B N rows from `begin` on, or for those that exist, and R columns of
// x, with ascending e. x and out have N columns, all of which are written. B R chains run at once; with fewer than
// eight, they would wait for their own latency.
template <int R, int B, bool kWhole, class D, class S, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE void DotTile(D d, RowsInHand<S>& rows, size_t begin, size_t count, size_t depth, const T* HWY_RESTRICT x,
                        T* HWY_RESTRICT out) {
  constexpr size_t N = hn::MaxLanes(D());
  static_assert(R <= N);
  if constexpr (kWhole) count = B * N;
  // Lanes beyond the last row repeat it.
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
      rows.PrefetchVectors(d);
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
  // Measured: B = 4 is slower than 2, for bf16 by a tenth.
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

// Computes out[r][e] = out[r][e] factor[r] + sum_j weights[j][r] rows_j[e] with ascending j, starting from 0 if
// `clear`, for R rows r and C vectors of columns, or the first `columns` < N columns of one vector. With kSkipMasked, a
// weight of -0 leaves out unchanged even where a row is not finite.
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
      const bool prefetches = !kLeavesLines<S> || j % 4 != 3;
      if (prefetches && static_cast<size_t>(c) * N * sizeof(S) % 64 == 0) rows.PrefetchLine();
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

// Does this for all `columns`. Rows of `out` are padded to whole vectors.
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
