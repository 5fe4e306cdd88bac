// The engine definition of retention, and the equations of its reference.
#ifndef HEED_OPS_GATED_RETENTION_RETENTION_INTERNAL_H_
#define HEED_OPS_GATED_RETENTION_RETENTION_INTERNAL_H_

#include "heed/ops/gated/retention/retention.h"
#include "heed/mechanism/recurrent_internal.h"
#include "heed/mechanism/reference/recurrent_reference_internal.h"

namespace heed::retention {

recurrent::Definition DefinitionOf(const Options& options);

recurrent::ReferenceMath Math(const Inputs& in, const Options& options);

}  // namespace heed::retention

#endif  // HEED_OPS_GATED_RETENTION_RETENTION_INTERNAL_H_
