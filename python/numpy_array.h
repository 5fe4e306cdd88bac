// NumPy arrays that heed makes.
#ifndef HEED_PYTHON_NUMPY_ARRAY_H_
#define HEED_PYTHON_NUMPY_ARRAY_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <span>

#include "heed/core/tensor.h"

namespace heed::python {

// A new NumPy array that owns its uninitialised memory, and its view. bf16 needs ml_dtypes: throws Unsupported naming
// `operation` without it.
struct NewArray {
  NewArray(const char* operation, DType dtype, std::span<const int64_t> sizes);

  nanobind::object array;
  TensorView view;
};

// A new type of named tuples, which becomes an attribute of `m`, so that its objects can be pickled. `fields` are
// separated by spaces.
nanobind::object NamedTupleType(nanobind::module_& m, const std::string& name, const std::string& fields,
                                const std::string& doc);

// The name of a type.
std::string TypeName(nanobind::handle type);

// The documentation of the named tuple that a function `backward` returns.
std::string GradientsDoc(const std::string& backward);

// A named tuple of this type. Unlike a call of the type, this runs no Python code.
nanobind::object NewNamedTuple(nanobind::handle type, const nanobind::tuple& values);

// numpy.asarray(value). Throws nanobind::python_error.
nanobind::object NumPyArray(nanobind::handle value);

}  // namespace heed::python

#endif  // HEED_PYTHON_NUMPY_ARRAY_H_
