// NumPy arrays that heed makes.
#ifndef HEED_PYTHON_NUMPY_ARRAY_H_
#define HEED_PYTHON_NUMPY_ARRAY_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <span>

#include "heed/core/tensor.h"

namespace heed::python {

// A new NumPy array that owns its memory, not initialised, and its view. bf16
// needs ml_dtypes: throws Unsupported naming `operation` without it.
struct NewArray {
  NewArray(const char* operation, DType dtype, std::span<const int64_t> sizes);

  nanobind::object array;
  TensorView view;
};

// A named tuple of this type. Runs no code of Python, as calling the type would.
nanobind::object NewNamedTuple(nanobind::handle type, const nanobind::tuple& values);

// numpy.asarray(value). Throws nanobind::python_error.
nanobind::object NumPyArray(nanobind::handle value);

}  // namespace heed::python

#endif  // HEED_PYTHON_NUMPY_ARRAY_H_
