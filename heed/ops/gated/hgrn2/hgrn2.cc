// HGRN2 on the recurrence engine: a decay per key channel, whose complement is the key.
#include "heed/ops/gated/hgrn2/hgrn2_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::hgrn2 {

recurrent::Definition DefinitionOf(const Options&) {
  return {.table = mechanism::TableOf(kTensors, kStates), .root_scale = true};
}

HEED_DEFINE_RECURRENT(recurrent, hgrn2)

}  // namespace heed::hgrn2
