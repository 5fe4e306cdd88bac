// The definition of H3 for the engine: its tensors, and their members in the engine's structs.
#ifndef HEED_OPS_SSM_H3_H3_INTERNAL_H_
#define HEED_OPS_SSM_H3_H3_INTERNAL_H_

#include "heed/mechanism/scanning_internal.h"
#include "heed/ops/ssm/h3/h3.h"

namespace heed::h3 {

scanning::Definition DefinitionOf(const Options& options);

}  // namespace heed::h3

#endif  // HEED_OPS_SSM_H3_H3_INTERNAL_H_
