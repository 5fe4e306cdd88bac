// Common parts of the files of Based.
#ifndef HEED_OPS_LINEAR_BASED_BASED_INTERNAL_H_
#define HEED_OPS_LINEAR_BASED_BASED_INTERNAL_H_

#include "heed/ops/linear/based/based.h"
#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"

namespace heed::based {

recurrent::Definition DefinitionOf(const Options& options);

recurrent::ReferenceMath Math(const Inputs& in, const Options& options);

}  // namespace heed::based

#endif  // HEED_OPS_LINEAR_BASED_BASED_INTERNAL_H_
