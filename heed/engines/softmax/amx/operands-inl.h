// Operands of softmax attention in AMX tiles: queries, keys, values and probabilities as bf16 splits.
//
// Compiled once per SIMD target that has AMX or emulates it. Rows are in lanes, so that the code between products is
// the same as in other kernels:
//
//   S[key][lane] = K Q^T     a: keys,             b: pairs of channels of queries
//   O[dim][lane] += V^T P    a: values by channel, b: pairs of keys of probabilities
//
// Keys and values are copied into contiguous tiles, with zeros for missing keys and channels: keys row by row, values
// transposed. This takes 1 to 2 % of the time of 2048 queries. A bf16 has one term, an f16 two, an f32 three, or two
// with `precision = high`. Probabilities have as many terms, but three beside f16, which are as exact as f32.
#if defined(HEED_ENGINES_SOFTMAX_AMX_OPERANDS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_AMX_OPERANDS_INL_H_
#undef HEED_ENGINES_SOFTMAX_AMX_OPERANDS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_AMX_OPERANDS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "heed/core/dtype.h"
#include "heed/engines/softmax/forward/forward.h"
#include "heed/engines/softmax/block/operands-inl.h"
#include "heed/simd/convert-inl.h"
#include "heed/simd/math-inl.h"
#include "heed/simd/pair_tile-inl.h"
#include "heed/simd/amx_products-inl.h"
#include "heed/simd/amx_softmax-inl.h"
#include "heed/simd/amx.h"
#include "heed/simd/transpose-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

// Rounds pairs (first, second) to words of two bf16.
template <class D, class V = hn::Vec<D>>
HWY_INLINE auto RoundToPairs(D d, V first, V second) {
  const hn::RebindToUnsigned<D> words;
#if HWY_TARGET == HWY_AVX3_SPR
  (void)words;
  return hs::ToPairs(d, first, second);
#else
  const auto low = hn::PromoteTo(words, hs::Round(d, BF16(), first));
  const auto high = hn::PromoteTo(words, hs::Round(d, BF16(), second));
  return hn::Or(low, hn::ShiftLeft<16>(high));
#endif
}

// Rows of each storage that a kernel of `kTerms` terms reads, as bf16 splits.
template <int kTerms>
struct SplitRows {
  using D = hn::ScalableTag<float>;
  using Half = hn::Vec<hn::Rebind<uint16_t, D>>;
  static constexpr size_t N = hn::MaxLanes(D());

  // Calls f with a tag of the storage. One term is bf16, which needs no split.
  template <class F>
  static HWY_INLINE void WithStorage(DType dtype, const F& f) {
    if constexpr (kTerms == 1) {
      f(BF16());
    } else {
      if (dtype == DType::kF16) return f(F16());
      f(float());
    }
  }

  // Loads the first n <= N elements times a factor, and zeros beyond.
  template <class S>
  static HWY_INLINE void Load(const S* from, size_t n, float factor, Half* split) {
    if constexpr (kTerms == 1) {
      const hn::Rebind<uint16_t, D> halves;
      const auto* at = reinterpret_cast<const uint16_t*>(from);
      split[0] = n == N ? hn::LoadU(halves, at) : hn::LoadN(halves, at, n);
    } else {
      const auto x = n == N ? hs::LoadWide(D(), from) : hs::LoadWideN(D(), from, n);
      hs::SplitBf16<kTerms>(D(), hn::Mul(x, hn::Set(D(), factor)), split);
    }
  }

  // Tells whether all numbers with these first terms are finite.
  class Largest {
   public:
    HWY_INLINE Largest() : most_(hn::Zero(hn::Rebind<uint16_t, D>())) {}
    HWY_INLINE void Add(Half first) { most_ = hn::Max(most_, hn::And(first, Exponent())); }
    HWY_INLINE bool IsFinite() const { return hn::AllFalse(hn::Rebind<uint16_t, D>(), hn::Eq(most_, Exponent())); }

   private:
    static HWY_INLINE Half Exponent() { return hn::Set(hn::Rebind<uint16_t, D>(), uint16_t{0x7F80}); }
    Half most_;
  };
};

// kOfKeys and kOfValues are numbers of products (amx_products-inl.h): of K Q^T, and of V^T P.
template <int kOfKeys, int kOfValues, class AmxUnit>
struct AmxOperands {
  static constexpr int kKeyProducts = kOfKeys, kValueProducts = kOfValues;
  static constexpr int kTerms = hs::TermPairs<kKeyProducts>::kA;
  static constexpr int kWeightTerms = hs::TermPairs<kValueProducts>::kB;
  static_assert(hs::TermPairs<kValueProducts>::kA == kTerms);
  using Compute = float;
  using Query = uint32_t;
  using Key = BF16;
  using Value = BF16;
  using Tiles = AmxUnit;
  using D = hn::ScalableTag<float>;
  using V = hn::Vec<D>;
  using RowSplit = SplitRows<kTerms>;

  // A sum over a segment has fewer additions than keys: a product adds up 32 keys, and probabilities are added in
  // pairs. A segment is computed with K and V in L2, of which splits take more.
  static constexpr KeyGrid kGrid = {.tile = kAmxGrid.tile,
                                    .step = kAmxGrid.step,
                                    .segment = kTerms == 1   ? 2048
                                               : kTerms == 2 ? 1024
                                                             : 512};
  static_assert(kGrid.step == kTileDepth);
  static constexpr int kKeyStep = kTileDepth;
  // f32 rows are multiplied by the factor; for rows that are exact in their terms that would be another rounding.
  static constexpr bool kFinishesLogits = kKeyProducts == 1 || kKeyProducts == 4;
  static constexpr bool kKeysInLanes = false;
  static constexpr bool kQuantized = false;
  static constexpr bool kUsesAmx = true;
  // Rows of a block: two tiles of lanes. With more, the code between products does not stay in L1; with fewer, it would
  // hardly be faster.
  static constexpr int kLaneVectors = 2 * kTileWords / hn::MaxLanes(D());
  static constexpr int kMostVectors = kLaneVectors;
  // Units of 32 keys whose probabilities are in the pipeline at once (pipeline-inl.h).
  static constexpr int kMostUnits = 4;

  // Keys whose tiles take half of a 2 MiB L2, in whole segments.
  static int64_t KeysInL2(const Problem& p) {
    const int64_t bytes = kTerms * (Up(p.depth, kTileDepth) + OutputRows(p.value_depth)) * 2;
    return std::max<int64_t>((int64_t{1} << 20) / bytes / kGrid.segment, 1) * kGrid.segment;
  }

  static bool KeysInPlace(DType) { return false; }
  static bool ValuesInPlace(DType) { return false; }
  static constexpr int64_t Up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
  static constexpr int64_t QueryRows(int64_t depth) { return kTerms * Up(depth, kTileDepth) / 2; }
  static constexpr int64_t KeySize(int64_t keys, int64_t depth) {
    return kTerms * Up(keys, kTileDepth) * Up(depth, kTileDepth);
  }
  static constexpr int64_t ValueSize(int64_t keys, int64_t depth) {
    return kTerms * Up(keys, kTileDepth) * OutputRows(depth);
  }
  static constexpr int64_t OutputRows(int64_t depth) { return Up(depth, 2 * kTileRows); }
  static constexpr int64_t WeightRows() { return kWeightTerms * kTileRows * 2 * kMostUnits; }

  static LogitFactor Split(double factor) { return kFinishesLogits ? LogitFactor{1, factor} : LogitFactor{factor, 1}; }

  // Packs queries to to[term][pair of channels][lane] and returns whether all are finite. This and the next functions
  // are compiled in block.cc (packing-inl.h).
  static HWY_NOINLINE bool PackQueries(DType dtype, const void* const* rows, size_t num_rows, size_t depth,
                                       double factor, size_t lanes, uint32_t* HWY_RESTRICT to);

  // Copies keys [begin, end) to tiles of 16 keys: for each, each term, 32 channels at a time. Returns whether all are
  // finite.
  static HWY_NOINLINE bool CopyKeys(const SourceRows& from, int64_t begin, int64_t end, int64_t depth,
                                    BF16* HWY_RESTRICT to);

  // Copies values of keys [begin, end), 32 keys at a time: for each, 16 channels at a time, each term, with a row of
  // the tile per channel.
  static HWY_NOINLINE void CopyValues(const SourceRows& from, int64_t begin, int64_t end, int64_t depth,
                                      BF16* HWY_RESTRICT to);

  static constexpr int64_t Chunks(int64_t depth) { return Up(depth, kTileDepth) / kTileDepth; }

  // The results of CopyKeys, CopyValues and PackQueries as tile operands, from key `begin` on, a multiple of 32 from
  // the first.
  static HWY_INLINE hs::TileFactor KeyTiles(const Operand<BF16>& k, int64_t begin, int64_t depth) {
    const int64_t chunks = Chunks(depth), row = kTerms * chunks * kTileBytes;
    return {reinterpret_cast<const char*>(k.data) + (begin - k.first) / kTileRows * row, row, kTileBytes,
            chunks * kTileBytes, 64};
  }
  static HWY_INLINE hs::TileFactor ValueTiles(const Operand<BF16>& v, int64_t begin, int64_t depth) {
    const int64_t unit = kTerms * OutputRows(depth) / kTileRows * kTileBytes;
    return {reinterpret_cast<const char*>(v.data) + (begin - v.first) / kTileDepth * unit, kTerms * kTileBytes, unit,
            kTileBytes, 64};
  }
  static HWY_INLINE hs::TileFactor QueryTiles(const uint32_t* q, size_t lanes, int64_t depth) {
    const auto row = static_cast<ptrdiff_t>(lanes * sizeof(uint32_t));
    return {reinterpret_cast<const char*>(q), 64, kTileRows * row, Chunks(depth) * kTileRows * row, row};
  }

  // Computes s[key][lane] of keys [begin, end), in whole steps, for all lanes.
  static HWY_INLINE void LogitTiles(const uint32_t* q, size_t lanes, const Operand<BF16>& k, int64_t begin, int64_t end,
                                    int64_t depth, float* s) {
    const int64_t chunks = Chunks(depth);
    const hs::TileFactor keys = KeyTiles(k, begin, depth), queries = QueryTiles(q, lanes, depth);
    hs::MultiplyTiles<Tiles, kKeyProducts, /*kAdd=*/false>(keys, Up(end - begin, kTileDepth) / kTileRows, queries,
                                                           kColumns, chunks, s, static_cast<ptrdiff_t>(lanes));
  }

  // True if logits of infinities are right. With splits an infinity meets zeros and becomes NaN.
  static constexpr bool kInfinite = kTerms == 1;

  // Recomputes logits that are NaN from the sums of terms.
  static HWY_NOINLINE void RepeatNaN(const uint32_t* q, size_t lanes, const Operand<BF16>& k, int64_t begin,
                                     int64_t end, int64_t depth, size_t num_lanes, float* s) {
    const int64_t chunks = Chunks(depth);
    const auto* keys = reinterpret_cast<const uint16_t*>(k.data);
    const int64_t pairs = chunks * kTileRows;
    for (int64_t j = begin; j < end; ++j, s += lanes) {
      const int64_t key = j - k.first;
      const uint16_t* row = keys + key / kTileRows * kTerms * chunks * kTileElements + key % kTileRows * kTileDepth;
      for (size_t lane = 0; lane < num_lanes; ++lane) {
        if (!std::isnan(s[lane])) continue;
        float sum = 0;
        for (int64_t e = 0; e < depth; ++e) {
          float of_key = 0, of_query = 0;
          for (int p = kTerms; p-- > 0;) {
            of_key += WidenBits(row[(p * chunks + e / kTileDepth) * kTileElements + e % kTileDepth]);
            const uint32_t pair = q[static_cast<size_t>(p * pairs + e / 2) * lanes + lane];
            of_query += WidenBits(static_cast<uint16_t>(e % 2 == 0 ? pair : pair >> 16));
          }
          sum += of_key * of_query;
        }
        s[lane] = sum;
      }
    }
  }

  // o[dim][lane] +=, or = if `first`, the values of keys [begin, end), in whole steps, times p[term][pair of
  // keys][lane].
  template <bool kSkipMasked>
  static HWY_INLINE void AddValues(const uint32_t* p, size_t lanes, const Operand<BF16>& v, int64_t begin, int64_t end,
                                   int64_t depth, bool first, float* o) {
    const ptrdiff_t tiles = OutputRows(depth) / kTileRows;
    const auto row = static_cast<ptrdiff_t>(lanes * sizeof(uint32_t));
    const auto out_row = static_cast<ptrdiff_t>(lanes);
    const hs::TileFactor values = ValueTiles(v, begin, depth);
    const hs::TileFactor weights = {reinterpret_cast<const char*>(p), 64, kTileRows * row, kGrid.tile / 2 * row, row};
    const int64_t steps = Up(end - begin, kTileDepth) / kTileDepth;
    if constexpr (kSkipMasked) {
      AddFiniteValues(values, tiles, weights, steps, first, o, out_row);
    } else if (first) {
      hs::MultiplyTiles<Tiles, kValueProducts, false>(values, tiles, weights, kColumns, steps, o, out_row);
    } else {
      hs::MultiplyTiles<Tiles, kValueProducts, true>(values, tiles, weights, kColumns, steps, o, out_row);
    }
  }

  // p[term][pair][lane] = 2^((s - shift) factor), from s[key][lane], and sum += p of a pair before p is rounded, with
  // pairs ascending. A missing key of a pair has P = 0; with kFlagMasked, masked pairs become -0.
  template <size_t W, int C, bool kFlagMasked>
  static HWY_INLINE void Weigh(size_t num_keys, const float* s, const V* HWY_RESTRICT shift, float factor,
                               V* HWY_RESTRICT sum, uint32_t* p) {
    const Weigher<C, kFlagMasked> probability(shift, factor);
    V l[C];
    HWY_UNROLL(4)
    for (int c = 0; c < C; ++c) l[c] = sum[c];
    size_t j = 0;
    for (; j + 2 <= num_keys; j += 2, s += 2 * W, p += W) {
      HWY_UNROLL(4)
      for (int c = 0; c < C; ++c) {
        const V first = probability(s, c), second = probability(s + W, c);
        l[c] = hn::Add(l[c], hn::Add(probability.Sum(first), probability.Sum(second)));
        StoreTerms<W>(probability.probabilities, first, second, p + static_cast<size_t>(c) * kLanes);
      }
    }
    for (; j < Steps(num_keys); j += 2, s += 2 * W, p += W) {
      for (int c = 0; c < C; ++c) {
        const V first = j < num_keys ? probability(s, c) : hn::Zero(D());
        l[c] = hn::Add(l[c], probability.Sum(first));
        StoreTerms<W>(probability.probabilities, first, hn::Zero(D()), p + static_cast<size_t>(c) * kLanes);
      }
    }
    HWY_UNROLL(4)
    for (int c = 0; c < C; ++c) sum[c] = l[c];
  }

  // The next two functions do it in two parts: P in the place of s, and then its terms.
  template <size_t W, int C, bool kFlagMasked>
  static HWY_INLINE void WeighInPlace(size_t num_keys, float* s, const V* HWY_RESTRICT shift, float factor,
                                      V* HWY_RESTRICT sum) {
    const Weigher<C, kFlagMasked> probability(shift, factor);
    for (size_t j = 0; j < num_keys; j += 2, s += 2 * W) {
      for (int c = 0; c < C; ++c) {
        float* at = s + static_cast<size_t>(c) * kLanes;
        const V first = probability(s, c);
        const V second = j + 1 < num_keys ? probability(s + W, c) : hn::Zero(D());
        sum[c] = hn::Add(sum[c], hn::Add(probability.Sum(first), probability.Sum(second)));
        hn::Store(first, D(), at);
        if (j + 1 < num_keys) hn::Store(second, D(), at + W);
      }
    }
  }
  template <size_t W, int C>
  static HWY_INLINE void PutWeights(size_t num_keys, const float* s, uint32_t* p) {
    const Probabilities probabilities;
    for (size_t j = 0; j < Steps(num_keys); j += 2, s += 2 * W, p += W) {
      for (int c = 0; c < C; ++c) {
        const float* at = s + static_cast<size_t>(c) * kLanes;
        StoreTerms<W>(probabilities, j < num_keys ? hn::Load(D(), at) : hn::Zero(D()),
                      j + 1 < num_keys ? hn::Load(D(), at + W) : hn::Zero(D()), p + static_cast<size_t>(c) * kLanes);
      }
    }
  }

  // P of a logit. The difference comes first: products of large logits, as with a bias of the most negative number,
  // would overflow.
  using Probabilities = hs::Probabilities<D>;
  static HWY_INLINE V Weight(const Probabilities& p, V s, V shift, V factor) {
    return p.Exp2(hn::Mul(hn::Sub(s, shift), factor));
  }

  // Returns 2^((row - shift) factor) of vector c. A masked pair adds +0 to a sum.
  template <int C, bool kFlagMasked>
  struct Weigher {
    V shift[C], factor;
    Probabilities probabilities;
    HWY_INLINE Weigher(const V* HWY_RESTRICT shifts, float f) : factor(hn::Set(D(), f)) {
      HWY_UNROLL(4)
      for (int c = 0; c < C; ++c) shift[c] = shifts[c];
    }
    HWY_INLINE V operator()(const float* row, int c) const {
      const D d;
      const V x = hn::Load(d, row + static_cast<size_t>(c) * kLanes);
      V w = Weight(probabilities, x, shift[c], factor);
      if constexpr (kWeightTerms == 1) w = hn::IfThenElse(hn::IsNaN(w), hn::NaN(d), w);  // a bias may be any NaN
      if constexpr (!kFlagMasked) return w;
      const auto masked = hn::Eq(x, hn::Set(d, -std::numeric_limits<float>::infinity()));
      return hn::IfThenElse(masked, hn::Set(d, -0.0f), w);
    }
    HWY_INLINE V Sum(V weight) const { return kFlagMasked ? hn::Add(weight, hn::Zero(D())) : weight; }
  };

  // Stores the terms of a pair of keys' P, `kPairs` rows apart.
  template <size_t W, int64_t kPairs = kGrid.tile / 2>
  static HWY_INLINE void StoreTerms(const Probabilities& probabilities, V first, V second, uint32_t* to) {
    const D d;
    const hn::RebindToUnsigned<D> words;
    if constexpr (kWeightTerms == 1) return hn::Store(probabilities.ToPairs(first, second), words, to);
    HWY_UNROLL(3)
    for (int p = 0; p < kWeightTerms; ++p) {
      const auto pair = RoundToPairs(d, first, second);
      hn::Store(pair, words, to + static_cast<size_t>(p * kPairs) * W);
      if (p + 1 == kWeightTerms) break;
      first = hn::Sub(first, hn::BitCast(d, hn::ShiftLeft<16>(pair)));
      second = hn::Sub(second, hn::BitCast(d, hn::And(pair, hn::Set(words, 0xFFFF0000u))));
    }
  }

  // AddValues for values that may not be finite: these are left out of the tiles and added one by one for the rows that
  // see them, whose P is not the -0 of a masked pair.
  static HWY_NOINLINE void AddFiniteValues(const hs::TileFactor& values, ptrdiff_t tiles, const hs::TileFactor& weights,
                                           ptrdiff_t steps, bool first, float* o, ptrdiff_t out_row) {
    constexpr uint16_t kExponent = 0x7F80;
    alignas(64) uint16_t tile[2][kTerms][kTileElements];
    const hs::TileFactor finite = {reinterpret_cast<const char*>(tile), sizeof(tile[0]), 0, kTileBytes, 64};
    for (ptrdiff_t step = 0; step < steps; ++step) {
      hs::TileFactor p = weights;
      p.data += step * weights.step;
      for (ptrdiff_t i = 0; i < tiles; i += 2) {
        for (int term = 0; term < 2 * kTerms; ++term) {
          uint16_t* to = tile[term % 2][term / 2];
          std::memcpy(to, values.At(i + term % 2, step, term / 2), kTileBytes);
          for (int64_t at = 0; at < kTileElements; ++at) {
            if ((to[at] & kExponent) == kExponent) to[at] = 0;
          }
        }
        float* out = o + i * kTileRows * out_row;
        if (first && step == 0) {
          hs::MultiplyTiles<Tiles, kValueProducts, false>(finite, 2, p, kColumns, 1, out, out_row);
        } else {
          hs::MultiplyTiles<Tiles, kValueProducts, true>(finite, 2, p, kColumns, 1, out, out_row);
        }
        for (int64_t at = 0; at < 2 * kTileElements; ++at) {
          const auto* all = reinterpret_cast<const uint16_t*>(values.At(i + at / kTileElements, step, 0));
          const uint16_t value = all[at % kTileElements];
          if ((value & kExponent) != kExponent) continue;
          const int64_t key = at % kTileDepth;
          const auto* words = reinterpret_cast<const uint32_t*>(p.data + key / 2 * weights.stride);
          for (int lane = 0; lane < kColumns * kTileWords; ++lane) {
            const auto bits = static_cast<uint16_t>(words[lane] >> (key % 2 * 16));
            if (bits == kMaskedBits) continue;
            out[at / kTileDepth * out_row + lane] += WidenBits(bits) * WidenBits(value);
          }
        }
      }
    }
  }

  // -0 in bf16.
  static constexpr uint16_t kMaskedBits = 0x8000;

  static float WidenBits(uint16_t bits) {
    const uint32_t word = uint32_t{bits} << 16;
    float x;
    std::memcpy(&x, &word, sizeof(x));
    return x;
  }

 private:
  static constexpr size_t kLanes = hn::MaxLanes(D());
  static constexpr int kColumns = 2;  // in tiles
  static constexpr int64_t kTileElements = kTileBytes / 2;
  static constexpr size_t Steps(size_t num_keys) {
    return static_cast<size_t>(Up(static_cast<int64_t>(num_keys), kTileDepth));
  }
};

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_AMX_OPERANDS_INL_H_
