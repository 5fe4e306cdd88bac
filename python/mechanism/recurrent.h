// Binding of a mechanism on the recurrence engine, from its definition.
#ifndef PYTHON_MECHANISM_RECURRENT_H_
#define PYTHON_MECHANISM_RECURRENT_H_

#include <nanobind/nanobind.h>

#include <utility>

#include "python/mechanism/binding.h"
#include "heed/mechanism/recurrent.h"
#include "heed/mechanism/recurrent_internal.h"

namespace heed::recurrent {

// The table of a definition; sets the shapes of o and states in `binding`.
binding::Table<Api> TableOf(const Definition& definition, binding::Binding& binding);

template <class Options>
void Bind(nanobind::module_& m, binding::Binding binding, const Definition& definition,
          const binding::Passes<Api, Options>& passes) {
  const binding::Table<Api> table = TableOf(definition, binding);
  binding::Bind(m, std::move(binding), table, passes);
}

}  // namespace heed::recurrent

#endif  // PYTHON_MECHANISM_RECURRENT_H_
