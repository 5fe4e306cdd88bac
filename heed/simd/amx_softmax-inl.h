// Operations of a softmax between AMX products.
//
// Compiled once per SIMD target.
//
// While AMX multiplies, the CPU runs one multiply-add of 512 bits per cycle instead of two. Beside it, additions,
// integer operations and permutations run at full rate, up to 1.5 operations per cycle in all.
#if defined(HEED_SIMD_AMX_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_SIMD_AMX_SOFTMAX_INL_H_
#undef HEED_SIMD_AMX_SOFTMAX_INL_H_
#else
#define HEED_SIMD_AMX_SOFTMAX_INL_H_
#endif

#include <cstdint>

#include "heed/simd/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Powers of two by 1/32, times the leading coefficient of a quadratic. The first is the number whose product with the
// quadratic at 0 rounds to 1: the output of a row that sees one key is its value.
struct PowersOfTwo {
  HWY_ALIGN float at[32];
};
inline constexpr PowersOfTwo kPowersOfTwo = {{
    0.242840633f, 0.248158142f, 0.253592104f, 0.259145051f, 0.264819562f, 0.270618379f, 0.276544154f, 0.282599658f,
    0.288787782f, 0.295111418f, 0.301573515f, 0.308177114f, 0.314925313f, 0.321821302f, 0.328868270f, 0.336069524f,
    0.343428493f, 0.350948602f, 0.358633369f, 0.366486430f, 0.374511451f, 0.382712156f, 0.391092479f, 0.399656296f,
    0.408407629f, 0.417350590f, 0.426489353f, 0.435828269f, 0.445371658f, 0.455124021f, 0.465089947f, 0.475274086f,
}};

// 2^x of a probability in AMX tiles, within 3e-7 and exactly 1 at 0, and rounding to bf16.
//
// 2^(i/32) comes from a table, which is a permutation of two registers, and 2^r with 0 <= r < 1/32 is a quadratic,
// ((r + B)^2 + A) times a factor of the table, within 5.3e-8: five multiplications instead of the eight of a polynomial
// of degree 5. Everything is rounded down, because scalef takes the floor of its exponent by itself.
template <class D>
class Probabilities {
  using V = hn::Vec<D>;
  using Words = hn::Vec<hn::RebindToUnsigned<D>>;
  static constexpr D d_{};
  static_assert(sizeof(hn::TFromD<D>) == 4);

 public:
#if HEED_HAVE_SCALEF
  HWY_INLINE Probabilities() {
    Keep(a_);
    Keep(b_);
    Keep(counts_32nds_);
    Keep(lower_);
    Keep(upper_);
    Keep(half_);
    Keep(high_bytes_);
    asm("" : "+k"(low_halves_));
  }

  HWY_INLINE V Exp2(V x) const {
    constexpr int kDownBy32nds = 0x59;  // imm8 of vreduceps: what is left of the floor to five bits, no exceptions
    constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    const V r = V{_mm512_reduce_ps(x.raw, kDownBy32nds)};
    const __m512i index = _mm512_castps_si512(_mm512_add_round_ps(x.raw, counts_32nds_.raw, kDown));
    const V power = V{_mm512_permutex2var_ps(lower_.raw, index, upper_.raw)};
    const V u = hn::Add(r, b_);
    return ScaleByPowerOfTwo(d_, hn::Mul(power, hn::MulAdd(u, u, a_)), x);
  }

  // Rounds pairs (first, second) to words of two bf16, ties up: three integer operations, of which the permutation
  // alone is bound to a port. The instruction for it takes as long as four. A NaN whose bits are all ones becomes -0.
  HWY_INLINE Words ToPairs(V first, V second) const {
    const hn::RebindToUnsigned<D> words;
    const auto low = hn::Add(hn::BitCast(words, first), half_), high = hn::Add(hn::BitCast(words, second), half_);
    return Words{_mm512_mask_shuffle_epi8(high.raw, low_halves_, low.raw, high_bytes_.raw)};
  }

 private:
  // Keeps a constant in a register. The compiler would load it again after each product.
  template <class Vec>
  static HWY_INLINE void Keep(Vec& constant) {
    asm("" : "+v"(constant.raw));
  }

  V a_ = hn::Set(d_, kA), b_ = hn::Set(d_, kB);
  V counts_32nds_ = hn::Set(d_, 393216.0f);  // 1.5 2^18: the last bit of a sum with it counts 32nds
  V lower_ = hn::Load(d_, kPowersOfTwo.at), upper_ = hn::Load(d_, kPowersOfTwo.at + 16);
  Words half_ = hn::Set(hn::RebindToUnsigned<D>(), uint32_t{0x8000});
  Words high_bytes_ = hn::Dup128VecFromValues(hn::RebindToUnsigned<D>(), 0x0302, 0x0706, 0x0B0A, 0x0F0E);
  __mmask64 low_halves_ = 0x3333333333333333u;
#else
  HWY_INLINE V Exp2(V x) const {
    x = ClampExponent(d_, x);
    const hn::RebindToSigned<D> di;
    const V steps = hn::Floor(hn::Mul(x, hn::Set(d_, 32.0f)));
    const V u = hn::Add(DifferenceDown(x, hn::Mul(steps, hn::Set(d_, 1.0f / 32))), hn::Set(d_, kB));
    const V power = hn::GatherIndex(d_, kPowersOfTwo.at, hn::And(hn::ConvertTo(di, steps), hn::Set(di, 31)));
    return ScaleByPowerOfTwo(d_, hn::Mul(power, hn::MulAdd(u, u, hn::Set(d_, kA))), hn::Floor(x));
  }
  HWY_INLINE Words ToPairs(V first, V second) const {
    const hn::RebindToUnsigned<D> words;
    const auto half = hn::Set(words, uint32_t{0x8000});
    const auto low = hn::Add(hn::BitCast(words, first), half), high = hn::Add(hn::BitCast(words, second), half);
    return hn::Or(hn::ShiftRight<16>(low), hn::And(high, hn::Set(words, 0xFFFF0000u)));
  }

 private:
  // a - b >= 0, rounded down as vreduceps rounds. The error of the nearest is exact by Knuth's TwoSum.
  static HWY_INLINE V DifferenceDown(V a, V b) {
    const hn::RebindToUnsigned<D> words;
    const V nearest = hn::Sub(a, b), of_b = hn::Sub(nearest, a);
    const V error = hn::Sub(hn::Sub(a, hn::Sub(nearest, of_b)), hn::Add(b, of_b));
    const auto above = hn::Lt(error, hn::Zero(d_));
    const auto below = hn::Sub(hn::BitCast(words, nearest), hn::Set(words, uint32_t{1}));
    return hn::IfThenElse(above, hn::BitCast(d_, below), nearest);
  }
#endif
  static constexpr float kA = 2.0813079467f, kB = 1.4271017707f;
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_SIMD_AMX_SOFTMAX_INL_H_
