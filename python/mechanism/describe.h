// Bindings of mechanisms on an engine follow from their definitions.
#ifndef HEED_PYTHON_MECHANISM_DESCRIBE_H_
#define HEED_PYTHON_MECHANISM_DESCRIBE_H_

#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/scanning_internal.h"
#include "python/mechanism/binding.h"

// Sets what follows from the table of a definition.
namespace heed::recurrent {
void Describe(const Definition& definition, binding::Binding& binding);
}
namespace heed::scanning {
void Describe(const Definition& definition, binding::Binding& binding);
}

#endif  // HEED_PYTHON_MECHANISM_DESCRIBE_H_
