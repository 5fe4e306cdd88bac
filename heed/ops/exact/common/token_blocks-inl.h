// Rows of a block of 64 tokens: loads, stores, and the masks of triangles.
//
// Compiled once per SIMD target. Rows are whole vectors, with zeros beyond their elements.
#if defined(HEED_OPS_EXACT_COMMON_TOKEN_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_OPS_EXACT_COMMON_TOKEN_BLOCKS_INL_H_
#undef HEED_OPS_EXACT_COMMON_TOKEN_BLOCKS_INL_H_
#else
#define HEED_OPS_EXACT_COMMON_TOKEN_BLOCKS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "heed/core/tensor.h"
#include "heed/ops/exact/common/token_blocks_internal.h"
#include "heed/simd/convert-inl.h"
#include "heed/simd/products-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::token_blocks::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// Calls f(T(), S()) for the types of the computation and of tensors of this dtype.
template <class F>
HWY_INLINE void WithTypes(DType dtype, const F& f) {
  if (dtype == DType::kF64) return f(double(), double());
  hs::WithStorage<float>(dtype, [&](auto stored) HWY_ATTR { f(float(), stored); });
}

// Elements of a row in whole vectors of any target.
inline int64_t Padded(int64_t size) { return (size + 15) / 16 * 16; }

template <class T>
HWY_INLINE void Clear(T* to, int64_t n) {
  std::memset(to, 0, static_cast<size_t>(n) * sizeof(T));
}

template <class T>
HWY_INLINE const T* At(const ConstTensorView& t, int64_t i, int64_t j, int64_t h) {
  return t.as<T>() + i * t.stride(0) + j * t.stride(1) + h * t.stride(2);
}
template <class T>
HWY_INLINE T* At(const TensorView& t, int64_t i, int64_t j, int64_t h) {
  return t.as<T>() + i * t.stride(0) + j * t.stride(1) + h * t.stride(2);
}
inline double Number(const ConstTensorView& t, int64_t i, int64_t j, int64_t h) {
  return LoadAsDouble(t.dtype(), t.data(), i * t.stride(0) + j * t.stride(1) + h * t.stride(2));
}
inline void SetNumber(const TensorView& t, int64_t i, int64_t j, int64_t h, double value) {
  if (!t.present()) return;
  StoreDouble(t.dtype(), t.data(), i * t.stride(0) + j * t.stride(1) + h * t.stride(2), value);
}

// Rows of a block, with zeros after the last of `count`.
template <class S, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void LoadRows(D d, const ConstTensorView& t, int64_t b, int64_t token, int64_t count, int64_t h,
                           int64_t padded, T* to) {
  for (int64_t i = 0; i < count; ++i) {
    hs::LoadRow(d, At<S>(t, b, token + i, h), t.size(3), padded, to + i * padded);
  }
  Clear(to + count * padded, (kBlock - count) * padded);
}
template <class S, class D, class T = hn::TFromD<D>>
HWY_NOINLINE void StoreRows(D d, const T* from, int64_t padded, const TensorView& t, int64_t b, int64_t token,
                            int64_t count, int64_t h) {
  for (int64_t i = 0; i < count && t.present(); ++i) {
    hs::StoreRow(d, from + i * padded, t.size(3), At<S>(t, b, token + i, h));
  }
}

// Sets what is above the diagonal of [count, 64], or on it too with `strict`, to -0, which products skip.
template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void KeepLower(D d, int64_t count, bool strict, T* square) {
  constexpr int64_t N = hn::MaxLanes(D());
  const auto skipped = hn::Set(d, T{-0.0});
  for (int64_t t = 0; t < count; ++t) {
    const int64_t kept = strict ? t : t + 1;
    for (int64_t s = kept / N * N; s < kBlock; s += N) {
      T* HWY_RESTRICT at = square + t * kBlock + s;
      const auto seen = hn::FirstN(d, static_cast<size_t>(std::clamp<int64_t>(kept - s, 0, N)));
      hn::Store(hn::IfThenElse(seen, hn::Load(d, at), skipped), d, at);
    }
  }
}

template <class D, class T = hn::TFromD<D>>
HWY_NOINLINE void ScaleRows(D d, T factor, int64_t n, T* rows) {
  constexpr int64_t N = hn::MaxLanes(D());
  const auto factors = hn::Set(d, factor);
  for (int64_t i = 0; i < n; i += N) hn::Store(hn::Mul(factors, hn::Load(d, rows + i)), d, rows + i);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::token_blocks::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_OPS_EXACT_COMMON_TOKEN_BLOCKS_INL_H_
