// Feature maps phi of rows, and their derivatives.
//
// Compiled once per SIMD target. Rows are padded to whole vectors with zeros, whatever phi(0) is.
#if defined(HEED_ENGINES_RECURRENCE_FEATURES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_RECURRENCE_FEATURES_INL_H_
#undef HEED_ENGINES_RECURRENCE_FEATURES_INL_H_
#else
#define HEED_ENGINES_RECURRENCE_FEATURES_INL_H_
#endif

#include <cstddef>

#include "heed/engines/recurrence/problem.h"
#include "heed/simd/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// The largest exponent of Feature::kExp, with which sums of products stay finite in f32.
inline constexpr double kMaxFeatureExponent = 80;

// y = f(vector, index) for all vectors of x, with zeros beyond `size`.
template <class D, class F, class T = hn::TFromD<D>>
HWY_INLINE void MapVectors(D d, const T* x, size_t size, T* y, const F& f) {
  constexpr size_t N = hn::MaxLanes(D());
  for (size_t i = 0; i < size; i += N) {
    const auto valid = hn::FirstN(d, HWY_MIN(N, size - i));
    hn::Store(hn::IfThenElseZero(valid, f(hn::Load(d, x + i), i)), d, y + i);
  }
}

template <class D, class T = hn::TFromD<D>>
HWY_INLINE void Softmax(D d, const T* x, size_t size, T* y) {
  constexpr size_t N = hn::MaxLanes(D());
  const auto lowest = hn::Set(d, hwy::LowestValue<T>());
  auto max = lowest, sum = hn::Zero(d);
  for (size_t i = 0; i < size; i += N) {
    const auto valid = hn::FirstN(d, HWY_MIN(N, size - i));
    max = hn::Max(hn::IfThenElse(valid, hn::Load(d, x + i), lowest), max);
  }
  max = hn::Set(d, hn::ReduceMax(d, max));
  MapVectors(d, x, size, y, [&](auto v, size_t) HWY_ATTR { return hs::Exp(d, hn::Sub(v, max)); });
  for (size_t i = 0; i < size; i += N) sum = hn::Add(sum, hn::Load(d, y + i));
  const auto inverse = hn::Set(d, T{1} / hn::ReduceSum(d, sum));
  MapVectors(d, y, size, y, [&](auto v, size_t) HWY_ATTR { return hn::Mul(v, inverse); });
}

// to = [1, y, y_i^2 / sqrt(2), y_i y_j (i < j)] with y = x scale. The dot product of two such rows is 1 + s + s^2 / 2,
// where s is the dot product of their y.
template <class T>
HWY_INLINE void Taylor(const T* HWY_RESTRICT x, T scale, size_t size, size_t row, T* HWY_RESTRICT to) {
  constexpr T kRootHalf = static_cast<T>(0.70710678118654752440);
  size_t at = 0;
  to[at++] = 1;
  for (size_t i = 0; i < size; ++i) to[at++] = x[i] * scale;
  const T* y = to + 1;
  for (size_t i = 0; i < size; ++i) to[at++] = y[i] * y[i] * kRootHalf;
  for (size_t i = 0; i < size; ++i) {
    for (size_t j = i + 1; j < size; ++j) to[at++] = y[i] * y[j];
  }
  while (at < row) to[at++] = 0;
}

// Computes dx from to = Taylor(x) and its gradient.
template <class T>
HWY_INLINE void TaylorBackward(const T* HWY_RESTRICT to, const T* HWY_RESTRICT d_to, T scale, size_t size,
                               T* HWY_RESTRICT dx) {
  constexpr T kRootTwo = static_cast<T>(1.41421356237309504880);
  const T* y = to + 1;
  const T *d_linear = d_to + 1, *d_square = d_linear + size, *d_pair = d_square + size;
  for (size_t i = 0; i < size; ++i) dx[i] = d_linear[i] + d_square[i] * y[i] * kRootTwo;
  for (size_t i = 0; i < size; ++i) {
    for (size_t j = i + 1; j < size; ++j, ++d_pair) {
      dx[i] += *d_pair * y[j];
      dx[j] += *d_pair * y[i];
    }
  }
  for (size_t i = 0; i < size; ++i) dx[i] *= scale;
}

// y = phi(x) for x of `size` elements; y has `row` elements. x and y may be the same memory unless phi adds channels.
// `scale` is for kTaylor.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void MapFeatures(D d, Feature feature, const T* x, T scale, size_t size, size_t row, T* y) {
  const auto zero = hn::Zero(d), one = hn::Set(d, T{1});
  switch (feature) {
    case Feature::kIdentity:
      if (x != y) MapVectors(d, x, size, y, [](auto v, size_t) HWY_ATTR { return v; });
      return;
    case Feature::kElu1:
      return MapVectors(d, x, size, y, [&](auto v, size_t) HWY_ATTR {
        return hn::IfThenElse(hn::Gt(v, zero), hn::Add(v, one), hs::Exp(d, v));
      });
    case Feature::kRelu:  // NaN propagates, which Max() would not ensure: x86 returns its second operand
      return MapVectors(d, x, size, y,
                        [&](auto v, size_t) HWY_ATTR { return hn::IfThenElse(hn::Lt(v, zero), zero, v); });
    case Feature::kReluSquared:
      return MapVectors(d, x, size, y,
                        [&](auto v, size_t) HWY_ATTR { return hn::IfThenElse(hn::Lt(v, zero), zero, hn::Mul(v, v)); });
    case Feature::kExp:
      return MapVectors(d, x, size, y, [&](auto v, size_t) HWY_ATTR {
        const auto limit = hn::Set(d, static_cast<T>(kMaxFeatureExponent));
        return hs::Exp(d, hn::IfThenElse(hn::Gt(v, limit), limit, v));
      });
    case Feature::kSoftmax: return Softmax(d, x, size, y);
    case Feature::kTaylor: return Taylor(x, scale, size, row, y);
    case Feature::kSoftmaxOfTokens:  // RowReader computes these, which need more than one row
    case Feature::kRandomExp:
    case Feature::kRandomRelu: return;
  }
}

// Computes dx from dy and y = phi(x), and for elementwise maps from x. For these y is `scale` phi(x), and dx has the
// same factor; otherwise `scale` is that of kTaylor.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void MapFeaturesBackward(D d, Feature feature, const T* x, const T* y, const T* dy, T scale, size_t size,
                                    T* dx) {
  constexpr size_t N = hn::MaxLanes(D());
  const auto zero = hn::Zero(d), whole_slope = hn::Set(d, scale);
  const auto load_y = [&](size_t i) HWY_ATTR { return hn::Load(d, y + i); };
  const auto load_x = [&](size_t i) HWY_ATTR { return hn::Load(d, x + i); };
  const auto map = [&](const auto& slope) HWY_ATTR {
    MapVectors(d, dy, size, dx, [&](auto v, size_t i) HWY_ATTR { return hn::Mul(v, slope(i)); });
  };
  switch (feature) {
    case Feature::kIdentity: return map([&](size_t) HWY_ATTR { return whole_slope; });
    case Feature::kElu1:
      return map([&](size_t i) HWY_ATTR { return hn::IfThenElse(hn::Gt(load_x(i), zero), whole_slope, load_y(i)); });
    case Feature::kRelu:
      return map([&](size_t i) HWY_ATTR { return hn::IfThenElseZero(hn::Gt(load_x(i), zero), whole_slope); });
    case Feature::kReluSquared:
      return map([&](size_t i) HWY_ATTR {
        const auto v = load_x(i);
        return hn::IfThenElseZero(hn::Gt(v, zero), hn::Mul(whole_slope, hn::Add(v, v)));
      });
    case Feature::kExp:
      return map([&](size_t i) HWY_ATTR {
        const auto limit = hn::Set(d, static_cast<T>(kMaxFeatureExponent));
        return hn::IfThenElse(hn::Gt(load_x(i), limit), zero, load_y(i));
      });
    case Feature::kSoftmax: {
      auto dot = zero;
      for (size_t i = 0; i < size; i += N) {
        dot = hn::MulAdd(load_y(i), hn::Load(d, dy + i), dot);
      }
      const auto mean = hn::Set(d, hn::ReduceSum(d, dot));
      return MapVectors(d, dy, size, dx,
                        [&](auto v, size_t i) HWY_ATTR { return hn::Mul(load_y(i), hn::Sub(v, mean)); });
    }
    case Feature::kTaylor: return TaylorBackward(y, dy, scale, size, dx);
    case Feature::kSoftmaxOfTokens:
    case Feature::kRandomExp:
    case Feature::kRandomRelu: return;
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_FEATURES_INL_H_
