// The operands of the last three products of the backward pass: P and dS are read as broadcasts; rows of queries,
// output gradients and keys are read as vectors.
//
// Compiled once per SIMD target. As in the forward pass, this is all that differs between types. An element of an
// operand is a word:
//
//   FmaGradients<T>  a word is one element of type T
//   PairGradients    a word is two bf16 of consecutive rows; P and dS are rounded to bf16, in place as pairs of
//                    query rows, and dS once more as pairs of keys in a tile of its own. With BFMMLA all are stored as
//                    quads (quad_tile-inl.h): of two keys, or two queries, by two words each.
#if defined(HEED_ENGINES_SOFTMAX_BACKWARD_GRADIENT_OPERANDS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEED_ENGINES_SOFTMAX_BACKWARD_GRADIENT_OPERANDS_INL_H_
#undef HEED_ENGINES_SOFTMAX_BACKWARD_GRADIENT_OPERANDS_INL_H_
#else
#define HEED_ENGINES_SOFTMAX_BACKWARD_GRADIENT_OPERANDS_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "heed/engines/softmax/backward/gradient_rows-inl.h"
#include "heed/engines/softmax/block/operands-inl.h"
#include "heed/engines/softmax/tile_list.h"
#include "heed/simd/tile-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace hs = heed::HWY_NAMESPACE;  // simd/; hs:: keeps Highway's namesakes out

template <class T>
struct FmaGradients : FmaOperands<T> {
  using Operands = FmaOperands<T>;  // of the logits, which are computed by the same functions forward and backward
  using Word = T;
  static constexpr int kStep = 1;   // rows in a word
  static constexpr int kWords = 1;  // words of a row in a step of a sum
  static constexpr bool kFuseHeads = true;
  static constexpr bool kKeysAreWords = true;
  static int64_t KeyRow(int64_t depth) { return PaddedRow<T>(depth); }

  // Copies rows as words. Returns true if all elements are finite.
  static HWY_INLINE bool ToWords(DType dtype, const void* const* rows, size_t num_rows, int64_t depth, T* words) {
    return CopyRows<T>(dtype, rows, num_rows, depth, words);
  }
  static HWY_INLINE bool ToWords(const SourceRows& from, const Interval& tokens, int64_t depth, T* words) {
    return CopyTokens<T>(from, tokens, depth, words);
  }
  static HWY_INLINE void CopyGroup(const SourceRows& from, const Interval& tokens, int64_t depth, T* keys) {
    CopyTokens<T>(from, tokens, depth, keys);
  }

  // Points `rows` at the words, from which queries are packed into lanes: they are in cache. Returns their dtype.
  static DType PointToRows(DType, const T* words, size_t num_rows, int64_t depth, const void** rows) {
    for (size_t i = 0; i < num_rows; ++i) {
      rows[i] = words + static_cast<int64_t>(i) * PaddedRow<T>(depth);
    }
    return DTypeOf<T>::value;
  }

  // Computed P and dS are words already, along queries and along keys.
  static HWY_INLINE void RoundWeights(size_t, size_t, size_t, size_t, T*, T*, T*) {}
  static const T* Columns(const T* d_logits, const T*) { return d_logits; }

  template <int R, int C, bool kSkipMasked>
  static HWY_INLINE void Accumulate(const T* a, ptrdiff_t a_row, ptrdiff_t a_step, const T* b, ptrdiff_t b_step,
                                    size_t count, T* out, ptrdiff_t out_row) {
    hs::AccumulateTile<R, C, kSkipMasked>(hn::ScalableTag<T>(), a, a_row, a_step, b, b_step, count, out, out_row);
  }
};

#if HWY_TARGET == HEED_PAIR_TARGET

struct PairGradients : PairOperands {
  using Operands = PairGradients;
  using Word = uint32_t;
  static constexpr int kStep = 2, kWords = hs::kStepWords;
  static constexpr int kKeyStep = kStep * kWords;
  static constexpr KeyGrid kGrid = {.tile = kTileKeys, .step = kKeyStep};
  // A word has two rows: if heads shared a block, rows of two heads could be paired.
  static constexpr bool kFuseHeads = false;
  static constexpr bool kKeysAreWords = false;
  static int64_t KeyRow(int64_t depth) { return depth; }

  // Stores words[i][e] = (row 2 i, row 2 i + 1) at channel e, with zeros beyond the last row, for whole steps.
  template <class RowAt>
  static HWY_INLINE bool Interleave(size_t num_rows, int64_t depth, const RowAt& row_at, uint32_t* HWY_RESTRICT words) {
    const D d;
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<uint16_t, D> halves;
    V marks = hn::Zero(d);  // NaN once an element is not finite
    const size_t padded = (num_rows + kKeyStep - 1) / kKeyStep * kKeyStep;
    for (size_t i = 0; i < padded; i += 2, words += PaddedRow<float>(depth)) {
      const uint16_t* first = i < num_rows ? row_at(i) : nullptr;
      const uint16_t* second = i + 1 < num_rows ? row_at(i + 1) : nullptr;
      V of_rows = hn::Zero(d);
      ForVectors<float>(depth, [&](int64_t e, size_t n) HWY_ATTR {
        const auto load = [&](const uint16_t* row) HWY_ATTR {
          if (row == nullptr) return hn::Zero(du);
          return hn::PromoteTo(du, n == hn::MaxLanes(D()) ? hn::LoadU(halves, row + e) : hn::LoadN(halves, row + e, n));
        };
        const auto low = load(first), high = hn::ShiftLeft<16>(load(second));
        hn::Store(hn::Or(low, high), du, words + e);
        of_rows = hn::MulAdd(hn::BitCast(d, hn::ShiftLeft<16>(low)), hn::Zero(d), of_rows);
        of_rows = hn::MulAdd(hn::BitCast(d, high), hn::Zero(d), of_rows);
      });
      marks = hn::Add(marks, of_rows);
    }
    return hn::AllTrue(d, hn::Eq(marks, hn::Zero(d)));
  }

  // Sums over queries descend, sums over keys ascend.
  static HWY_INLINE bool ToWords(DType, const void* const* rows, size_t num_rows, int64_t depth, uint32_t* words) {
    const bool finite =
        Interleave(num_rows, depth, [&](size_t i) HWY_ATTR { return static_cast<const uint16_t*>(rows[i]); }, words);
    Arrange</*kDescending=*/true>(num_rows, depth, words);
    return finite;
  }
  static HWY_INLINE bool ToWords(const SourceRows& from, const Interval& tokens, int64_t depth, uint32_t* words) {
    const auto num_rows = static_cast<size_t>(tokens.size());
    const bool finite = Interleave(
        num_rows, depth, [&](size_t i) HWY_ATTR { return from.At<uint16_t>(tokens.begin + static_cast<int64_t>(i)); },
        words);
    Arrange</*kDescending=*/false>(num_rows, depth, words);
    return finite;
  }
  template <bool kDescending>
  static HWY_INLINE void Arrange([[maybe_unused]] size_t num_rows, [[maybe_unused]] int64_t depth,
                                 [[maybe_unused]] uint32_t* words) {
#if HEED_QUAD_PRODUCTS
    const auto row = static_cast<size_t>(PaddedRow<float>(depth));
    hs::ToQuads<kDescending>(D(), words, row, (num_rows + 3) / 4 * 2, static_cast<size_t>(depth));
#endif
  }
  static HWY_INLINE void CopyGroup(const SourceRows& from, const Interval& tokens, int64_t depth, BF16* keys) {
    PairOperands::CopyKeys(from, tokens.begin, tokens.end, depth, keys);
  }
  static DType PointToRows(DType dtype, const uint32_t*, size_t, int64_t, const void**) { return dtype; }

  // Rounds P and dS of vectors [c0, c1) of a tile in place, as pairs of query rows, and stores dS as pairs of keys in
  // `columns`. Masked elements keep their sign.
#if HEED_QUAD_PRODUCTS
  // The quads of P and dS of two keys take the place of the first one's, the later two queries first; those of dS by
  // pairs of keys are consecutive, the lower lanes of a vector first. Missing keys are masked.
  static HWY_INLINE void RoundWeights(size_t num_keys, size_t c0, size_t c1, size_t lanes, float* p, float* d_logits,
                                      float* columns) {
    constexpr size_t N = hn::MaxLanes(D());
    const D d;
    const hn::RebindToUnsigned<D> words;
    for (size_t j = 0; j < num_keys; j += 4, columns += 2 * lanes) {
      for (size_t c = c0; c < c1; ++c) {
        V weights[4], ds[4];
        for (size_t i = 0; i < 4; ++i) {
          const size_t at = (j + i) * lanes + c * N;
          const bool present = j + i < num_keys;
          weights[i] = present ? hn::Load(d, p + at) : hn::Set(d, -0.0f);
          ds[i] = present ? hn::Load(d, d_logits + at) : hn::Set(d, -0.0f);
        }
        const auto quads = hs::QuadsOfLanes(d, hs::ToPairs(d, ds[0], ds[1]), hs::ToPairs(d, ds[2], ds[3]));
        hn::Store(hn::BitCast(d, quads.lower), d, columns + 2 * c * N);
        hn::Store(hn::BitCast(d, quads.upper), d, columns + 2 * c * N + N);
        for (size_t i = 0; i < 4 && j + i < num_keys; i += 2) {
          const size_t at = (j + i) * lanes + c * N;
          hn::Store(hn::BitCast(d, hn::Reverse2(words, hs::ToQuad(d, weights[i], weights[i + 1]))), d, p + at);
          hn::Store(hn::BitCast(d, hn::Reverse2(words, hs::ToQuad(d, ds[i], ds[i + 1]))), d, d_logits + at);
        }
      }
    }
  }
#else
  static HWY_INLINE void RoundWeights(size_t num_keys, size_t c0, size_t c1, size_t lanes, float* p, float* d_logits,
                                      float* columns) {
    constexpr size_t N = hn::MaxLanes(D());
    const D d;
    const hn::Rebind<hwy::bfloat16_t, D> half;
    const auto halve = [&](float* row, size_t c) HWY_ATTR {
      hn::Store(hn::DemoteTo(half, hn::Load(d, row + c * N)), half, reinterpret_cast<hwy::bfloat16_t*>(row) + c * N);
    };
    for (size_t j = 0; j < num_keys; j += 2, columns += lanes) {
      for (size_t c = c0; c < c1; ++c) {
        float* ds = d_logits + j * lanes;
        const bool two = j + 1 < num_keys;
        const V next = two ? hn::Load(d, ds + lanes + c * N) : hn::Zero(d);
        hn::Store(hn::BitCast(d, hs::ToPairs(d, hn::Load(d, ds + c * N), next)), d, columns + c * N);
        halve(p + j * lanes, c);
        halve(ds, c);
        if (!two) continue;
        halve(p + (j + 1) * lanes, c);
        halve(ds + lanes, c);
      }
    }
  }
#endif
  static const uint32_t* Columns(const uint32_t*, const uint32_t* columns) { return columns; }

  template <int R, int C, bool kSkipMasked>
  static HWY_INLINE void Accumulate(const uint32_t* a, ptrdiff_t a_row, ptrdiff_t a_step, const uint32_t* b,
                                    ptrdiff_t b_step, size_t count, float* out, ptrdiff_t out_row) {
    hs::AccumulatePairTile<R, C, kSkipMasked>(D(), a, a_row, a_step, b, b_step, count, out, out_row);
  }
};

#endif  // HWY_TARGET == HEED_PAIR_TARGET

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HEED_ENGINES_SOFTMAX_BACKWARD_GRADIENT_OPERANDS_INL_H_
