// What all functions of the module share: threads, switches, the Context of a
// calling thread, and the table of mechanisms that `explain` knows.
#ifndef HEED_PYTHON_RUNTIME_H_
#define HEED_PYTHON_RUNTIME_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "heed/core/context.h"
#include "heed/core/dtype.h"
#include "heed/core/error.h"
#include "python/arguments.h"
#include "python/gil.h"

namespace heed::python {

inline constexpr int64_t kMaxThreads = 4096;

// Process-wide settings. 0 threads: the CPUs of the affinity mask, asked anew
// for every call.
void SetNumThreads(int num_threads);
int NumThreads();
void SetChecks(bool on);
bool Checks();
void SetStrict(bool on);
bool Strict();

// The calling thread's Context for this many threads; 0 is NumThreads(). Kept,
// with its scratch, for the thread's next call.
Context& ThreadContext(int num_threads);

// Whose words an error has: those of a Python function, or of PyTorch's operator, which gets gradients from its graph.
enum class Caller { kPython, kTorch };

// A message of the C++ surface in the caller's words: "attention::Forward: o has ..." becomes "attention: out has ...".
// One table has the arguments that C++ calls otherwise.
std::string Reworded(Caller caller, const std::string& operation, const std::string& message);

// Calls f() without the GIL; its errors name `operation` and the caller's arguments.
template <class F>
void ComputeFor(Caller caller, const char* operation, F&& f) {
  try {
    const GilReleased released;
    f();
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(Reworded(caller, operation, error.what()));
  } catch (const Unsupported& error) {
    throw Unsupported(Reworded(caller, operation, error.what()));
  }
}
template <class F>
void Compute(const char* operation, F&& f) {
  ComputeFor(Caller::kPython, operation, f);
}
template <class F>
void ComputeForTorch(const char* operation, F&& f) {
  ComputeFor(Caller::kTorch, operation, f);
}

// `heed.explain(name, ...)` for one mechanism: everything but the name, dtype
// and threads.
using ExplainFunction = std::function<nanobind::dict(DType dtype, int num_threads, PyObject* kwargs)>;
void RegisterExplain(const char* name, ExplainFunction function);

// What every explanation has. Counts are doubles because they can pass 2^63; whole ones
// are ints to Python.
nanobind::dict Described(const std::string& kernel, const std::string& target, const std::string& why, double flops,
                         double bytes, int64_t workspace_bytes, double visited_pairs, bool invariant,
                         std::span<const char* const> copied);

// Binds explain, threads and switches.
void BindRuntime(nanobind::module_& m);

}  // namespace heed::python

#endif  // HEED_PYTHON_RUNTIME_H_
