// Arrays of Python as views of heed: every array argument is converted here.
#ifndef HEED_PYTHON_TENSOR_CASTER_H_
#define HEED_PYTHON_TENSOR_CASTER_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <forward_list>
#include <vector>

#include "heed/core/tensor.h"
#include "python/arguments.h"
#include "python/array_import.h"

namespace heed::python {

// The kind of elements of an array argument, for the message about a dtype that heed does not have.
enum class Kind { kFloat, kInt, kBool };

// The arrays of one call. Views are valid while this object lives; it must be destroyed with the GIL held.
class Arrays {
 public:
  Arrays() = default;
  Arrays(const Arrays&) = delete;
  Arrays& operator=(const Arrays&) = delete;

  // For explain instead of compute: a tuple of ints is the shape of an array that does not exist.
  void AllowShapes(DType float_dtype) {
    allow_shapes_ = true;
    shape_dtype_ = float_dtype;
  }

  // Tensors of torch are read without a capsule, whether they require a gradient or not.
  void AllowTorch() { allow_torch_ = true; }

  // Tensors of torch on CUDA devices are accepted too, but only in place: a copy would have to wait for the device.
  void AllowDevices() { allow_devices_ = true; }

  // An array of the caller, in place, or a copy if its last axis is not contiguous. Accepts any object on the CPU that
  // has DLPack or a buffer, and NumPy arrays of ml_dtypes.bfloat16, which have neither.
  ConstTensorView Read(const Argument& argument, Kind kind);

  // Reads an array in place also if its last axis has stride 0, as a broadcast mask does.
  ConstTensorView ReadBroadcast(const Argument& argument, Kind kind);

  // Reads an array in place, whatever its strides.
  ConstTensorView ReadInPlace(const Argument& argument, Kind kind);

  // Reads a list or tuple of numbers too.
  ConstTensorView ReadList(const Argument& argument, Kind kind);

  // Reads a vector of positions as i64, from any ints.
  ConstTensorView ReadPositions(const Argument& argument);

  // A tensor to write to: never a copy.
  TensorView Write(const Argument& argument, Kind kind);

  // Names of the arguments that were copied.
  const std::vector<const char*>& copied() const { return copied_; }

 private:
  // The last axes that may stay in place.
  enum class Rows { kContiguous, kContiguousOrRepeated, kAny };

  ConstTensorView Import(const Argument& argument, Kind kind, bool writable, Rows rows);
  ConstTensorView View(const Argument& argument, ArrayLayout& layout, bool writable, Rows rows);
  ConstTensorView FromShape(const Argument& argument, Kind kind);

  std::forward_list<ArrayHolder> holders_;
  std::vector<const char*> copied_;
  bool allow_shapes_ = false;
  bool allow_torch_ = false;
  bool allow_devices_ = false;
  DType shape_dtype_ = DType::kF32;
};

// Throws for a tensor on a device whose values are needed while arguments are read.
void CheckOnCpu(const Argument& argument, const ConstTensorView& view);

}  // namespace heed::python

#endif  // HEED_PYTHON_TENSOR_CASTER_H_
