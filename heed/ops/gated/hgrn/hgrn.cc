// HGRN on the scan engine.
#include "heed/ops/gated/hgrn/hgrn_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::hgrn {

scanning::Definition DefinitionOf(const Options&) {
  return {.table = mechanism::TableOf(kTensors, kStates), .rule = scan::Rule::kDecay, .flops = 2};
}

HEED_DEFINE_RECURRENT(scanning, hgrn)

}  // namespace heed::hgrn
