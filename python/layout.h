// A check of the axes of tensors, which the caller may have meant in another order.
#ifndef HEED_PYTHON_LAYOUT_H_
#define HEED_PYTHON_LAYOUT_H_

#include "heed/core/tensor.h"

namespace heed::python {

// With set_checks, warns once per process if [B, T, H, D] has fewer tokens than heads, which suggests [B, H, T, D]. The
// number of tokens is that of the longest tensor and the number of heads is the smallest, so that neither one query
// over many keys nor shared key heads cause a warning; a single token may be the first of a sequence. Absent tensors
// and packed ones of rank 3 do not count.
void WarnOfHeadsBeforeTokens(const char* operation, const ConstTensorView& q, const ConstTensorView& k,
                             const ConstTensorView& v);

}  // namespace heed::python

#endif  // HEED_PYTHON_LAYOUT_H_
