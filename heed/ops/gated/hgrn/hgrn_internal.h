// The definition of HGRN for the engine: its tensors, and their members in the engine's structs.
#ifndef HEED_OPS_GATED_HGRN_HGRN_INTERNAL_H_
#define HEED_OPS_GATED_HGRN_HGRN_INTERNAL_H_

#include "heed/ops/gated/hgrn/hgrn.h"
#include "heed/mechanism/scanning_internal.h"

namespace heed::hgrn {

scanning::Definition DefinitionOf(const Options& options);

}  // namespace heed::hgrn

#endif  // HEED_OPS_GATED_HGRN_HGRN_INTERNAL_H_
