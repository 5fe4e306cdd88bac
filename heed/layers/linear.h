// Linear: products of rows with a matrix of weights, which is packed once when it is loaded.
//
//   y = x W^T + b      x: [rows, inputs] f32, W: [outputs, inputs] f32 or bf16, b: [outputs]
//
// Each output is one chain of FMAs in f32, inputs ascending, to which the bias is added. The bits of a row depend
// neither on threads nor on the other rows: prefill and decoding agree to the bit.
//
// Cost. 2 inputs outputs flops per row, bound by arithmetic; for few rows one pass over the weights, bound by memory.
// bf16 halves the bytes of that pass and takes the same time where arithmetic is the bound. Weights are padded to 64
// outputs.
#ifndef HEED_LAYERS_LINEAR_H_
#define HEED_LAYERS_LINEAR_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/export.h"
#include "heed/core/tensor.h"

namespace heed::layers {

// Some outputs of a matrix that consists of several parts: the rows of one weight, and its bias.
struct LinearPart {
  ConstTensorView weight;     // [rows, inputs], or [inputs, rows] if `transposed`
  ConstTensorView bias = {};  // [rows], any float dtype; absent: 0
  bool transposed = false;
};

class HEED_API Linear {
 public:
  Linear() = default;  // absent

  // Copies the parts. The copy is bf16 if all parts are; f32, f16 and f64 are kept in f32. Strides are free. Throws
  // InvalidArgument for other dtypes and ranks, for no part, for parts of different inputs, a bias of another size, and
  // sizes below 1.
  explicit Linear(std::span<const LinearPart> parts);
  explicit Linear(const ConstTensorView& weight, const ConstTensorView& bias = {});

  bool present() const { return panels_ != nullptr; }
  int64_t inputs() const { return inputs_; }
  int64_t outputs() const { return outputs_; }
  DType dtype() const { return dtype_; }
  int64_t nbytes() const;  // bytes of the packed weights

  // y = x W^T + b. x [rows, inputs] and y [rows, outputs] are f32, each row contiguous, with any distance between rows;
  // y shares no memory with x. The number of rows may be 0. Throws InvalidArgument for anything else.
  void Forward(Context& ctx, const ConstTensorView& x, const TensorView& y) const;

  // Forward() without checks, for layers.
  void Rows(Context& ctx, const float* x, int64_t x_stride, int64_t rows, float* y, int64_t y_stride) const;

  // Computes Forward() for one matrix, written for reading: in double. Outputs may have dtype f64.
  static void Reference(const ConstTensorView& x, const ConstTensorView& weight, const ConstTensorView& bias,
                        const TensorView& y);

 private:
  friend struct LinearAccess;  // for products of several matrices

  int64_t inputs_ = 0, outputs_ = 0;
  DType dtype_ = DType::kF32;
  std::shared_ptr<const void> panels_;
  std::vector<float> bias_;  // padded like the outputs; empty: none
};

}  // namespace heed::layers

#endif  // HEED_LAYERS_LINEAR_H_
