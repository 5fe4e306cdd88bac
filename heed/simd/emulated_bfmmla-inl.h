// Emulated BFDOT and BFMMLA: the bits of ARM's bf16 products on x86, for tests.
//
// Compiled once per SIMD target, in files with HEED_EMULATE_BFMMLA alone, in which pair_products-inl.h has these
// products and says what they are. They do not depend on whether the floating-point environment flushes subnormal
// numbers.
#if defined(HEED_SIMD_EMULATED_BFMMLA_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_EMULATED_BFMMLA_INL_H_
#undef HEED_SIMD_EMULATED_BFMMLA_INL_H_
#else
#define HEED_SIMD_EMULATED_BFMMLA_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Returns x, or a zero of its sign if x is subnormal.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V FlushSubnormal(D d, V x) {
  const auto subnormal = hn::Lt(hn::Abs(x), hn::Set(d, 0x1p-126f));
  return hn::IfThenElse(subnormal, hn::CopySign(hn::Zero(d), x), x);
}

// Returns a + b, rounded to odd: of the two numbers around an inexact sum, the one whose last bit is 1. Rounding to
// nearest gives one of them, and its error says on which side the other one is. a and b are not subnormal.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V AddToOdd(D d, V a, V b) {
  const hn::RebindToUnsigned<D> words;
  const hn::RebindToSigned<D> integers;
  const auto b_is_larger = hn::Gt(hn::Abs(b), hn::Abs(a));
  const V large = hn::IfThenElse(b_is_larger, b, a), small = hn::IfThenElse(b_is_larger, a, b);
  // Small sums are scaled, so that their errors are not subnormal.
  const auto scaled = hn::Lt(hn::Abs(large), hn::Set(d, 0x1p-60f));
  const V one = hn::Set(d, 1.0f), up = hn::IfThenElse(scaled, hn::Set(d, 0x1p64f), one);
  const V x = hn::Mul(large, up), y = hn::Mul(small, up);
  V sum = hn::Add(x, y);
  const V error = hn::Sub(y, hn::Sub(sum, x));
  // Sums below 2^128 that rounding to nearest makes infinite are rounded to the largest number, which is odd.
  const V half = hn::Set(d, 0.5f), rest = hn::Sub(hn::Set(d, 0x1p127f), hn::Mul(hn::Abs(large), half));
  const auto largest = hn::And(hn::IsInf(sum), hn::Lt(hn::Mul(hn::Abs(small), half), rest));
  sum = hn::IfThenElse(largest, hn::CopySign(hn::Set(d, 0x1.FFFFFEp127f), large), sum);
  const auto bits = hn::BitCast(integers, sum), last = hn::Set(integers, 1);
  const auto even = hn::Eq(hn::And(bits, last), hn::Zero(integers));
  const auto inexact = hn::RebindMask(integers, hn::And(hn::Gt(hn::Abs(error), hn::Zero(d)), hn::IsFinite(sum)));
  // The other number is one step away from zero if sum and error have one sign, and one step towards it otherwise.
  const auto step = hn::Or(hn::BroadcastSignBit(hn::Xor(bits, hn::BitCast(integers, error))), last);
  sum = hn::BitCast(d, hn::MaskedAddOr(bits, hn::And(even, inexact), bits, step));
  const V result = FlushSubnormal(d, hn::Mul(sum, hn::IfThenElse(scaled, hn::Set(d, 0x1p-64f), one)));
  return hn::IfThenElse(hn::IsNaN(result), hn::BitCast(d, hn::Set(words, 0x7FC00000u)), result);
}

// Returns acc + lower a * lower b + upper a * upper b, for the bf16 pairs in words a and b, as BFDOT adds them.
// Products are function calls, so that kernels compile quickly; gcc 12 crashes if their arguments are values.
template <class D, class V = hn::Vec<D>, class Words>
HWY_NOINLINE V DotPairs(D d, const Words& a, const Words& b, const V& acc) {
  const hn::RebindToUnsigned<D> words;
  const auto lower = [&](const Words& x) HWY_ATTR { return FlushSubnormal(d, hn::BitCast(d, hn::ShiftLeft<16>(x))); };
  const auto upper = [&](const Words& x) HWY_ATTR {
    return FlushSubnormal(d, hn::BitCast(d, hn::And(x, hn::Set(words, 0xFFFF0000u))));
  };
  const V first = FlushSubnormal(d, hn::Mul(lower(a), lower(b)));
  const V second = FlushSubnormal(d, hn::Mul(upper(a), upper(b)));
  return AddToOdd(d, FlushSubnormal(d, acc), AddToOdd(d, first, second));
}

// Returns acc with the products of two rows a and two lanes b, each of four bf16, added as BFMMLA adds them.
template <class D, class V = hn::Vec<D>, class Words>
HWY_NOINLINE V AddQuads(D d, const Words& a, const Words& b, const V& acc) {
  const hn::RebindToUnsigned<D> words;
  const V half = DotPairs(d, hn::DupEven(a), hn::ConcatEven(words, b, b), acc);
  return DotPairs(d, hn::DupOdd(a), hn::ConcatOdd(words, b, b), half);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_EMULATED_BFMMLA_INL_H_
