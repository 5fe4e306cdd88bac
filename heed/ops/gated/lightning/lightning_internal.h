// The engine definition of lightning, and the equations of its reference.
#ifndef HEED_OPS_GATED_LIGHTNING_LIGHTNING_INTERNAL_H_
#define HEED_OPS_GATED_LIGHTNING_LIGHTNING_INTERNAL_H_

#include "heed/ops/gated/lightning/lightning.h"
#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"

namespace heed::lightning {

recurrent::Definition DefinitionOf(const Options& options);

recurrent::ReferenceMath Math(const Inputs& in, const Options& options);

}  // namespace heed::lightning

#endif  // HEED_OPS_GATED_LIGHTNING_LIGHTNING_INTERNAL_H_
