// The queries, keys and decays of a block, as the recurrence takes them.
//
// Compiled once per SIMD target.
#if defined(HEED_ENGINES_RECURRENCE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_RECURRENCE_ROWS_INL_H_
#undef HEED_ENGINES_RECURRENCE_ROWS_INL_H_
#else
#define HEED_ENGINES_RECURRENCE_ROWS_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "heed/core/carver.h"
#include "heed/engines/recurrence/block-inl.h"
#include "heed/engines/recurrence/features-inl.h"
#include "heed/engines/recurrence/problem.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// The queries, keys and decays of a block.
template <class T>
struct BlockRows {
  T *q, *k;    // [kBlock][row]: scale phi(q), phi(k)
  T* raw;      // [padded key_size], of one row; null if phi is the identity
  T* decay;    // [kBlock][row] or [kBlock]

  void LayOut(const Problem& p, Carver& carver, int64_t block = kBlockTokens) {
    const auto row = static_cast<int64_t>(Padded<T>(p.features()));
    carver.Next(q, block * row);
    carver.Next(k, block * row);
    carver.Next(raw, static_cast<int64_t>(Padded<T>(p.key_size)));
    carver.Next(decay, p.gate == Gate::kNone     ? 0
                       : p.gate == Gate::kScalar ? kBlockTokens
                                                 : block * row);
  }
};

// Reads rows of one value head.
template <class T>
class RowReader {
 public:
  RowReader(const Problem& p, const Sequence& s, int64_t value_head,
            const BlockRows<T>& rows)
      : p_(p), s_(s), value_head_(value_head), key_head_(value_head / p.group()),
        size_(static_cast<size_t>(p.key_size)), row_(Padded<T>(p.features())),
        rows_(rows) {}

  HWY_NOINLINE HWY_ATTR void Queries(int64_t first, size_t n) const {
    const hn::ScalableTag<T> d;
    Mapped(p_.q, p_.query_scale(), first, n, rows_.q);
    if (p_.outer_scale() == 1) return;
    const auto scale = hn::Set(d, static_cast<T>(p_.outer_scale()));
    for (size_t i = 0; i < n * row_; i += hn::MaxLanes(d)) {
      hn::Store(hn::Mul(scale, hn::Load(d, rows_.q + i)), d, rows_.q + i);
    }
  }

  // And decays.
  HWY_NOINLINE HWY_ATTR void Keys(int64_t first, size_t n) const {
    Decays(first, n);
    if (!p_.complement_keys) Mapped(p_.k, p_.key_scale(), first, n, rows_.k);
  }

 private:
  HWY_ATTR void Mapped(const Rows& from, double inner_scale, int64_t first, size_t n,
                       T* to) const {
    const hn::ScalableTag<T> d;
    const T inner = static_cast<T>(inner_scale);
    if (p_.feature != Feature::kTaylor) {
      LoadRows(d, from, s_, key_head_, first, n, size_, to, row_);
      if (p_.feature == Feature::kIdentity) return;
      for (size_t t = 0; t < n; ++t) {
        MapFeatures(d, p_.feature, to + t * row_, inner, size_, row_, to + t * row_);
      }
      return;
    }
    for (size_t t = 0; t < n; ++t) {
      LoadRows(d, from, s_, key_head_, first + static_cast<int64_t>(t), 1, size_,
               rows_.raw, Padded<T>(p_.key_size));
      MapFeatures(d, p_.feature, rows_.raw, inner, size_, row_, to + t * row_);
    }
  }

  HWY_ATTR void Decays(int64_t first, size_t n) const {
    const hn::ScalableTag<T> d;
    if (p_.gate == Gate::kNone) return;
    if (p_.gate == Gate::kScalar) {
      std::memset(rows_.decay, 0, kBlock * sizeof(T));
      LoadRows(d, p_.log_decay, s_, value_head_, first, n, 1, rows_.k, hn::MaxLanes(d));
      for (size_t t = 0; t < n; ++t) rows_.decay[t] = rows_.k[t * hn::MaxLanes(d)];
      return ExpDecays(d, rows_.decay, 1, kBlock);
    }
    LoadRows(d, p_.log_decay, s_, value_head_, first, n, size_, rows_.decay, row_);
    if (p_.complement_keys) Complements(n);
    ExpDecays(d, rows_.decay, n, row_);
  }

  // k = 1 - exp(g), without cancellation.
  HWY_ATTR void Complements(size_t n) const {
    const hn::ScalableTag<T> d;
    for (size_t t = 0; t < n; ++t) {
      MapVectors(d, rows_.decay + t * row_, size_, rows_.k + t * row_,
                 [&](auto g, size_t) HWY_ATTR {
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

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_ROWS_INL_H_
