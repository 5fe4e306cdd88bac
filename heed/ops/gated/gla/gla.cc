// GLA on the recurrence engine: a decay per key channel.
#include "heed/ops/gated/gla/gla_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::gla {

recurrent::Definition DefinitionOf(const Options&) {
  return {.table = mechanism::TableOf(kTensors, kStates), .root_scale = true};
}

HEED_DEFINE_RECURRENT(recurrent, gla)

}  // namespace heed::gla
