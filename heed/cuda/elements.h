// Tensor elements in memory and as tensor core operands: 16-bit elements as they are, f32 as bf16 splits.
#ifndef HEED_CUDA_ELEMENTS_H_
#define HEED_CUDA_ELEMENTS_H_

#include <cstdint>
#include <type_traits>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"
#include "heed/cuda/bf16_split.h"

namespace heed::cuda {

template <DType kDType>
using Element = std::conditional_t<kDType == DType::kF32, float, uint16_t>;

// The dtype and the number of the terms of an operand (bf16_split.h).
template <DType kDType>
inline constexpr DType kSplitDType = kDType == DType::kF32 ? DType::kBF16 : kDType;
template <DType kDType>
inline constexpr int kSplitTermsOf = kDType == DType::kF32 ? kSplitTerms : 1;

template <class M, DType kDType>
HEED_DEVICE float ToFloat(Element<kDType> x) {
  if constexpr (kDType == DType::kF32) {
    return x;
  } else {
    return M::template Widen<kDType>(x);
  }
}

// Stores two floats in a row of `channels` channels, from the even index `channel` on.
template <class M, DType kDType>
HEED_DEVICE void StorePair(Element<kDType>* row, int channel, int channels, float low, float high) {
  if constexpr (kDType == DType::kF32) {
    if (channel < channels) row[channel] = low;
    if (channel + 1 < channels) row[channel + 1] = high;
  } else {
    const uint32_t pair = M::template Pack<kDType>(low, high);
    if (channel < channels) row[channel] = static_cast<uint16_t>(pair);
    if (channel + 1 < channels) row[channel + 1] = static_cast<uint16_t>(pair >> 16);
  }
}

}  // namespace heed::cuda

#endif  // HEED_CUDA_ELEMENTS_H_
