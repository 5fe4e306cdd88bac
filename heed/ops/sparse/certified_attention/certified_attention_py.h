// Certified attention over a cache, for the bindings of caches.
#ifndef HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_ATTENTION_PY_H_
#define HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_ATTENTION_PY_H_

#include <nanobind/nanobind.h>

#include <string>
#include <utility>

#include "python/caches/kv_cache_py.h"

namespace heed::certified_attention {

// cache.attend(q, *, epsilon=None, level='auto', return_bound=False, ...): attention::AttendOn() without an epsilon.
// With one, returns o, followed by the requested bound and lse.
nanobind::object AttendOn(const python::CacheOwner& cache, const nanobind::args& args, const nanobind::kwargs& kwargs);

// AttendOn for heed.torch: writes the results to the tensors `out` and, if given, `lse` and `bound`.
void AttendOnTorch(const python::CacheOwner& cache, const nanobind::args& args, const nanobind::kwargs& kwargs);

const char* AttendSignature(bool bound, bool lse);
std::string AttendText();

// Adds `attend` to a cache class, whose caches may have a sketch.
template <class Class>
void DefineAttend(Class& bound) {
  const std::string text = AttendText();
  for (const auto& [of_bound, of_lse] : {std::pair{false, false}, {false, true}, {true, false}, {true, true}}) {
    bound.def("attend", &AttendOn, nanobind::sig(AttendSignature(of_bound, of_lse)), text.c_str());
  }
}

}  // namespace heed::certified_attention

#endif  // HEED_OPS_SPARSE_CERTIFIED_ATTENTION_CERTIFIED_ATTENTION_PY_H_
