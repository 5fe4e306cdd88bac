// Simple GLA on the recurrence engine: one decay per token and head.
#include "heed/ops/gated/simple_gla/simple_gla_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::simple_gla {

recurrent::Definition DefinitionOf(const Options&) {
  return {.table = mechanism::TableOf(kTensors, kStates), .root_scale = true};
}

HEED_DEFINE_RECURRENT(recurrent, simple_gla)

}  // namespace heed::simple_gla
