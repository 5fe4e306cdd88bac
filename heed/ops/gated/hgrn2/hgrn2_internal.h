// The engine definition of hgrn2, and the equations of its reference.
#ifndef HEED_OPS_GATED_HGRN2_HGRN2_INTERNAL_H_
#define HEED_OPS_GATED_HGRN2_HGRN2_INTERNAL_H_

#include "heed/ops/gated/hgrn2/hgrn2.h"
#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"

namespace heed::hgrn2 {

recurrent::Definition DefinitionOf(const Options& options);

recurrent::ReferenceMath Math(const Inputs& in, const Options& options);

}  // namespace heed::hgrn2

#endif  // HEED_OPS_GATED_HGRN2_HGRN2_INTERNAL_H_
