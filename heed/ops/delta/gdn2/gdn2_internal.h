// The engine definition of gdn2, and the equations of its reference.
#ifndef HEED_OPS_DELTA_GDN2_GDN2_INTERNAL_H_
#define HEED_OPS_DELTA_GDN2_GDN2_INTERNAL_H_

#include "heed/ops/delta/gdn2/gdn2.h"
#include "heed/mechanism/reference/delta_reference_internal.h"
#include "heed/mechanism/recurrent_internal.h"

namespace heed::gdn2 {

recurrent::Definition DefinitionOf(const Options& options);

recurrent::DeltaMath Math(const Inputs& in, const Options& options);

}  // namespace heed::gdn2

#endif  // HEED_OPS_DELTA_GDN2_GDN2_INTERNAL_H_
