// The definition of RG-LRU for the engine: its tensors, and their members in the engine's structs.
#ifndef HEED_OPS_GATED_RG_LRU_RG_LRU_INTERNAL_H_
#define HEED_OPS_GATED_RG_LRU_RG_LRU_INTERNAL_H_

#include "heed/ops/gated/rg_lru/rg_lru.h"
#include "heed/mechanism/scanning_internal.h"

namespace heed::rg_lru {

scanning::Definition DefinitionOf(const Options& options);

}  // namespace heed::rg_lru

#endif  // HEED_OPS_GATED_RG_LRU_RG_LRU_INTERNAL_H_
