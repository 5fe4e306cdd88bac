// The engine definition of simple_gla, and the equations of its reference.
#ifndef HEED_OPS_GATED_SIMPLE_GLA_SIMPLE_GLA_INTERNAL_H_
#define HEED_OPS_GATED_SIMPLE_GLA_SIMPLE_GLA_INTERNAL_H_

#include "heed/ops/gated/simple_gla/simple_gla.h"
#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"

namespace heed::simple_gla {

recurrent::Definition DefinitionOf(const Options& options);

recurrent::ReferenceMath Math(const Inputs& in, const Options& options);

}  // namespace heed::simple_gla

#endif  // HEED_OPS_GATED_SIMPLE_GLA_SIMPLE_GLA_INTERNAL_H_
