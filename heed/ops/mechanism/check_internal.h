// Checks of the tensors of a part, with messages that name operation, argument,
// what it got and what it expected.
#ifndef HEED_OPS_MECHANISM_CHECK_INTERNAL_H_
#define HEED_OPS_MECHANISM_CHECK_INTERNAL_H_

#include <array>
#include <cstddef>
#include <string>

#include "heed/core/tensor.h"
#include "heed/ops/mechanism/table_internal.h"

namespace heed::mechanism {

// Throws InvalidArgument "rotary: dim is 3, expected ...".
[[noreturn]] void Fail(const char* op, const char* name, const std::string& got, const std::string& expected);

// "0.5", "1e+39".
std::string Text(double value);

// Present, on the device, aligned, with data where there are elements.
void CheckReadable(const char* op, const char* name, const ConstTensorView& t, Device device = {});

// Throws unless the dtype is a float.
void CheckFloat(const char* op, const char* name, const ConstTensorView& t);

// f64, or f32: of states, and what is computed in.
DType StateDType(DType dtype);

// Throws unless the tensor is there and has this dtype and shape. With `data` false, pointers may be null.
void CheckTensor(const char* op, const char* name, const ConstTensorView& t, const Axes& shape, DType dtype, bool data,
                 Device device = {});

// No value above 0, nor NaN.
void CheckNotPositive(const char* op, const char* name, const ConstTensorView& t);

// What a tensor has; 0 of one that is absent.
double Bytes(const ConstTensorView& t);

// The last axis has stride 1.
void CheckContiguousRows(const char* op, const char* name, const ConstTensorView& t);

// Readable on the CPU, every element reached once, sharing no memory with `in`, which
// messages call `in_name`.
void CheckWritable(const char* op, const char* name, const TensorView& t, const char* in_name,
                   const ConstTensorView& in);

// The tensors of a call, so that what it writes shares no memory with what it reads or
// with each other. Allocates nothing but for long names.
class Apart {
 public:
  // What is written is on this device.
  explicit Apart(Device device = {}) : device_(device) {}
  // Absent ones are left out.
  void Reads(const char* name, const ConstTensorView& t);
  // Writable, apart from all before, which it joins.
  void Writes(const char* op, const char* name, const TensorView& t);
  // Checks before that it is there, of this shape and dtype.
  void Writes(const char* op, const char* name, const TensorView& t, const Axes& shape, DType dtype) {
    CheckTensor(op, name, t, shape, dtype, true, device_);
    Writes(op, name, t);
  }

 private:
  struct Named {
    std::string name;
    ConstTensorView view;
  };
  Device device_;
  std::array<Named, 32> tensors_;
  size_t count_ = 0;
};

}  // namespace heed::mechanism

#endif  // HEED_OPS_MECHANISM_CHECK_INTERNAL_H_
