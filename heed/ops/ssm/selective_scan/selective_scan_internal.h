// The definition of the selective scan for the engine: its tensors, and their members in the engine's structs.
#ifndef HEED_OPS_SSM_SELECTIVE_SCAN_SELECTIVE_SCAN_INTERNAL_H_
#define HEED_OPS_SSM_SELECTIVE_SCAN_SELECTIVE_SCAN_INTERNAL_H_

#include "heed/mechanism/scanning_internal.h"
#include "heed/ops/ssm/selective_scan/selective_scan.h"

namespace heed::selective_scan {

scanning::Definition DefinitionOf(const Options& options);

}  // namespace heed::selective_scan

#endif  // HEED_OPS_SSM_SELECTIVE_SCAN_SELECTIVE_SCAN_INTERNAL_H_
