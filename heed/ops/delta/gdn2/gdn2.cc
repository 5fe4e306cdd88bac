// The gated delta rule with two gates on the recurrence engine.
#include "heed/ops/delta/gdn2/gdn2_internal.h"

namespace heed::gdn2 {

recurrent::Definition DefinitionOf(const Options&) {
  return {.decay = recurrent::DecayShape::kKey,
          .root_scale = true,
          .delta = recurrence::Delta::kAfterDecay,
          .erase_and_write = true};
}

HEED_DEFINE_RECURRENT(recurrent, gdn2)

}  // namespace heed::gdn2
