// The gated delta rule with two gates on the recurrence engine.
#include "heed/ops/delta/gdn2/gdn2_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::gdn2 {

recurrent::Definition DefinitionOf(const Options&) {
  return {.table = mechanism::TableOf(kTensors, kStates), .root_scale = true};
}

HEED_DEFINE_RECURRENT(recurrent, gdn2)

}  // namespace heed::gdn2
