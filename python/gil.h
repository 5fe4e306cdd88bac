// The GIL, and threads that are still in a call of heed when the interpreter ends.
//
// Before Python 3.14 a daemon thread that wants the GIL while the interpreter finalises is
// ended by unwinding its stack. That ends the process, too: destructors do not let it pass, and
// those that would need the GIL. So wherever a thread may meet its end it stays, asleep, until
// the process is gone.
#ifndef HEED_PYTHON_GIL_H_
#define HEED_PYTHON_GIL_H_

#include <Python.h>

#include <exception>
#include <utility>

namespace heed::python {

[[noreturn]] void StayForever();

// Without the GIL for as long as it lives.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased();
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* const state_;
};

// f(), which runs code of Python, so that the GIL may go to others for a while. It should own
// nothing: what it owns is given up without the GIL if this is the thread's end.
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
