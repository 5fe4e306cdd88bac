// NumPy arrays that heed makes.
#include "python/numpy_array.h"

#include <nanobind/stl/string.h>  // IWYU pragma: keep

#include <atomic>
#include <string>

#include "heed/core/error.h"
#include "python/buffer.h"
#include "python/gil.h"

namespace heed::python {
namespace {

namespace nb = nanobind;

// Never destroyed: the interpreter is gone when static objects are destroyed.
struct NumPy {
  nb::object* module = new nb::object(RunPython([] { return nb::module_::import_("numpy"); }));
  nb::object* empty = new nb::object(module->attr("empty"));
  nb::object* asarray = new nb::object(module->attr("asarray"));
  nb::object* dtypes[7];

  NumPy() {
    const char* names[7] = {"float64", "float32", "uint16", "float16", "int64", "int32", "bool"};
    for (int i = 0; i < 7; ++i) dtypes[i] = new nb::object(module->attr("dtype")(names[i]));
  }

  // Imported when the first array is made, not with heed. It is not a static local, because an import lets other
  // threads run, and they would wait for it with the GIL held.
  static const NumPy& Get() {
    static std::atomic<const NumPy*> made{nullptr};
    const NumPy* numpy = made.load(std::memory_order_acquire);
    if (numpy == nullptr) {
      numpy = new NumPy;
      made.store(numpy, std::memory_order_release);
    }
    return *numpy;
  }
};

}  // namespace

nb::object NumPyArray(nb::handle value) {
  const nb::object& asarray = *NumPy::Get().asarray;
  return RunPython([&] { return asarray(value); });
}

nb::object NamedTupleType(nb::module_& m, const std::string& name, const std::string& fields, const std::string& doc) {
  nb::object type = nb::module_::import_("collections").attr("namedtuple")(name, fields);
  type.attr("__module__") = m.attr("__name__");  // the package makes it its own, as of every class
  type.attr("__doc__") = doc;
  m.attr(name.c_str()) = type;
  return type;
}

std::string TypeName(nb::handle type) { return nb::cast<std::string>(type.attr("__name__")); }

std::string GradientsDoc(const std::string& backward) {
  return "What " + backward +
         " returns: gradients, each in the shape and dtype of its argument;\n"
         "None if the argument was not given.";
}

nb::object NewNamedTuple(nb::handle type, const nb::tuple& values) {
  const nb::tuple arguments = nb::make_tuple(values);
  static const auto new_tuple = reinterpret_cast<newfunc>(PyType_GetSlot(&PyTuple_Type, Py_tp_new));
  nb::object tuple = nb::steal(new_tuple(reinterpret_cast<PyTypeObject*>(type.ptr()), arguments.ptr(), nullptr));
  if (!tuple.is_valid()) throw nb::python_error();
  return tuple;
}

NewArray::NewArray(const char* operation, DType dtype, std::span<const int64_t> sizes) {
  const NumPy& numpy = NumPy::Get();
  PyObject* shape = PyTuple_New(static_cast<Py_ssize_t>(sizes.size()));
  if (shape == nullptr) throw nb::python_error();
  nb::object owner = nb::steal(shape);
  for (size_t i = 0; i < sizes.size(); ++i) {
    NB_TUPLE_SET_ITEM(shape, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(sizes[i]));
  }
  array = (*numpy.empty)(owner, *numpy.dtypes[static_cast<int>(dtype)]);
  // No other object refers to the array, so its memory stays in place although the buffer is released.
  Buffer buffer;
  if (!buffer.Get(array, Buffer::kSimple)) throw nb::python_error();
  view = TensorView(buffer->buf, dtype, sizes);
  if (dtype == DType::kBF16) {
    try {
      const nb::object ml_dtypes = RunPython([] { return nb::module_::import_("ml_dtypes"); });
      array = array.attr("view")(ml_dtypes.attr("bfloat16"));
    } catch (const nb::python_error& error) {
      if (!error.matches(PyExc_ImportError)) throw;
      throw Unsupported(std::string(operation) +
                        ": a bf16 result needs the package ml_dtypes, which is "
                        "not installed");
    }
  }
}

}  // namespace heed::python
