// Quantisation of one row to int8 with a scale.
#ifndef HEED_STATE_QUANTIZE_ROW_INTERNAL_H_
#define HEED_STATE_QUANTIZE_ROW_INTERNAL_H_

#include <cstddef>
#include <cstdint>

#include "heed/core/dtype.h"

namespace heed {

// Element i of the row, f32, bf16 or f16, is `stride` i elements from `row`. It becomes q[i] = x / scale, rounded half
// to even, with scale = max |x| / 127: from -127 to 127. A row of zeros has the scale 1. The smallest scale is 2^-126,
// because arithmetic that flushes would lose a subnormal one. Returns false, with nothing written but `scratch` (of n
// elements), if an element is not finite. The caller has set ScopedFloatControl.
bool QuantizeRow(DType dtype, const std::byte* row, int64_t stride, int64_t n, float* scratch, int8_t* q, float* scale);

}  // namespace heed

#endif  // HEED_STATE_QUANTIZE_ROW_INTERNAL_H_
