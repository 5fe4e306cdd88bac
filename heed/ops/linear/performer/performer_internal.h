// Common parts of the files of Performer.
#ifndef HEED_OPS_LINEAR_PERFORMER_PERFORMER_INTERNAL_H_
#define HEED_OPS_LINEAR_PERFORMER_PERFORMER_INTERNAL_H_

#include "heed/ops/linear/performer/performer.h"
#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"

namespace heed::performer {

recurrent::Definition DefinitionOf(const Options& options);

recurrent::ReferenceMath Math(const Inputs& in, const Options& options);

}  // namespace heed::performer

#endif  // HEED_OPS_LINEAR_PERFORMER_PERFORMER_INTERNAL_H_
