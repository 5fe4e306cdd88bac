// The part of decays in gradients: pairs of tokens of a tile, the u term, and gradients of log decays.
//
// Compiled once per SIMD target. The gradient of a log decay is a sum over all later tokens,
//
//   dlog_decay_t = sum_{s >= t} (q_s .* dq_s - k_s .* dk_s)
//
// per channel, or summed over channels for a scalar decay. It is computed inside blocks; the tokens after a block
// contribute <S, D> at its end. If the query reads before its token's decay (u term), q_t .* dq_t is not part of it.
#if defined(HEED_ENGINES_RECURRENCE_GATE_GRADIENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_RECURRENCE_GATE_GRADIENTS_INL_H_
#undef HEED_ENGINES_RECURRENCE_GATE_GRADIENTS_INL_H_
#else
#define HEED_ENGINES_RECURRENCE_GATE_GRADIENTS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "heed/engines/recurrence/block-inl.h"
#include "heed/engines/recurrence/gradients-inl.h"
#include "heed/engines/recurrence/head_gradients-inl.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/engines/recurrence/tasks.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class T>
class GateGradients : protected HeadGradients<T> {
  using Base = HeadGradients<T>;

 protected:
  using Base::Base;
  using typename Base::D;
  using Base::d_, Base::N, Base::p_, Base::g_, Base::s_, Base::task_, Base::head_, Base::b_, Base::shared_, Base::dq_,
      Base::row_, Base::value_row_, Base::values_, Base::by_key_, Base::by_value_;

  // The shape of S^T and D^T without the normaliser's row.
  StateShape BoundaryShape() const { return {values_, values_, by_key_.begin, by_key_.end, by_key_.size, true}; }

  // The part's columns of S^T after a block, of D^T, and of D.
  T* BoundaryState(int64_t block) const { return b_.BoundaryState(block) + by_key_.begin * values_; }
  T* DTransposed() const { return b_.d_transposed + by_key_.begin * by_key_.rows; }
  T* DState() const { return b_.d_state + by_value_.begin * by_value_.rows; }

  // QueryPairs() and KeyPairs() add the pairs of tokens of each tile to dq and dk, without own pairs. The normaliser is
  // part of KeyPairs(); its part of dq is added by AddNormalizer().
  HWY_NOINLINE HWY_ATTR void QueryPairs(size_t n) {
    ForTokenTiles(n, [&](auto tokens, size_t begin, size_t tile) HWY_ATTR {
      constexpr int kTokens = tokens.value;
      T* pairs = value_pairs_ + tile * kTile * kTile;
      if (!p_.has_value_decay) {
        ValuePairs<kTokens>(d_, b_.d_o + begin * value_row_, b_.v + begin * value_row_, value_row_, pairs);
      }
      WithForm(p_, [&](auto form) HWY_ATTR {
        TileQueryGradients<kTokens, form.value>(d_, b_.rows.k + begin * row_,
                                                b_.rows.decay + begin * DecayRow(form.value, row_), pairs, row_,
                                                by_key_.begin, by_key_.end, dq_ + begin * row_);
      });
    });
  }
  HWY_NOINLINE HWY_ATTR void KeyPairs(size_t n) {
    ForTokenTiles(n, [&](auto tokens, size_t begin, size_t tile) HWY_ATTR {
      constexpr int kTokens = tokens.value;
      T* pairs = value_pairs_ + tile * kTile * kTile;
      if (p_.normalize) {
        ValuePairs<kTokens>(d_, b_.d_o + begin * value_row_, b_.v + begin * value_row_, value_row_, pairs);
      }
      WithForm(p_, [&](auto form) HWY_ATTR {
        TileKeyGradients<kTokens, form.value>(d_, b_.rows.q + begin * row_,
                                              b_.rows.decay + begin * DecayRow(form.value, row_), pairs, row_,
                                              by_key_.begin, by_key_.end, b_.dk + begin * row_);
      });
    });
  }

  // Add the pairs without decays, after the gradients of decays. With the u term these are a query and the key of the
  // token before.
  HWY_ATTR void OwnQueryPairs(size_t n) const {
    AddOwnPairs<PairsOf::kQueries>(d_, b_.rows.k, value_pairs_, n, p_.has_bonus ? 1 : 0, row_, by_key_.begin,
                                   by_key_.end, dq_);
  }
  HWY_ATTR void OwnKeyPairs(size_t n) const {
    AddOwnPairs<PairsOf::kKeys>(d_, b_.rows.q, value_pairs_, n, p_.has_bonus ? 1 : 0, row_, by_key_.begin, by_key_.end,
                                b_.dk);
  }

  HWY_NOINLINE HWY_ATTR void BonusGradients(size_t n) {
    std::memset(b_.d_bonus, 0, row_ * sizeof(T));
    ForTokenTiles(n, [&](auto tokens, size_t begin, size_t tile) HWY_ATTR {
      const size_t at = begin * row_;
      TileBonusGradients<tokens.value>(d_, b_.rows.q + at, b_.rows.k + at, b_.rows.bonus,
                                       value_pairs_ + tile * kTile * kTile, row_, by_key_.begin, by_key_.end, dq_ + at,
                                       b_.dk + at, b_.d_bonus);
    });
    double* to = shared_.ConstantsOf(shared_.d_bonus, p_, task_.sequence, head_);
    for (size_t i = by_key_.begin; i < by_key_.end; ++i) to[i] += static_cast<double>(b_.d_bonus[i]);
  }

  // Computes <S, D> at the end of the block per key channel, before D has passed the block.
  HWY_ATTR void BoundaryProducts(int64_t block) {
    const T* state = BoundaryState(block);
    StateProducts(d_, state, BoundaryShape(), DTransposed(), by_key_, b_.suffix);
    if (p_.has_value_decay) {
      StateRowProducts(d_, state, BoundaryShape(), DTransposed(), by_key_, b_.value_suffix);
    }
    if (!p_.normalize) return;
    const T* z = b_.BoundaryZ(block + 1);
    ForColumnBlocks<T>(by_key_, [&](size_t column, size_t width) HWY_ATTR {
      const T* dz = DTransposed() + by_key_.Offset(column) + values_ * width;
      for (size_t i = 0; i < width; i += N) {
        hn::Store(hn::MulAdd(hn::Load(d_, z + column + i), hn::Load(d_, dz + i), hn::Load(d_, b_.suffix + column + i)),
                  d_, b_.suffix + column + i);
      }
    });
  }

  HWY_NOINLINE HWY_ATTR void ValuePairGradients(size_t n) {
    ForTokenTiles(n, [&](auto tokens, size_t begin, size_t tile) HWY_ATTR {
      const size_t at = begin * value_row_;
      TileKeyGradients<tokens.value, Form::kKey>(d_, b_.d_o + at, b_.rows.value_decay + at,
                                                 b_.pairs + tile * kTile * kTile, value_row_, by_value_.begin,
                                                 by_value_.end, b_.dv + at);
    });
  }
  HWY_ATTR void OwnValuePairs(size_t n) const {
    AddOwnPairs<PairsOf::kKeys>(d_, b_.d_o, b_.pairs, n, 0, value_row_, by_value_.begin, by_value_.end, b_.dv);
  }

  // Loads a vector of T, converted to the type of D.
  template <class Wide>
  static HWY_INLINE hn::Vec<Wide> Load(Wide d, const T* from) {
    if constexpr (sizeof(T) == sizeof(hn::TFromD<Wide>))
      return hn::LoadU(d, from);
    else
      return hn::PromoteTo(d, hn::LoadU(hn::Rebind<T, Wide>(), from));
  }

  // Sums q .* dq - k .* dk over later tokens, before the pairs without decays are added to dq and dk. Gradients of
  // constant decays are summed over tokens, in f64.
  HWY_ATTR void DecayGradients(size_t n) {
    if (g_.d_log_decay.data == nullptr) return;
    const auto sums = [&](auto d, size_t i, const auto& put) HWY_ATTR {
      auto later = Load(d, b_.suffix + i);
      for (size_t t = n; t-- > 0;) {
        const size_t at = t * row_ + i;
        const auto query_product = hn::Mul(Load(d, b_.rows.q + at), Load(d, dq_ + at));
        const auto k = Load(d, b_.rows.k + at), dk = Load(d, b_.dk + at);
        const auto past_query = later;
        later = hn::Add(later, hn::NegMulAdd(k, dk, query_product));
        // With the u term a query reads before its token's decay.
        put(p_.has_bonus ? hn::NegMulAdd(k, dk, past_query) : later, at);
      }
    };
    if (!p_.constant_decay) {
      for (size_t i = by_key_.begin; i < by_key_.end; i += N) {
        sums(d_, i, [&](auto gradient, size_t at) HWY_ATTR { hn::Store(gradient, d_, b_.d_decay + at); });
      }
      return;
    }
    const hn::ScalableTag<double> d;
    double* to = shared_.ConstantsOf(shared_.d_decay, p_, task_.sequence, head_);
    for (size_t i = by_key_.begin; i < by_key_.end; i += hn::MaxLanes(d)) {
      auto total = hn::LoadU(d, to + i);
      sums(d, i, [&](auto gradient, size_t) HWY_ATTR { total = hn::Add(total, gradient); });
      hn::StoreU(total, d, to + i);
    }
  }

  // Stores the gradients of decays per token. Keys of the form 1 - exp(log_decay) need the complete dk.
  HWY_ATTR void StoreDecayGradients(int64_t first, size_t n) {
    if (g_.d_log_decay.data == nullptr || p_.constant_decay) return;
    for (size_t t = 0; t < n && p_.complement_keys; ++t) {
      for (size_t i = by_key_.begin; i < by_key_.end; i += N) {
        const size_t at = t * row_ + i;
        hn::Store(
            hn::NegMulAdd(hn::Load(d_, b_.rows.decay + at), hn::Load(d_, b_.dk + at), hn::Load(d_, b_.d_decay + at)),
            d_, b_.d_decay + at);
      }
    }
    StoreRows(d_, b_.d_decay, row_, g_.d_log_decay, s_, head_, first, n, by_key_.begin,
              std::min(by_key_.end, by_key_.size), [](auto v, size_t, size_t) HWY_ATTR { return v; });
  }

  // AddQueryProducts(), AddNormalizerProducts() and ScalarDecayGradients() sum the terms of a scalar decay's gradient
  // over units of kPartColumns columns, in f64 and without own pairs: q .* dq, the normaliser's part of it, and <S, D>
  // at the block's end minus k .* dk. SumDecayGradients() adds the units when all tasks have finished.
  HWY_ATTR void AddQueryProducts(int64_t first, size_t n) {
    SumUnits(
        first, n,
        [&](auto d, auto sum, size_t t, size_t i)
            HWY_ATTR { return hn::MulAdd(Load(d, b_.rows.q + t * row_ + i), Load(d, dq_ + t * row_ + i), sum); },
        [](double& to, double sum) { to = sum; });
  }
  // The gradient of z_t . q_t times (a_t .* z_{t-1}) . q_t, which excludes the token's own key.
  HWY_ATTR void AddNormalizerProducts(int64_t first, size_t n, const T* z_before, const T* decays) {
    SumUnits(
        first, n,
        [&](auto d, auto sum, size_t t, size_t i) HWY_ATTR {
          const auto decay = static_cast<double>(decays[t]);  // as TileDecay() gives it
          const double factor = static_cast<double>(b_.d_o[t * value_row_ + values_]) * (decay < 0 ? 1 + decay : decay);
          const auto z = Load(d, (t == 0 ? z_before : b_.z + (t - 1) * row_) + i);
          return hn::MulAdd(hn::Mul(hn::Set(d, factor), Load(d, b_.rows.q + t * row_ + i)), z, sum);
        },
        [](double& to, double sum) { to += sum; });
  }
  HWY_ATTR void ScalarDecayGradients(int64_t first, size_t n) {
    if (g_.d_log_decay.data == nullptr) return;
    SumUnits(
        first, n,
        [&](auto d, auto sum, size_t t, size_t i) HWY_ATTR {
          if (t + 1 == n) sum = hn::Add(sum, Load(d, b_.suffix + i));
          return hn::NegMulAdd(Load(d, b_.rows.k + t * row_ + i), Load(d, b_.dk + t * row_ + i), sum);
        },
        [](double& to, double sum) { to += sum; });
  }
  template <class F, class Put>
  HWY_INLINE void SumUnits(int64_t first, size_t n, const F& add, const Put& put) {
    const hn::ScalableTag<double> d;
    constexpr auto kUnit = static_cast<size_t>(kPartColumns);
    double* parts = shared_.DecayParts(p_, task_.sequence, head_) + first;
    for (size_t begin = by_key_.begin; begin < by_key_.end; begin += kUnit) {
      const size_t end = std::min(begin + kUnit, by_key_.end);
      double* to = parts + static_cast<int64_t>(begin / kUnit) * s_.count;
      for (size_t t = 0; t < n; ++t) {
        auto sum = hn::Zero(d);
        for (size_t i = begin; i < end; i += hn::MaxLanes(d)) sum = add(d, sum, t, i);
        put(to[t], hn::ReduceSum(d, sum));
      }
    }
  }

  // DecayGradients() for decays of columns: sums o .* d_o - v .* dv over later tokens, without own pairs.
  HWY_ATTR void ValueDecayGradients(int64_t first, size_t n) {
    const T* o = b_.outputs + static_cast<size_t>(first) * value_row_;
    T* to = b_.value_read;  // no longer needed
    for (size_t i = by_value_.begin; i < by_value_.end; i += N) {
      auto later = hn::Load(d_, b_.value_suffix + i);
      for (size_t t = n; t-- > 0;) {
        const size_t at = t * value_row_ + i;
        const auto output_product = hn::Mul(hn::Load(d_, o + at), hn::Load(d_, b_.d_o + at));
        later = hn::Add(later, hn::NegMulAdd(hn::Load(d_, b_.v + at), hn::Load(d_, b_.dv + at), output_product));
        hn::Store(later, d_, to + at);
      }
    }
    StoreRows(d_, to, value_row_, g_.d_log_value_decay, s_, head_, first, n, by_value_.begin,
              std::min(by_value_.end, values_), [](auto v, size_t, size_t) HWY_ATTR { return v; });
  }

  T* value_pairs_ = nullptr;  // w_tj of the current block
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_GATE_GRADIENTS_INL_H_
