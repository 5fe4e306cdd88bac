// The buffer protocol's functions, found by name in the running Python.
#include "python/buffer.h"

#include <dlfcn.h>

#include <cstddef>
#include <stdexcept>
#include <string>

namespace heed::python {
namespace {

#ifdef PyBUF_SIMPLE
static_assert(sizeof(BufferView) == sizeof(Py_buffer) &&
              offsetof(BufferView, internal) == offsetof(Py_buffer, internal));
static_assert(Buffer::kSimple == PyBUF_SIMPLE && Buffer::kFormat == PyBUF_FORMAT && Buffer::kStrided == PyBUF_STRIDES);
#endif

template <class Function>
Function* Find(const char* name) {
  auto* function = reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
  if (function == nullptr) throw std::runtime_error(std::string("heed: this Python has no function ") + name);
  return function;
}

struct Protocol {
  int (*check)(PyObject*) = Find<int(PyObject*)>("PyObject_CheckBuffer");
  int (*get)(PyObject*, BufferView*, int) = Find<int(PyObject*, BufferView*, int)>("PyObject_GetBuffer");
  void (*release)(BufferView*) = Find<void(BufferView*)>("PyBuffer_Release");

  static const Protocol& OfThisPython() {
    static const Protocol protocol;
    return protocol;
  }
};

}  // namespace

Buffer::~Buffer() {
  if (view_.obj != nullptr) Protocol::OfThisPython().release(&view_);
}

bool Buffer::Has(nb::handle exporter) { return Protocol::OfThisPython().check(exporter.ptr()) != 0; }

bool Buffer::Get(nb::handle exporter, int flags) {
  return Protocol::OfThisPython().get(exporter.ptr(), &view_, flags) == 0;
}

}  // namespace heed::python
