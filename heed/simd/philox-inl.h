// Philox4x32-10 on vectors: lanes differ in the second counter word.
//
// Compiled once per SIMD target. The scalar version and the source are in core/philox.h.
#if defined(HEED_SIMD_PHILOX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_PHILOX_INL_H_
#undef HEED_SIMD_PHILOX_INL_H_
#else
#define HEED_SIMD_PHILOX_INL_H_
#endif

#include <cstdint>

#include "heed/core/philox.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Low and high words of m * x.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void MulWide(D d, uint32_t m, V x, V* low, V* high) {
  const V factor = hn::Set(d, m);
  const hn::Repartition<uint64_t, D> wide;
  const auto even = hn::BitCast(d, hn::MulEven(x, factor));
  const auto odd = hn::BitCast(d, hn::MulEven(hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(wide, x))), factor));
  *low = hn::OddEven(hn::BitCast(d, hn::ShiftLeft<32>(hn::BitCast(wide, odd))), even);
  *high = hn::OddEven(odd, hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(wide, even))));
}

// Computes four words per lane, from counter (c0, c1, c2, c3) with key (k0, k1).
template <class D, class V = hn::Vec<D>>
HWY_INLINE void Philox(D d, uint32_t c0, V c1, V c2, uint32_t c3, uint32_t k0, uint32_t k1, V* HWY_RESTRICT words) {
  V a = hn::Set(d, c0), b = c1, c = c2, e = hn::Set(d, c3);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    V low0, high0, low1, high1;
    MulWide(d, kPhiloxM0, a, &low0, &high0);
    MulWide(d, kPhiloxM1, c, &low1, &high1);
    a = hn::Xor(hn::Xor(high1, b), hn::Set(d, k0));
    b = low1;
    c = hn::Xor(hn::Xor(high0, e), hn::Set(d, k1));
    e = low0;
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  words[0] = a;
  words[1] = b;
  words[2] = c;
  words[3] = e;
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_PHILOX_INL_H_
