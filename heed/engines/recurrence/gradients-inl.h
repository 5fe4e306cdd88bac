// Gradients inside a tile of a recurrence with decays: pairs of its tokens, and products of states.
//
// Compiled once per SIMD target. With E_t and F_j as in block-inl.h, L_tj = a_{j+1} ... a_t, w_tj = <d_o_t, v_j>, and
// with u_t = S d_o_t and x_j = D v_j from the states at the two ends of the tile:
//
//   dq_t = E_t .* u_t + sum_{j < t} w_tj L_tj .* k_j + w_tt k_t
//   dk_j = F_j .* x_j + sum_{t > j} w_tj L_tj .* q_t + w_jj q_j
//
// The last terms, the own pairs, are added at the end by AddOwnPairs(). There is no decay between a token's query and
// its own key, so these terms cancel in the gradient of decays, sum q .* dq - k .* dk, which is computed without them:
// if decays are strong, it would otherwise consist of their rounding errors. With the u term, E and L end before token
// t: the pairs without decays are those of a query with the key of the token before, and TileBonusGradients() adds the
// own pairs. (A query that begins a tile reads that key from the state, so these still cancel.)
//
// The decayed keys and queries are running products, as in TileTables().
#if defined(HEED_ENGINES_RECURRENCE_GRADIENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_RECURRENCE_GRADIENTS_INL_H_
#undef HEED_ENGINES_RECURRENCE_GRADIENTS_INL_H_
#else
#define HEED_ENGINES_RECURRENCE_GRADIENTS_INL_H_
#endif

#include <cstddef>

#include "heed/engines/recurrence/block-inl.h"
#include "heed/engines/recurrence/problem.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Computes w_tj of a tile, [TB][TB].
template <int TB, class D, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE void ValuePairs(D d, const T* d_o, const T* v, size_t row, T* pairs) {
  constexpr size_t N = hn::MaxLanes(D());
  V sum[TB][TB];
  HWY_UNROLL(4)
  for (int t = 0; t < TB; ++t) {
    HWY_UNROLL(4)
    for (int j = 0; j < TB; ++j) sum[t][j] = hn::Zero(d);
  }
  for (size_t i = 0; i < row; i += N) {
    V values[TB];
    HWY_UNROLL(4)
    for (int t = 0; t < TB; ++t) {
      const size_t at = static_cast<size_t>(t) * row + i;
      values[t] = hn::Load(d, v + at);
      const V gradient = hn::Load(d, d_o + at);
      HWY_UNROLL(4)
      for (int j = 0; j <= t; ++j) sum[t][j] = hn::MulAdd(gradient, values[j], sum[t][j]);
    }
  }
  HWY_UNROLL(4)
  for (int t = 0; t < TB; ++t) {
    HWY_UNROLL(4)
    for (int j = 0; j <= t; ++j) pairs[t * TB + j] = hn::ReduceSum(d, sum[t][j]);
  }
}

// Replaces u by dq without own pairs, for a tile and columns [begin, end) of rows of `row` elements.
template <int TB, Form kForm, class D, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE void TileQueryGradients(D d, const T* k, const T* decay, const T* pairs, size_t row, size_t begin,
                                   size_t end, T* dq) {
  constexpr bool kBefore = kForm == Form::kBonus;
  for (size_t i = begin; i < end; i += hn::MaxLanes(D())) {
    V keys[TB];
    V from_begin = hn::Set(d, T{1});
    HWY_UNROLL(4)
    for (int t = 0; t < TB; ++t) {
      const size_t at = static_cast<size_t>(t) * row + i;
      const V a = DecayAt<kForm>(d, decay, t, row, i), before = from_begin;
      from_begin = t == 0 ? a : hn::Mul(from_begin, a);
      V sum = hn::Mul(kBefore ? before : from_begin, hn::Load(d, dq + at));
      HWY_UNROLL(4)
      for (int j = 0; j < t; ++j) {
        if constexpr (!kBefore) keys[j] = hn::Mul(keys[j], a);
        if (!kBefore || j + 1 < t) sum = hn::MulAdd(hn::Set(d, pairs[t * TB + j]), keys[j], sum);
        if constexpr (kBefore) keys[j] = hn::Mul(keys[j], a);
      }
      keys[t] = hn::Load(d, k + at);
      hn::Store(sum, d, dq + at);
    }
  }
}

// Adds the pairs without decays, of queries with the keys `lag` tokens before them in the same tile: to dq with `x` the
// keys, or to dk with `x` the queries.
enum class PairsOf { kQueries, kKeys };

template <PairsOf kOf, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void AddOwnPairs(D d, const T* x, const T* pairs, size_t n, size_t lag, size_t row, size_t begin,
                              size_t end, T* to) {
  const size_t key = lag * row, x_before = kOf == PairsOf::kQueries ? key : 0, to_before = key - x_before;
  ForTokenTiles(n, [&](auto tokens, size_t first, size_t tile) HWY_ATTR {
    for (size_t t = lag; t < tokens.value; ++t) {
      const auto pair = hn::Set(d, pairs[tile * kTile * kTile + t * tokens.value + t - lag]);
      for (size_t at = (first + t) * row + begin; at < (first + t) * row + end; at += hn::MaxLanes(D())) {
        T* sum = to + (at - to_before);
        hn::Store(hn::MulAdd(pair, hn::Load(d, x + (at - x_before)), hn::Load(d, sum)), d, sum);
      }
    }
  });
}

// Replaces S^T q by o without own pairs, for a block with decays of columns: adds the pairs of tokens of each tile.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void AddValuePairs(D d, const T* v, const T* decay, const T* pairs, size_t n, size_t row, size_t begin,
                                size_t end, T* o) {
  ForTokenTiles(n, [&](auto tokens, size_t first, size_t tile) HWY_ATTR {
    TileQueryGradients<tokens.value, Form::kKey>(d, v + first * row, decay + first * row, pairs + tile * kTile * kTile,
                                                 row, begin, end, o + first * row);
  });
}

// Replaces x by dk without own pairs, for a tile.
template <int TB, Form kForm, class D, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE void TileKeyGradients(D d, const T* q, const T* decay, const T* pairs, size_t row, size_t begin, size_t end,
                                 T* dk) {
  constexpr bool kBefore = kForm == Form::kBonus;
  for (size_t i = begin; i < end; i += hn::MaxLanes(D())) {
    V queries[TB];
    V to_end = hn::Set(d, T{1}), later = to_end;  // the decay of the next token
    HWY_UNROLL(4)
    for (int j = TB - 1; j >= 0; --j) {
      const size_t at = static_cast<size_t>(j) * row + i;
      V sum = hn::Mul(to_end, hn::Load(d, dk + at));
      HWY_UNROLL(4)
      for (int t = TB - 1; t > j; --t) {
        if (kBefore && t == j + 1) continue;
        queries[t] = hn::Mul(queries[t], later);
        sum = hn::MulAdd(hn::Set(d, pairs[t * TB + j]), queries[t], sum);
      }
      queries[j] = hn::Load(d, q + at);
      hn::Store(sum, d, dk + at);
      later = DecayAt<kForm>(d, decay, j, row, i);
      to_end = hn::Mul(to_end, later);
    }
  }
}

// Adds the own pairs w_tt (q_t .* u) . k_t of the u term: to dq, to dk, and to du, which is a sum over tokens.
template <int TB, class D, class T = hn::TFromD<D>, class V = hn::Vec<D>>
HWY_INLINE void TileBonusGradients(D d, const T* q, const T* k, const T* bonus, const T* pairs, size_t row,
                                   size_t begin, size_t end, T* dq, T* dk, T* du) {
  for (size_t i = begin; i < end; i += hn::MaxLanes(D())) {
    const V u = hn::Load(d, bonus + i);
    V sum = hn::Load(d, du + i);
    HWY_UNROLL(4)
    for (int t = 0; t < TB; ++t) {
      const size_t at = static_cast<size_t>(t) * row + i;
      const V pair = hn::Set(d, pairs[t * TB + t]), scaled_u = hn::Mul(pair, u);
      const V query = hn::Load(d, q + at), key = hn::Load(d, k + at);
      hn::Store(hn::MulAdd(scaled_u, key, hn::Load(d, dq + at)), d, dq + at);
      hn::Store(hn::MulAdd(scaled_u, query, hn::Load(d, dk + at)), d, dk + at);
      sum = hn::MulAdd(hn::Mul(pair, query), key, sum);
    }
    hn::Store(sum, d, du + i);
  }
}

// to[i] = sum_r a[r][i] b[r][i] over the rows of a, for two states with the same columns.
template <class D, int kVectors, class T = hn::TFromD<D>>
HWY_INLINE void StateProducts(D d, const T* a, const BlockedShape<kVectors>& a_shape, const T* b,
                              const BlockedShape<kVectors>& b_shape, T* to) {
  ForColumnBlocks<T>(a_shape, [&](size_t column, size_t width) HWY_ATTR {
    for (size_t i = 0; i < width; i += hn::MaxLanes(D())) {
      const T* HWY_RESTRICT from_a = a + a_shape.Offset(column) + i;
      const T* HWY_RESTRICT from_b = b + b_shape.Offset(column) + i;
      auto sum = hn::Zero(d);
      for (size_t r = 0; r < a_shape.rows; ++r, from_a += width, from_b += width) {
        sum = hn::MulAdd(hn::Load(d, from_a), hn::Load(d, from_b), sum);
      }
      hn::Store(sum, d, to + column + i);
    }
  });
}

// to[r] = sum_i a[r][i] b[r][i] over all columns.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void StateRowProducts(D d, const T* a, const StateShape& a_shape, const T* b, const StateShape& b_shape,
                                 T* to) {
  for (size_t r = 0; r < a_shape.rows; ++r) {
    auto sum = hn::Zero(d);
    ForColumnBlocks<T>(a_shape, [&](size_t column, size_t width) HWY_ATTR {
      const T* from_a = a + a_shape.Offset(column) + r * width;
      const T* from_b = b + b_shape.Offset(column) + r * width;
      for (size_t i = 0; i < width; i += hn::MaxLanes(D())) {
        sum = hn::MulAdd(hn::Load(d, from_a + i), hn::Load(d, from_b + i), sum);
      }
    });
    to[r] = hn::ReduceSum(d, sum);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_GRADIENTS_INL_H_
