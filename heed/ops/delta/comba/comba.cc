// Comba on the recurrence engine.
#include "heed/ops/delta/comba/comba_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::comba {

recurrent::Definition DefinitionOf(const Options&) {
  return {.table = mechanism::TableOf(kTensors, kStates), .root_scale = true};
}

HEED_DEFINE_RECURRENT(recurrent, comba)

}  // namespace heed::comba
