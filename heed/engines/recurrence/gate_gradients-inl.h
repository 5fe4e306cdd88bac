// What a gate adds to gradients: products of a tile's tokens with each other, of a bonus, and gradients of decays.
//
// Compiled once per SIMD target.
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
  using Base::d_, Base::N, Base::p_, Base::g_, Base::s_, Base::task_, Base::head_,
      Base::b_, Base::shared_, Base::dq_, Base::row_, Base::value_row_, Base::values_,
      Base::by_key_, Base::by_value_;

  // S^T and D^T without a normaliser.
  StateShape Borders() const {
    return {values_, values_, by_key_.begin, by_key_.end, by_key_.size, true};
  }

  // What tokens of one tile add to each other's gradients, but for their own pairs. A normaliser
  // shows in those of keys alone: what it adds to queries comes later.
  HWY_NOINLINE HWY_ATTR void QueryPairs(size_t n) {
    ForTokenTiles(n, [&](auto tokens, size_t begin, size_t tile) HWY_ATTR {
      constexpr int kTokens = tokens.value;
      T* pairs = value_pairs_ + tile * kTile * kTile;
      if (!p_.has_value_decay) {
        ValuePairs<kTokens>(d_, b_.d_o + begin * value_row_, b_.v + begin * value_row_,
                            value_row_, pairs);
      }
      WithForm(p_, [&](auto form) HWY_ATTR {
        TileQueryGradients<kTokens, form.value>(
            d_, b_.rows.k + begin * row_, b_.rows.decay + begin * DecayRow(form.value, row_),
            pairs, row_, by_key_.begin, by_key_.end, dq_ + begin * row_);
      });
    });
  }
  HWY_NOINLINE HWY_ATTR void KeyPairs(size_t n) {
    ForTokenTiles(n, [&](auto tokens, size_t begin, size_t tile) HWY_ATTR {
      constexpr int kTokens = tokens.value;
      T* pairs = value_pairs_ + tile * kTile * kTile;
      if (p_.normalize) {
        ValuePairs<kTokens>(d_, b_.d_o + begin * value_row_, b_.v + begin * value_row_,
                            value_row_, pairs);
      }
      WithForm(p_, [&](auto form) HWY_ATTR {
        TileKeyGradients<kTokens, form.value>(
            d_, b_.rows.q + begin * row_, b_.rows.decay + begin * DecayRow(form.value, row_),
            pairs, row_, by_key_.begin, by_key_.end, b_.dk + begin * row_);
      });
    });
  }

  HWY_ATTR void OwnPairs(const T* x, size_t n, T* to) const {
    AddOwnPairs(d_, x, value_pairs_, n, row_, by_key_.begin, by_key_.end, to);
  }

  HWY_NOINLINE HWY_ATTR void BonusGradients(size_t n) {
    std::memset(b_.d_bonus, 0, row_ * sizeof(T));
    ForTokenTiles(n, [&](auto tokens, size_t begin, size_t tile) HWY_ATTR {
      const size_t at = begin * row_;
      TileBonusGradients<tokens.value>(d_, b_.rows.q + at, b_.rows.k + at, b_.rows.bonus,
                                       value_pairs_ + tile * kTile * kTile, row_,
                                       by_key_.begin, by_key_.end, dq_ + at, b_.dk + at,
                                       b_.d_bonus);
    });
    AddConstants(shared_.d_bonus, b_.d_bonus, 1);
  }

  // The sum of n rows to the gradients of what tokens share.
  HWY_ATTR void AddConstants(double* sums, const T* rows, size_t n) {
    double* to = shared_.ConstantsOf(sums, p_, task_.sequence, head_);
    for (size_t t = 0; t < n; ++t, rows += row_) {
      for (size_t i = by_key_.begin; i < by_key_.end; ++i) {
        to[i] += static_cast<double>(rows[i]);
      }
    }
  }

  // <S, D> at the end of the block, by key, before D is past it.
  HWY_ATTR void BoundaryProducts(int64_t block) {
    const T* state = b_.Border(block);
    StateProducts(d_, state, Borders(), b_.d_transposed, by_key_, b_.suffix);
    if (p_.has_value_decay) {
      StateRowProducts(d_, state, Borders(), b_.d_transposed, by_key_, b_.value_suffix);
    }
    if (!p_.normalize) return;
    const T* z = b_.BorderZ(block + 1);
    ForStripsOf<T>(by_key_, [&](size_t column, size_t width) HWY_ATTR {
      const T* dz = b_.d_transposed + by_key_.Offset(column) + values_ * width;
      for (size_t i = 0; i < width; i += N) {
        hn::Store(hn::MulAdd(hn::Load(d_, z + column + i), hn::Load(d_, dz + i),
                             hn::Load(d_, b_.suffix + column + i)),
                  d_, b_.suffix + column + i);
      }
    });
  }

  HWY_NOINLINE HWY_ATTR void ValuePairGradients(size_t n) {
    ForTokenTiles(n, [&](auto tokens, size_t begin, size_t tile) HWY_ATTR {
      const size_t at = begin * value_row_;
      TileKeyGradients<tokens.value, Form::kKey>(
          d_, b_.d_o + at, b_.rows.value_decay + at, b_.pairs + tile * kTile * kTile,
          value_row_, by_value_.begin, by_value_.end, b_.dv + at);
    });
  }
  HWY_ATTR void OwnValuePairs(size_t n) const {
    AddOwnPairs(d_, b_.d_o, b_.pairs, n, value_row_, by_value_.begin, by_value_.end, b_.dv);
  }

  HWY_INLINE hn::Vec<D> DecayProduct(size_t at) const {
    return hn::NegMulAdd(hn::Load(d_, b_.rows.k + at), hn::Load(d_, b_.dk + at),
                         hn::Mul(hn::Load(d_, b_.rows.q + at), hn::Load(d_, dq_ + at)));
  }

  // Sums of q .* dq - k .* dk over later tokens, before own pairs are part of either.
  HWY_ATTR void DecayGradients(size_t n) {
    if (g_.d_log_decay.data == nullptr) return;
    for (size_t i = by_key_.begin; i < by_key_.end; i += N) {
      auto later = hn::Load(d_, b_.suffix + i);
      for (size_t t = n; t-- > 0;) {
        const size_t at = t * row_ + i;
        const auto past_query = later;
        later = hn::Add(later, DecayProduct(at));
        auto gradient = later;
        if (p_.has_bonus) {  // its query does not see a token's decay
          gradient = hn::NegMulAdd(hn::Load(d_, b_.rows.k + at), hn::Load(d_, b_.dk + at),
                                   past_query);
        }
        hn::Store(gradient, d_, b_.d_decay + at);
      }
    }
  }

  // Stores them when dk is whole, as a key that is 1 - exp(log_decay) needs it.
  HWY_ATTR void StoreDecayGradients(int64_t first, size_t n) {
    if (g_.d_log_decay.data == nullptr) return;
    for (size_t t = 0; t < n && p_.complement_keys; ++t) {
      for (size_t i = by_key_.begin; i < by_key_.end; i += N) {
        const size_t at = t * row_ + i;
        hn::Store(hn::NegMulAdd(hn::Load(d_, b_.rows.decay + at), hn::Load(d_, b_.dk + at),
                                hn::Load(d_, b_.d_decay + at)),
                  d_, b_.d_decay + at);
      }
    }
    if (p_.constant_decay) return AddConstants(shared_.d_decay, b_.d_decay, n);
    StoreRows(d_, b_.d_decay, row_, g_.d_log_decay, s_, head_, first, n, by_key_.begin,
              std::min(by_key_.end, by_key_.size),
              [](auto v, size_t, size_t) HWY_ATTR { return v; });
  }

  // q .* dq, then the normaliser's part of it, and then - k .* dk and what comes from beyond the block, none with
  // own pairs, summed over units of columns, which are added up in f64 when all parts are there.
  HWY_ATTR void AddQueryProducts(int64_t first, size_t n) {
    SumUnits(first, n, [&](auto sum, size_t t, size_t i) HWY_ATTR {
      return hn::MulAdd(hn::Load(d_, b_.rows.q + t * row_ + i), hn::Load(d_, dq_ + t * row_ + i), sum);
    }, [](double& to, double sum) { to = sum; });
  }
  // The gradient of z_t . q_t, times z_t without its own key.
  HWY_ATTR void AddNormalizerProducts(int64_t first, size_t n, const T* z_before, const T* decays) {
    SumUnits(first, n, [&](auto sum, size_t t, size_t i) HWY_ATTR {
      const auto z = hn::Load(d_, (t == 0 ? z_before : b_.z + (t - 1) * row_) + i);
      const auto decayed = NextNormalizer(d_, hn::Set(d_, decays[t]), z, hn::Zero(d_));
      const auto weighted = hn::Mul(hn::Set(d_, b_.d_o[t * value_row_ + values_]), decayed);
      return hn::MulAdd(hn::Load(d_, b_.rows.q + t * row_ + i), weighted, sum);
    }, [](double& to, double sum) { to += sum; });
  }
  HWY_ATTR void ScalarDecayGradients(int64_t first, size_t n) {
    if (g_.d_log_decay.data == nullptr) return;
    SumUnits(first, n, [&](auto sum, size_t t, size_t i) HWY_ATTR {
      if (t + 1 == n) sum = hn::Add(sum, hn::Load(d_, b_.suffix + i));
      return hn::NegMulAdd(hn::Load(d_, b_.rows.k + t * row_ + i), hn::Load(d_, b_.dk + t * row_ + i), sum);
    }, [](double& to, double sum) { to += sum; });
  }
  template <class F, class Put>
  HWY_INLINE void SumUnits(int64_t first, size_t n, const F& add, const Put& put) {
    constexpr auto kUnit = static_cast<size_t>(kPartColumns);
    double* parts = shared_.DecayParts(p_, task_.sequence, head_) + first;
    for (size_t begin = by_key_.begin; begin < by_key_.end; begin += kUnit) {
      const size_t end = std::min(begin + kUnit, by_key_.end);
      double* to = parts + static_cast<int64_t>(begin / kUnit) * s_.count;
      for (size_t t = 0; t < n; ++t) {
        auto sum = hn::Zero(d_);
        for (size_t i = begin; i < end; i += N) sum = add(sum, t, i);
        put(to[t], static_cast<double>(hn::ReduceSum(d_, sum)));
      }
    }
  }

  // Does as DecayGradients() by value: sums of o .* d_o - v .* dv over later tokens, without own pairs.
  HWY_ATTR void ValueDecayGradients(int64_t first, size_t n) {
    const T* o = b_.outputs + static_cast<size_t>(first) * value_row_;
    T* to = b_.value_read;  // has been used
    for (size_t i = by_value_.begin; i < by_value_.end; i += N) {
      auto later = hn::Load(d_, b_.value_suffix + i);
      for (size_t t = n; t-- > 0;) {
        const size_t at = t * value_row_ + i;
        const auto of_output = hn::Mul(hn::Load(d_, o + at), hn::Load(d_, b_.d_o + at));
        later = hn::Add(later, hn::NegMulAdd(hn::Load(d_, b_.v + at),
                                             hn::Load(d_, b_.dv + at), of_output));
        hn::Store(later, d_, to + at);
      }
    }
    StoreRows(d_, to, value_row_, g_.d_log_value_decay, s_, head_, first, n,
              by_value_.begin, std::min(by_value_.end, values_),
              [](auto v, size_t, size_t) HWY_ATTR { return v; });
  }

  T* value_pairs_ = nullptr;  // of the current block
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_GATE_GRADIENTS_INL_H_
