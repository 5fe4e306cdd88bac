// One row as int8 with a scale.
#ifndef HEED_STATE_QUANTIZE_ROW_INTERNAL_H_
#define HEED_STATE_QUANTIZE_ROW_INTERNAL_H_

#include <cstddef>
#include <cstdint>

#include "heed/core/dtype.h"

namespace heed {

// Element i of the row, f32, bf16 or f16, is `stride` i elements from `row`. It becomes
// q[i] = x / scale, rounded half to even, with scale = max |x| / 127: from -127 to 127. A
// row of zeros has the scale 1, and none has a subnormal one, which arithmetic that flushes
// would lose: 2^-126 is the smallest. False, with nothing written but `scratch` (of n), if
// an element is not finite. The caller has ScopedFloatControl.
bool QuantizeRow(DType dtype, const std::byte* row, int64_t stride, int64_t n, float* scratch, int8_t* q, float* scale);

}  // namespace heed

#endif  // HEED_STATE_QUANTIZE_ROW_INTERNAL_H_
