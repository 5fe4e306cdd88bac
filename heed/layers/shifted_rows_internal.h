// Token shift with gradients: mixes of each row with the one before it, as many as a layer has, in one pass.
//
//   y_m,t = x_{t-1} + mix_m .* (x_t - x_{t-1})                            x_{-1} = first, or zeros
//
// PyTorch's layers call these functions; the layers of this folder have rows of f32 (token_shift_internal.h).
#ifndef HEED_LAYERS_SHIFTED_ROWS_INTERNAL_H_
#define HEED_LAYERS_SHIFTED_ROWS_INTERNAL_H_

#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/tensor.h"

namespace heed::layers {

// One float dtype; any strides, but the last axis is contiguous.
struct ShiftedRows {
  ConstTensorView x;      // [B, T, C]
  ConstTensorView first;  // [B, C]; absent: zeros
  ConstTensorView mix;    // [M, C]
};

// Only present tensors are computed, in the shape and dtype of what they are the gradients of.
struct ShiftedRowsGradients {
  TensorView dx, dfirst, dmix;
};

// Computes y, [M, B, T, C]. Any size may be 0.
//
// Computes in f32 (f64) and rounds once. The bits do not depend on threads.
//
// Throws InvalidArgument if a shape, dtype or stride disagrees with the above or an output overlaps another tensor.
void ShiftedRowsForward(Context& ctx, const ShiftedRows& in, const TensorView& y);

// Computes the gradients of <dy, y>.
void ShiftedRowsBackward(Context& ctx, const ShiftedRows& in, const ConstTensorView& dy,
                         const ShiftedRowsGradients& out);

// A checked call.
struct ShiftedRowsCall {
  ShiftedRows in;
  ConstTensorView dy;  // absent: forward
  TensorView y;
  ShiftedRowsGradients out;
  void* partials = nullptr;  // [tasks, M, C] in f32 (f64) for dmix; null: it is not computed
};

// Computes rows [begin, end) of the B T rows of a call, those of one task.
using ShiftedRowsKernel = void (*)(const ShiftedRowsCall&, int64_t task, int64_t begin, int64_t end);
ShiftedRowsKernel ShiftedRowsKernelFor(const Context& ctx);

}  // namespace heed::layers

#endif  // HEED_LAYERS_SHIFTED_ROWS_INTERNAL_H_
