// Kimi delta attention on the recurrence engine.
#include "heed/ops/delta/kda/kda_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::kda {

recurrent::Definition DefinitionOf(const Options&) {
  return {.table = mechanism::TableOf(kTensors, kStates), .root_scale = true};
}

HEED_DEFINE_RECURRENT(recurrent, kda)

}  // namespace heed::kda
