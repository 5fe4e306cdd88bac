// Arrays in and out of Python: DLPack and the buffer protocol to views, views
// to NumPy.
#ifndef HEED_PYTHON_TENSOR_CASTER_H_
#define HEED_PYTHON_TENSOR_CASTER_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <forward_list>
#include <memory>
#include <span>
#include <vector>

#include "heed/core/tensor.h"
#include "python/arguments.h"
#include "python/dlpack.h"

namespace heed::python {

// What an array argument may hold, for the message about a dtype that heed does
// not have.
enum class Kind { kFloat, kInt, kBool };

// The arrays of one call. Views are valid while this lives; it must be
// destroyed with the GIL held.
class Arrays {
 public:
  Arrays() = default;
  Arrays(const Arrays&) = delete;
  Arrays& operator=(const Arrays&) = delete;

  // Describe instead of compute: a tuple of ints is the shape of an array that
  // is not there.
  void AllowShapes(DType float_dtype) {
    allow_shapes_ = true;
    shape_dtype_ = float_dtype;
  }

  // An array of the caller, in place, or a copy if its last axis is not
  // contiguous. Anything on the CPU that has DLPack or a buffer, and NumPy
  // arrays of ml_dtypes.bfloat16, which have neither.
  ConstTensorView Read(const Argument& argument, Kind kind);

  // The same; a last axis of stride 0 stays, which a broadcast mask has.
  ConstTensorView ReadBroadcast(const Argument& argument, Kind kind);

  // The same as Read; a list or tuple of numbers too.
  ConstTensorView ReadList(const Argument& argument, Kind kind);

  // A vector of positions as i64, from any ints.
  ConstTensorView ReadPositions(const Argument& argument);

  // The same, to write to: never a copy.
  TensorView Write(const Argument& argument, Kind kind);

  // Names of the arguments that were copied.
  const std::vector<const char*>& copied() const { return copied_; }

 private:
  // Keeps the memory of one array.
  struct Holder {
    Holder() = default;
    Holder(const Holder&) = delete;
    Holder& operator=(const Holder&) = delete;
    ~Holder();

    Py_buffer buffer{};
    DLManagedTensor* tensor = nullptr;
    DLManagedTensorVersioned* versioned = nullptr;
    std::unique_ptr<char[]> copy;
  };
  struct Layout;

  enum class Rows {
    kContiguous,
    kContiguousOrRepeated,
    kAny
  };  // what may stay in place

  ConstTensorView Import(const Argument& argument, Kind kind, bool writable,
                         Rows rows);
  bool FromBuffer(const Argument& argument, nb::handle value, bool writable,
                  Layout& layout);
  bool FromDlpack(const Argument& argument, bool writable, Layout& layout);
  ConstTensorView View(const Argument& argument, Layout& layout, bool writable,
                       Rows rows);
  ConstTensorView FromShape(const Argument& argument, Kind kind);

  std::forward_list<Holder> holders_;
  std::vector<const char*> copied_;
  bool allow_shapes_ = false;
  DType shape_dtype_ = DType::kF32;
};

// A new NumPy array that owns its memory, not initialised, and its view. bf16
// needs ml_dtypes: throws Unsupported naming `operation` without it.
struct NewArray {
  NewArray(const char* operation, DType dtype, std::span<const int64_t> sizes);

  nb::object array;
  TensorView view;
};

}  // namespace heed::python

#endif  // HEED_PYTHON_TENSOR_CASTER_H_
