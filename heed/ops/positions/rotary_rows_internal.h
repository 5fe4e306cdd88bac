// The inner loop of rotary encoding, once per SIMD target.
#ifndef HEED_OPS_POSITIONS_ROTARY_ROWS_INTERNAL_H_
#define HEED_OPS_POSITIONS_ROTARY_ROWS_INTERNAL_H_

#include <cstddef>
#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/ops/positions/rotary.h"

namespace heed::positions {

// The heads of one token: rows that are rotated by the same angles.
struct RotaryRows {
  const void* x;
  void* y;
  int64_t num_rows, x_stride, y_stride;  // strides in elements
  int64_t half;                          // pairs per row
  const double* cos;                     // [half]
  const double* sin;                     // [half]
  double sign;                           // of sin
  void* scratch;                         // RotateScratchBytes(half)
};

inline int64_t RotateScratchBytes(int64_t half) { return 4 * half * int64_t{sizeof(double)}; }

// Rotates 2 * half elements of each row. Results do not depend on the target.
void RotateRows(int64_t allowed_targets, DType dtype, RotaryPairs pairs, const RotaryRows& rows);

}  // namespace heed::positions

#endif  // HEED_OPS_POSITIONS_ROTARY_ROWS_INTERNAL_H_
