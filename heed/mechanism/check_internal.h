// Checks of the tensors of an operation, with messages that give the operation, argument, actual and expected value.
#ifndef HEED_MECHANISM_CHECK_INTERNAL_H_
#define HEED_MECHANISM_CHECK_INTERNAL_H_

#include <array>
#include <cstddef>
#include <string>

#include "heed/core/tensor.h"
#include "heed/mechanism/table_internal.h"

namespace heed::mechanism {

// Throws InvalidArgument "rotary: dim is 3, expected ...".
[[noreturn]] void Fail(const char* op, const char* name, const std::string& got, const std::string& expected);

// "0.5", "1e+39".
std::string Text(double value);

// Checks that a tensor is present, on the device, aligned, and has data if it has elements.
void CheckReadable(const char* op, const char* name, const ConstTensorView& t, Device device = {});

// Throws unless the dtype is a float.
void CheckFloat(const char* op, const char* name, const ConstTensorView& t);

// f64 for f64, else f32: the dtype of states and of accumulation.
DType StateDType(DType dtype);

// Throws unless the tensor is present and has this dtype and shape. With `data` false, pointers may be null.
void CheckTensor(const char* op, const char* name, const ConstTensorView& t, const Axes& shape, DType dtype, bool data,
                 Device device = {});

// Throws for a value above 0 or NaN.
void CheckNotPositive(const char* op, const char* name, const ConstTensorView& t);

// Bytes of a tensor; 0 if absent.
double Bytes(const ConstTensorView& t);

// Throws unless the last axis has stride 1.
void CheckContiguousRows(const char* op, const char* name, const ConstTensorView& t);

// Throws unless the tensor is readable on the CPU, has no overlapping elements, and shares no memory with `in`, which
// messages call `in_name`.
void CheckWritable(const char* op, const char* name, const TensorView& t, const char* in_name,
                   const ConstTensorView& in);

// Checks that the outputs of a call share no memory with its inputs or each other. Allocates nothing.
class Apart {
 public:
  // Outputs are on this device.
  explicit Apart(Device device = {}) : device_(device) {}
  // Skips absent tensors.
  void Reads(const char* name, const ConstTensorView& t);
  // Checks that it is writable and apart from all previous tensors, then adds it to them.
  void Writes(const char* op, const char* name, const TensorView& t);
  // First checks that it is present, with this shape and dtype.
  void Writes(const char* op, const char* name, const TensorView& t, const Axes& shape, DType dtype) {
    CheckTensor(op, name, t, shape, dtype, true, device_);
    Writes(op, name, t);
  }

 private:
  struct Named {
    std::array<char, 32> name;  // a copy that ends with 0: callers pass temporary names too
    ConstTensorView view;
  };
  Device device_;
  std::array<Named, 48> tensors_;
  size_t count_ = 0;
};

}  // namespace heed::mechanism

#endif  // HEED_MECHANISM_CHECK_INTERNAL_H_
