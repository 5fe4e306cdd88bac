// Based on the recurrence engine: a feature map and a normaliser, without decay.
#include "heed/ops/linear/based/based_internal.h"

#include "heed/mechanism/define_internal.h"

namespace heed::based {

recurrent::Definition DefinitionOf(const Options& options) {
  return {.table = mechanism::TableOf(kTensors, kStates),
          .root_scale = true,
          .feature = recurrence::Feature::kTaylor,
          .normalize = options.normalize,
          .eps = options.eps};
}

HEED_DEFINE_RECURRENT(recurrent, based)

}  // namespace heed::based
