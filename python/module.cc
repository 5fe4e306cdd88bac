// The extension module heed._core: errors, shared functions, and all mechanisms of heed/ops.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "docstrings/alibi.h"
#include "heed/core/error.h"
#include "heed/ops/positions/alibi.h"
#include "python/advise.h"
#include "python/caches/kv_cache_py.h"
#include "python/arguments.h"
#include "python/docstring.h"
#include "python/layer_rows.h"
#include "python/numpy_array.h"
#include "python/positions.h"
#include "python/runtime.h"
#include "python/torch_host.h"
#include "python/view.h"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace heed {

// Generated from heed/ops/CMakeLists.txt: calls Bind of every mechanism.
void BindAllOps(nb::module_& m);

namespace python {

void BindOrthogonalFeatures(nb::module_& m);  // heed/ops/linear/performer/orthogonal_features_py.cc
void BindPatterns(nb::module_& m);            // heed/patterns/pattern_py.cc
void BindNSACache(nb::module_& m);            // python/caches/nsa_cache_py.cc

namespace {

constexpr int64_t kMostHeads = 1 << 20;
constexpr Said kAlibiArguments[] = {{"heads", "number of heads, at least 1"}};

nb::object AlibiSlopesArray(nb::handle heads) {
  const std::vector<double> slopes = AlibiSlopes(ToInt({"alibi_slopes", "heads", heads}, 1, kMostHeads));
  const int64_t size = static_cast<int64_t>(slopes.size());
  NewArray result("alibi_slopes", DType::kF32, {&size, 1});
  std::transform(slopes.begin(), slopes.end(), result.view.as<float>(),
                 [](double slope) { return static_cast<float>(slope); });
  return result.array;
}

// The beginning of CPython's type object, which no Python 3 has changed. The limited API reads the slot of attribute
// lookup (PyType_GetSlot), but does not write it.
struct TypeHead {
  PyVarObject head;
  const void* from_name_to_str[15];  // tp_name, ..., tp_str
  getattrofunc getattro;
};
#ifndef Py_LIMITED_API
static_assert(offsetof(TypeHead, getattro) == offsetof(PyTypeObject, tp_getattro));
#endif

// nanobind's attribute lookup for each type of its functions.
std::unordered_map<PyTypeObject*, getattrofunc> attributes_of_nanobind;

// Finds an attribute as nanobind does, except __doc__: nanobind would return the signature of every overload, and here
// Python finds the text in the type.
PyObject* FindAttribute(PyObject* self, PyObject* name) {
  if (PyUnicode_CompareWithASCIIString(name, "__doc__") == 0) {
    return PyObject_GenericGetAttr(self, name);
  }
  return attributes_of_nanobind.at(Py_TYPE(self))(self, name);
}

// Adds an attribute to a type of nanobind's functions, which Python code cannot change. The types belong to the domain
// heed, which no other module has.
void AddAttribute(nb::handle type, const char* name, nb::handle value) {
  auto* of = reinterpret_cast<PyTypeObject*>(type.ptr());
  const auto slot = reinterpret_cast<getattrofunc>(PyType_GetSlot(of, Py_tp_getattro));
  auto* head = reinterpret_cast<TypeHead*>(of);
  // In a Python that moves the slot, __doc__ stays nanobind's.
  if (head->getattro == slot && slot != &FindAttribute) {
    attributes_of_nanobind.emplace(of, slot);
    head->getattro = &FindAttribute;
  }
  const nb::object attributes = nb::steal(PyObject_GenericGetDict(type.ptr(), nullptr));
  if (!attributes.is_valid() || PyDict_SetItemString(attributes.ptr(), name, value.ptr()) != 0) {
    throw nb::python_error();
  }
  PyType_Modified(of);
}

}  // namespace
}  // namespace python
}  // namespace heed

NB_MODULE(_core_of_any_interpreter, m) {
  m.attr("__doc__") = "heed's C++ functions. Use them through the package heed.";
  // An object that others keep until Python ends (torch.compile does) is not a leak of this module.
  nb::set_leak_warnings(false);
  m.attr("__version__") = HEED_VERSION;

  nb::exception<heed::InvalidArgument>(m, "InvalidArgument", PyExc_ValueError).attr("__doc__") =
      "A wrong shape, dtype or option: the message names function, argument, "
      "actual and expected value.";
  nb::exception<heed::Unsupported>(m, "Unsupported", PyExc_RuntimeError).attr("__doc__") =
      "A valid call that this build or machine does not support.";
  nb::exception<heed::FileError>(m, "FileError", PyExc_OSError).attr("__doc__") =
      "A file that cannot be read, written or trusted: the message begins with its path.";

  m.def(
      "alibi_slopes", &heed::python::AlibiSlopesArray, "heads"_a.none(),
      nb::sig("def alibi_slopes(heads: int) -> "
              "numpy.typing.NDArray[numpy.float32]"),
      heed::python::Docstring(heed::doc::kAlibiSlopes, "def alibi_slopes(heads: int)", {heed::python::kAlibiArguments},
                              "Example:\n\n  >>> import heed\n  >>> heed.alibi_slopes(4).tolist()\n"
                              "  [0.25, 0.0625, 0.015625, 0.00390625]")
          .c_str());
  m.def("_add_attribute", &heed::python::AddAttribute);
  heed::python::BindPositions(m);
  heed::python::BindLayerRows(m);
  heed::python::BindOrthogonalFeatures(m);
  heed::python::BindPatterns(m);
  heed::python::BindRuntime(m);
  heed::python::BindTorchHost(m);
  heed::BindAllOps(m);
  heed::python::BindKVCacheBase(m);
  heed::python::BindKVCache(m);
  heed::python::BindRingKVCache(m);
  heed::python::BindLatentKVCache(m);
  heed::python::BindNSACache(m);
  heed::python::BindView(m);
  heed::python::BindAdvise(m);
}

// nanobind knows the types of one interpreter only: those of a second one would replace them. The function that its
// macro defines would be called too late to refuse.
extern "C" NB_EXPORT PyObject* PyInit__core();
extern "C" PyObject* PyInit__core() {
  static std::atomic<int64_t> first_interpreter{-1};
  const int64_t interpreter = PyInterpreterState_GetID(PyInterpreterState_Get());
  int64_t first = -1;
  if (!first_interpreter.compare_exchange_strong(first, interpreter) && first != interpreter) {
    PyErr_Format(PyExc_ImportError,
                 "import heed: interpreter %lld of this process has imported it, and this is %lld, "
                 "expected one interpreter per process",
                 static_cast<long long>(first), static_cast<long long>(interpreter));
    return nullptr;
  }
  return PyInit__core_of_any_interpreter();
}
