// The engine definition of gla, and the equations of its reference.
#ifndef HEED_OPS_GATED_GLA_GLA_INTERNAL_H_
#define HEED_OPS_GATED_GLA_GLA_INTERNAL_H_

#include "heed/ops/gated/gla/gla.h"
#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"

namespace heed::gla {

recurrent::Definition DefinitionOf(const Options& options);

recurrent::ReferenceMath Math(const Inputs& in, const Options& options);

}  // namespace heed::gla

#endif  // HEED_OPS_GATED_GLA_GLA_INTERNAL_H_
