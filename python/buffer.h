// Python's buffer protocol. Python 3.10 has it, but its limited API lacks it: that begins with 3.11.
#ifndef HEED_PYTHON_BUFFER_H_
#define HEED_PYTHON_BUFFER_H_

#include <nanobind/nanobind.h>

namespace heed::python {

namespace nb = nanobind;

// The fields of Py_buffer, which is the same in every Python 3 and part of the stable ABI from 3.11 on.
struct BufferView {
  void* buf;
  PyObject* obj;
  Py_ssize_t len;
  Py_ssize_t itemsize;
  int readonly;
  int ndim;
  char* format;
  Py_ssize_t* shape;
  Py_ssize_t* strides;
  Py_ssize_t* suboffsets;
  void* internal;
};

// One buffer of an exporter, released with the GIL held.
class Buffer {
 public:
  // Python's PyBUF_SIMPLE, PyBUF_FORMAT and PyBUF_STRIDES.
  static constexpr int kSimple = 0, kFormat = 0x4, kStrided = 0x18;

  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  static bool Has(nb::handle exporter);

  // False with a pending Python error if the exporter refuses. Called at most once.
  bool Get(nb::handle exporter, int flags);

  const BufferView& operator*() const { return view_; }
  const BufferView* operator->() const { return &view_; }

 private:
  BufferView view_{};
};

}  // namespace heed::python

#endif  // HEED_PYTHON_BUFFER_H_
