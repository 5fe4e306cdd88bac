// Lightning attention on the recurrence engine: one constant decay per head.
#include "heed/ops/gated/lightning/lightning_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::lightning {

recurrent::Definition DefinitionOf(const Options&) {
  return {.table = mechanism::TableOf(kTensors, kStates), .root_scale = true};
}

HEED_DEFINE_RECURRENT(recurrent, lightning)

}  // namespace heed::lightning
