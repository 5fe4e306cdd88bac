// The shared state of the module's functions: threads, switches, the Context of a calling thread, and the table of
// mechanisms for `explain`.
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

// Process-wide settings. 0 threads means the CPUs of the affinity mask, which is read again for every call.
void SetNumThreads(int num_threads);
int NumThreads();
void SetChecks(bool on);
bool Checks();
void SetStrict(bool on);
bool Strict();

// The calling thread's Context for this number of threads; 0 means NumThreads(). It is kept, with its scratch memory,
// for the thread's next call.
Context& ThreadContext(int num_threads);

// The caller whose names an error uses: a Python function, or PyTorch's operator, which gets gradients from its graph.
enum class Caller { kPython, kTorch };

// A message of the C++ library with the caller's names: "attention::Forward: o has ..." becomes "attention: out has
// ...". One table lists the arguments whose names differ.
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

// `heed.explain(name, ...)` for one mechanism. The arguments are all but the name, dtype and threads.
using ExplainFunction = std::function<nanobind::dict(DType dtype, int num_threads, PyObject* kwargs)>;
void RegisterExplain(const char* name, ExplainFunction function);

// The common members of every explanation. Counts are doubles because they can exceed 2^63; whole numbers become ints
// in Python.
nanobind::dict Described(const std::string& kernel, const std::string& target, const std::string& why, double flops,
                         double bytes, int64_t workspace_bytes, double visited_pairs, bool invariant,
                         std::span<const char* const> copied);

// Binds explain, threads and switches.
void BindRuntime(nanobind::module_& m);

}  // namespace heed::python

#endif  // HEED_PYTHON_RUNTIME_H_
