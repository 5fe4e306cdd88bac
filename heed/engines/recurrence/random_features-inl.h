// Random features: exp or relu of products with the rows of a fixed matrix W [M, K].
//
// Compiled once per SIMD target. W y of a block is ReadState() with W^T as a state of K rows; the gradient of y is
// ReadState() with W as a state of M rows.
#if defined(HEED_ENGINES_RECURRENCE_RANDOM_FEATURES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_RECURRENCE_RANDOM_FEATURES_INL_H_
#undef HEED_ENGINES_RECURRENCE_RANDOM_FEATURES_INL_H_
#else
#define HEED_ENGINES_RECURRENCE_RANDOM_FEATURES_INL_H_
#endif

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "heed/engines/recurrence/block-inl.h"
#include "heed/engines/recurrence/features-inl.h"
#include "heed/engines/recurrence/problem.h"
#include "heed/simd/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::recurrence::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

inline constexpr double kReluOffset = 1e-3;

// The shapes of W^T and W as states.
template <class T>
StateShape TransposedProjection(const Problem& p) {
  const auto keys = static_cast<size_t>(p.key_size);
  return {keys, keys, 0, Padded<T>(p.projection_rows), static_cast<size_t>(p.projection_rows), true};
}
template <class T>
StateShape ProjectionShape(const Problem& p) {
  const auto rows = static_cast<size_t>(p.projection_rows);
  return {rows, rows, 0, Padded<T>(p.key_size), static_cast<size_t>(p.key_size), false};
}

template <class T>
HWY_INLINE void LoadProjectionRow(const Problem& p, size_t row, T* to) {
  LoadRows(hn::ScalableTag<T>(), p.projection, Sequence(), 0, static_cast<int64_t>(row), 1,
           static_cast<size_t>(p.key_size), to, Padded<T>(p.key_size));
}

// Packs W^T. `row` is memory for one row of W.
template <class T>
HWY_NOINLINE HWY_ATTR void PackTransposed(const Problem& p, T* row, T* to) {
  const StateShape shape = TransposedProjection<T>(p);
  std::memset(to, 0, shape.Offset(shape.end) * sizeof(T));
  ForColumnBlocks<T>(shape, [&](size_t column, size_t width) HWY_ATTR {
    for (size_t i = 0; i < width && column + i < shape.size; ++i) {
      LoadProjectionRow(p, column + i, row);
      T* at = to + shape.Offset(column) + i;
      for (size_t r = 0; r < shape.rows; ++r) at[r * width] = row[r];
    }
  });
}
template <class T>
HWY_NOINLINE HWY_ATTR void PackProjection(const Problem& p, T* row, T* to) {
  const StateShape shape = ProjectionShape<T>(p);
  for (size_t r = 0; r < shape.rows; ++r) {
    LoadProjectionRow(p, r, row);
    ForColumnBlocks<T>(shape, [&](size_t column, size_t width) HWY_ATTR {
      std::memcpy(to + shape.Offset(column) + r * width, row + column, width * sizeof(T));
    });
  }
}

// Computes W y of one token, without packing W.
template <class T>
HWY_NOINLINE HWY_ATTR void ProjectOne(const Problem& p, const T* y, T* to, size_t row) {
  const hn::ScalableTag<T> d;
  constexpr size_t N = hn::MaxLanes(hn::ScalableTag<T>());
  const auto size = static_cast<size_t>(p.key_size);
  std::memset(to, 0, row * sizeof(T));
  hs::WithStorage<T>(p.projection.dtype, [&](auto stored) HWY_ATTR {
    for (int64_t r = 0; r < p.projection_rows; ++r) {
      const auto* w = RowAt<decltype(stored)>(p.projection, Sequence(), 0, r);
      auto sum = hn::Zero(d);
      size_t i = 0;
      for (; i + N <= size; i += N) {
        sum = hn::MulAdd(hs::LoadWide(d, w + i), hn::Load(d, y + i), sum);
      }
      if (i < size) {
        sum = hn::MulAdd(hs::LoadWideN(d, w + i, size - i), hn::Load(d, y + i), sum);
      }
      to[r] = hn::ReduceSum(d, sum);
    }
  });
}

template <class T>
HWY_INLINE T Largest(const T* x, size_t size) {
  const hn::ScalableTag<T> d;
  constexpr size_t N = hn::MaxLanes(hn::ScalableTag<T>());
  const auto lowest = hn::Set(d, -hwy::HighestValue<T>());
  auto max = lowest;
  for (size_t i = 0; i < size; i += N) {
    const auto valid = hn::FirstN(d, HWY_MIN(N, size - i));
    max = hn::Max(hn::IfThenElse(valid, hn::Load(d, x + i), lowest), max);
  }
  return hn::ReduceMax(d, max);
}

template <class T>
HWY_INLINE T HalfSquare(const T* y, size_t row) {
  const hn::ScalableTag<T> d;
  auto sum = hn::Zero(d);
  for (size_t i = 0; i < row; i += hn::MaxLanes(d)) {
    const auto v = hn::Load(d, y + i);
    sum = hn::MulAdd(v, v, sum);
  }
  return hn::ReduceSum(d, sum) / 2;
}

template <class T>
HWY_INLINE T ExpOf(T x) {
  const hn::ScalableTag<T> d;
  return hn::GetLane(hs::Exp(d, hn::Set(d, x)));
}

// Replaces W y by phi. For kRandomExp, `shift` is subtracted from exponents.
template <class T>
HWY_INLINE void ExpFeatures(const Problem& p, T* x, size_t size, T shift) {
  const hn::ScalableTag<T> d;
  const double norm = 1 / std::sqrt(static_cast<double>(size));
  const auto factor = hn::Set(d, static_cast<T>(norm));
  const auto floor = hn::Set(d, static_cast<T>(norm * p.feature_eps));
  MapVectors(d, x, size, x, [&](auto v, size_t) HWY_ATTR {
    return hn::MulAdd(factor, hs::Exp(d, hn::Sub(v, hn::Set(d, shift))), floor);
  });
}
template <class T>
HWY_INLINE void ReluFeatures(T* x, size_t size) {
  const hn::ScalableTag<T> d;
  const auto zero = hn::Zero(d), offset = hn::Set(d, static_cast<T>(kReluOffset));
  MapVectors(d, x, size, x, [&](auto v, size_t) HWY_ATTR {  // NaN propagates
    return hn::Add(hn::IfThenElse(hn::Lt(v, zero), zero, v), offset);
  });
}

template <class T>
HWY_INLINE T RowSum(const T* x, size_t row) {
  const hn::ScalableTag<T> d;
  auto sum = hn::Zero(d);
  for (size_t i = 0; i < row; i += hn::MaxLanes(d)) sum = hn::Add(sum, hn::Load(d, x + i));
  return hn::ReduceSum(d, sum);
}

// Replaces the gradient of phi by the gradient of W y.
template <class T>
HWY_INLINE void RandomFeaturesBackward(const Problem& p, const T* phi, T* gradient) {
  const hn::ScalableTag<T> d;
  const auto size = static_cast<size_t>(p.projection_rows);
  if (p.feature == Feature::kRandomRelu) {
    const auto offset = hn::Set(d, static_cast<T>(kReluOffset));
    return MapVectors(d, gradient, size, gradient, [&](auto v, size_t i) HWY_ATTR {
      return hn::IfThenElseZero(hn::Gt(hn::Load(d, phi + i), offset), v);
    });
  }
  const double norm = 1 / std::sqrt(static_cast<double>(size));
  const auto floor = hn::Set(d, static_cast<T>(norm * p.feature_eps));
  MapVectors(d, gradient, size, gradient,
             [&](auto v, size_t i) HWY_ATTR { return hn::Mul(v, hn::Sub(hn::Load(d, phi + i), floor)); });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::recurrence::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_RECURRENCE_RANDOM_FEATURES_INL_H_
