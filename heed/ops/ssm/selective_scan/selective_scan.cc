// The selective scan on the scan engine.
#include "heed/ops/ssm/selective_scan/selective_scan_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::selective_scan {

scanning::Definition DefinitionOf(const Options& options) {
  return {.table = mechanism::TableOf(kTensors, kStates),
          .rule = scan::Rule::kSelective,
          .flops = 7,
          .softplus = options.delta_softplus};
}

HEED_DEFINE_RECURRENT(scanning, selective_scan)

}  // namespace heed::selective_scan
