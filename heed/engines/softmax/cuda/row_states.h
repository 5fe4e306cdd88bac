// Softmax states of rows, segment by segment: the maximum of the logits, the sum of exponentials, and outputs.
//
// Blocks that sweep all keys and CombineBlock (split-KV) merge the same states in the same order with the roundings
// below, so that a row's bits do not depend on the split.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_ROW_STATES_H_
#define HEED_ENGINES_SOFTMAX_CUDA_ROW_STATES_H_

#include <cmath>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"
#include "heed/engines/softmax/cuda/forward_params.h"
#include "heed/engines/softmax/cuda/pair_logits.h"

namespace heed::softmax::cuda {

inline constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

// The exponent of a power of two that scales P, so that small probabilities keep their bits in f16.
constexpr int ProbabilityPower(DType dtype) { return dtype == DType::kF16 ? 10 : 0; }

// The merge of a row's state up to some key with that of the next segment. Merging an empty state changes no bit.
template <class M>
class MergedStates {
 public:
  // `unit` is the scale of the logits.
  HEED_DEVICE MergedStates(const SoftmaxState& before, const SoftmaxState& since, float unit)
      : before_is_empty_(before.sum == 0), since_is_empty_(since.sum == 0), max_(fmaxf(before.max, since.max)) {
    const float factor = unit * kLog2E, shift = max_ == -INFINITY ? 0 : max_;
    of_before_ = M::Exp2((before.max - shift) * factor);
    of_since_ = M::Exp2((since.max - shift) * factor);
  }
  HEED_DEVICE float max() const { return max_; }
  HEED_DEVICE float Sum(float before, float since) const {
    if (before_is_empty_) return since;
    return since_is_empty_ ? before : fmaf(before, of_before_, since * of_since_);
  }

 private:
  bool before_is_empty_, since_is_empty_;
  float max_, of_before_, of_since_;
};

// A row's lse, and the factor that normalises its outputs.
struct RowEnd {
  float lse, factor;
};

template <class M>
HEED_DEVICE RowEnd EndOf(const ForwardParams& p, DType dtype, const SoftmaxState& terms, float unit, int head) {
  if (terms.sum == 0) return {-INFINITY, 0};
  RowEnd end;
  end.lse = fmaf(terms.max, unit, logf(terms.sum)) - (dtype == DType::kF16 ? ProbabilityPower(DType::kF16) * kLn2 : 0);
  end.factor = 1 / terms.sum;
  if (p.dropout > 0) end.factor /= 1 - p.dropout;
  if (p.sinks.data != nullptr) end.factor /= 1 + expf(NumberOf<M>(p.sinks, 0, head) - end.lse);
  return end;
}

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_ROW_STATES_H_
