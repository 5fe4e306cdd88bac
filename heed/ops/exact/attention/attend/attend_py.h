// Attention over a cache, for the bindings of the cache classes.
#ifndef HEED_OPS_EXACT_ATTENTION_ATTEND_ATTEND_PY_H_
#define HEED_OPS_EXACT_ATTENTION_ATTEND_ATTEND_PY_H_

#include <nanobind/nanobind.h>

#include <string>

#include "docstrings/attend.h"
#include "python/caches/kv_cache_py.h"
#include "python/caches/kv_cache_signature_py.h"

namespace heed::attention {

// cache.attend(q, *, ...): returns o, or (o, lse), as NumPy arrays.
nanobind::object AttendOn(const python::CacheOwner& cache, const nanobind::args& args, const nanobind::kwargs& kwargs);

// cache.quantization_bound(q, *, ...): returns (logit, output).
nanobind::object BoundOn(const python::CacheOwner& cache, const nanobind::args& args, const nanobind::kwargs& kwargs);

// AttendOn for heed.torch: writes the results to the tensors `out` and, if given, `lse`.
void AttendOnTorch(const python::CacheOwner& cache, const nanobind::args& args, const nanobind::kwargs& kwargs);

// Returns a signature of `attend` or a similar method in which the options that a cache takes are spelled out.
const char* SpelledForCache(const std::string& signature);

// Adds `attend` to a cache class.
template <class Class>
void DefineAttend(Class& bound, const char* signature, const char* lse_signature) {
  namespace nb = nanobind;
  const std::string text =
      python::Docstring(doc::kAttend, signature, {python::kAttendArguments}, python::kAttendInPython);
  bound.def("attend", &AttendOn, nb::sig(SpelledForCache(signature)), text.c_str())
      .def("attend", &AttendOn, nb::sig(SpelledForCache(lse_signature)), text.c_str());
}

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTEND_ATTEND_PY_H_
