// The GIL, and threads that are still inside a call of heed when the interpreter ends.
//
// Before Python 3.14, a daemon thread that requests the GIL while the interpreter finalises is ended by unwinding its
// stack. This ends the process too: destructors do not let the exception pass, and some would need the GIL themselves.
// A thread that may be ended in this way therefore sleeps until the process exits.
#ifndef HEED_PYTHON_GIL_H_
#define HEED_PYTHON_GIL_H_

#include <Python.h>

#include <exception>
#include <utility>

namespace heed::python {

[[noreturn]] void StayForever();

// Releases the GIL as long as it lives.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased();
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* const state_;
};

// Calls f(), which runs Python code, so that other threads may get the GIL meanwhile. It should own nothing: if the
// thread is ended here, the objects that it owns are destroyed without the GIL.
template <class F>
auto RunPython(F&& f) {
  try {
    return std::forward<F>(f)();
  } catch (const std::exception&) {
    throw;
  } catch (...) {
    StayForever();
  }
}

}  // namespace heed::python

#endif  // HEED_PYTHON_GIL_H_
