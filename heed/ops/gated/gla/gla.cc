// GLA on the recurrence engine: a decay per key channel.
#include "heed/ops/gated/gla/gla_internal.h"

namespace heed::gla {

recurrent::Definition DefinitionOf(const Options&) {
  return {.decay = recurrent::DecayShape::kKey, .root_scale = true, .value_decay = true};
}

HEED_DEFINE_RECURRENT(recurrent, gla)

}  // namespace heed::gla
