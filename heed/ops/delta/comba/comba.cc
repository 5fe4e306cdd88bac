// Comba on the recurrence engine.
#include "heed/ops/delta/comba/comba_internal.h"

namespace heed::comba {

recurrent::Definition DefinitionOf(const Options&) {
  return {.decay = recurrent::DecayShape::kToken,
          .root_scale = true,
          .delta = recurrence::Delta::kAfterDecay,
          .beta = true,
          .read_key = true};
}

HEED_DEFINE_RECURRENT(recurrent, comba)

}  // namespace heed::comba
