// Rows that are normed and multiplied by a gate, with gradients: one pass where elementwise operations take several.
//
//   y = r(x) x .* w .* a(g)                        r of a row: 1 / sqrt(mean of squares + eps), 1 / sqrt(sum of squares
//   + y = r(z) z .* w,  z = x .* a(g)   gate_first   eps), or the constant `factor`
//
// PyTorch's layers call these functions; the layers of this folder have rows of f32 (rows_internal.h).
#ifndef HEED_LAYERS_GATED_ROWS_INTERNAL_H_
#define HEED_LAYERS_GATED_ROWS_INTERNAL_H_

#include <cstddef>
#include <cstdint>

#include "heed/core/context.h"
#include "heed/core/tensor.h"

namespace heed::layers {

enum class RowNorm { kNone, kRms, kUnit };
enum class RowGate { kSilu, kSigmoid, kLogSigmoid };

// One float dtype; any leading axes and strides, but the last axis is contiguous. At least one of x and gate is
// present.
struct GatedRows {
  ConstTensorView x;       // [..., N]; absent: ones, which kNone alone allows
  ConstTensorView gate;    // [..., N], the shape of x; absent: none
  ConstTensorView weight;  // [N], or [H, N] for x [..., H, N]; absent: ones, as with kNone
  RowNorm norm = RowNorm::kRms;
  RowGate activation = RowGate::kSilu;
  bool gate_first = false;
  double eps = 0;     // of a norm
  double factor = 1;  // of kNone
};

// Only present tensors are computed, in the shape and dtype of what they are the gradients of.
struct GatedRowsGradients {
  TensorView dx, dgate, dweight;
};

// Computes y, in the shape and dtype of x or gate. Any size may be 0.
//
// Computes in f32 (f64) and rounds once. The bits of a row depend on nothing but the row and the SIMD target; those of
// dweight depend on the number of rows too, never on threads.
//
// Throws InvalidArgument if a shape, dtype or stride disagrees with the above or an output overlaps another tensor.
void GatedRowsForward(Context& ctx, const GatedRows& in, const TensorView& y);

// Computes the gradients of <dy, y>.
void GatedRowsBackward(Context& ctx, const GatedRows& in, const ConstTensorView& dy, const GatedRowsGradients& out);

// A checked call. A unit of work is a row, or without a norm `columns` of its elements.
struct GatedRowsCall {
  GatedRows in;
  ConstTensorView dy;  // absent: forward
  TensorView y;
  GatedRowsGradients out;    // without dweight
  void* partials = nullptr;  // [tasks, weight's shape] in f32 (f64); null: dweight is not computed
  int64_t columns = 0, units_of_row = 0;
  const ConstTensorView& like() const { return in.x.present() ? in.x : in.gate; }
};

// Computes units [begin, end) of a call, those of one task.
using GatedRowsKernel = void (*)(const GatedRowsCall&, int64_t task, int64_t begin, int64_t end);
GatedRowsKernel GatedRowsKernelFor(const Context& ctx);

}  // namespace heed::layers

#endif  // HEED_LAYERS_GATED_ROWS_INTERNAL_H_
