// bf16 splits of f32 (3xBF16): a float is the sum of three bf16, whose products on tensor cores are as exact as those
// of f32.
//
// An operand of 16 x 16 or 16 x 8 elements is an array [term][word] of fragments (machine.h). Beside operands that are
// split, a bf16 operand has one term and an f16 operand two; a product of f16 with f16 has one f16 term each.
#ifndef HEED_CUDA_BF16_SPLIT_H_
#define HEED_CUDA_BF16_SPLIT_H_

#include <cmath>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"

namespace heed::cuda {

inline constexpr int kSplitTerms = 3;

// True if the terms of x add up to x: false for infinities, NaN, and magnitudes above the largest bf16.
HEED_DEVICE bool FitsSplit(float x) { return fabsf(x) <= 0x1.FEp127f; }

// Writes word i, two floats, of each term. An infinity or NaN is in the first term alone. With `kFinite`, which
// promises finite inputs, it gives NaN in a later term, if there is one.
template <class M, DType kTerm = DType::kBF16, bool kFinite = false, int kCount, int kWords>
HEED_DEVICE void Split(float low, float high, int i, uint32_t (&split)[kCount][kWords]) {
  static_assert(kTerm == DType::kBF16 || kCount == 1);
  HEED_DEVICE_UNROLL
  for (int term = 0; term < kCount; ++term) {
    const uint32_t pair = M::template Pack<kTerm>(low, high);
    split[term][i] = pair;
    if (term + 1 == kCount) break;
    low -= M::template Widen<kTerm>(static_cast<uint16_t>(pair));
    high -= M::template Widen<kTerm>(static_cast<uint16_t>(pair >> 16));
    if constexpr (!kFinite) {
      low = low == low ? low : 0;
      high = high == high ? high : 0;
    }
  }
}

// Splits the 16 x 16 results of two products, the left and the right eight columns.
template <class M, DType kTerm = DType::kBF16, bool kFinite = false, int kCount>
HEED_DEVICE void SplitResults(const float (&left)[4], const float (&right)[4], uint32_t (&split)[kCount][4]) {
  Split<M, kTerm, kFinite>(left[0], left[1], 0, split);
  Split<M, kTerm, kFinite>(left[2], left[3], 1, split);
  Split<M, kTerm, kFinite>(right[0], right[1], 2, split);
  Split<M, kTerm, kFinite>(right[2], right[3], 3, split);
}

// Splits tensor elements of 16 bits exactly into bf16 terms.
template <DType kDType>
inline constexpr int kExactTerms = kDType == DType::kBF16 ? 1 : 2;

template <DType kDType, class M>
HEED_DEVICE void ToSplit(const uint32_t (&r)[4], uint32_t (&split)[kExactTerms<kDType>][4]) {
  HEED_DEVICE_UNROLL
  for (int i = 0; i < 4; ++i) {
    if constexpr (kDType == DType::kBF16) {
      split[0][i] = r[i];
    } else {
      Split<M>(M::template Widen<kDType>(static_cast<uint16_t>(r[i])),
               M::template Widen<kDType>(static_cast<uint16_t>(r[i] >> 16)), i, split);
    }
  }
}

// Words i and j of each term, as a second operand.
template <int kCount>
struct SecondOperand {
  uint32_t at[kCount][2];
};
template <int kCount>
HEED_DEVICE SecondOperand<kCount> WordsOf(const uint32_t (&split)[kCount][4], int i, int j) {
  SecondOperand<kCount> words;
  HEED_DEVICE_UNROLL
  for (int term = 0; term < kCount; ++term) {
    words.at[term][0] = split[term][i];
    words.at[term][1] = split[term][j];
  }
  return words;
}

// c += a b over the products of terms that count in f32, smallest first.
template <DType kTerm = DType::kBF16, class M, int kA, int kB>
HEED_DEVICE void MmaSplit(M& m, const uint32_t (&a)[kA][4], const uint32_t (&b)[kB][2], float (&c)[4]) {
  HEED_DEVICE_UNROLL
  for (int sum = kSplitTerms - 1; sum >= 0; --sum) {
    HEED_DEVICE_UNROLL
    for (int i = 0; i < kA; ++i) {
      if (i <= sum && sum - i < kB) m.template MmaSync<kTerm>(a[i], b[sum - i], c);
    }
  }
}

}  // namespace heed::cuda

#endif  // HEED_CUDA_BF16_SPLIT_H_
