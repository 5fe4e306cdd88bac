// Reads the rows of a block: queries and keys through their feature maps, values with their factors, and decays; and
// finishes rows of o.
//
// Compiled once per SIMD target.
#if defined(HEED_ENGINES_RECURRENCE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_RECURRENCE_ROWS_INL_H_
#undef HEED_ENGINES_RECURRENCE_ROWS_INL_H_
#else
#define HEED_ENGINES_RECURRENCE_ROWS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "heed/core/carver.h"
#include "heed/engines/recurrence/block-inl.h"
#include "heed/engines/recurrence/features-inl.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/engines/recurrence/random_features-inl.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// The queries, keys and decays of a block. Absent ones have no memory.
template <class T>
struct BlockRows {
  T *q, *k;       // [kBlock][row]: scale phi(q), phi(k)
  T* raw;         // x before phi: [padded key_size], with random features [kBlock][padded key_size]
  T* decay;       // a: [kBlock][row], for scalars [kBlock]
  T* tile_decay;  // E_n - 1 of each tile: [tiles][row]
  T* bonus;       // [row]
  // Decays of columns: b_t, their products over tiles, and v decayed to the ends of tiles.
  T *value_decay, *value_tile_decay, *value_write;
  // [row], for Feature::kSoftmaxOfTokens. With a running maximum `max` is one number m.
  T *max, *inverse_sum;
  // [kBlock], for exponential gates: exp(i - m), exp(-m), and the decays of z in the form of TileDecay().
  T *key_factors, *floors, *normalizer_decay;
  T* projection;  // W^T of random features in column blocks; null for a step

  // Without `of_head` what blocks of a head share has no memory of its own.
  void LayOut(const Problem& p, Carver& carver, int64_t block = kBlockTokens, bool of_head = true) {
    const auto row = static_cast<int64_t>(Padded<T>(p.features()));
    carver.Next(q, block * row);
    carver.Next(k, block * row);
    const bool random = IsRandom(p.feature);
    const auto raw_row = static_cast<int64_t>(Padded<T>(p.key_size));
    carver.Next(raw, (random ? block : 1) * raw_row);
    carver.Next(decay, p.gate == Gate::kNone ? 0 : p.gate == Gate::kScalar ? kBlockTokens : block * row);
    carver.Next(tile_decay, p.gate == Gate::kNone ? 0 : kBlockTokens / kTileTokens * row);
    carver.Next(bonus, p.has_bonus && of_head ? row : 0);
    const int64_t values = p.has_value_decay ? static_cast<int64_t>(Padded<T>(p.value_size)) : 0;
    carver.Next(value_decay, block * values);
    carver.Next(value_tile_decay, kBlockTokens / kTileTokens * values);
    carver.Next(value_write, block * values);
    const int64_t columns = p.key_feature == Feature::kSoftmaxOfTokens && of_head ? row : 0;
    carver.Next(max, of_head && (p.running_max() || random) ? 1 : columns);
    carver.Next(inverse_sum, columns);
    const int64_t gates = p.exp_gates ? kBlockTokens : 0;
    carver.Next(key_factors, gates);
    carver.Next(floors, gates);
    carver.Next(normalizer_decay, gates);
    carver.Next(projection, random && block > 1 && of_head ? p.key_size * row : 0);
    if (block == 1) projection = nullptr;
  }
  void ShareHead(const BlockRows& first) {
    bonus = first.bonus;
    max = first.max;
    inverse_sum = first.inverse_sum;
    projection = first.projection;
  }
};

// Returns log(sigmoid(x)) without cancellation.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V LogSigmoid(D d, V x) {
  const V negative = hn::Max(hn::Neg(x), hn::Zero(d));
  return hn::Neg(hn::Add(negative, hn::Log1p(d, hs::Exp(d, hn::Neg(hn::Abs(x))))));
}

// Reads the rows of one value head of one sequence.
template <class T>
class RowReader {
 public:
  RowReader(const Problem& p, const Sequence& s, int64_t value_head, const BlockRows<T>& rows)
      : p_(p), s_(s), value_head_(value_head), key_head_(value_head / p.group()),
        size_(static_cast<size_t>(p.key_size)), row_(Padded<T>(p.features())), rows_(rows) {}

  // Must be called first: reads u, packs the projection, and initialises the running maximum.
  HWY_NOINLINE HWY_ATTR void Begin() const {
    if (p_.has_bonus) {
      LoadRows(hn::ScalableTag<T>(), p_.bonus, s_, value_head_, 0, 1, size_, rows_.bonus, row_);
    }
    if (p_.exp_gates) *rows_.max = InitialMax(0);
    if (!IsRandom(p_.feature)) return;
    if (rows_.projection != nullptr) PackTransposed(p_, rows_.raw, rows_.projection);
    *rows_.max = p_.feature == Feature::kRandomRelu ? 0 : InitialMax(-std::numeric_limits<T>::infinity());
  }
  // Must be called after the last token.
  void StoreMax() const {
    if (p_.final_m.data == nullptr) return;
    *StateAt<T>(p_.final_m, s_.state, value_head_) = *rows_.max;
  }
  T* max() const { return rows_.max; }
  // The decays of z in the block, in the form that Denominators() takes.
  const T* NormalizerDecays() const {
    return p_.exp_gates ? rows_.normalizer_decay : p_.gate == Gate::kNone ? nullptr : rows_.decay;
  }

  // Returns the queries, if they are wanted, and keys for BlockTables(), which are copied only if they need to be
  // converted or mapped.
  HWY_NOINLINE HWY_ATTR QueriesAndKeys<T> ForTables(int64_t first, size_t n, bool queries) const {
    const auto row = static_cast<ptrdiff_t>(row_);
    QueriesAndKeys<T> rows = {{rows_.q, row}, {rows_.k, row}};
    if (!queries) {
      rows.q = {};
    } else if (p_.feature == Feature::kIdentity && InPlace<T>(p_.q, p_.key_size)) {
      rows.q = InPlaceRows(p_.q, key_head_, first);
      rows.scale = static_cast<T>(p_.outer_scale());
    } else {
      Queries(first, n);
    }
    if (p_.key_feature == Feature::kIdentity && InPlace<T>(p_.k, p_.key_size) && !p_.exp_gates &&
        p_.key_mask.data == nullptr && !p_.complement_keys) {
      Decays(first, n);
      rows.k = InPlaceRows(p_.k, key_head_, first);
    } else {
      Keys(first, n);
    }
    return rows;
  }

  HWY_NOINLINE HWY_ATTR void Queries(int64_t first, size_t n) const {
    const hn::ScalableTag<T> d;
    if (IsRandom(p_.feature)) {
      return Random(p_.q, false, p_.query_scale(), first, n, rows_.q);
    }
    Mapped(p_.q, p_.feature, p_.query_scale(), first, n, rows_.q);
    if (p_.outer_scale() == 1) return;
    const auto scale = hn::Set(d, static_cast<T>(p_.outer_scale()));
    for (size_t i = 0; i < n * row_; i += hn::MaxLanes(d)) {
      hn::Store(hn::Mul(scale, hn::Load(d, rows_.q + i)), d, rows_.q + i);
    }
  }

  // Loads keys, and their decays.
  HWY_NOINLINE HWY_ATTR void Keys(int64_t first, size_t n) const {
    if (IsRandom(p_.feature)) {
      return Random(p_.k, true, p_.key_scale(), first, n, rows_.k);
    }
    Decays(first, n);
    if (p_.complement_keys) return;
    Mapped(p_.k, p_.key_feature, p_.key_scale(), first, n, rows_.k);
    ClearMasked(first, n, rows_.k, row_);
    for (size_t t = 0; p_.exp_gates && t < n; ++t) {
      const hn::ScalableTag<T> d;
      const auto factor = hn::Set(d, rows_.key_factors[t]);
      for (size_t i = t * row_; i < (t + 1) * row_; i += hn::MaxLanes(d)) {
        hn::Store(hn::Mul(factor, hn::Load(d, rows_.k + i)), d, rows_.k + i);
      }
    }
  }

  // Loads decays, and with complement_keys the keys that follow from them.
  HWY_ATTR void Decays(int64_t first, size_t n) const {
    const hn::ScalableTag<T> d;
    if (p_.gate == Gate::kNone) return;
    if (p_.gate == Gate::kScalar) {
      if (p_.exp_gates) {
        ExpGates(first, n);
      } else {
        LoadScalars(p_.log_decay, first, n, rows_.decay);
      }
      return ExpScalarDecays(d, rows_.decay, n, row_, rows_.tile_decay);
    }
    RowsAt<T> log_decay = {rows_.decay, static_cast<ptrdiff_t>(row_)};
    if (InPlace<T>(p_.log_decay, p_.key_size) && !p_.complement_keys) {
      log_decay = InPlaceRows(p_.log_decay, value_head_, first);
    } else {
      LoadRows(d, p_.log_decay, s_, value_head_, first, n, size_, rows_.decay, row_);
      if (p_.complement_keys) Complements(n);
    }
    ExpDecays(d, log_decay, n, row_, rows_.decay, rows_.tile_decay);
  }

  // Reduces all keys for non-causal feature maps, before Keys() is called: the maximum of W y for Feature::kRandomExp;
  // for kSoftmaxOfTokens the maximum and the sum of exponentials of each channel.
  HWY_NOINLINE HWY_ATTR void ReduceKeys() const {
    if (p_.key_feature == Feature::kRandomExp) {
      for (int64_t first = 0; first < s_.count; first += kBlockTokens) {
        const auto n = static_cast<size_t>(std::min(kBlockTokens, s_.count - first));
        Project(p_.k, p_.key_scale(), first, n, rows_.k);
        for (size_t t = 0; t < n; ++t) {
          *rows_.max = std::max(Largest(rows_.k + t * row_, num_features()), *rows_.max);
        }
      }
      return;
    }
    if (p_.key_feature != Feature::kSoftmaxOfTokens) return;
    const hn::ScalableTag<T> d;
    constexpr size_t N = hn::MaxLanes(hn::ScalableTag<T>());
    std::fill_n(rows_.max, row_, hwy::LowestValue<T>());
    std::fill_n(rows_.inverse_sum, row_, T{0});
    for (int64_t first = 0; first < s_.count; first += kBlockTokens) {
      const auto n = static_cast<size_t>(std::min(kBlockTokens, s_.count - first));
      LoadRows(d, p_.k, s_, key_head_, first, n, size_, rows_.k, row_);
      for (size_t i = 0; i < row_; i += N) {
        const auto before = hn::Load(d, rows_.max + i);
        auto max = before;
        for (size_t t = 0; t < n; ++t) {
          if (IsUnmasked(first, t)) max = hn::Max(hn::Load(d, rows_.k + t * row_ + i), max);
        }
        auto sum = hn::Mul(hn::Load(d, rows_.inverse_sum + i), hs::Exp(d, hn::Sub(before, max)));
        for (size_t t = 0; t < n; ++t) {
          if (!IsUnmasked(first, t)) continue;
          sum = hn::Add(sum, hs::Exp(d, hn::Sub(hn::Load(d, rows_.k + t * row_ + i), max)));
        }
        hn::Store(max, d, rows_.max + i);
        hn::Store(sum, d, rows_.inverse_sum + i);
      }
    }
    for (size_t i = 0; i < row_; ++i) rows_.inverse_sum[i] = 1 / rows_.inverse_sum[i];
  }

  // Loads values times their factors, with zeros for masked tokens.
  HWY_ATTR void Values(int64_t first, size_t n, T* to, size_t value_row) const {
    const hn::ScalableTag<T> d;
    LoadRows(d, p_.v, s_, value_head_, first, n, static_cast<size_t>(p_.value_size), to, value_row);
    ClearMasked(first, n, to, value_row);
    if (p_.value_factors.data == nullptr) return;
    for (size_t t = 0; t < n; ++t, to += value_row) {
      const auto factor = hn::Set(d, *RowAt<T>(p_.value_factors, s_, value_head_, first + static_cast<int64_t>(t)));
      for (size_t i = 0; i < value_row; i += hn::MaxLanes(d)) {
        hn::Store(hn::Mul(factor, hn::Load(d, to + i)), d, to + i);
      }
    }
  }

  // Computes the decays of columns.
  HWY_ATTR void ValueDecays(int64_t first, size_t n, size_t value_row) const {
    const hn::ScalableTag<T> d;
    LoadRows(d, p_.log_value_decay, s_, value_head_, first, n, static_cast<size_t>(p_.value_size), rows_.value_decay,
             value_row);
    ExpDecays(d, {rows_.value_decay, static_cast<ptrdiff_t>(value_row)}, n, value_row, rows_.value_decay,
              rows_.value_tile_decay);
  }

  // Loads rows of q or k times `inner_scale` into `raw`.
  HWY_ATTR void Scaled(const Rows& from, double inner_scale, int64_t first, size_t n) const {
    const hn::ScalableTag<T> d;
    const size_t raw_row = Padded<T>(p_.key_size);
    LoadRows(d, from, s_, key_head_, first, n, size_, rows_.raw, raw_row);
    const auto scale = hn::Set(d, static_cast<T>(inner_scale));
    for (size_t i = 0; i < n * raw_row; i += hn::MaxLanes(d)) {
      hn::Store(hn::Mul(scale, hn::Load(d, rows_.raw + i)), d, rows_.raw + i);
    }
  }

 private:
  RowsAt<T> InPlaceRows(const Rows& rows, int64_t head, int64_t first) const {
    return {RowAt<T>(rows, s_, head, first), static_cast<ptrdiff_t>(rows.token_stride)};
  }

  T InitialMax(T absent) const {
    return p_.initial_m.data == nullptr ? absent : *StateAt<T>(p_.initial_m, s_.state, value_head_);
  }
  size_t num_features() const { return static_cast<size_t>(p_.projection_rows); }

  // Computes W y.
  HWY_ATTR void Project(const Rows& from, double inner_scale, int64_t first, size_t n, T* to) const {
    const hn::ScalableTag<T> d;
    Scaled(from, inner_scale, first, n);
    if (rows_.projection == nullptr) return ProjectOne(p_, rows_.raw, to, row_);
    ReadState(d, rows_.raw, Padded<T>(p_.key_size), n, TransposedProjection<T>(p_), rows_.projection, to, row_);
  }

  HWY_ATTR void Random(const Rows& from, bool keys, double inner_scale, int64_t first, size_t n, T* to) const {
    const size_t raw_row = Padded<T>(p_.key_size);
    Project(from, inner_scale, first, n, to);
    if (keys && p_.running_max()) {
      std::memset(rows_.tile_decay, 0, kBlock / kTile * row_ * sizeof(T));
    }
    for (size_t t = 0; t < n; ++t, to += row_) {
      if (p_.feature == Feature::kRandomRelu) {
        ReluFeatures(to, num_features());
        continue;
      }
      T shift = keys && !p_.causal ? *rows_.max : Largest(to, num_features());
      if (keys && p_.causal) {
        const T before = *rows_.max;
        shift = std::max(shift, before);
        rows_.decay[t] = ExpOf(before - shift);
        *rows_.max = shift;
      }
      if (keys || !p_.factors_cancel()) shift += HalfSquare(rows_.raw + t * raw_row, raw_row);
      ExpFeatures(p_, to, num_features(), shift);
    }
  }

  bool IsUnmasked(int64_t first, size_t t) const {
    return p_.key_mask.data == nullptr || *RowAt<uint8_t>(p_.key_mask, s_, 0, first + static_cast<int64_t>(t)) != 0;
  }

  HWY_ATTR void ClearMasked(int64_t first, size_t n, T* rows, size_t row) const {
    for (size_t t = 0; p_.key_mask.data != nullptr && t < n; ++t) {
      if (!IsUnmasked(first, t)) std::memset(rows + t * row, 0, row * sizeof(T));
    }
  }

  HWY_ATTR void Mapped(const Rows& from, Feature feature, double inner_scale, int64_t first, size_t n, T* to) const {
    const hn::ScalableTag<T> d;
    const T inner = static_cast<T>(inner_scale);
    if (feature != Feature::kTaylor) {
      LoadRows(d, from, s_, key_head_, first, n, size_, to, row_);
      if (feature == Feature::kIdentity) return;
      if (IsElementwise(feature) && size_ == row_) {  // rows without padding are mapped as one
        return MapFeatures(d, feature, to, inner, n * row_, n * row_, to);
      }
      for (size_t t = 0; t < n; ++t) {
        T* x = to + t * row_;
        if (feature != Feature::kSoftmaxOfTokens) {
          MapFeatures(d, feature, x, inner, size_, row_, x);
          continue;
        }
        MapVectors(d, x, size_, x, [&](auto v, size_t i) HWY_ATTR {
          return hn::Mul(hs::Exp(d, hn::Sub(v, hn::Load(d, rows_.max + i))), hn::Load(d, rows_.inverse_sum + i));
        });
      }
      return;
    }
    for (size_t t = 0; t < n; ++t) {
      LoadRows(d, from, s_, key_head_, first + static_cast<int64_t>(t), 1, size_, rows_.raw, Padded<T>(p_.key_size));
      MapFeatures(d, feature, rows_.raw, inner, size_, row_, to + t * row_);
    }
  }

  // Loads one number per token, and zeros to the end of the block.
  HWY_ATTR void LoadScalars(const Rows& from, int64_t first, size_t n, T* to) const {
    const hn::ScalableTag<T> d;
    std::memset(to, 0, kBlock * sizeof(T));
    LoadRows(d, from, s_, value_head_, first, n, 1, rows_.k, hn::MaxLanes(d));
    for (size_t t = 0; t < n; ++t) to[t] = rows_.k[t * hn::MaxLanes(d)];
  }

  // Computes log decays, factors of keys and floors of denominators, and advances m past the block. Inside the block m
  // is a double: in float, m + log sigmoid(f) would lose the decay of a forget gate that is nearly open. At the end of
  // the block m is rounded up to T, so that no exponent is positive, and S after the block is relative to the rounded
  // m.
  HWY_NOINLINE HWY_ATTR void ExpGates(int64_t first, size_t n) const {
    const hn::ScalableTag<T> d;
    T *decay = rows_.decay, *factors = rows_.key_factors, *floors = rows_.floors;
    LoadScalars(p_.forget_gate, first, n, decay);
    LoadScalars(p_.input_gate, first, n, factors);
    std::memset(floors, 0, kBlock * sizeof(T));
    for (size_t i = 0; i < kBlock; i += hn::MaxLanes(d)) {
      hn::Store(LogSigmoid(d, hn::Load(d, decay + i)), d, decay + i);
    }
    std::fill(decay + n, decay + kBlock, T{0});
    double m = static_cast<double>(*rows_.max);
    for (size_t t = 0; t < n; ++t) {
      const double kept = m + static_cast<double>(decay[t]), arriving = static_cast<double>(factors[t]);
      m = std::max({kept, arriving, static_cast<double>(hwy::LowestValue<T>())});
      if (t + 1 == n) {
        T rounded = static_cast<T>(m);
        if (static_cast<double>(rounded) < m) {
          rounded = std::nextafter(rounded, std::numeric_limits<T>::infinity());
        }
        m = static_cast<double>(*rows_.max = rounded);
      }
      decay[t] = static_cast<T>(kept - m);
      factors[t] = static_cast<T>(arriving - m);
      floors[t] = static_cast<T>(-m);
    }
    for (size_t i = 0; i < kBlock; i += hn::MaxLanes(d)) {
      const auto [a, less_one] = ExpsOfDecay(d, hn::Load(d, decay + i));
      hn::Store(TileDecay(d, a, less_one), d, rows_.normalizer_decay + i);
      for (T* x : {factors, floors}) hn::Store(hs::Exp(d, hn::Load(d, x + i)), d, x + i);
    }
  }

  // Computes k = 1 - exp(g) without cancellation.
  HWY_ATTR void Complements(size_t n) const {
    const hn::ScalableTag<T> d;
    for (size_t t = 0; t < n; ++t) {
      MapVectors(d, rows_.decay + t * row_, size_, rows_.k + t * row_, [&](auto g, size_t) HWY_ATTR {
        const auto zero = hn::Zero(d);
        g = hn::IfThenElse(hn::Gt(g, zero), zero, g);
        return hn::Neg(hs::Expm1(d, g));
      });
    }
  }

  const Problem& p_;
  const Sequence& s_;
  int64_t value_head_, key_head_;
  size_t size_, row_;
  const BlockRows<T>& rows_;
};

// forward_f32.cc and forward_f64.cc instantiate it, also for the backward pass.
extern template class RowReader<float>;
extern template class RowReader<double>;

// The denominator of o_t for token t of the block, from `product` = z_t . q_t.
template <class T>
T Denominator(const Problem& p, const BlockRows<T>& rows, T product, size_t t) {
  if (p.exp_gates) {
    return std::max(std::abs(product), rows.floors[t]) + static_cast<T>(p.eps);
  }
  if (!IsRandom(p.feature)) return product + static_cast<T>(p.eps);
  return std::max(product, std::numeric_limits<T>::min());  // a sum of positive terms, which may underflow
}

// The derivative of the denominator with respect to z_t . q_t. m and the floor are treated as constants.
template <class T>
T DenominatorSlope(const Problem& p, const BlockRows<T>& rows, T product, size_t t) {
  if (!p.exp_gates) return 1;
  if (std::abs(product) <= rows.floors[t]) return 0;
  return std::copysign(T{1}, product);
}

// Loads columns [begin, end) of rows.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void LoadColumns(D d, const Rows& rows, const Sequence& s, int64_t head, int64_t first, size_t n,
                            size_t begin, size_t end, T* to, size_t row) {
  Rows columns = rows;
  columns.data = static_cast<const char*>(rows.data) + begin * SizeOf(rows.dtype);
  const auto size = static_cast<int64_t>(end - begin);
  for (size_t t = 0; t < n; ++t) {
    LoadRows(d, columns, s, head, first + static_cast<int64_t>(t), 1, end - begin, to + t * row + begin,
             Padded<T>(size));
  }
}

// Applies the skip and the output gate to columns [begin, end) of a block of o before it is stored.
template <class T>
class OutputRows {
 public:
  // Overwrites `values` [n][row] with the rows of `v`, and `gate` [n][row] with silu(output_gate).
  HWY_NOINLINE HWY_ATTR OutputRows(const Problem& p, const Sequence& s, int64_t head, int64_t first, size_t n,
                                   T* values, T* gate, size_t row, size_t begin, size_t end)
      : skip_(p.skip.data == nullptr ? nullptr : static_cast<const T*>(p.skip.data) + head * p.skip.head_stride),
        values_(values), gate_(p.output_gate.data == nullptr ? nullptr : gate), row_(row),
        size_(static_cast<size_t>(p.value_size)) {
    const hn::ScalableTag<T> d;
    end = std::min(end, size_);
    if (skip_ != nullptr) LoadColumns(d, p.v, s, head, first, n, begin, end, values_, row);
    if (gate_ == nullptr) return;
    LoadColumns(d, p.output_gate, s, head, first, n, begin, end, gate_, row);
    for (size_t t = 0; t < n; ++t) {
      for (size_t i = t * row + begin; i < t * row + end; i += hn::MaxLanes(d)) {
        const auto z = hn::Load(d, gate_ + i);
        const auto denominator = hn::Add(hn::Set(d, T{1}), hs::Exp(d, hn::Neg(z)));
        hn::Store(hn::Div(z, denominator), d, gate_ + i);
      }
    }
  }

  // Finishes x, the outputs of token t from column i on.
  template <class V>
  HWY_INLINE V Finished(V x, size_t t, size_t i) const {
    const hn::ScalableTag<T> d;
    if (skip_ != nullptr) {
      const auto skip = hn::LoadN(d, skip_ + i, HWY_MIN(hn::MaxLanes(d), size_ - i));
      x = hn::MulAdd(skip, hn::Load(d, values_ + t * row_ + i), x);
    }
    if (gate_ != nullptr) x = hn::Mul(x, hn::Load(d, gate_ + t * row_ + i));
    return x;
  }

 private:
  const T* skip_;
  T *values_, *gate_;
  size_t row_, size_;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_ROWS_INL_H_
