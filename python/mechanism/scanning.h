// Binding of a mechanism on the scan engine, from its definition.
#ifndef PYTHON_MECHANISM_SCANNING_H_
#define PYTHON_MECHANISM_SCANNING_H_

#include <nanobind/nanobind.h>

#include <utility>

#include "python/mechanism/binding.h"
#include "heed/mechanism/scanning.h"
#include "heed/mechanism/scanning_internal.h"

namespace heed::scanning {

// Marks a tensor as read in place, since scans read any strides. Autocast converts tensors over tokens, which have more
// than two axes.
void ReadInPlace(binding::Parameter& parameter);

binding::Table<Api> TableOf(const Definition& definition);

template <class Options>
void Bind(nanobind::module_& m, binding::Binding binding, const Definition& definition,
          const binding::Passes<Api, Options>& passes) {
  binding.states_together = true;
  binding::Bind(m, std::move(binding), TableOf(definition), passes);
}

}  // namespace heed::scanning

#endif  // PYTHON_MECHANISM_SCANNING_H_
