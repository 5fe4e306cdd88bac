// Kimi delta attention on the recurrence engine.
#include "heed/ops/delta/kda/kda_internal.h"

namespace heed::kda {

recurrent::Definition DefinitionOf(const Options&) {
  return {
      .decay = recurrent::DecayShape::kKey, .root_scale = true, .delta = recurrence::Delta::kAfterDecay, .beta = true};
}

HEED_DEFINE_RECURRENT(recurrent, kda)

}  // namespace heed::kda
