// The engine definition of kda, and the equations of its reference.
#ifndef HEED_OPS_DELTA_KDA_KDA_INTERNAL_H_
#define HEED_OPS_DELTA_KDA_KDA_INTERNAL_H_

#include "heed/ops/delta/kda/kda.h"
#include "heed/mechanism/reference/delta_reference_internal.h"
#include "heed/mechanism/recurrent_internal.h"

namespace heed::kda {

recurrent::Definition DefinitionOf(const Options& options);

recurrent::DeltaMath Math(const Inputs& in, const Options& options);

}  // namespace heed::kda

#endif  // HEED_OPS_DELTA_KDA_KDA_INTERNAL_H_
