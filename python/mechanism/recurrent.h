// Binding of a mechanism on the recurrence engine, from its definition.
#ifndef HEED_PYTHON_MECHANISM_RECURRENT_H_
#define HEED_PYTHON_MECHANISM_RECURRENT_H_

#include <nanobind/nanobind.h>

#include <utility>

#include "heed/mechanism/recurrent_internal.h"
#include "python/mechanism/binding.h"

namespace heed::recurrent {

// Sets what follows from the table of a definition.
void Describe(const Definition& definition, binding::Binding& binding);

template <class Structs, class Options>
void Bind(nanobind::module_& m, binding::Binding binding, const Definition& definition,
          const mechanism::Functions<Structs, Options>& functions,
          Options (*own)(const binding::Settings&) = &binding::Default<Options>) {
  Describe(definition, binding);
  binding::Bind<Structs, Options>(m, std::move(binding), functions, own);
}

}  // namespace heed::recurrent

#endif  // HEED_PYTHON_MECHANISM_RECURRENT_H_
