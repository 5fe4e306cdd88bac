// The engine definition of comba, and the equations of its reference.
#ifndef HEED_OPS_DELTA_COMBA_COMBA_INTERNAL_H_
#define HEED_OPS_DELTA_COMBA_COMBA_INTERNAL_H_

#include "heed/ops/delta/comba/comba.h"
#include "heed/mechanism/reference/delta_reference_internal.h"
#include "heed/mechanism/recurrent_internal.h"

namespace heed::comba {

recurrent::Definition DefinitionOf(const Options& options);

recurrent::DeltaMath Math(const Inputs& in, const Options& options);

}  // namespace heed::comba

#endif  // HEED_OPS_DELTA_COMBA_COMBA_INTERNAL_H_
