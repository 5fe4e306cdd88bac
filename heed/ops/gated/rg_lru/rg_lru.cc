// RG-LRU on the scan engine.
#include "heed/ops/gated/rg_lru/rg_lru_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::rg_lru {

scanning::Definition DefinitionOf(const Options& options) {
  return {.table = mechanism::TableOf(kTensors, kStates), .rule = scan::Rule::kGates, .flops = 30, .c = options.c};
}

HEED_DEFINE_RECURRENT(scanning, rg_lru)

}  // namespace heed::rg_lru
