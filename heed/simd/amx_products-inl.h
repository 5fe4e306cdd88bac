// Matrix products in AMX tiles of bf16, whose operands may be bf16 splits.
//
// Compiled once per SIMD target.
//
// An f32 is split into three bf16, with f32's exponents and 8 bits each. A product of splits is the sum of the products
// of their terms, without the smallest ones (h, m, l: the high, middle and low term):
//
//   products                                      left out, relative to |a b|
//   1  h h                                        nothing, for bf16
//   3  h m + h h + m h                            at most 2^-16, for f32
//   4  h m + h h + m h + m m                      nothing, for f16
//   5  h h + h m + m m + m h + h l                at most 2^-24, for f16 a and f32 b
//   6  h h + h m + m m + m h + l h + h l          at most 2^-24, for f32
//   13, 31  l + m + h of the one operand          nothing, for bf16 and f32
//
// The order changes one operand from product to product where possible: 24 products load 16 tiles. The bound is the AMX
// unit with 16 cycles per product, as long as both operands are in L1; from L2 a third of the rate is lost.
#if defined(HEED_SIMD_AMX_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_AMX_PRODUCTS_INL_H_
#undef HEED_SIMD_AMX_PRODUCTS_INL_H_
#else
#define HEED_SIMD_AMX_PRODUCTS_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "heed/core/dtype.h"
#include "heed/simd/convert-inl.h"
#include "heed/simd/amx.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The terms of a and b in a product.
struct TermPair {
  int a, b;
};
template <int kProducts>
struct TermPairs;
template <>
struct TermPairs<1> {
  static constexpr int kA = 1, kB = 1;
  static constexpr TermPair kAll[] = {{0, 0}};
};
template <>
struct TermPairs<3> {
  static constexpr int kA = 2, kB = 2;
  static constexpr TermPair kAll[] = {{0, 1}, {0, 0}, {1, 0}};
};
template <>
struct TermPairs<4> {
  static constexpr int kA = 2, kB = 2;
  static constexpr TermPair kAll[] = {{0, 1}, {0, 0}, {1, 0}, {1, 1}};
};
template <>
struct TermPairs<5> {
  static constexpr int kA = 2, kB = 3;
  static constexpr TermPair kAll[] = {{0, 0}, {0, 1}, {1, 1}, {1, 0}, {0, 2}};
};
template <>
struct TermPairs<6> {
  static constexpr int kA = 3, kB = 3;
  static constexpr TermPair kAll[] = {{0, 0}, {0, 1}, {1, 1}, {1, 0}, {2, 0}, {0, 2}};
};

// One operand is bf16, the other has three terms, smallest first.
template <>
struct TermPairs<13> {
  static constexpr int kA = 1, kB = 3;
  static constexpr TermPair kAll[] = {{0, 2}, {0, 1}, {0, 0}};
};
template <>
struct TermPairs<31> {
  static constexpr int kA = 3, kB = 1;
  static constexpr TermPair kAll[] = {{2, 0}, {1, 0}, {0, 0}};
};

// Splits pairs (low, high) of f32 into three bf16 terms each, as words. Terms are truncated instead of rounded: their
// sum is exact, and truncation takes half the time. An infinity or NaN is in the first term alone.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void TruncateToPairs(D d, V low, V high, hn::Vec<hn::RebindToUnsigned<D>>* HWY_RESTRICT split) {
  const hn::RebindToUnsigned<D> words;
  const auto upper = hn::Set(words, 0xFFFF0000u);
  const auto rest = [&](V x) HWY_ATTR {
    const V left = hn::Sub(x, hn::BitCast(d, hn::And(hn::BitCast(words, x), upper)));
    return hn::IfThenZeroElse(hn::IsNaN(left), left);
  };
  for (int i = 0; i < 3; ++i) {
    split[i] = hn::Or(hn::ShiftRight<16>(hn::BitCast(words, low)), hn::And(hn::BitCast(words, high), upper));
    if (i == 2) break;
    low = rest(low);
    high = rest(high);
  }
}

// Rounds x to bf16. The instruction flushes subnormal numbers to 0, as the products do.
template <class D, class V = hn::Vec<D>>
HWY_INLINE auto RoundTerm(D d, V x) {
#if HWY_TARGET == HWY_AVX3_SPR
  const hn::Rebind<hwy::bfloat16_t, D> half;
  return hn::BitCast(hn::Rebind<uint16_t, D>(), hn::DemoteTo(half, x));
#else
  return Round(d, BF16(), x);
#endif
}

// Splits x into bf16 terms, each the nearest to the rest. An infinity or NaN is in the first term alone; a finite
// number that would round to infinity is truncated.
template <int kTerms, class D, class V = hn::Vec<D>>
HWY_INLINE void SplitBf16(D d, V x, hn::Vec<hn::Rebind<uint16_t, D>>* HWY_RESTRICT split) {
  const hn::RebindToUnsigned<D> words;
  if constexpr (kTerms == 1) {
    split[0] = RoundTerm(d, x);
  } else {
    const V largest = hn::BitCast(d, hn::Set(words, 0x7F7F0000u));
    V rest;
    const auto ordinary = hn::Le(hn::Abs(x), largest);
    if (HWY_UNLIKELY(!hn::AllTrue(d, ordinary))) {
      const auto finite = hn::IsFinite(x);
      const auto clipped = hn::AndNot(ordinary, finite);
      split[0] = RoundTerm(d, hn::IfThenElse(clipped, hn::CopySign(largest, x), x));
      rest = hn::IfThenElseZero(finite, hn::Sub(x, Widen(d, BF16(), split[0])));
    } else {
      split[0] = RoundTerm(d, x);
      rest = hn::Sub(x, Widen(d, BF16(), split[0]));
    }
    for (int i = 1; i < kTerms; ++i) {
      split[i] = RoundTerm(d, rest);
      if (i + 1 < kTerms) rest = hn::Sub(rest, Widen(d, BF16(), split[i]));
    }
  }
}

// Code between products is inlined, many times over, where AMX multiplies in the meantime. With emulation, for tests,
// it is called, so that kernels compile quickly.
#undef HEED_BETWEEN_PRODUCTS
#if HWY_TARGET == HWY_AVX3_SPR
#define HEED_BETWEEN_PRODUCTS HWY_INLINE
#else
#define HEED_BETWEEN_PRODUCTS HWY_NOINLINE
#endif

// An operand of tiles: the address of tile (row, step, term), and the distance of its rows.
struct TileFactor {
  const char* data;
  ptrdiff_t row, step, term;  // in bytes
  ptrdiff_t stride;           // between rows of a tile
  const char* At(ptrdiff_t r, ptrdiff_t s, int p) const { return data + r * row + s * step + p * term; }
};

// A block of 2 x 2 sums in tile registers: 0 to 3 are sums, 4 and 5 tiles of a, 6 and 7 tiles of b. Tiles of a are
// streamed and those of b stay in L1, which is a fifth to a quarter faster if a is in L2.
template <class Tiles, int kProducts>
struct TileBlock {
  static constexpr int Sum(int i, int j) { return 2 * i + j; }

  // Calls f.template operator()<i, j>() for each sum.
  template <class F>
  static HWY_INLINE void ForSums(const F& f) {
    f.template operator()<0, 0>();
    f.template operator()<0, 1>();
    f.template operator()<1, 0>();
    f.template operator()<1, 1>();
  }

  // The products of one step. Calls before<i, j>() before the first product of each sum, and between<i, j>() after each
  // product: AMX takes 16 cycles per product, in which vector code can run.
  template <int k = 0, class Before, class Between>
  static HWY_INLINE void Step(const TileFactor& a, ptrdiff_t i, const TileFactor& b, ptrdiff_t j, ptrdiff_t step,
                              const Before& before, Between& between) {
    constexpr auto& kPairs = TermPairs<kProducts>::kAll;
    constexpr TermPair now = kPairs[k], last = kPairs[k == 0 ? 0 : k - 1];
    constexpr bool new_a = k == 0 || now.a != last.a, new_b = k == 0 || now.b != last.b;
    ForSums([&]<int m, int n>() HWY_ATTR HEED_INLINE_LAMBDA {
      if constexpr (new_a && n == 0) {
        Tiles::template LoadOnce<4 + m>(a.At(i + m, step, now.a), a.stride);
      }
      if constexpr (new_b && m == 0) Tiles::template Load<6 + n>(b.At(j + n, step, now.b), b.stride);
      if constexpr (k == 0) before.template operator()<m, n>();
      Tiles::template AddProducts<Sum(m, n), 4 + m, 6 + n>();
      between.template Do<m, n>();
    });
    if constexpr (k + 1 < static_cast<int>(std::size(kPairs))) {
      Step<k + 1>(a, i, b, j, step, Nothing(), between);
    }
  }

  struct Nothing {
    template <int m, int n>
    HWY_INLINE void operator()() const {}
    template <int m, int n>
    HWY_INLINE void Do() const {}
  };

  // Stores the sums to `out`.
  static HWY_INLINE void StoreAll(float* out, ptrdiff_t out_row) {
    ForSums([&]<int m, int n>() HWY_ATTR HEED_INLINE_LAMBDA { StoreSum<m, n>(out, out_row); });
  }

  // Sums over the steps of tiles from (i, j) on, left in registers. With kAdd it adds to `out`. If `before` is not
  // null, the previous sums are stored there, each just before its register is needed again: four stores in a row would
  // stall.
  template <bool kAdd>
  static HWY_INLINE void Sums(const TileFactor& a, ptrdiff_t i, const TileFactor& b, ptrdiff_t j, ptrdiff_t steps,
                              float* before, const float* out, ptrdiff_t out_row) {
    Nothing nothing;
    Step(
        a, i, b, j, 0,
        [&]<int m, int n>() HWY_ATTR HEED_INLINE_LAMBDA {
          if (before != nullptr) StoreSum<m, n>(before, out_row);
          if constexpr (kAdd) {
            Tiles::template Load<Sum(m, n)>(out + At(m, n, out_row), out_row * kFloat);
          } else {
            Tiles::template Zero<Sum(m, n)>();
          }
        },
        nothing);
    for (ptrdiff_t step = 1; step < steps; ++step) Step(a, i, b, j, step, nothing, nothing);
  }

  template <int m, int n>
  static HWY_INLINE void StoreSum(float* out, ptrdiff_t out_row) {
    Tiles::template Store<Sum(m, n)>(out + At(m, n, out_row), out_row * kFloat);
  }

 private:
  static constexpr ptrdiff_t kFloat = sizeof(float);

  static constexpr ptrdiff_t At(ptrdiff_t i, ptrdiff_t j, ptrdiff_t out_row) {
    return i * kTileRows * out_row + j * kTileWords;
  }
};

// out = a b, or out += a b with kAdd, of `rows` by `columns` tiles, both even.
template <class Tiles, int kProducts, bool kAdd>
HWY_INLINE void MultiplyTiles(const TileFactor& a, ptrdiff_t rows, const TileFactor& b, ptrdiff_t columns,
                              ptrdiff_t steps, float* out, ptrdiff_t out_row) {
  using Block = TileBlock<Tiles, kProducts>;
  if (rows == 0 || columns == 0) return;
  float* before = nullptr;
  for (ptrdiff_t j = 0; j < columns; j += 2) {
    for (ptrdiff_t i = 0; i < rows; i += 2) {
      float* at = out + i * kTileRows * out_row + j * kTileWords;
      Block::template Sums<kAdd>(a, i, b, j, steps, before, at, out_row);
      before = at;
    }
  }
  Block::StoreAll(before, out_row);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_AMX_PRODUCTS_INL_H_
