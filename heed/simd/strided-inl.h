// Loads and stores of lanes with any stride in memory.
//
// Compiled once per SIMD target. Strides of 1 and -1 are vector loads; others go element by element. Conversions are
// those of convert-inl.h, so that results do not depend on strides.
#if defined(HEED_SIMD_STRIDED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_STRIDED_INL_H_
#undef HEED_SIMD_STRIDED_INL_H_
#else
#define HEED_SIMD_STRIDED_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "heed/core/dtype.h"
#include "heed/simd/convert-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Loads the first n <= N elements, with zeros beyond; reads no other memory.
template <class D, class S>
HWY_INLINE hn::Vec<D> LoadStrided(D d, const S* from, int64_t stride, size_t n) {
  constexpr size_t N = hn::MaxLanes(D());
  if (stride == 1 || n == 1) return n == N ? LoadWide(d, from) : LoadWideN(d, from, n);
  if (stride == -1 && n == N) {
    return hn::Reverse(d, LoadWide(d, from - static_cast<int64_t>(N - 1)));
  }
  S lanes[N] = {};
  for (size_t i = 0; i < n; ++i) lanes[i] = from[static_cast<int64_t>(i) * stride];
  return LoadWide(d, lanes);
}

// Stores the first n <= N elements of x, rounded; writes no other memory.
template <class D, class S, class V = hn::Vec<D>>
HWY_INLINE void StoreStrided(D d, V x, S* to, int64_t stride, size_t n) {
  constexpr size_t N = hn::MaxLanes(D());
  if (stride == 1 || n == 1) return StoreRounded(d, x, to, n);
  if (stride == -1 && n == N) {
    return StoreRounded(d, hn::Reverse(d, x), to - static_cast<int64_t>(N - 1), N);
  }
  S lanes[N];
  StoreRounded(d, x, lanes, N);
  for (size_t i = 0; i < n; ++i) to[static_cast<int64_t>(i) * stride] = lanes[i];
}

// One element, widened.
template <class T, class S>
HWY_INLINE T WideElement(S x) {
  if constexpr (std::is_same_v<T, S>) {
    return x;
  } else {
    return ToFloat(x);
  }
}

// Loads rows of `count` elements, transposed: to[j * next + i] is element j of row i, for n <= N rows, zero in the
// lanes beyond. Short rows without gaps between them are read as vectors.
template <class D, class S, class T = hn::TFromD<D>>
HWY_INLINE void LoadColumns(D d, const S* from, int64_t row_stride, int64_t stride, size_t count, size_t n, T* to,
                            size_t next) {
  constexpr size_t N = hn::MaxLanes(D());
  // The portable target has no fast interleaved loads.
  constexpr bool kVectors = HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR;
  if (kVectors && n == N && stride == 1 && row_stride == static_cast<int64_t>(count) && count >= 2 && count <= 4) {
    using Bits = std::conditional_t<std::is_same_v<S, T>, T, uint16_t>;
    const hn::Rebind<Bits, D> ds;
    const Bits* p = reinterpret_cast<const Bits*>(from);
    const auto store = [&](auto column, size_t j) HWY_ATTR {
      if constexpr (std::is_same_v<S, T>) {
        hn::StoreU(column, d, to + j * next);
      } else {
        hn::StoreU(Widen(d, S(), column), d, to + j * next);
      }
    };
    hn::Vec<decltype(ds)> a, b, c, e;
    if (count == 2) {
      hn::LoadInterleaved2(ds, p, a, b);
    } else if (count == 3) {
      hn::LoadInterleaved3(ds, p, a, b, c);
      store(c, 2);
    } else {
      hn::LoadInterleaved4(ds, p, a, b, c, e);
      store(c, 2);
      store(e, 3);
    }
    store(a, 0);
    store(b, 1);
    return;
  }
  for (size_t j = 0; j < count; ++j) {
    for (size_t i = 0; i < N; ++i) {
      to[j * next + i] =
          i < n ? WideElement<T>(from[static_cast<int64_t>(i) * row_stride + static_cast<int64_t>(j) * stride]) : T{0};
    }
  }
}

// The inverse of LoadColumns, for elements of the same type.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE void StoreColumns(D d, const T* from, size_t next, size_t count, size_t n, T* to, int64_t row_stride,
                             int64_t stride) {
  constexpr size_t N = hn::MaxLanes(D());
  constexpr bool kVectors = HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR;
  if (kVectors && n == N && stride == 1 && row_stride == static_cast<int64_t>(count) && count >= 2 && count <= 4) {
    const auto a = hn::LoadU(d, from), b = hn::LoadU(d, from + next);
    if (count == 2) return hn::StoreInterleaved2(a, b, d, to);
    const auto c = hn::LoadU(d, from + 2 * next);
    if (count == 3) return hn::StoreInterleaved3(a, b, c, d, to);
    return hn::StoreInterleaved4(a, b, c, hn::LoadU(d, from + 3 * next), d, to);
  }
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < count; ++j) {
      to[static_cast<int64_t>(i) * row_stride + static_cast<int64_t>(j) * stride] = from[j * next + i];
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_STRIDED_INL_H_
