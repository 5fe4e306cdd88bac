// The definition of S4D for the engine: its tensors, and their members in the engine's structs.
#ifndef HEED_OPS_SSM_S4D_S4D_INTERNAL_H_
#define HEED_OPS_SSM_S4D_S4D_INTERNAL_H_

#include "heed/mechanism/scanning_internal.h"
#include "heed/ops/ssm/s4d/s4d.h"

namespace heed::s4d {

scanning::Definition DefinitionOf(const Options& options);

}  // namespace heed::s4d

#endif  // HEED_OPS_SSM_S4D_S4D_INTERNAL_H_
