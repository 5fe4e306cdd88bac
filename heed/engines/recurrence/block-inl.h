// A block of tokens of the recurrence: loading and widening rows, folding decays into tables, loading and storing
// states.
//
// Compiled once per SIMD target. With a_t = exp(log_decay_t) <= 1, the tables of a tile of tokens 1..n are
//
//   E_t = a_1 ... a_t       read_t  = q_t .* E_t
//   F_j = a_{j+1} ... a_n   write_j = k_j .* F_j       decay = TileDecay(E_n)
//   pairs_tj = sum_i q_ti k_ji (a_{j+1} ... a_t)_i,  j <= t
//
// so that o_t = S^T read_t + sum_{j <= t} pairs_tj v_j and S <- E_n .* S + sum_j write_j v_j^T (register_tile-inl.h).
// With the u term (Form::kBonus) queries read the state before their token: read_t = q_t .* E_{t-1}, pairs_tj has the
// decays up to a_{t-1}, and pairs_tt = sum_i q_ti u_i k_ti.
//
// The tables are products of at most four factors <= 1 and nothing is divided, so that no intermediate decay over- or
// underflows, as exp(-G) of a cumulative log decay G would.
//
// A state is multiplied by T / 4 decays E. If all are equal and near 1, each is rounded alike, and what early tokens
// have written drifts by T / 8 roundings. E - 1 is accurate to a rounding of itself: S + (E - 1) S is off by a rounding
// of S, of either sign as long as tokens write to it (StateTile). A value that is written once and then decays by less
// than a rounding per tile stays as it is, which is off by at most half a rounding per tile.
#if defined(HEED_ENGINES_RECURRENCE_BLOCK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_RECURRENCE_BLOCK_INL_H_
#undef HEED_ENGINES_RECURRENCE_BLOCK_INL_H_
#else
#define HEED_ENGINES_RECURRENCE_BLOCK_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "heed/engines/recurrence/decays-inl.h"
#include "heed/engines/recurrence/features-inl.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/engines/recurrence/register_tile-inl.h"
#include "heed/simd/convert-inl.h"
#include "heed/simd/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

inline constexpr auto kBlock = static_cast<size_t>(kBlockTokens);
inline constexpr auto kTile = static_cast<size_t>(kTileTokens);

// The number of elements of a row, padded to whole vectors.
template <class T>
constexpr size_t Padded(int64_t size) {
  constexpr size_t N = hn::MaxLanes(hn::ScalableTag<T>());
  return (static_cast<size_t>(size) + N - 1) / N * N;
}

// True if tiles can load or store these rows in memory. They access each element once, so a copy gains nothing.
template <class T>
bool InPlace(const Rows& rows, int64_t size) {
  return rows.data != nullptr && rows.dtype == DTypeOf<T>::value && static_cast<size_t>(size) == Padded<T>(size);
}

template <class S>
HWY_INLINE S* RowAt(const Rows& rows, const Sequence& s, int64_t head, int64_t token) {
  return const_cast<S*>(static_cast<const S*>(rows.data)) + s.batch * rows.batch_stride +
         (s.first + token) * rows.token_stride + head * rows.head_stride;
}

// The offset of a token's row, in elements of `rows`.
inline int64_t NumberAt(const Rows& rows, const Sequence& s, int64_t head, int64_t token) {
  return s.batch * rows.batch_stride + (s.first + token) * rows.token_stride + head * rows.head_stride;
}

// LoadRows() for constants that LoadWide() does not convert: f64 with f32 computation, and f32 or 16 bits with f64.
template <class T>
HWY_NOINLINE void ConvertRows(const Rows& rows, const Sequence& s, int64_t head, int64_t first, size_t n, size_t size,
                              T* HWY_RESTRICT to, size_t row, size_t every) {
  for (size_t t = 0; t < n; ++t, to += every * row) {
    const int64_t from = NumberAt(rows, s, head, first + static_cast<int64_t>(t));
    for (size_t i = 0; i < row; ++i) {
      const auto at = from + static_cast<int64_t>(i);
      to[i] = i < size ? static_cast<T>(LoadAsDouble(rows.dtype, rows.data, at)) : T{0};
    }
  }
}

// Loads the rows of tokens [first, first + n), widened, with zeros from `size` to `row`, into each `every`-th row of
// `to`.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void LoadRows(D d, const Rows& rows, const Sequence& s, int64_t head, int64_t first, size_t n, size_t size,
                         T* HWY_RESTRICT to, size_t row, size_t every = 1) {
  constexpr size_t N = hn::MaxLanes(D());
  if (std::is_same_v<T, double> != (rows.dtype == DType::kF64)) {
    return ConvertRows(rows, s, head, first, n, size, to, row, every);
  }
  hs::WithStorage<T>(rows.dtype, [&](auto stored) HWY_ATTR {
    for (size_t t = 0; t < n; ++t, to += every * row) {
      const auto* from = RowAt<decltype(stored)>(rows, s, head, first + static_cast<int64_t>(t));
      size_t i = 0;
      for (; i + N <= size; i += N) hn::Store(hs::LoadWide(d, from + i), d, to + i);
      if (i < size) hn::Store(hs::LoadWideN(d, from + i, size - i), d, to + i);
      for (i = Padded<T>(static_cast<int64_t>(size)); i < row; i += N) {
        hn::Store(hn::Zero(d), d, to + i);
      }
    }
  });
}

// Adds columns [begin, end) of the rows from token `first` on to the prefetches.
inline void AddRows(RowPrefetch& prefetch, const Rows& rows, const Sequence& s, int64_t head, int64_t first,
                    int64_t begin, int64_t end) {
  const auto bytes = static_cast<int64_t>(SizeOf(rows.dtype));
  prefetch.Add(static_cast<const char*>(rows.data) + bytes * (NumberAt(rows, s, head, first) + begin),
               rows.token_stride * bytes, static_cast<size_t>((end - begin) * bytes));
}

// Stores columns [begin, end) of rows, rounded, as f(vector, token, column).
template <class D, class F, class T = hn::TFromD<D>>
HWY_INLINE void StoreRows(D d, const T* HWY_RESTRICT from, size_t row, const Rows& rows, const Sequence& s,
                          int64_t head, int64_t first, size_t n, size_t begin, size_t end, const F& f) {
  constexpr size_t N = hn::MaxLanes(D());
  hs::WithStorage<T>(rows.dtype, [&](auto stored) HWY_ATTR {
    for (size_t t = 0; t < n; ++t, from += row) {
      auto* to = RowAt<decltype(stored)>(rows, s, head, first + static_cast<int64_t>(t));
      for (size_t i = begin; i < end; i += N) {
        hs::StoreRounded(d, f(hn::Load(d, from + i), t, i), to + i, HWY_MIN(N, end - i));
      }
    }
  });
}

inline void StoreNumber(const Rows& rows, const Sequence& s, int64_t head, int64_t token, double number) {
  StoreDouble(rows.dtype, const_cast<void*>(rows.data), NumberAt(rows, s, head, token), number);
}

// The shape of columns [begin, end) of a state in column blocks of at most kVectors vectors.
template <int kVectors>
struct BlockedShape {
  size_t rows;  // rows of the state in column blocks, of which the first `stored` are also in States
  size_t stored;
  size_t begin, end;  // multiples of a vector
  size_t size;        // number of columns without padding
  bool transposed;    // true if rows are value channels and columns key channels

  // Offset of the column block that begins at `column`.
  size_t Offset(size_t column) const { return (column - begin) * rows; }
};
using StateShape = BlockedShape<kColumnBlockVectors>;

template <class T, int kVectors>
size_t NumColumnBlocks(const BlockedShape<kVectors>& shape) {
  constexpr size_t kWidth = kVectors * hn::MaxLanes(hn::ScalableTag<T>());
  return (shape.end - shape.begin + kWidth - 1) / kWidth;
}

// The number of calls of RowPrefetch::Issue() per block in SweepColumnBlocks(), AddOuterProducts() and ReadState().
template <class T>
size_t NumPrefetches(const StateShape& shape) {
  return NumColumnBlocks<T>(shape) * (kBlock / kTile) * (shape.rows / RowPrefetch::kPrefetchRows);
}
template <class T>
size_t NumSumPrefetches(const StateShape& shape) {
  return NumColumnBlocks<T>(shape) * shape.rows / hs::TileRows<kColumnBlockVectors>();
}
template <class T>
size_t NumReadPrefetches(const StateShape& shape) {
  return NumColumnBlocks<T>(shape) * kBlock / hs::TileRows<kColumnBlockVectors>();
}

// Calls f(std::integral_constant<int, vectors>, first column) for each column block.
template <class T, int kVectors, class F>
HWY_INLINE void ForColumnBlockVectors(const BlockedShape<kVectors>& shape, const F& f) {
  constexpr size_t N = hn::MaxLanes(hn::ScalableTag<T>());
  hs::ForTiles<kVectors>(shape.begin / N, shape.end / N, [&](auto vectors, size_t c) HWY_ATTR { f(vectors, c * N); });
}

// Calls f(first column, width) for each column block.
template <class T, int kVectors, class F>
HWY_INLINE void ForColumnBlocks(const BlockedShape<kVectors>& shape, const F& f) {
  constexpr size_t N = hn::MaxLanes(hn::ScalableTag<T>());
  ForColumnBlockVectors<T>(shape, [&](auto vectors, size_t column) HWY_ATTR { f(column, vectors.value * N); });
}

template <class D, int kVectors, class F>
HWY_INLINE void ForStateElements(D /*d*/, const BlockedShape<kVectors>& shape, const F& f) {
  constexpr size_t N = hn::MaxLanes(D());
  hs::ForTiles<kVectors>(shape.begin / N, shape.end / N, [&](auto vectors, size_t c) HWY_ATTR {
    constexpr size_t kWidth = vectors.value * N;
    const size_t base = shape.Offset(c * N);
    for (size_t r = 0; r < shape.stored; ++r) {
      for (size_t i = 0; i < kWidth && c * N + i < shape.size; ++i) {
        f(base + r * kWidth + i, r, c * N + i);
      }
    }
  });
}

template <class T>
HWY_INLINE T* StateAt(const States& states, int64_t sequence, int64_t head) {
  return const_cast<T*>(static_cast<const T*>(states.data)) + sequence * states.sequence_stride +
         head * states.head_stride;
}

template <class D, int kVectors, class T = hn::TFromD<D>>
HWY_NOINLINE void LoadState(D d, const States& states, int64_t sequence, int64_t head,
                            const BlockedShape<kVectors>& shape, T* state) {
  std::memset(state, 0, shape.Offset(shape.end) * sizeof(T));
  if (states.data == nullptr) return;
  const T* at = StateAt<T>(states, sequence, head);
  const int64_t row = shape.transposed ? states.value_stride : states.key_stride;
  const int64_t column = shape.transposed ? states.key_stride : states.value_stride;
  ForStateElements(d, shape, [&](size_t i, size_t r, size_t c) HWY_ATTR {
    state[i] = at[static_cast<int64_t>(r) * row + static_cast<int64_t>(c) * column];
  });
}

template <class D, int kVectors, class T = hn::TFromD<D>>
HWY_NOINLINE void StoreState(D d, const T* state, const BlockedShape<kVectors>& shape, const States& states,
                             int64_t sequence, int64_t head) {
  if (states.data == nullptr) return;
  T* at = StateAt<T>(states, sequence, head);
  const int64_t row = shape.transposed ? states.value_stride : states.key_stride;
  const int64_t column = shape.transposed ? states.key_stride : states.value_stride;
  ForStateElements(d, shape, [&](size_t i, size_t r, size_t c) HWY_ATTR {
    at[static_cast<int64_t>(r) * row + static_cast<int64_t>(c) * column] = state[i];
  });
}

// state[r][c] += sum_t rows_t[r] lanes_t[c] over n tokens, in ascending order. Prefetches are distributed over the
// tiles, which have at least four rows of a column block.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void AddOuterProducts(D d, const T* rows, size_t row_stride, const T* lanes, size_t lane_stride, size_t n,
                                   const StateShape& shape, T* state, RowPrefetch& prefetch) {
  constexpr size_t N = hn::MaxLanes(D());
  hs::ForTiles<kColumnBlockVectors>(shape.begin / N, shape.end / N, [&](auto vectors, size_t c) HWY_ATTR {
    constexpr auto kWidth = static_cast<ptrdiff_t>(vectors.value * N);
    T* column_block = state + shape.Offset(c * N);
    hs::ForTiles<hs::TileRows<vectors.value>()>(0, shape.rows, [&](auto tile, size_t r) HWY_ATTR {
      prefetch.Issue();
      hs::AccumulateTile<tile.value, vectors.value, false>(d, rows + r, 1, static_cast<ptrdiff_t>(row_stride),
                                                           lanes + c * N, static_cast<ptrdiff_t>(lane_stride), n,
                                                           column_block + static_cast<ptrdiff_t>(r) * kWidth, kWidth);
    });
  });
}

template <class D, class T = hn::TFromD<D>>
HWY_INLINE void AddOuterProducts(D d, const T* rows, size_t row_stride, const T* lanes, size_t lane_stride, size_t n,
                                 const StateShape& shape, T* state) {
  RowPrefetch none;
  AddOuterProducts(d, rows, row_stride, lanes, lane_stride, n, shape, state, none);
}

// out_t[c] = sum_r rows_t[r] state[r][c] for n tokens.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void ReadState(D d, const T* rows, size_t row_stride, size_t n, const StateShape& shape, const T* state,
                            T* out, size_t out_stride, RowPrefetch& prefetch) {
  constexpr size_t N = hn::MaxLanes(D());
  // The last part of a row has its padding.
  const size_t end = shape.end >= shape.size ? out_stride : shape.end;
  for (size_t t = 0; t < n; ++t) {
    std::memset(out + t * out_stride + shape.begin, 0, (end - shape.begin) * sizeof(T));
  }
  hs::ForTiles<kColumnBlockVectors>(shape.begin / N, shape.end / N, [&](auto vectors, size_t c) HWY_ATTR {
    hs::ForTiles<hs::TileRows<vectors.value>()>(0, n, [&](auto tokens, size_t t) HWY_ATTR {
      prefetch.Issue();
      hs::AccumulateTile<tokens.value, vectors.value, false>(
          d, rows + t * row_stride, static_cast<ptrdiff_t>(row_stride), 1, state + shape.Offset(c * N),
          static_cast<ptrdiff_t>(vectors.value * N), shape.rows, out + t * out_stride + c * N,
          static_cast<ptrdiff_t>(out_stride));
    });
  });
}

template <class D, class T = hn::TFromD<D>>
HWY_INLINE void ReadState(D d, const T* rows, size_t row_stride, size_t n, const StateShape& shape, const T* state,
                          T* out, size_t out_stride) {
  RowPrefetch none;
  ReadState(d, rows, row_stride, n, shape, state, out, out_stride, none);
}

// Loads z [K], padded with zeros to `row` elements.
template <class T>
HWY_INLINE void LoadNormalizer(const States& states, int64_t sequence, int64_t head, size_t size, size_t row, T* z) {
  std::memset(z, 0, row * sizeof(T));
  if (states.data == nullptr) return;
  const T* at = StateAt<T>(states, sequence, head);
  for (size_t i = 0; i < size; ++i) {
    z[i] = at[static_cast<int64_t>(i) * states.key_stride];
  }
}

template <class T>
HWY_INLINE void StoreNormalizer(const T* z, const States& states, int64_t sequence, int64_t head, size_t size) {
  if (states.data == nullptr) return;
  T* at = StateAt<T>(states, sequence, head);
  for (size_t i = 0; i < size; ++i) {
    at[static_cast<int64_t>(i) * states.key_stride] = z[i];
  }
}

// Rows in memory, `stride` elements apart.
template <class T>
struct RowsAt {
  const T* data;
  ptrdiff_t stride;

  const T* operator()(size_t t) const { return data + static_cast<ptrdiff_t>(t) * stride; }
};

// Computes a_t = exp(min(log_decay_t, 0)) of n tokens into rows of `decay`, and E_n - 1 of each tile into rows of
// `less_one`. NaN propagates. `decay` may replace the log decays.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void ExpDecays(D d, const RowsAt<T>& log_decay, size_t n, size_t row, T* decay, T* less_one) {
  const auto zero = hn::Zero(d);
  for (size_t begin = 0; begin < n; begin += kTile, less_one += row) {
    const size_t end = HWY_MIN(begin + kTile, n);
    for (size_t i = 0; i < row; i += hn::MaxLanes(D())) {
      auto sum = zero;
      for (size_t t = begin; t < end; ++t) {
        auto g = hn::LoadU(d, log_decay(t) + i);
        g = hn::IfThenElse(hn::Gt(g, zero), zero, g);
        sum = hn::Add(sum, g);
        hn::Store(ExpOfDecay(d, g), d, decay + t * row + i);
      }
      hn::Store(ExpsOfDecay(d, sum).less_one, d, less_one + i);
    }
  }
}

// ExpDecays() for one log decay per token of a whole block. Missing tokens have zeros.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void ExpScalarDecays(D d, T* log_decay, size_t n, size_t row, T* less_one) {
  constexpr size_t N = hn::MaxLanes(D());
  constexpr size_t kTiles = kBlock / kTile;
  HWY_ALIGN T sums[HWY_MAX(kTiles, N)] = {};
  for (size_t t = 0; t < kBlock; ++t) {
    if (log_decay[t] > 0) log_decay[t] = 0;
    sums[t / kTile] += log_decay[t];
  }
  for (size_t i = 0; i < kBlock; i += N) {
    hn::Store(ExpOfDecay(d, hn::Load(d, log_decay + i)), d, log_decay + i);
  }
  for (size_t i = 0; i < kTiles; i += N) {
    hn::Store(ExpsOfDecay(d, hn::Load(d, sums + i)).less_one, d, sums + i);
  }
  for (size_t tile = 0; tile * kTile < n; ++tile) {
    for (size_t i = 0; i < row; i += N) {
      hn::Store(hn::Set(d, sums[tile]), d, less_one + tile * row + i);
    }
  }
}

// The decay E of a tile in the form that Product takes: E - 1 if E >= 1/2, with the accuracy of a rounding of E - 1,
// else E.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V TileDecay(D d, V decay, V less_one) {
  const auto near = hn::And(hn::Ge(decay, hn::Set(d, hn::TFromD<D>{0.5})), hn::Lt(less_one, hn::Zero(d)));
  return hn::IfThenElse(near, less_one, decay);
}

// The decays of a tile: one per token, a row per token, or a row per token with the u term.
enum class Form { kScalar, kKey, kBonus };

// Calls f(std::integral_constant<Form, ...>) for a problem with decays.
template <class F>
HWY_INLINE void WithForm(const Problem& p, const F& f) {
  if (p.gate == Gate::kScalar) return f(std::integral_constant<Form, Form::kScalar>());
  if (p.has_bonus) return f(std::integral_constant<Form, Form::kBonus>());
  f(std::integral_constant<Form, Form::kKey>());
}

// The number of elements of `decay` per token.
constexpr size_t DecayRow(Form form, size_t row) { return form == Form::kScalar ? 1 : row; }

// The decays of token t from column i on.
template <Form kForm, class D, class T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> DecayAt(D d, const T* decay, int t, size_t row, size_t i) {
  if constexpr (kForm == Form::kScalar) return hn::Set(d, decay[t]);
  return hn::Load(d, decay + static_cast<size_t>(t) * row + i);
}

// Queries, which are still to be multiplied by `scale`, and keys.
template <class T>
struct QueriesAndKeys {
  RowsAt<T> q, k;
  T scale = 1;
};

// The tables that a pass needs: all, those with which keys update the state, or those with which queries update its
// gradient. Each has the same bits as in kAll.
enum class TablesOf { kAll, kKeys, kQueries };

// Computes the tables of a tile of TB tokens, the first being `begin`. On entry `tile_decay` is E_n - 1; `bonus` is u.
// q and `read` may be the same memory, and so may k and `write`.
template <int TB, Form kForm, TablesOf kOf, class D, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE void TileTables(D d, const QueriesAndKeys<T>& rows, size_t begin, const T* decay, const T* bonus, size_t row,
                           T* read, T* write, T* tile_decay, T* pairs, T* reversed_pairs) {
  constexpr bool kBefore = kForm == Form::kBonus;  // queries read the state before their token
  constexpr bool kQueries = kOf != TablesOf::kKeys, kKeys = kOf != TablesOf::kQueries, kPairs = kOf == TablesOf::kAll;
  constexpr size_t N = hn::MaxLanes(D());
  const V scale = hn::Set(d, rows.scale);
  V sum[TB][TB];
  HWY_UNROLL(4)
  for (int t = 0; t < TB; ++t) {
    HWY_UNROLL(4)
    for (int j = 0; j < TB; ++j) sum[t][j] = hn::Zero(d);
  }
  for (size_t i = 0; i < row; i += N) {
    V decayed[TB];  // keys with the decays up to the current token
    V from_begin = hn::Set(d, T{1});
    HWY_UNROLL(4)
    for (int t = 0; t < TB; ++t) {
      const size_t at = static_cast<size_t>(t) * row + i;
      const V a = DecayAt<kForm>(d, decay, t, row, i);
      const size_t token = begin + static_cast<size_t>(t);
      const V before = from_begin;
      V query = hn::Zero(d);
      if constexpr (kQueries) query = hn::Mul(scale, hn::LoadU(d, rows.q(token) + i));
      HWY_UNROLL(4)
      for (int j = 0; kKeys && j < t; ++j) {
        if constexpr (!kBefore) decayed[j] = hn::Mul(decayed[j], a);
        if constexpr (kPairs) sum[t][j] = hn::MulAdd(query, decayed[j], sum[t][j]);
        if constexpr (kBefore) decayed[j] = hn::Mul(decayed[j], a);
      }
      if constexpr (kKeys) decayed[t] = hn::LoadU(d, rows.k(token) + i);
      if constexpr (kPairs) {
        V own = query;
        if constexpr (kBefore) own = hn::Mul(query, hn::Load(d, bonus + i));
        sum[t][t] = hn::MulAdd(own, decayed[t], sum[t][t]);
      }
      from_begin = t == 0 ? a : hn::Mul(from_begin, a);
      if constexpr (kQueries) hn::Store(hn::Mul(query, kBefore ? before : from_begin), d, read + at);
    }
    HWY_UNROLL(4)
    for (int j = 0; kKeys && j < TB; ++j) {
      hn::Store(decayed[j], d, write + static_cast<size_t>(j) * row + i);
    }
    hn::Store(TileDecay(d, from_begin, hn::Load(d, tile_decay + i)), d, tile_decay + i);
  }
  if constexpr (!kPairs) return;
  HWY_UNROLL(4)
  for (int t = 0; t < TB; ++t) {
    HWY_UNROLL(4)
    for (int j = 0; j <= t; ++j) {
      const T pair = hn::ReduceSum(d, sum[t][j]);
      pairs[t * TB + j] = pair;
      if (reversed_pairs != nullptr) {
        reversed_pairs[(TB - 1 - j) * TB + (TB - 1 - t)] = pair;
      }
    }
  }
}

// Calls f(std::integral_constant<int, tokens>, first token, tile) for the tiles of n tokens.
template <class F>
HWY_INLINE void ForTokenTiles(size_t n, const F& f) {
  for (size_t begin = 0; begin < n; begin += kTile) {
    const size_t tile = begin / kTile;
    switch (HWY_MIN(kTile, n - begin)) {
      case 1: f(std::integral_constant<int, 1>(), begin, tile); break;
      case 2: f(std::integral_constant<int, 2>(), begin, tile); break;
      case 3: f(std::integral_constant<int, 3>(), begin, tile); break;
      default: f(std::integral_constant<int, 4>(), begin, tile);
    }
  }
}

// The tables of a block. Only those that are computed have memory.
template <class T>
struct Tables {
  T *read, *write;              // [kBlock][row]
  T* decay;                     // [tiles][row]: TileDecay()
  T* pairs;                     // [tiles][TB][TB]
  T* reversed_pairs = nullptr;  // `pairs` for reversed passes, or null
};

template <Form kForm, TablesOf kOf, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void BlockTables(D d, const QueriesAndKeys<T>& rows, const T* decay, const T* bonus, size_t n, size_t row,
                              const Tables<T>& to) {
  const auto from = [](T* rows_of, size_t at) { return rows_of == nullptr ? nullptr : rows_of + at; };
  ForTokenTiles(n, [&](auto tokens, size_t begin, size_t tile) HWY_ATTR {
    const size_t at = begin * row, pair = tile * kTile * kTile;
    TileTables<tokens.value, kForm, kOf>(d, rows, begin, decay + begin * DecayRow(kForm, row), bonus, row,
                                         from(to.read, at), from(to.write, at), to.decay + tile * row,
                                         from(to.pairs, pair), from(to.reversed_pairs, pair));
  });
}

// forward_f32.cc and forward_f64.cc instantiate these, also for the backward pass.
#ifndef HEED_BLOCKS_OF
#define HEED_TABLES_OF(EXTERN, T, FORM, OF)                                                                            \
  EXTERN template void BlockTables<FORM, OF>(hn::ScalableTag<T>, const QueriesAndKeys<T>&, const T*, const T*, size_t, \
                                             size_t, const Tables<T>&);
#define HEED_FORMS_OF(EXTERN, T, OF)           \
  HEED_TABLES_OF(EXTERN, T, Form::kScalar, OF) \
  HEED_TABLES_OF(EXTERN, T, Form::kKey, OF)    \
  HEED_TABLES_OF(EXTERN, T, Form::kBonus, OF)
#define HEED_SWEEPS_OF(EXTERN, T, DECAY, READ)                                                                     \
  EXTERN template void SweepColumnBlocks<DECAY, READ>(hn::ScalableTag<T>, const Product<T>&, size_t, bool, size_t, \
                                                      size_t, size_t, T*, RowPrefetch&);
#define HEED_BLOCKS_OF(EXTERN, T)                                                                               \
  HEED_FORMS_OF(EXTERN, T, TablesOf::kAll)                                                                      \
  HEED_FORMS_OF(EXTERN, T, TablesOf::kKeys)                                                                     \
  HEED_FORMS_OF(EXTERN, T, TablesOf::kQueries)                                                                  \
  HEED_SWEEPS_OF(EXTERN, T, Decay::kNone, true)                                                                 \
  HEED_SWEEPS_OF(EXTERN, T, Decay::kRows, true)                                                                 \
  HEED_SWEEPS_OF(EXTERN, T, Decay::kLanes, true)                                                                \
  HEED_SWEEPS_OF(EXTERN, T, Decay::kRowsLanes, true)                                                            \
  HEED_SWEEPS_OF(EXTERN, T, Decay::kNone, false)                                                                \
  HEED_SWEEPS_OF(EXTERN, T, Decay::kRows, false)                                                                \
  HEED_SWEEPS_OF(EXTERN, T, Decay::kLanes, false)                                                               \
  HEED_SWEEPS_OF(EXTERN, T, Decay::kRowsLanes, false)                                                           \
  EXTERN template void AddOuterProducts(hn::ScalableTag<T>, const T*, size_t, const T*, size_t, size_t,         \
                                        const StateShape&, T*, RowPrefetch&);                                   \
  EXTERN template void ReadState(hn::ScalableTag<T>, const T*, size_t, size_t, const StateShape&, const T*, T*, \
                                 size_t, RowPrefetch&);
#endif
HEED_BLOCKS_OF(extern, float)
HEED_BLOCKS_OF(extern, double)

// a .* z + k, where `decay` is a in the form of TileDecay().
template <class D, class V = hn::Vec<D>>
HWY_INLINE V NextNormalizer(D d, V decay, V z, V k) {
  const V rest = hn::IfThenElseZero(hn::Lt(decay, hn::Zero(d)), z);
  return hn::Add(rest, hn::MulAdd(decay, z, k));
}

// z_t = a_t .* z_{t-1} + k_t and, with kRead, to[t] = z_t . q_t. `decay` is null or has one number per token in the
// form of TileDecay(). z_t is stored to row t of `to_z`, whose rows are `stride` apart; with 0 only the last remains.
template <bool kRead = true, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void Denominators(D d, const T* q, const T* k, const T* decay, size_t n, size_t row, const T* z, T* to_z,
                               size_t stride, T* to) {
  constexpr size_t N = hn::MaxLanes(D());
  for (size_t t = 0; t < n; ++t, k += row) {
    auto sum = hn::Zero(d);
    const auto a = hn::Set(d, decay == nullptr ? T{1} : decay[t]);
    for (size_t i = 0; i < row; i += N) {
      const auto v = NextNormalizer(d, a, hn::Load(d, z + i), hn::Load(d, k + i));
      hn::Store(v, d, to_z + i);
      if constexpr (kRead) sum = hn::MulAdd(v, hn::Load(d, q + t * row + i), sum);
    }
    if constexpr (kRead) to[t] = hn::ReduceSum(d, sum);
    z = to_z;
    to_z += stride;
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_BLOCK_INL_H_
