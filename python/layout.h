// What can be said of the axes of tensors that the caller may have meant otherwise.
#ifndef HEED_PYTHON_LAYOUT_H_
#define HEED_PYTHON_LAYOUT_H_

#include "heed/core/tensor.h"

namespace heed::python {

// Under set_checks, once in a process: warns where [B, T, H, D] has fewer tokens than heads, which
// [B, H, T, D] looks like. Tokens are those of the longest tensor and heads of the one that has
// fewest, so that neither one query over many keys nor heads that share keys are taken for it; one
// token in all may be the first of a text. Absent tensors and packed ones of rank 3 do not count.
void WarnOfHeadsBeforeTokens(const char* operation, const ConstTensorView& q, const ConstTensorView& k,
                             const ConstTensorView& v);

}  // namespace heed::python

#endif  // HEED_PYTHON_LAYOUT_H_
