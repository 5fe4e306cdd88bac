// The inner loop of rotary encoding: rows of one token, all rotated by the same angles.
//
// It is memory-bound: x is read and y written once. So f32 is computed in f64, which leaves one rounding in the result,
// and 16-bit dtypes in f32. Products and sums are not fused: every target and the tail of a row give the same bits.
#include "heed/core/targets.h"
// After targets.h:
#include "heed/core/dispatch.h"
#include "heed/ops/positions/rotary_rows_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/ops/positions/rotary_rows.cc"  // this file
#include "hwy/foreach_target.h"                                 // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::positions::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// True if vectors round and convert as single elements do. Highway's portable target saturates infinities, and its f16
// conversions for old x86 do not handle them.
template <class T>
constexpr bool kVectorsAgree = HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR;
#if HWY_ARCH_X86
template <>
constexpr bool kVectorsAgree<F16> = HWY_TARGET <= HWY_AVX2;
#endif

// The type that elements of type T are computed in.
template <class T>
struct ComputedIn {
  using Type = float;
};
template <>
struct ComputedIn<float> {
  using Type = double;
};
template <>
struct ComputedIn<double> {
  using Type = double;
};

// Functions for one element.

HWY_INLINE double Load1(const double* p) { return *p; }
HWY_INLINE double Load1(const float* p) { return *p; }
HWY_INLINE float Load1(const BF16* p) { return ToFloat(*p); }
HWY_INLINE float Load1(const F16* p) { return ToFloat(*p); }
HWY_INLINE void Store1(double v, double* p) { *p = v; }
HWY_INLINE void Store1(double v, float* p) { *p = static_cast<float>(v); }
HWY_INLINE void Store1(float v, BF16* p) { *p = ToBF16(v); }
HWY_INLINE void Store1(float v, F16* p) { *p = ToF16(v); }

// Functions for a vector of elements, with the same roundings.

template <class D>
HWY_INLINE hn::Vec<D> LoadVector(D d, const double* p) {
  return hn::LoadU(d, p);
}
template <class D>
HWY_INLINE hn::Vec<D> LoadVector(D d, const float* p) {
  return hn::PromoteTo(d, hn::LoadU(hn::Rebind<float, D>(), p));
}
template <class D>
HWY_INLINE hn::Vec<D> LoadVector(D d, const BF16* p) {
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::LoadU(hn::Rebind<uint16_t, D>(), reinterpret_cast<const uint16_t*>(p));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, bits)));
}
template <class D>
HWY_INLINE hn::Vec<D> LoadVector(D d, const F16* p) {
  const hn::Rebind<hwy::float16_t, D> half;
  return hn::PromoteTo(d, hn::LoadU(half, reinterpret_cast<const hwy::float16_t*>(p)));
}

template <class D>
HWY_INLINE void StoreVector(D d, hn::Vec<D> v, double* p) {
  hn::StoreU(v, d, p);
}
template <class D>
HWY_INLINE void StoreVector(D, hn::Vec<D> v, float* p) {
  const hn::Rebind<float, D> narrow;
  hn::StoreU(hn::DemoteTo(narrow, v), narrow, p);
}
// A NaN stays a NaN: it comes from a bf16 or is the default one, so the lower half of its bits is 0.
template <class D>
HWY_INLINE void StoreVector(D, hn::Vec<D> v, BF16* p) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint16_t, D> narrow;
  const auto bits = hn::BitCast(du, v);
  const auto high = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(high, hn::Set(du, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7FFF)), odd));
  hn::StoreU(hn::TruncateTo(narrow, rounded), narrow, reinterpret_cast<uint16_t*>(p));
}
template <class D>
HWY_INLINE void StoreVector(D, hn::Vec<D> v, F16* p) {
  const hn::Rebind<hwy::float16_t, D> narrow;
  hn::StoreU(hn::DemoteTo(narrow, v), narrow, reinterpret_cast<hwy::float16_t*>(p));
}

// Pairs (i, half + i); c and s are [half].
template <class T, class C>
void RotateHalves(const T* HWY_RESTRICT x, const C* HWY_RESTRICT c, const C* HWY_RESTRICT s, size_t half,
                  T* HWY_RESTRICT y) {
  size_t i = 0;
  if constexpr (kVectorsAgree<T>) {
    const hn::ScalableTag<C> d;
    const size_t N = hn::Lanes(d);
    for (; i + N <= half; i += N) {
      const auto a = LoadVector(d, x + i), b = LoadVector(d, x + half + i);
      const auto vc = hn::LoadU(d, c + i), vs = hn::LoadU(d, s + i);
      StoreVector(d, hn::Sub(hn::Mul(a, vc), hn::Mul(b, vs)), y + i);
      StoreVector(d, hn::Add(hn::Mul(b, vc), hn::Mul(a, vs)), y + half + i);
    }
  }
  for (; i < half; ++i) {
    const C a = Load1(x + i), b = Load1(x + half + i);
    Store1(a * c[i] - b * s[i], y + i);
    Store1(b * c[i] + a * s[i], y + half + i);
  }
}

// Pairs (2i, 2i + 1); c and s are [2 half]: each cosine twice, each sine negated and unchanged.
template <class T, class C>
void RotateNeighbours(const T* HWY_RESTRICT x, const C* HWY_RESTRICT c, const C* HWY_RESTRICT s, size_t half,
                      T* HWY_RESTRICT y) {
  size_t i = 0;
  if constexpr (kVectorsAgree<T>) {
    const hn::ScalableTag<C> d;
    const size_t N = hn::Lanes(d);
    for (; i + N <= 2 * half; i += N) {
      const auto v = LoadVector(d, x + i), other = hn::Reverse2(d, v);
      const auto vc = hn::LoadU(d, c + i), vs = hn::LoadU(d, s + i);
      StoreVector(d, hn::Add(hn::Mul(v, vc), hn::Mul(other, vs)), y + i);
    }
  }
  for (; i < 2 * half; i += 2) {
    const C a = Load1(x + i), b = Load1(x + i + 1);
    Store1(a * c[i] + b * s[i], y + i);
    Store1(b * c[i + 1] + a * s[i + 1], y + i + 1);
  }
}

template <class T>
void RotateTyped(RotaryPairs pairs, const RotaryRows& rows) {
  using C = typename ComputedIn<T>::Type;
  const auto half = static_cast<size_t>(rows.half);
  const bool halves = pairs == RotaryPairs::kHalfSplit;
  C* HWY_RESTRICT c = static_cast<C*>(rows.scratch);
  C* HWY_RESTRICT s = c + 2 * half;
  for (size_t i = 0; i < half; ++i) {
    const C cos = static_cast<C>(rows.cos[i]);
    const C sin = static_cast<C>(rows.sign * rows.sin[i]);
    if (halves) {
      c[i] = cos;
      s[i] = sin;
    } else {
      c[2 * i] = c[2 * i + 1] = cos;
      s[2 * i] = -sin;
      s[2 * i + 1] = sin;
    }
  }
  const T* x = static_cast<const T*>(rows.x);
  T* y = static_cast<T*>(rows.y);
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    if (halves) {
      RotateHalves<T, C>(x, c, s, half, y);
    } else {
      RotateNeighbours<T, C>(x, c, s, half, y);
    }
    x += rows.x_stride;
    y += rows.y_stride;
  }
}

void Rotate(DType dtype, RotaryPairs pairs, const RotaryRows& rows) {
  switch (dtype) {
    case DType::kF64: return RotateTyped<double>(pairs, rows);
    case DType::kF32: return RotateTyped<float>(pairs, rows);
    case DType::kBF16: return RotateTyped<BF16>(pairs, rows);
    default: return RotateTyped<F16>(pairs, rows);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::positions::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace heed::positions {

HWY_EXPORT(Rotate);

void RotateRows(int64_t allowed_targets, DType dtype, RotaryPairs pairs, const RotaryRows& rows) {
  HWY_DISPATCH_TABLE(Rotate)[TargetIndex(allowed_targets)](dtype, pairs, rows);
}

}  // namespace heed::positions
#endif  // HWY_ONCE
