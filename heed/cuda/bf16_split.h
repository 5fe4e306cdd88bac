// Numbers of f32 as sums of three of bf16, which tensor cores multiply: products of these sums are as exact as f32's.
//
// An operand of 16 x 16 or 16 x 8 elements is an array [piece][word] of fragments (machine.h). Beside pieces of bf16,
// tensors of bf16 are one and those of f16 two; f16 beside f16 is one piece of f16.
#ifndef HEED_CUDA_BF16_SPLIT_H_
#define HEED_CUDA_BF16_SPLIT_H_

#include <cmath>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"

namespace heed::cuda {

inline constexpr int kSplitTerms = 3;

// Whether the pieces of a number are its sum: not if it is infinite, NaN, or above the largest bf16.
HEED_DEVICE bool FitsSplit(float x) { return fabsf(x) <= 0x1.FEp127f; }

// Word i of each piece: two numbers. What is not finite has it in the first piece alone, or, where all should be
// finite, is NaN in one of the others, if there are any.
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

// Of 16 x 16 numbers that stand as results of two products, of the left and the right eight columns.
template <class M, DType kTerm = DType::kBF16, bool kFinite = false, int kCount>
HEED_DEVICE void SplitResults(const float (&left)[4], const float (&right)[4], uint32_t (&split)[kCount][4]) {
  Split<M, kTerm, kFinite>(left[0], left[1], 0, split);
  Split<M, kTerm, kFinite>(left[2], left[3], 1, split);
  Split<M, kTerm, kFinite>(right[0], right[1], 2, split);
  Split<M, kTerm, kFinite>(right[2], right[3], 3, split);
}

// A tensor's elements as operands.
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

// Words i and j of an operand as a second one.
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

// c += a b, small products first.
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
