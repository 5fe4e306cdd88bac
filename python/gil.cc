// Threads that are still inside a call of heed when the interpreter ends.
#include "python/gil.h"

#include <chrono>
#include <thread>

namespace heed::python {

void StayForever() {
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

GilReleased::~GilReleased() {
  try {
    PyEval_RestoreThread(state_);
  } catch (...) {
    StayForever();
  }
}

}  // namespace heed::python
