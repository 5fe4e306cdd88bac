// Dot products of four bytes with four signed ones, in one instruction on targets of HEED_BYTE_PRODUCTS. x86's takes
// one operand as unsigned: signed bytes b are passed as b + 128. ARM's takes both as signed.
//
// Compiled once per SIMD target. A file with HEED_BYTE_PRODUCTS includes this header before others that are compiled
// per target, because it adds the dot product to what their functions are compiled for.
#if defined(HEED_SIMD_DOT_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_DOT_PRODUCTS_INL_H_
#undef HEED_SIMD_DOT_PRODUCTS_INL_H_
#else
#define HEED_SIMD_DOT_PRODUCTS_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"

#undef HEED_SIGNED_DOT_PRODUCTS
#if defined(HEED_BYTE_PRODUCTS) && HWY_TARGET == HWY_NEON
#define HEED_SIGNED_DOT_PRODUCTS 1
// Highway's NEON has AES beside the baseline, its NEON_BF16 much more than the dot product. Functions rather than files
// are compiled for it: the linker may take an inline function of this file for others, which run on every CPU.
#undef HWY_TARGET_STR
#define HWY_TARGET_STR "arch=armv8.2-a+crypto+dotprod"
#else
#define HEED_SIGNED_DOT_PRODUCTS 0
#endif

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Returns the initial value of a sum of AddDots(), where `start` is -128 times the sum of the signed bytes.
template <class DI>
HWY_INLINE hn::Vec<DI> StartOfDots(DI di, int32_t start) {
  return HEED_SIGNED_DOT_PRODUCTS ? hn::Zero(di) : hn::Set(di, start);
}

// Adds the dot products of signed bytes, given as `offset_bytes`, which are 128 larger, with b. Where the instruction
// takes them as unsigned, StartOfDots() subtracts what that adds.
template <class DI, class VI = hn::Vec<DI>>
HWY_INLINE VI AddDots(DI di, hn::Vec<hn::Repartition<uint8_t, DI>> offset_bytes, hn::Vec<hn::Repartition<int8_t, DI>> b,
                      VI sum) {
#if HEED_SIGNED_DOT_PRODUCTS
  const hn::Repartition<uint8_t, DI> unsigned_bytes;
  const auto a =
      hn::BitCast(hn::Repartition<int8_t, DI>(), hn::Xor(offset_bytes, hn::Set(unsigned_bytes, uint8_t{128})));
  return VI(vdotq_s32(sum.raw, a.raw, b.raw));
#else
  return hn::SumOfMulQuadAccumulate(di, offset_bytes, b, sum);
#endif
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_DOT_PRODUCTS_INL_H_
