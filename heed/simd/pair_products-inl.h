// Products of bf16 pairs in one instruction, on targets of HEED_BF16_PAIRS: VDPBF16PS of x86, BFDOT and BFMMLA of ARM.
//
// Compiled once per SIMD target. A file with HEED_BF16_PAIRS includes this header before others that are compiled per
// target, because on ARM it adds the products to what their functions are compiled for.
//
// A 32-bit word holds two bf16. A dot product multiplies them by two others and adds both products to an f32: 4 flops
// per lane. Subnormal inputs and results count as 0, whatever the floating-point environment says. x86's rounds to
// nearest after each addition; ARM's rounds to odd after the sum of the products and after adding it to the f32.
//
// BFMMLA multiplies two rows of four bf16 by two lanes of four: 8 flops per lane. Each of its four sums is that of two
// dot products, one after the other, so that both instructions have the same bits. Tests emulate ARM's products on x86
// in files with HEED_EMULATE_BFMMLA (emulated_bfmmla-inl.h).
#if defined(HEED_SIMD_PAIR_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_PAIR_PRODUCTS_INL_H_
#undef HEED_SIMD_PAIR_PRODUCTS_INL_H_
#else
#define HEED_SIMD_PAIR_PRODUCTS_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"

#undef HEED_QUAD_PRODUCTS
#if defined(HEED_BF16_PAIRS) && HWY_TARGET == HWY_NEON
#define HEED_QUAD_PRODUCTS 1
// Highway's NEON_BF16 needs newer compilers than these instructions do. Functions rather than files are compiled for
// them: the linker may take an inline function of this file for others, which run on every CPU.
#undef HWY_TARGET_STR
#define HWY_TARGET_STR "arch=armv8.2-a+crypto+dotprod+bf16"
#elif defined(HEED_BF16_PAIRS) && defined(HEED_EMULATE_BFMMLA)
#define HEED_QUAD_PRODUCTS 1
#include "heed/simd/emulated_bfmmla-inl.h"
#else
#define HEED_QUAD_PRODUCTS 0
#endif

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HEED_QUAD_PRODUCTS && HWY_TARGET == HWY_NEON

template <class D, class V = hn::Vec<D>, class Words>
HWY_INLINE V DotPairs(D /*d*/, Words a, Words b, V acc) {
  return V(vbfdotq_f32(acc.raw, vreinterpretq_bf16_u32(a.raw), vreinterpretq_bf16_u32(b.raw)));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE auto ToPairs(D /*d*/, V first, V second) {
  const auto low = vreinterpretq_u16_bf16(vcvtq_low_bf16_f32(first.raw));
  const auto high = vreinterpretq_u16_bf16(vcvtq_low_bf16_f32(second.raw));
  return hn::Vec<hn::RebindToUnsigned<D>>(vreinterpretq_u32_u16(vzip1q_u16(low, high)));
}

// Returns the quad of two rows of four numbers, rounded to bf16.
template <class D, class V = hn::Vec<D>>
HWY_INLINE auto ToQuad(D /*d*/, V first, V second) {
  const auto both = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(first.raw), second.raw);
  return hn::Vec<hn::RebindToUnsigned<D>>(vreinterpretq_u32_bf16(both));
}

// Returns acc with the products of two rows a and two lanes b, each of four bf16, added.
template <class D, class V = hn::Vec<D>, class Words>
HWY_INLINE V AddQuads(D /*d*/, Words a, Words b, V acc) {
  return V(vbfmmlaq_f32(acc.raw, vreinterpretq_bf16_u32(a.raw), vreinterpretq_bf16_u32(b.raw)));
}

#else

#if !HEED_QUAD_PRODUCTS
// Returns acc + lower a * lower b + upper a * upper b, for the bf16 pairs in words a and b.
template <class D, class V = hn::Vec<D>, class Words>
HWY_INLINE V DotPairs(D d, Words a, Words b, V acc) {
  const hn::Repartition<hwy::bfloat16_t, D> pairs;
  V unused = hn::Zero(d);
  return hn::ReorderWidenMulAccumulate(d, hn::BitCast(pairs, a), hn::BitCast(pairs, b), acc, unused);
}

#endif

// The indices 0, N, 1, N + 1, ... interleave two vectors.
template <size_t N>
struct Interleaved {
  HWY_ALIGN uint16_t at[2 * N];
  constexpr Interleaved() : at() {
    for (size_t i = 0; i < 2 * N; ++i) {
      at[i] = static_cast<uint16_t>(i / 2 + i % 2 * N);
    }
  }
};

// Returns words of the pairs (first, second), both rounded to bf16.
template <class D, class V = hn::Vec<D>>
HWY_INLINE auto ToPairs(D /*d*/, V first, V second) {
  const hn::RebindToUnsigned<D> words;
  const hn::Repartition<hwy::bfloat16_t, D> pairs;
  const hn::RebindToUnsigned<decltype(pairs)> halves;
  static constexpr Interleaved<hn::MaxLanes(D())> kInterleaved;
  const auto both = hn::BitCast(halves, hn::OrderedDemote2To(pairs, first, second));
  return hn::BitCast(words, hn::TableLookupLanes(both, hn::SetTableIndices(halves, kInterleaved.at)));
}

#if HEED_QUAD_PRODUCTS
template <class D, class V = hn::Vec<D>>
HWY_INLINE auto ToQuad(D /*d*/, V first, V second) {
  const hn::Repartition<hwy::bfloat16_t, D> pairs;
  return hn::BitCast(hn::RebindToUnsigned<D>(), hn::OrderedDemote2To(pairs, first, second));
}
#endif

#endif  // HEED_QUAD_PRODUCTS && HWY_TARGET == HWY_NEON

#if HEED_QUAD_PRODUCTS

// Two lanes, then the next two, of a vector of lanes: two words of each.
template <class D, class Words = hn::Vec<hn::RebindToUnsigned<D>>>
struct LaneQuads {
  Words lower, upper;
};

// The quads of a vector of lanes, given its first and second words.
template <class D, class Words = hn::Vec<hn::RebindToUnsigned<D>>>
HWY_INLINE LaneQuads<D> QuadsOfLanes(D /*d*/, Words first, Words second) {
  const hn::RebindToUnsigned<D> words;
  return {hn::InterleaveLower(words, first, second), hn::InterleaveUpper(words, first, second)};
}

// Sums of R rows and C vectors of lanes as BFMMLA has them: in a vector, those of two rows and two lanes.
template <int R, int C, class D>
class QuadSums {
  static_assert(R % 2 == 0 && hn::MaxLanes(D()) == 4);
  using V = hn::Vec<D>;
  using Words = hn::Vec<hn::RebindToUnsigned<D>>;

 public:
  HWY_INLINE QuadSums() {}  // a constructor that the compiler writes would not be compiled for this target

  // Sets the sums of rows r and r + 1, r even, for vector c of lanes.
  HWY_INLINE void Set(int r, int c, V first, V second) {
    sums_[r / 2][2 * c] = hn::ConcatLowerLower(D(), second, first);
    sums_[r / 2][2 * c + 1] = hn::ConcatUpperUpper(D(), second, first);
  }

  // Returns those of row r.
  HWY_INLINE V Get(int r, int c) const {
    const V lower = sums_[r / 2][2 * c], upper = sums_[r / 2][2 * c + 1];
    return r % 2 == 0 ? hn::ConcatLowerLower(D(), upper, lower) : hn::ConcatUpperUpper(D(), upper, lower);
  }

  // Adds products of two words: rows[m] is the quad of rows 2 m and 2 m + 1, lanes(c) returns those of vector c.
  template <class F>
  HWY_INLINE void Add(const Words* HWY_RESTRICT rows, const F& lanes) {
    HWY_UNROLL(32)
    for (int c = 0; c < C; ++c) {
      const LaneQuads<D> quads = lanes(c);
      HWY_UNROLL(32)
      for (int m = 0; m < R / 2; ++m) {
        sums_[m][2 * c] = AddQuads(D(), rows[m], quads.lower, sums_[m][2 * c]);
        sums_[m][2 * c + 1] = AddQuads(D(), rows[m], quads.upper, sums_[m][2 * c + 1]);
      }
    }
  }

 private:
  V sums_[R / 2][2 * C];
};

// The second word of a row that has one alone. Its products with a word of zeros are -0, which changes no sum.
inline constexpr uint32_t kNoPair = 0x80008000u;

#endif  // HEED_QUAD_PRODUCTS

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_PAIR_PRODUCTS_INL_H_
