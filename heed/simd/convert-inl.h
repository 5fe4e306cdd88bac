// Loads that widen and stores that round: memory of any float type, arithmetic in f32 or f64.
//
// Compiled once per SIMD target. Widening is exact; rounding is once, to nearest even, and a NaN stays NaN.
#if defined(HEED_SIMD_CONVERT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_CONVERT_INL_H_
#undef HEED_SIMD_CONVERT_INL_H_
#else
#define HEED_SIMD_CONVERT_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "heed/core/dtype.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Conversions between the bits of 16-bit floats and vectors of T.
template <class D, class Bits>
HWY_INLINE hn::Vec<D> Widen(D d, BF16 /*tag*/, Bits bits) {
  const hn::RebindToUnsigned<D> du;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, bits)));
}

// Highway's f16 conversions do not handle infinities and NaN on CPUs without f16 instructions, so this file has its own
// for these.
#define HEED_HAVE_F16_CONVERSIONS (HWY_ARCH_ARM_A64 || (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2))

template <class D, class Bits>
HWY_INLINE hn::Vec<D> Widen(D d, F16 /*tag*/, Bits bits) {
#if HEED_HAVE_F16_CONVERSIONS
  const hn::Rebind<hwy::float16_t, D> half;
  return hn::PromoteTo(d, hn::BitCast(half, bits));
#else
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const auto word = hn::PromoteTo(du, bits);
  const auto sign = hn::ShiftLeft<16>(hn::And(word, hn::Set(du, 0x8000u)));
  const auto rest = hn::And(word, hn::Set(du, 0x7FFFu));
  const auto bias = hn::Set(du, 112u << 23);  // difference of exponent biases: 127 - 15
  const auto normal = hn::Add(hn::ShiftLeft<13>(rest), bias);
  const auto special = hn::Gt(rest, hn::Set(du, 0x7BFFu));  // infinities and NaN
  const auto subnormal = hn::Lt(rest, hn::Set(du, 0x400u));
  const auto small = hn::BitCast(du, hn::Mul(hn::ConvertTo(d, hn::BitCast(di, rest)), hn::Set(d, 0x1p-24f)));
  const auto large = hn::IfThenElse(special, hn::Add(normal, bias), normal);
  return hn::BitCast(d, hn::Or(sign, hn::IfThenElse(subnormal, small, large)));
#endif
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE auto Round(D /*d*/, BF16 /*tag*/, V x) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint16_t, D> du16;
  const auto bits = hn::BitCast(du, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7FFFu)));
  const auto quiet = hn::Or(bits, hn::Set(du, 0x400000u));
  const auto is_nan = hn::RebindMask(du, hn::IsNaN(x));
  return hn::TruncateTo(du16, hn::ShiftRight<16>(hn::IfThenElse(is_nan, quiet, rounded)));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE auto Round(D d, F16 /*tag*/, V x) {
  const hn::Rebind<uint16_t, D> du16;
#if HEED_HAVE_F16_CONVERSIONS
  (void)d;
  const hn::Rebind<hwy::float16_t, D> half;
  return hn::BitCast(du16, hn::DemoteTo(half, x));
#else
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, x);
  const auto size = hn::And(bits, hn::Set(du, 0x7FFFFFFFu));
  const auto sign = hn::ShiftRight<16>(hn::AndNot(hn::Set(du, 0x7FFFFFFFu), bits));
  const auto odd = hn::And(hn::ShiftRight<13>(size), hn::Set(du, 1u));
  const auto normal = hn::ShiftRight<13>(hn::Add(hn::Sub(size, hn::Set(du, (112u << 23) - 0xFFFu)), odd));
  const auto small = hn::BitCast(du, hn::NearestInt(hn::Mul(hn::BitCast(d, size), hn::Set(d, 0x1p24f))));
  const auto nan = hn::Or(hn::Set(du, 0x7E00u), hn::And(hn::ShiftRight<13>(size), hn::Set(du, 0x3FFu)));
  auto half = hn::IfThenElse(hn::Lt(size, hn::Set(du, 0x38800000u)), small, normal);
  half = hn::IfThenElse(hn::Gt(size, hn::Set(du, 0x477FEFFFu)), hn::Set(du, 0x7C00u), half);
  half = hn::IfThenElse(hn::Gt(size, hn::Set(du, 0x7F800000u)), nan, half);
  return hn::TruncateTo(du16, hn::Or(sign, half));
#endif
}

template <class D, class V8>
HWY_INLINE hn::Vec<D> FromInt8(D d, V8 x) {
  return hn::ConvertTo(d, hn::PromoteTo(hn::RebindToSigned<D>(), x));
}

template <class D, class S>
HWY_INLINE hn::Vec<D> LoadWide(D d, const S* HWY_RESTRICT from) {
  if constexpr (std::is_same_v<S, hn::TFromD<D>>) {
    return hn::LoadU(d, from);
  } else if constexpr (std::is_same_v<S, int8_t>) {
    return FromInt8(d, hn::LoadU(hn::Rebind<int8_t, D>(), from));
  } else {
    const hn::Rebind<uint16_t, D> du16;
    return Widen(d, S(), hn::LoadU(du16, reinterpret_cast<const uint16_t*>(from)));
  }
}

// Loads the first n <= N elements, with zeros beyond; reads no other memory.
template <class D, class S>
HWY_INLINE hn::Vec<D> LoadWideN(D d, const S* HWY_RESTRICT from, size_t n) {
  if constexpr (std::is_same_v<S, hn::TFromD<D>>) {
    return hn::LoadN(d, from, n);
  } else if constexpr (std::is_same_v<S, int8_t>) {
    return FromInt8(d, hn::LoadN(hn::Rebind<int8_t, D>(), from, n));
  } else {
    const hn::Rebind<uint16_t, D> du16;
    return Widen(d, S(), hn::LoadN(du16, reinterpret_cast<const uint16_t*>(from), n));
  }
}

// Stores the first n <= N elements of x, rounded; writes no other memory.
template <class D, class S, class V = hn::Vec<D>>
HWY_INLINE void StoreRounded(D d, V x, S* HWY_RESTRICT to, size_t n) {
  const bool whole = n == hn::MaxLanes(d);
  if constexpr (std::is_same_v<S, hn::TFromD<D>>) {
    if (whole) {
      hn::StoreU(x, d, to);
    } else {
      hn::StoreN(x, d, to, n);
    }
  } else {
    const hn::Rebind<uint16_t, D> du16;
    const auto bits = Round(d, S(), x);
    uint16_t* HWY_RESTRICT at = reinterpret_cast<uint16_t*>(to);
    if (whole) {
      hn::StoreU(bits, du16, at);
    } else {
      hn::StoreN(bits, du16, at, n);
    }
  }
}

// Calls f(S()) with the element type of `dtype`: T itself or, for T = float, one of the 16-bit floats, which are
// computed in f32.
template <class T, class F>
HWY_INLINE void WithStorage(DType dtype, const F& f) {
  if constexpr (std::is_same_v<T, float>) {
    if (dtype == DType::kBF16) return f(BF16());
    if (dtype == DType::kF16) return f(F16());
  }
  return f(T());
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_CONVERT_INL_H_
