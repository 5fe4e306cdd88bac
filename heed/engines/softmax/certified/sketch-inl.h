// The kernel of sketch.h: N keys per vector, bytes read in memory order, integer products only.
//
// Compiled once per SIMD target. A block is contiguous, 72 bytes per key of 64 channels. The bound is memory on CPUs
// with integer dot products of bytes. The lines of the next block are prefetched between the products of this one.
#if defined(HEED_ENGINES_SOFTMAX_CERTIFIED_SKETCH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_CERTIFIED_SKETCH_INL_H_
#undef HEED_ENGINES_SOFTMAX_CERTIFIED_SKETCH_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_CERTIFIED_SKETCH_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "heed/engines/softmax/certified/sketch.h"
#include "heed/simd/dot_products-inl.h"
#include "heed/simd/math-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/

// Applies the soft cap to a bound of a logit so that the result bounds the capped logit. `outward` is 1 for upper
// bounds and -1 for lower ones. A bound that is not finite carries no information and stays so.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Capped(D d, V x, float softcap, float outward) {
  const V cap = hn::Set(d, softcap);
  // Up to cap 2^-14 the cap changes x by less than a factor 2^-28, and the quotient may be subnormal.
  const V capped = hn::Mul(cap, hs::Tanh(d, hn::Div(x, cap)));
  const V y = hn::IfThenElse(hn::Lt(hn::Abs(x), hn::Set(d, softcap * 0x1p-14f)), x, capped);
  return hn::IfThenElse(hn::IsFinite(x), hn::MulAdd(hn::Set(d, outward * 0x1p-18f), hn::Abs(y), y), x);
}

// Adds a term to a bound and widens it by the f32 rounding of both.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V WithTerm(D d, V x, V term, float outward) {
  return hn::MulAdd(hn::Set(d, outward * 0x1p-20f), hn::Add(hn::Abs(x), hn::Abs(term)), hn::Add(x, term));
}

class SketchBlock {
  using D = hn::CappedTag<float, kSketchKeys>;
  using DI = hn::RebindToSigned<D>;
  using V = hn::Vec<D>;
  using VI = hn::Vec<DI>;
  static constexpr size_t N = hn::MaxLanes(D());
  static constexpr size_t kVectors = kSketchKeys / N;
  static constexpr float kRounding = 0x1p-20f;

 public:
  SketchBlock(const SketchQueries& rows, const SketchParts& parts) : rows_(rows), parts_(parts) {}

  // Computes block `index`, which is number `at` of this call.
  template <int R>
  HWY_INLINE void Score(const std::byte* block, const std::byte* next, int64_t at, int64_t index,
                        const SketchMasses* masses) const {
    constexpr size_t U = R == 1 ? 4 : R == 2 ? 2 : 1;  // vectors of keys at once: eight chains of sums
    static_assert(kVectors % U == 0);
    HWY_ALIGN float high[R][kSketchKeys], low[R][kSketchKeys];
    const D d;
    V most[R];
    for (int r = 0; r < R; ++r) most[r] = hn::Set(d, -std::numeric_limits<float>::infinity());
    for (size_t v = 0; v < kVectors; v += U) Logits<R, U>(block, next, at, v, most, high, low);
    for (int r = 0; r < R; ++r) Sum(hn::ReduceMax(d, most[r]), high[r], low[r], index, masses[r]);
  }

 private:
  template <int R, size_t U>
  HWY_INLINE void Logits(const std::byte* block, const std::byte* next, int64_t block_at, size_t v, V* most,
                         float (*HWY_RESTRICT high)[kSketchKeys], float (*HWY_RESTRICT low)[kSketchKeys]) const {
    const D d;
    const DI di;
    const hn::Repartition<uint8_t, D> bytes;
    const hn::Repartition<int8_t, D> signed_bytes;
    VI sum[R][U][2];
    HWY_UNROLL(4)
    for (int r = 0; r < R; ++r) {
      HWY_UNROLL(4)
      for (size_t u = 0; u < U; ++u) {
        sum[r][u][0] = hs::StartOfDots(di, rows_.starts[r][0]);
        sum[r][u][1] = hs::StartOfDots(di, rows_.starts[r][1]);
      }
    }
    const auto* HWY_RESTRICT at = reinterpret_cast<const uint8_t*>(block) + v * N * 4;
    const auto* HWY_RESTRICT ahead = reinterpret_cast<const char*>(next) + v * N * 4;
    const int32_t* HWY_RESTRICT word = rows_.words;
    for (int64_t quad = 0; quad < rows_.quads; ++quad) {
      HWY_UNROLL(4)
      for (size_t u = 0; u < U; ++u) {
        const auto key = hn::LoadU(bytes, at + u * N * 4);
        HWY_UNROLL(4)
        for (int r = 0; r < R; ++r) {
          HWY_UNROLL(2)
          for (int k = 0; k < 2; ++k) {
            const auto four = hn::BitCast(signed_bytes, hn::Set(di, word[2 * r + k]));
            sum[r][u][k] = hs::AddDots(di, key, four, sum[r][u][k]);
          }
        }
      }
      for (size_t line = 0; line < U * N * 4; line += 64) hwy::Prefetch(ahead + line);
      at += kSketchKeys * 4;
      ahead += kSketchKeys * 4;
      word += 2 * R;
    }
    HWY_UNROLL(4)
    for (size_t u = 0; u < U; ++u) {
      const size_t first = (v + u) * N;
      const V step = hn::LoadU(d, PartOf(block, parts_.step) + first);
      const V error = hn::LoadU(d, PartOf(block, parts_.error) + first);
      hwy::Prefetch(PartOf(next, parts_.step) + first);
      hwy::Prefetch(PartOf(next, parts_.error) + first);
      HWY_UNROLL(4)
      for (int r = 0; r < R; ++r) {
        const V product =
            hn::MulAdd(hn::ConvertTo(d, sum[r][u][0]), hn::Set(d, 256.0f), hn::ConvertTo(d, sum[r][u][1]));
        const V s = hn::Mul(product, hn::Mul(hn::Set(d, rows_.factor[r]), step));
        V delta = hn::Min(hn::Mul(hn::Set(d, rows_.by_step[r]), step), hn::Mul(hn::Set(d, rows_.by_error[r]), error));
        delta = hn::MulAdd(hn::Set(d, rows_.by_query[r]), step, delta);
        delta = hn::MulAdd(hn::Abs(s), hn::Set(d, kRounding), delta);
        V upper = hn::Add(s, delta), lower = hn::Sub(s, delta);
        if (HWY_UNLIKELY(rows_.softcap != 0)) {
          upper = Capped(d, upper, rows_.softcap, 1);
          lower = Capped(d, lower, rows_.softcap, -1);
        }
        if (HWY_UNLIKELY(rows_.terms[r] != nullptr)) {
          const V term = hn::LoadU(d, rows_.terms[r] + block_at * kSketchKeys + static_cast<int64_t>(first));
          upper = WithTerm(d, upper, term, 1);
          // A visible key never gets the bound -infinity of a hidden one, however small its probability.
          const auto vanishes = hn::Eq(upper, hn::Set(d, -std::numeric_limits<float>::infinity()));
          upper = hn::IfThenElse(vanishes, hn::Set(d, std::numeric_limits<float>::lowest()), upper);
          lower = WithTerm(d, lower, term, -1);
        }
        // Hidden keys have probability 0.
        const hn::RebindToUnsigned<D> du;
        const auto seen = hn::Set(du, static_cast<uint32_t>(rows_.seen[r][block_at] >> first));
        const auto sees = hn::RebindMask(d, hn::TestBit(seen, hn::Shl(hn::Set(du, 1u), hn::Iota(du, 0))));
        const V none = hn::Set(d, -std::numeric_limits<float>::infinity());
        upper = hn::IfThenElse(sees, upper, none);
        hn::Store(upper, d, high[r] + first);
        hn::Store(hn::IfThenElse(sees, lower, none), d, low[r] + first);
        most[r] = hn::Max(most[r], upper);
      }
    }
  }

  HWY_INLINE void Sum(float most, const float* HWY_RESTRICT high, const float* HWY_RESTRICT low, int64_t index,
                      const SketchMasses& masses) const {
    const D d;
    // A block without a visible key has only logits of -infinity, which a shift of 0 leaves so. If a logit is NaN, the
    // sums are NaN whatever `most` is.
    const bool none = most == -std::numeric_limits<float>::infinity();
    const V shift = hn::Set(d, none ? 0.0f : most);
    V upper = hn::Zero(d), lower = hn::Zero(d);
    for (size_t i = 0; i < kSketchKeys; i += N) {
      upper = hn::Add(upper, hs::Exp(d, hn::Sub(hn::Load(d, high + i), shift)));
      lower = hn::Add(lower, hs::Exp(d, hn::Sub(hn::Load(d, low + i), shift)));
    }
    masses.upper[index] = hn::ReduceSum(d, upper);
    masses.lower[index] = hn::ReduceSum(d, lower);
    // ARM's maximum leaves NaN out: a block of NaN is not one without visible keys.
    masses.logit[index] = none && std::isnan(masses.upper[index]) ? masses.upper[index] : most;
  }

  static HWY_INLINE const float* PartOf(const std::byte* block, int64_t at) {
    return reinterpret_cast<const float*>(block + at);
  }

  const SketchQueries& rows_;
  const SketchParts& parts_;
};

template <int R>
void ScoreRows(const SketchQueries& rows, const std::byte* const* blocks, int64_t begin, int64_t end,
               const SketchParts& parts, const SketchMasses* masses) {
  const SketchBlock block(rows, parts);
  for (int64_t i = begin; i < end; ++i) {
    block.Score<R>(blocks[i - begin], blocks[std::min(i + 1, end - 1) - begin], i - begin, i, masses);
  }
}

inline void ScoreSketch(const SketchQueries& rows, const std::byte* const* blocks, int64_t begin, int64_t end,
                        const SketchParts& parts, const SketchMasses* masses) {
  switch (rows.num_rows) {
    case 1: return ScoreRows<1>(rows, blocks, begin, end, parts, masses);
    case 2: return ScoreRows<2>(rows, blocks, begin, end, parts, masses);
    case 3: return ScoreRows<3>(rows, blocks, begin, end, parts, masses);
    default: return ScoreRows<4>(rows, blocks, begin, end, parts, masses);
  }
}

inline void ScoreBoxes(const BoxQuery& row, const std::byte* const* blocks, int64_t begin, int64_t end,
                       const BoxParts& parts, const SketchMasses& masses) {
  const hn::ScalableTag<float> d;
  const size_t N = hn::Lanes(d), depth = static_cast<size_t>(row.depth);
  // The rounding errors: products, at most depth + 8 sums, the query and the mean each have a relative error of 2^-24.
  const float rounding = static_cast<float>(row.depth + 16) * 0x1p-23f;
  const auto with = [&](float x, float term, float outward)
                        HWY_ATTR { return hn::GetLane(WithTerm(d, hn::Set(d, x), hn::Set(d, term), outward)); };
  const auto capped = [&](float x, float outward)
                          HWY_ATTR { return hn::GetLane(Capped(d, hn::Set(d, x), row.softcap, outward)); };
  for (int64_t i = begin; i < end; ++i) {
    const auto at = [&](int64_t part) { return reinterpret_cast<const float*>(blocks[i - begin] + part); };
    const float *const min = at(parts.min), *const max = at(parts.max), *const mean = at(parts.mean);
    auto high = hn::Zero(d), middle = hn::Zero(d), size = hn::Zero(d), least = hn::Zero(d);
    for (size_t e = 0; e < depth; e += N) {
      const size_t n = std::min(N, depth - e);
      const auto q = hn::LoadN(d, row.scaled + e, n), low = hn::LoadN(d, min + e, n), up = hn::LoadN(d, max + e, n);
      high = hn::Add(high, hn::Max(hn::Mul(q, low), hn::Mul(q, up)));
      middle = hn::MulAdd(q, hn::LoadN(d, mean + e, n), middle);
      size = hn::MulAdd(hn::Abs(q), hn::Max(hn::Abs(low), hn::Abs(up)), size);
      if (HWY_UNLIKELY(row.softcap != 0)) least = hn::Add(least, hn::Min(hn::Mul(q, low), hn::Mul(q, up)));
    }
    const float widened = rounding * hn::ReduceSum(d, size);
    float most = hn::ReduceSum(d, high) + widened, of_mean = hn::ReduceSum(d, middle) - widened;
    if (HWY_UNLIKELY(row.softcap != 0)) {
      most = capped(most, 1);
      of_mean = capped(hn::ReduceSum(d, least) - widened, -1);
    }
    if (HWY_UNLIKELY(row.terms != nullptr)) {
      const float* const terms = row.terms + (i - begin) * kSketchKeys;
      float largest = terms[0], smallest = terms[0];
      bool known = true;
      for (int64_t j = 0; j < kSketchKeys; ++j) {
        known = known && terms[j] == terms[j];
        largest = std::max(largest, terms[j]);
        smallest = std::min(smallest, terms[j]);
      }
      most = known ? with(most, largest, 1) : std::numeric_limits<float>::quiet_NaN();
      of_mean = with(of_mean, smallest, -1);
    }
    constexpr auto kKeys = static_cast<float>(kSketchKeys);
    masses.logit[i] = most;
    masses.upper[i] = most - most == 0 ? kKeys : std::numeric_limits<float>::infinity();
    masses.lower[i] = kKeys * hn::GetLane(hs::Exp(d, hn::Set(d, of_mean - most)));
  }
}

inline float LevelSketch(const SketchMasses& masses, int64_t n) {
  using D = hn::ScalableTag<float>;
  const D d;
  const size_t N = hn::Lanes(d), count = static_cast<size_t>(n);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  float most = -kInfinity;
  for (size_t i = 0; i < count; ++i) {
    if (masses.logit[i] > most && masses.logit[i] < kInfinity) most = masses.logit[i];
  }
  const auto shift = hn::Set(d, most == -kInfinity ? 0.0f : most);
  for (size_t i = 0; i < count; i += N) {
    const size_t left = std::min(N, count - i);
    const auto factor = hs::Exp(d, hn::Sub(hn::LoadN(d, masses.logit + i, left), shift));
    auto upper = hn::Mul(hn::LoadN(d, masses.upper + i, left), factor);
    auto lower = hn::Mul(hn::LoadN(d, masses.lower + i, left), factor);
    const auto known = hn::And(hn::IsFinite(upper), hn::IsFinite(lower));
    upper = hn::IfThenElse(known, upper, hn::Set(d, kInfinity));
    lower = hn::IfThenElseZero(known, lower);
    hn::StoreN(upper, d, masses.upper + i, left);
    hn::StoreN(lower, d, masses.lower + i, left);
  }
  return most;
}

inline SketchPasses Sketch() { return {.box = &ScoreBoxes, .score = &ScoreSketch, .level = &LevelSketch}; }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_CERTIFIED_SKETCH_INL_H_
